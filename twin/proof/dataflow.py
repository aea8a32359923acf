"""What a stage must read to compute the model: derived from the model alone, then compared with the
plan.

A plan that forgets a read would run and compute something else without a sign, so every stage's
reads are compared exactly and in their order, since the kernel takes them by their place: value,
parts, scale, step and elements.
"""

from __future__ import annotations

from collections.abc import Iterator

from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.types import Parts, Plan
from twin.proof.layer_flow import layers
from twin.proof.violation import Violation
from twin.proof.walk import Need, Walk, Wrong, compare, first_hole

PROBE_KINDS = (StageKind.STREAM, StageKind.EXCHANGE, StageKind.ATTENTION, StageKind.SAMPLE)


def check_data_flow(plan: Plan) -> list[Violation]:
    """Everything a model's plan, or a probe's, reads wrongly. The plan's structure must be
    sound.
    """
    found = list(_every_word_read(plan))
    if plan.spec is None:
        return found + list(_probe(plan))
    walk = Walk(plan, plan.spec)
    try:
        walk.step(layers)
    except Wrong as wrong:
        walk.found.append(wrong.violation)
    return found + walk.found


# ---- every word that is written is read ----------------------------------------------------------


def _every_word_read(plan: Plan) -> Iterator[Violation]:
    """Only a poll proves that a store arrived; without one it could land after the word's next
    use.
    """
    spans: dict[tuple[int, bool], set[Span]] = {}
    for stage in plan.stages:
        for read in stage.reads:
            every = {span for block in set(read.spans) for span in block}
            for own in (True, False):
                if read.parts is Parts.ALL or (read.parts is Parts.OWN) == own:
                    spans.setdefault((read.value, own), set()).update(every)
    for value in plan.values:
        for own in (True, False) if value.pushed and plan.ranks > 1 else (True,):
            hole = first_hole(spans.get((value.id, own), set()), (0, value.elements))
            if hole is not None:
                whose = "the own part" if own else "the other ranks' parts"
                message = f"no block reads {value.name}[{hole}] of {whose}"
                yield Violation("unread", plan.stages[value.stage].name, message)


# ---- probes --------------------------------------------------------------------------------------


def _probe(plan: Plan) -> Iterator[Violation]:
    """A probe's hand-offs form a ring: each publisher gathers what the one before it published; in
    an exchange others may, too.
    """
    for stage in plan.stages:
        if stage.kind not in PROBE_KINDS:
            yield Violation("data flow", stage.name, "a plan without a model has no such stage")
            return
    chain = [stage for stage in plan.stages if stage.publishes is not None]
    for index, stage in enumerate(chain):
        assert stage.publishes is not None
        before = plan.values[chain[index - 1].publishes or 0]
        owned = plan.values[stage.publishes].owned
        listens = [
            stage.kind is StageKind.EXCHANGE and any(read.spans[block] for read in stage.reads)
            for block in range(plan.blocks)
        ]
        working = [lo < hi or heard for (lo, hi), heard in zip(owned, listens, strict=True)]
        parts = Parts.ALL if before.pushed else Parts.OWN
        spans = tuple(((0, before.elements),) if works else () for works in working)
        yield from compare(
            plan, stage, [Need(before, spans, parts, previous_step=before.stage >= stage.index)]
        )
    for stage in plan.stages:
        if stage.publishes is None and stage.reads:
            yield Violation("data flow", stage.name, "reads but publishes nothing")
