"""What the proof says when a plan breaks a rule."""

from __future__ import annotations

from twin.frozen import frozen

NEXT_STEP = {
    "structure": "rebuild the plan with twin.plan.build; hand-edited plans keep ids, lengths and "
    "spans consistent",
    "outputs": "give every element, row and item to exactly one block, in block order "
    "(twin.plan.spans.spread)",
    "deadlock": "let the producer come first: publish in an earlier stage, or read the previous "
    "step's value",
    "kernel": "choose options that the kernel takes, or rebuild the plan with twin.plan.build",
    "residency": "use fewer blocks per GPU, or execution=graph",
    "ring": "raise ring_slots or slot_bytes, or lower window_slots or tile_rows",
    "collective": "inside a resident kernel push; between kernels use the library, or push with "
    "sentinel or counter",
    "data flow": "add the missing read, or rebuild the plan with twin.plan.build",
    "unread": "do not publish or push what nobody reads: its arrival would never be proven",
    "reset": "give each value exactly one reset after its last reader and before its copy is "
    "used again",
    "race": "raise copies, or move the reset to where both sides are proven",
    "drafts": "rebuild the plan with twin.plan.build, or use lookup=0",
    "budget": "lower ring_slots, slot_bytes, max_context or blocks, or choose a node with "
    "more memory",
}


@frozen
class Violation:
    """One broken rule: a key of NEXT_STEP, the stage it shows in, and who did what to which
    element.
    """

    rule: str
    stage: str
    message: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.rule}: {self.message}; {NEXT_STEP[self.rule]}"
