"""Proves that a plan is safe to run, or says why not.

`happens_before.py` proves that no word is reused too early, `dataflow.py` that the model is what is
computed; here is the rest: structure, ownership, order, residency and budgets. Shares no code with
the builder and `resets.py`, whose work it judges.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from twin.errors import InvalidPlan
from twin.frozen import frozen
from twin.plan.attention import Attention
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix, Routed, Span, routed_share
from twin.plan.options import MOST_STAGGER_NS, CollectiveKind, Execution, HandOffKind
from twin.plan.types import Parts, Plan, Read, Stage, Value
from twin.proof.dataflow import check_data_flow
from twin.proof.happens_before import prove_reuse
from twin.proof.kernel_rules import MOST_NUMBER, check_kernel, check_layout
from twin.proof.stored import PLAIN
from twin.proof.violation import Violation
from twin.schedule.choose import schedule_of

__all__ = ["Report", "Violation", "prove", "violations"]

THE_PLAN = "the plan"
OPTION_MINIMUM = {
    "gpus": 1,
    "blocks": 1,
    "slot_bytes": 1,
    "ring_slots": 1,
    "window_slots": 1,
    "tile_rows": 1,
    "context": 1,
    "max_context": 1,
    "kv_page": 1,
    "copies": 1,
    "prompt_chunk": 1,
    "batch": 1,
    "draft": 0,
    "lookup": 0,
    "expert_ranks": 1,
    "ahead_slots": 0,
    "lane_stagger_ns": 0,
}
ITEM_KINDS = (StageKind.ATTENTION, StageKind.INDEX, StageKind.DELTA)
ROUTED_KINDS = (StageKind.ROUTED_UP, StageKind.ROUTED_DOWN)


@frozen
class Report:
    """What was proven."""

    plan: str
    ranks: int
    blocks: int  # per rank
    stages: int
    values: int
    # pairs (reader, reset), (reset, write), (reset, poll) or (reader, write) of whole stages
    orderings: int


def prove(plan: Plan) -> Report:
    """Prove that the plan cannot hang, race, compute something else or exceed a budget.

    Raises InvalidPlan with the first violation and the number of others.
    """
    found, orderings = _examine(plan)
    if found:
        others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise InvalidPlan(f"{plan.name}: {found[0]}{others}")
    return Report(plan.name, plan.ranks, plan.blocks, len(plan.stages), len(plan.values), orderings)


def violations(plan: Plan) -> list[Violation]:
    """Every rule that the plan breaks. A broken structure hides the rules that build on it."""
    return _examine(plan)[0]


def _examine(plan: Plan) -> tuple[list[Violation], int]:
    found = list(_structure(plan))
    if found:
        return found, 0
    wrong = [*_outputs(plan), *check_data_flow(plan), *check_kernel(plan)]
    if (
        not wrong
    ):  # then the plan can be laid out, and the shared memory that a block needs is known
        wrong = check_layout(plan) or list(_chip_budget(plan))
    proof = prove_reuse(plan)
    return [
        *_order(plan),
        *_collectives(plan),
        *_resets(plan),
        *_budgets(plan),
        *wrong,
        *proof.violations,
    ], proof.orderings


# ---- structure: what every other rule relies on --------------------------------------------------


def _structure(plan: Plan) -> Iterator[Violation]:
    def wrong(message: str, stage: str = THE_PLAN) -> Violation:
        return Violation("structure", stage, message)

    options = plan.options
    for name, least in OPTION_MINIMUM.items():
        most = MOST_STAGGER_NS if name == "lane_stagger_ns" else MOST_NUMBER
        if not least <= getattr(options, name) <= most:
            yield wrong(f"{name}={getattr(options, name)} is not between {least} and {most}")
    if options.weight_dtype.value not in PLAIN:
        yield wrong(f"weight_dtype={options.weight_dtype.value} is no type of weights")
    for own in plan.attentions:
        for splits, positions in _divisions(own):
            if min(splits, positions) < 1:
                held = f"{splits} splits of {positions} positions"
                yield wrong(f"{held} in pages of {options.kv_page}")
        if own.together < 1 or own.first_pages < 0:
            yield wrong(f"{own.together} splits take {own.first_pages} pages each before others do")
    layers = plan.spec.layers if plan.spec else 0
    if options.delay is not None and not 0 <= options.delay <= layers:
        yield wrong(f"delay={options.delay} is not between 0 and the {layers} layers")
    if options.expert_ranks > 0 and plan.ranks % options.expert_ranks:
        yield wrong(f"{options.expert_ranks} groups of experts on {plan.ranks} ranks")
    if (
        min(plan.ranks, plan.ranks_per_gpu, plan.blocks) < 1
        or plan.ranks != options.gpus * plan.ranks_per_gpu
    ):
        yield wrong(f"{plan.ranks} ranks, {plan.ranks_per_gpu} per GPU, on {options.gpus} GPUs")
    if options.blocks != plan.blocks * plan.ranks_per_gpu:
        yield wrong(
            f"{plan.blocks} blocks per rank x {plan.ranks_per_gpu} ranks per GPU are not "
            f"{options.blocks} blocks per GPU"
        )
    for name, ids in (
        ("buffer", [b.id for b in plan.buffers]),
        ("value", [v.id for v in plan.values]),
        ("stage", [s.index for s in plan.stages]),
    ):
        if ids != list(range(len(ids))):
            yield wrong(f"the {name} ids {ids[:8]}... are not 0, 1, 2, ...")
            return
    for buffer in plan.buffers:
        if buffer.elements < 1 or buffer.copies < 1 or buffer.parts not in (1, plan.ranks):
            yield wrong(
                f"buffer {buffer.name} is {buffer.copies} copies x {buffer.parts} parts x "
                f"{buffer.elements} elements"
            )
    for value in plan.values:
        yield from (wrong(f"{value.name}: {message}") for message in _value_faults(plan, value))
    for stage in plan.stages:
        if not 0 <= stage.heads < max(1, len(plan.attentions)):
            yield wrong(f"heads {stage.heads} of {len(plan.attentions)} attentions", stage.name)
        yield from (wrong(message, stage.name) for message in _stage_faults(plan, stage))


def _value_faults(plan: Plan, value: Value) -> Iterator[str]:
    if not 0 <= value.stage < len(plan.stages) or plan.stages[value.stage].publishes != value.id:
        yield f"its stage {value.stage} does not publish it"
    if not 0 <= value.buffer < len(plan.buffers):
        yield f"there is no buffer {value.buffer}"
        return
    buffer = plan.buffers[value.buffer]
    if not 0 <= value.copy < buffer.copies:
        yield f"copy {value.copy} of {buffer.copies} in buffer {buffer.name}"
    if value.elements != buffer.elements:
        yield f"{value.elements} elements in a buffer of {buffer.elements}"
    if value.words != buffer.words or value.words < 1:
        yield f"{value.words} words an element in a buffer of {buffer.words}"
    if value.pushed and plan.ranks == 1:
        yield "pushed, but there is no other rank"
    if value.pushed and buffer.parts != plan.ranks:
        yield f"pushed by {plan.ranks} ranks into {buffer.parts} parts"
    if len(value.owned) != plan.blocks:
        yield f"{len(value.owned)} owned spans for {plan.blocks} blocks"
    for block, span in _outside(value.owned, value.elements, 1):
        yield f"block {block} owns {span} of {value.elements} elements"


def _stage_faults(plan: Plan, stage: Stage) -> Iterator[str]:
    if stage.publishes is not None and not (
        0 <= stage.publishes < len(plan.values)
        and plan.values[stage.publishes].stage == stage.index
    ):
        yield f"publishes value {stage.publishes}, which is not its own"
    for read in stage.reads:
        yield from _read_faults(plan, read)
    for reset in stage.resets:
        if not 0 <= reset.value < len(plan.values):
            yield f"resets value {reset.value}, which does not exist"
    for matrix in stage.matrices:
        yield from _matrix_faults(plan, stage, matrix)
    if stage.gate is not None and not 0 <= stage.gate < stage.index:
        yield f"its weights wait for stage {stage.gate}, which is not before it"
    if stage.routed and stage.gate is None:
        yield "its experts are chosen by no stage"
    if stage.routed and stage.kind not in ROUTED_KINDS:
        yield (
            f"uses chosen experts, which only {' and '.join(kind.value for kind in ROUTED_KINDS)} "
            "do"
        )
    if stage.kind is StageKind.ATTENTION and stage.scan is None and not plan.attentions:
        yield "attends with no scan of its own, and the plan describes no attention"
    if stage.scan and stage.window:
        yield f"window {stage.window}, although the entries that it scans are counted already"
    if stage.kept and (stage.publishes is not None or len(stage.matrices) != 1):
        yield "keeps its sums, so it has one matrix and publishes nothing"
    if (len(stage.items) != plan.blocks) if stage.kind in ITEM_KINDS else stage.items:
        yield f"{len(stage.items)} item spans for {plan.blocks} blocks"
    items = item_count(plan, stage)
    for block, span in _outside(stage.items, items, 1):
        yield f"block {block} owns items {span} of {items}"


def _read_faults(plan: Plan, read: Read) -> Iterator[str]:
    if not 0 <= read.value < len(plan.values):
        yield f"reads value {read.value}, which does not exist"
        return
    value = plan.values[read.value]
    if len(read.spans) != plan.blocks:
        yield f"{len(read.spans)} read spans of {value.name} for {plan.blocks} blocks"
    if read.parts is not Parts.OWN and not value.pushed:
        yield f"reads {read.parts.value} parts of {value.name}, which is not pushed"
    if not math.isfinite(read.scale):
        yield f"scale {read.scale} of {value.name}"
    for block in _unordered(read.spans, value.elements):
        yield (
            f"block {block} reads {read.spans[block]} of {value.name}[{value.elements}]: not "
            "ascending, disjoint and inside"
        )


@lru_cache(maxsize=1024)
def _unordered(each: tuple[tuple[Span, ...], ...], elements: int) -> tuple[int, ...]:
    """Blocks whose spans are not ascending, disjoint, not empty and inside of 0..elements; of
    blocks that read the same, the first.
    """
    found = []
    for spans in dict.fromkeys(each):
        edges = [edge for span in spans for edge in span]
        if (
            any(lo >= hi for lo, hi in spans)
            or edges != sorted(edges)
            or not all(0 <= edge <= elements for edge in edges)
        ):
            found.append(each.index(spans))
    return tuple(found)


def _matrix_faults(plan: Plan, stage: Stage, matrix: Matrix) -> Iterator[str]:
    if min(matrix.rows, matrix.cols, matrix.unit, matrix.tile_rows, matrix.tile_cols) < 1:
        yield (
            f"a matrix of {matrix.rows} x {matrix.cols} in tiles of {matrix.tile_rows} x "
            f"{matrix.tile_cols} and units of {matrix.unit}"
        )
        return
    # rows of a channel meet in the block, behind all of its products
    whole = stage.kind is StageKind.CONV_IN or matrix.tile_rows % matrix.unit == 0
    if matrix.rows % matrix.unit or not whole:
        yield (
            f"{matrix.rows} rows in tiles of {matrix.tile_rows}: not whole units of {matrix.unit} "
            "rows"
        )
    if stage.routed and not matrix.owned:
        yield from _share_faults(plan, stage, stage.routed, matrix)
        return
    if len(matrix.owned) != plan.blocks:
        yield f"{len(matrix.owned)} row spans for {plan.blocks} blocks"
    for block, span in _outside(matrix.owned, matrix.rows, matrix.unit):
        yield f"block {block} owns rows {span} of {matrix.rows} in units of {matrix.unit}"


@lru_cache(maxsize=1024)
def _outside(owned: tuple[Span, ...], count: int, unit: int) -> tuple[tuple[int, Span], ...]:
    """Blocks whose spans are no whole units of 0..count-1. Layers that are alike are looked at
    once.
    """
    return tuple(
        (block, (lo, hi))
        for block, (lo, hi) in enumerate(owned)
        if not 0 <= lo <= hi <= count or lo % unit or hi % unit
    )


def _share_faults(plan: Plan, stage: Stage, routed: Routed, matrix: Matrix) -> Iterator[str]:
    """Blocks that divide the chosen experts' rows: each needs room for its largest share in what it
    publishes.
    """
    if stage.publishes is None or not 0 <= stage.publishes < len(plan.values):
        yield "divides the rows of chosen experts but publishes nothing"
        return
    rows = routed.most * matrix.rows // max(1, matrix.unit)
    for block, (lo, hi) in enumerate(plan.values[stage.publishes].owned):
        low, high = routed_share(rows, plan.blocks, block, matrix.share_step)
        if hi - lo < high - low:
            yield (
                f"block {block} owns {hi - lo} elements for up to {high - low} of the chosen "
                "experts"
            )
            return


# ---- ownership -----------------------------------------------------------------------------------


def _outputs(plan: Plan) -> Iterator[Violation]:
    for value in plan.values:
        fault = _not_a_partition(value.owned, value.elements)
        if fault:
            yield Violation(
                "outputs", plan.stages[value.stage].name, f"{value.name}: element {fault}"
            )
    for stage in plan.stages:
        parts = [("row", matrix.owned, matrix.rows) for matrix in stage.matrices if matrix.owned]
        if stage.kind in ITEM_KINDS:
            parts.append(("item", stage.items, item_count(plan, stage)))
        for what, owned, count in parts:
            fault = _not_a_partition(owned, count)
            if fault:
                yield Violation("outputs", stage.name, f"{what} {fault}")


@lru_cache(maxsize=1024)
def _not_a_partition(owned: tuple[Span, ...], count: int) -> str:
    """Empty when the spans hold each of 0..count-1 exactly once, in block order. The kernel finds
    by a block's number what lies before its own: tokens that blocks have logits of, the rows that
    neighbours of a prompt pass share, where a block's low-bit tiles of an expert begin.
    """
    at, before = 0, -1
    for (lo, hi), block in sorted(
        (span, block) for block, span in enumerate(owned) if span[0] < span[1]
    ):
        if lo < at:
            return f"{lo} belongs to blocks {before} and {block}"
        if lo > at:
            return f"{at} belongs to no block"
        at, before = hi, block
    if at < count:
        return f"{at} belongs to no block"
    ends = (0, *(hi for _, hi in owned))
    for block, (lo, _) in enumerate(owned):
        if lo != ends[block]:
            return (
                f"{lo} is the first of block {block}, and the block before ends at {ends[block]}: "
                "blocks divide in their order"
            )
    return ""


# ---- order, residency, collectives, resets -------------------------------------------------------


def _order(plan: Plan) -> Iterator[Violation]:
    for stage in plan.stages:
        for read in stage.reads:
            value = plan.values[read.value]
            if not read.previous_step and value.stage >= stage.index:
                readers = [block for block, spans in enumerate(read.spans) if spans]
                message = (
                    f"blocks {readers[:4]} wait for {value.name}, which "
                    f"{plan.stages[value.stage].name} publishes later in the step"
                )
                yield Violation("deadlock", stage.name, message)
    resident = plan.options.execution is Execution.RESIDENT
    if resident and plan.options.blocks > plan.limits.blocks and not plan.limits.oversubscribe:
        message = (
            f"{plan.options.blocks} blocks per GPU wait for each other, {plan.limits.blocks} can "
            "be resident"
        )
        yield Violation("residency", THE_PLAN, message)


def _collectives(plan: Plan) -> Iterator[Violation]:
    kind, execution = plan.options.collective, plan.options.execution
    if kind is CollectiveKind.NONE and plan.ranks > 1:
        yield Violation("collective", THE_PLAN, f"collective=none with {plan.ranks} ranks")
    between_gpus = execution is not Execution.RESIDENT and plan.options.gpus > 1
    for stage in plan.stages:
        library = stage.kind is StageKind.COLLECTIVE
        if library and (kind is not CollectiveKind.LIBRARY or execution is Execution.RESIDENT):
            yield Violation(
                "collective",
                stage.name,
                f"a library call with collective={kind.value}, execution={execution.value}",
            )
        if library and (
            stage.resets or stage.matrix or len(stage.reads) != 1 or stage.publishes is None
        ):
            yield Violation(
                "collective", stage.name, "a library call gathers one value and does nothing else"
            )
        pushes = stage.publishes is not None and plan.values[stage.publishes].pushed
        if pushes and not library and between_gpus and plan.options.handoff is HandOffKind.GRID:
            yield Violation(
                "collective",
                stage.name,
                "pushes to other GPUs, whose kernels do not poll with grid hand-offs",
            )
        if not library and kind is CollectiveKind.LIBRARY and pushes:
            yield Violation(
                "collective", stage.name, "pushes to other ranks although collective=library"
            )


def _resets(plan: Plan) -> Iterator[Violation]:
    sentinel = plan.options.handoff is HandOffKind.SENTINEL
    resets = [(reset.value, stage.name) for stage in plan.stages for reset in stage.resets]
    if not sentinel:
        for id, stage in resets:
            yield Violation(
                "reset",
                stage,
                f"resets {plan.values[id].name} although {plan.options.handoff.value} hand-offs "
                "need none",
            )
        return
    places: dict[int, list[str]] = defaultdict(list)
    for id, stage in resets:
        places[id].append(stage)
    for value in plan.values:
        found = places[value.id]
        if len(found) != 1:
            where = found[-1] if found else plan.stages[value.stage].name
            yield Violation("reset", where, f"{value.name} is reset {len(found)} times a step")


# ---- budgets -------------------------------------------------------------------------------------


def _budgets(plan: Plan) -> Iterator[Violation]:
    options, limits = plan.options, plan.limits
    for what, used, limit in (
        ("bytes of memory per GPU", plan.memory_bytes(), limits.memory_bytes),
        ("cached positions", options.context, options.max_context),
    ):
        if used > limit:
            yield Violation("budget", THE_PLAN, f"needs {used} {what}, the limit is {limit}")
    if options.window_slots > options.ring_slots:
        yield Violation(
            "ring",
            THE_PLAN,
            f"{options.window_slots} slots in flight in a ring of {options.ring_slots}",
        )
    for stage in plan.stages:
        for matrix in stage.matrices:
            if (size := _tile_bytes(plan, matrix)) > options.slot_bytes:
                yield Violation(
                    "ring", stage.name, f"a tile of {size} bytes in a slot of {options.slot_bytes}"
                )
        if stage.gate is not None and options.ahead_slots >= options.ring_slots:
            message = (
                f"{options.ahead_slots} of {options.ring_slots} ring slots may wait behind "
                "experts, which then find none free"
            )
            yield Violation("deadlock", stage.name, message)
    if len(plan.die_of_block) != options.blocks or not all(
        0 <= die < limits.dies for die in plan.die_of_block
    ):
        message = (
            f"{len(plan.die_of_block)} entries in the die table for {options.blocks} blocks on "
            f"{limits.dies} dies"
        )
        yield Violation("structure", THE_PLAN, message)
    divided = [(own, *each) for own in plan.attentions for each in _divisions(own)]
    for own, splits, positions in divided:
        if positions % options.kv_page or splits * positions < options.max_context:
            held = f"{splits} splits x {positions} positions in pages of {options.kv_page}"
            message = f"{held} hold no {options.max_context} positions"
            yield Violation("budget", THE_PLAN, message)
        first = own.first_pages * options.kv_page
        if first > positions:
            message = f"the first {first} positions of a split, which holds {positions}"
            yield Violation("budget", THE_PLAN, message)


def _chip_budget(plan: Plan) -> Iterator[Violation]:
    used, limit = schedule_of(plan).block_bytes, plan.limits.on_chip_bytes
    if used > limit:
        yield Violation(
            "budget", THE_PLAN, f"needs {used} bytes on chip per block, the limit is {limit}"
        )


def _tile_bytes(plan: Plan, matrix: Matrix) -> int:
    if matrix.format is not None:
        return matrix.format.bytes(matrix.tile_rows, matrix.tile_cols)
    return matrix.tile_rows * matrix.tile_cols * plan.options.weight_dtype.bytes


def item_count(plan: Plan, stage: Stage) -> int:
    """Items of a stage that scans caches."""
    if stage.scan:
        return stage.scan.items
    if not plan.attentions:
        return 0
    own = plan.attentions[min(stage.heads, len(plan.attentions) - 1)]
    return own.kv_heads * (own.window_splits if stage.window else own.splits)


def _divisions(own: Attention) -> tuple[tuple[int, int], ...]:
    """Splits of a KV head and their capacity: of layers that attend all positions, of others."""
    return (own.splits, own.item_positions), (own.window_splits, own.window_positions)
