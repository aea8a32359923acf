"""A head that drafts: do its numbers lie where nothing else does, is each there before a block
reads it, and does attention see the tokens that count?

It can change no token: the model makes every one itself. What is wrong here costs accepted drafts,
or overwrites what the model needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from twin.kernel.tables import Layout
from twin.models.spec import DraftHead
from twin.plan.catalogue import StageKind
from twin.plan.types import Plan
from twin.proof.violation import Violation

DRAFTS = "the head's drafts"
# What blocks do between two barriers: (what, reads of what other blocks made, writes). Without what
# a block alone has (`own`), and without weights, which nobody writes.
Step = tuple[str, frozenset[str], frozenset[str]]


def _step(what: str, reads: Sequence[str], writes: Sequence[str]) -> Step:
    return what, frozenset(reads), frozenset(writes)


# of the tokens that the model verified, and of one draft behind another
VERIFIED: tuple[Step, ...] = (
    _step("states", ["states"], ["state"]),
    _step("inputs", ["state", "wanted"], ["input"]),
    _step("keys", ["input"], ["cache", "query"]),
)
FIRST, FURTHER = "state", "last"  # what a draft adds to
CHAINED = _step("keys", ["last", "best"], ["cache", "query"])


def draft_steps(residual: str) -> tuple[Step, ...]:
    return (
        _step("attention", ["cache", "query"], ["out"]),
        _step("output", ["out", residual], ["sum"]),
        _step("feed-forward", ["sum"], ["gated"]),
        _step("down", ["gated", "sum"], ["last"]),
        _step("head", ["last"], ["best"]),
    )


def check_head(plan: Plan, made: Layout) -> Iterator[Violation]:
    """Every rule that a plan's head breaks; none where it has none."""
    head = plan.spec.draft_head if plan.spec else None
    if head is None or not plan.options.lookup:
        return
    yield from _memory(plan, made, head)
    yield from _taken(plan, made, head)
    yield from check_steps(
        [*VERIFIED, *draft_steps(FIRST), CHAINED, *draft_steps(FURTHER), CHAINED]
    )
    yield from check_slots(plan.options.lookup)


def _wrong(message: str) -> Violation:
    return Violation("drafts", DRAFTS, message)


def _memory(plan: Plan, made: Layout, head: DraftHead) -> Iterator[Violation]:
    size, hidden, blocks = plan.options.weight_dtype.bytes, head.hidden, plan.blocks
    chunk, positions = plan.options.prompt_chunk, plan.options.max_context
    keys, queries = head.kv_heads * head.head_dim, head.heads * head.head_dim
    needed = {
        "fc": hidden * 3 * hidden * size / 4,
        "qkv": (queries + 2 * keys) * 2 * hidden * size / 4,
        "o": hidden * queries * size / 4,
        "gate_up": 2 * head.ffn * hidden * size / 4,
        "down": head.ffn * hidden * size / 4,
        "lm": (head.vocab + head.vocab % 2) * hidden * size / 4,
        "gains": 4 * hidden + 1,
        "turns": positions * head.head_dim,
        "ids": head.vocab,
        "states": chunk * 3 * hidden,
        "state": chunk * hidden,
        "input": chunk * 2 * hidden,
        "query": queries,
        "out": queries,
        "sum": hidden,
        "last": hidden,
        "gated": head.ffn,
        "own": blocks * 2 * hidden,
        "best": blocks * 2,
        "wanted": 4,
        "cache": positions * 2 * keys,
    }
    if head.own_table:
        assert plan.spec is not None
        needed["embed"] = plan.spec.vocab * hidden * size / 4
    places = sorted((int(made.sizes[f"draft_{name}"]), name) for name in needed)
    before = float(made.sizes["round_history"] + positions)
    for at, name in places:
        if at < before:
            yield _wrong(f"{name} begins at float {at}, and what lies before ends at {before:.0f}")
        before = at + needed[name]
    if before > made.sizes["prompt_floats"]:
        yield _wrong(f"{before:.0f} floats of {made.sizes['prompt_floats']}")


def _taken(plan: Plan, made: Layout, head: DraftHead) -> Iterator[Violation]:
    """The residuals are those of the layers' inputs, which every pass makes."""
    passes = made.schedule.of_passes()
    every = {one.stage.index for one in passes.stages} & {one.stage.index for one in passes.rounds}
    for i, layer in enumerate(head.taken):
        stage = plan.stages[int(made.sizes[f"draft_taken{i}"])]
        if stage.kind is not StageKind.QKV or stage.layer != layer:
            yield _wrong(f"takes {stage.name}, and wants the input of layer {layer}")
        elif stage.index not in every:
            yield _wrong(f"takes {stage.name}, which a pass leaves out")


def check_steps(steps: Sequence[Step]) -> Iterator[Violation]:
    """Blocks meet between two steps and at no other place: within one, no block may read what
    another one writes there, and what is read was written before.
    """
    known = {"states", "wanted"}  # by the pass, by who decides
    for what, reads, writes in steps:
        if both := reads & writes:
            yield _wrong(f"{what}: some blocks read {sorted(both)[0]} while others write it")
        if missing := reads - known:
            yield _wrong(f"{what}: reads {sorted(missing)[0]}, which nobody has made")
        known |= writes


def check_slots(lookup: int, *, chains_stay: bool = False) -> Iterator[Violation]:
    """All short sequences of rounds: a draft sees of each position before it what the model's own
    states gave, or a draft of its chain. `chains_stay`, for tests: verified tokens write no slots.
    """
    widths = [(drafts, kept) for drafts in {0, 1, lookup} for kept in range(1, drafts + 2)]
    for sequence in product(widths, repeat=2):
        slots: dict[int, object] = {}
        position = 1  # of the last token; the prompt's were read
        slots[0] = "model"
        for number, (drafts, kept) in enumerate(sequence):
            first, position = position, position + kept
            if not chains_stay:
                slots |= dict.fromkeys(range(first, position), "model")
            for i in range(drafts):
                at = position - 1 + i
                if i:
                    slots[at] = (number, i)
                for slot in range(at + 1):
                    wanted = "model" if slot < position else (number, slot - position + 1)
                    if slots.get(slot) != wanted:
                        yield _wrong(
                            f"draft {i} behind position {position} looks at slot {slot}, which "
                            f"holds {slots.get(slot)}"
                        )
                        return
