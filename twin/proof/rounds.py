"""Passes that verify drafts: does every token of one see what it would see alone, whatever was
drafted and rejected before?

Blocks of all ranks meet after each stage, so within a pass the order of stages is all that has to
be right. From pass to pass only keys and values stay. A rejected token's lie behind the tokens that
count; `_rounds` makes all short sequences of passes and acceptances, and looks at each read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from twin.kernel.prompt import INPUTS
from twin.kernel.tables import Layout
from twin.plan.catalogue import StageKind
from twin.plan.types import Plan, Stage
from twin.proof.draft_head import check_head
from twin.proof.handed import handed_on
from twin.proof.violation import Violation
from twin.schedule.passes import Passes

ROUND = "a pass that verifies drafts"
# of keys and values, which positions number; a state has one place for all positions
BY_POSITION = (StageKind.ATTENTION,)
STATEFUL = (StageKind.DELTA, StageKind.CONV_IN)
MOST_LOOKUP = 7
# All acceptances of so many passes in a row: a pass sees what earlier ones left behind the tokens
# that count, at most `lookup` positions, which the next passes write first.
ROUNDS_IN_A_ROW = 3


def check_rounds(plan: Plan, made: Layout) -> Iterator[Violation]:
    """Every rule that the plan's passes with drafts break; none where it has no drafts."""
    lookup = plan.options.lookup
    if not lookup:
        return
    passes = made.schedule.passes
    if passes is None or not passes.rounds:
        yield _wrong(ROUND, f"lookup={lookup}, and there are no passes")
        return
    if not 1 <= lookup <= MOST_LOOKUP or lookup >= passes.chunk:
        yield _wrong(
            ROUND, f"{lookup + 1} tokens in rows of {passes.chunk}, {MOST_LOOKUP + 1} at most"
        )
        return
    yield from _stages(plan, passes)
    yield from _memory(plan, made)
    yield from _rounds(lookup, appends_first=True)
    yield from check_head(plan, made)
    if passes.handed_on:
        yield from _order(plan, passes)
        yield from handed_on()


def _wrong(where: str, message: str) -> Violation:
    return Violation("drafts", where, message)


# ---- one pass --------------------------------------------------------------------------------


def _stages(plan: Plan, passes: Passes) -> Iterator[Violation]:
    """All that makes a token runs, in the plan's order, and reads what the same pass made."""
    order = [one.stage.index for one in passes.rounds]
    if order != sorted(set(order)):
        yield _wrong(ROUND, f"stages run in the order {order}")
    last = plan.stages[order[-1]]
    if last.kind is not StageKind.LM_HEAD:
        yield _wrong(last.name, "ends a pass whose logits somebody waits for")
    for stage in plan.stages[: last.index]:
        matrix = stage.matrix is not None
        if (matrix or stage.kind in BY_POSITION) and stage.index not in set(order):
            yield _wrong(stage.name, "is left out, and the logits rest on it")
        if stage.kind in STATEFUL:
            yield _wrong(stage.name, "keeps a state, which a rejected token would leave changed")
    for one in passes.rounds:
        yield from _reads(plan, one.stage)


def _reads(plan: Plan, stage: Stage) -> Iterator[Violation]:
    for read in stage.reads:
        value = plan.values[read.value]
        if read.previous_step:
            yield _wrong(stage.name, f"reads {value.name} of the pass before, of other tokens")
        elif value.stage >= stage.index:
            yield _wrong(stage.name, f"reads {value.name}, which the pass makes later")


def _order(plan: Plan, passes: Passes) -> Iterator[Violation]:
    """Where numbers are handed on one by one, all layers are alike."""
    kinds = [one.stage.kind for one in passes.rounds]
    layer = (
        StageKind.QKV,
        StageKind.ATTENTION,
        StageKind.O_PROJ,
        StageKind.GATE_UP,
        StageKind.DOWN,
    )
    if kinds != [*(layer * (len(kinds) // len(layer))), StageKind.LM_HEAD]:
        yield _wrong(ROUND, "has layers whose stages follow each other in another order")


# ---- memory ----------------------------------------------------------------------------------


def _memory(plan: Plan, made: Layout) -> Iterator[Violation]:
    """What a round keeps lies where nothing else of a pass does, and holds all its tokens."""
    sizes, tokens = made.sizes, plan.options.lookup + 1
    head = made.schedule.of_passes().rounds[-1].stage.matrix
    assert head is not None
    needed = {
        "round_logits": tokens * head.rows,
        "round_best": max(2 * tokens, 4) * plan.blocks,
        "round_round": 2 + tokens,
        "round_drawn": tokens + 1,
        "round_history": plan.options.max_context,
    }
    if sizes["tensor_pass"]:
        own = plan.kernel_attention()
        rows = own.kv_heads * int(sizes["round_splits"]) * tokens * own.group
        needed["round_parts"] = rows * (own.head_dim + 2)
    if made.schedule.of_passes().handed_on:
        needed |= _handed(plan, made)
    places = sorted((int(sizes[name]), floats, name) for name, floats in needed.items())
    before = max(int(sizes["prompt_decoded"]), *(int(row[-1]) for row in made.values))
    for at, floats, name in places:
        if at < before:
            yield _wrong(
                ROUND, f"{name} begins at float {at}, and what lies before ends at {before}"
            )
        before = at + floats
    if before > sizes["prompt_floats"]:
        yield _wrong(ROUND, f"{before} floats of {sizes['prompt_floats']}")
    counters = {name: sizes[name] for name in ("grid_counter", "prompt_counter", "round_counter")}
    if len(set(counters.values())) < len(counters) or max(counters.values()) >= sizes["counters"]:
        yield _wrong(ROUND, f"counters {counters} of {sizes['counters']}")


def _handed(plan: Plan, made: Layout) -> dict[str, int]:
    """What blocks hand on one by one, of MOST_LOOKUP + 1 tokens."""
    tokens, own = MOST_LOOKUP + 1, plan.kernel_attention()
    rows = {one.stage.kind: one.stage.matrix for one in made.schedule.of_passes().rounds}
    qkv, feed = rows[StageKind.QKV], rows[StageKind.GATE_UP]
    assert qkv is not None
    assert feed is not None
    return {
        "round_inputs": INPUTS * tokens * (3 * plan.shard.hidden // 2 + plan.blocks),
        "round_heads": tokens * qkv.rows,
        "round_fed": tokens * feed.rows // feed.unit // 2,
        "round_outputs": tokens * own.heads * own.head_dim // 2,
    }


# ---- pass after pass -------------------------------------------------------------------------


def _rounds(lookup: int, *, appends_first: bool, back: int = 0) -> Iterator[Violation]:
    """All sequences of ROUNDS_IN_A_ROW passes, by width and tokens that count.

    A cached position holds the pass and the place of the token that wrote it. `appends_first`: all
    tokens of a pass append before one of them looks; `back`: positions by which a pass begins too
    late. Both are for tests that see the mistake found.
    """
    widths = [(width, kept) for width in {1, 2, lookup + 1} for kept in range(1, width + 1)]
    for sequence in product(widths, repeat=ROUNDS_IN_A_ROW):
        cache: dict[int, tuple[int, int]] = {}
        counted: list[tuple[int, int]] = []  # who wrote the tokens that count, by position
        for number, (width, kept) in enumerate(sequence):
            first = len(counted) + back
            own = [(number, place) for place in range(width)]
            if appends_first:
                cache |= {first + place: writer for place, writer in enumerate(own)}
            for place in range(width):
                seen = [cache.get(position) for position in range(first + place + 1)]
                wanted = [*counted, *own[: place + 1]]
                if seen != wanted:
                    at = next(i for i, s in enumerate(seen) if i >= len(wanted) or s != wanted[i])
                    yield _wrong(
                        ROUND,
                        f"token {place} of pass {number} of {sequence} looks at position {at}, "
                        f"which holds {seen[at]}",
                    )
                    return
            cache |= {first + place: writer for place, writer in enumerate(own)}
            counted += own[:kept]
