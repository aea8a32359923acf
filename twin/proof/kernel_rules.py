"""What our kernel takes for granted of a plan, and the twin does not.

A plan that breaks such a rule is refused before the kernel computes something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from twin.errors import PlanError
from twin.kernel.fields import FLOATS
from twin.kernel.streams import PAGE_BYTES
from twin.kernel.tables import layout
from twin.models.formats import UNIT_BYTES
from twin.plan.catalogue import Input, StageKind, input_of
from twin.plan.matrix import MOST_BATCH_ROWS, Matrix, Span
from twin.plan.options import Execution, Residual, Sampling
from twin.plan.types import Plan, Stage
from twin.proof.rounds import STATEFUL, check_rounds
from twin.proof.stored import DECODED, in_blocks, multiplied
from twin.proof.violation import Violation
from twin.schedule.block import LINE_FLOATS
from twin.schedule.choose import chooser_of, schedule_of
from twin.schedule.chosen import multiplied as multiplied_at_once
from twin.schedule.memory import block_logits, logits_buffers_floats

LOADED_AT_ONCE = 8  # elements of a row: 16 bytes of the narrowest stored type
HEAD_STEP = 4  # elements of a head that a thread gathers at once
# a token's number is exchanged as an FP32, which holds every whole number up to here
MOST_INDEX = 2**24
SUMMARY = 4  # words of what a block publishes of its logits for the full sampler
BLOCK_THREADS = 256  # of an NVIDIA block, that multiply
MOST_SHAPES = 2  # of heads, for which a kernel has code
MOST_NUMBER = 2**31 - 1  # tables hold 4-byte fields
# (a matrix, reads, a publication); None: either
PROBE_STAGES: dict[StageKind, tuple[bool | None, ...]] = {
    StageKind.STREAM: (True, False, False),
    StageKind.EXCHANGE: (False, True, True),
    StageKind.ATTENTION: (False, False, False),
    StageKind.SAMPLE: (False, True, True),
}
THE_PLAN = "the plan"


def check_kernel(plan: Plan) -> list[Violation]:
    """Of a plan that the engine runs; the plan's structure must be sound."""
    if _simulated_only(plan):
        return []
    found = [
        *_limits(plan),
        *_lanes(plan),
        *(_of_warps(plan) if plan.limits.teams else _of_threads(plan)),
        *_experts(plan),
        *_states(plan),
        *_neighbours(plan),
        *(violation for stage in plan.stages for violation in _stage(plan, stage)),
    ]
    return (
        found
        if plan.spec
        else [*found, *(violation for stage in plan.stages for violation in _probe_stage(stage))]
    )


def check_layout(plan: Plan) -> list[Violation]:
    """The same, of what the kernel makes of a plan whose data flow is sound: does the layout exist,
    and do its numbers fit the tables?
    """
    return [] if _simulated_only(plan) else list(_laid_out(plan))


def _simulated_only(plan: Plan) -> bool:
    """By the model and the options, not by the stages: a dense model's plan with a stage that the
    kernel lacks is refused here.
    """
    options, spec = plan.options, plan.spec
    several = (
        options.batch > 1
        or options.draft > 0
        or options.expert_ranks > 1
        or options.ahead_slots > 0
    )
    runs = spec is None or (spec.runnable_reason() is None and multiplied(spec))
    runs &= spec is None or spec.hyper is None or plan.limits.oversubscribe
    return several or options.residual is Residual.SLICED or not runs


def _limits(plan: Plan) -> Iterator[Violation]:
    vocab = plan.shard.vocab * plan.ranks
    if vocab > MOST_INDEX:
        yield Violation(
            "kernel",
            THE_PLAN,
            f"{vocab} tokens: their numbers travel as FP32, exact up to {MOST_INDEX}",
        )
    for buffer in plan.buffers:
        if buffer.words != 1:
            yield Violation(
                "kernel",
                THE_PLAN,
                f"buffer {buffer.name} has {buffer.words} words an element; a step of one token "
                "has 1",
            )
    if len(plan.attentions) > MOST_SHAPES:
        message = f"heads of {len(plan.attentions)} shapes; the kernel has {MOST_SHAPES}"
        yield Violation("kernel", THE_PLAN, message)
    for own in plan.attentions:
        whole = min(own.heads, own.kv_heads, own.head_dim) > 0 and own.heads % own.kv_heads == 0
        if not whole or own.head_dim % HEAD_STEP:
            has = f"{own.heads} heads on {own.kv_heads} KV heads of {own.head_dim} elements"
            message = (
                f"{has}: the kernel takes whole groups, and heads of a multiple of {HEAD_STEP} "
                "elements"
            )
            yield Violation("kernel", THE_PLAN, message)


def _experts(plan: Plan) -> Iterator[Violation]:
    """Stages of chosen experts are multiplied as one matrix each."""
    routed = [(stage, stage.matrix) for stage in plan.stages if stage.routed and stage.matrix]
    for stage, matrix in routed:
        uneven = matrix.cols % min(matrix.tile_cols, matrix.cols)
        if stage.kind is StageKind.ROUTED_DOWN and uneven and not matrix.pack:
            message = (
                f"slices of {matrix.tile_cols} of {matrix.cols} columns; those of several experts "
                "are of one width where no tile brings scales"
            )
            yield Violation("kernel", stage.name, message)
        yield from _expert_tiles(plan, stage, matrix)


def _inputs(plan: Plan) -> list[Input | None]:
    """[stages] the kernel's input that a stage's matrix multiplies. What states, or channels with
    a history, made is one of its own if no heads make as many outputs.
    """
    made = {stage.publishes for stage in plan.stages if stage.kind in STATEFUL}
    follows = [any(read.value in made for read in stage.reads) for stage in plan.stages]
    heads = {
        stage.matrix.cols
        for stage, states in zip(plan.stages, follows, strict=True)
        if stage.kind is StageKind.O_PROJ and stage.matrix and not states
    }
    return [
        input_of(
            stage.kind,
            routed=plan.routed,
            heads=stage.heads,
            states=states and bool(heads) and bool(stage.matrix and stage.matrix.cols not in heads),
        )
        for stage, states in zip(plan.stages, follows, strict=True)
    ]


def _states(plan: Plan) -> Iterator[Violation]:
    """Recurrent states are compiled in as those of the first stage that has some."""
    first: Stage | None = None
    for stage in plan.stages:
        if stage.kind is not StageKind.DELTA or stage.scan is None:
            continue
        first = first or stage
        has, its = stage.scan, first.scan
        assert its is not None
        one, other = (has.splits, has.page, has.held_bytes), (its.splits, its.page, its.held_bytes)
        if one != other:
            message = f"items, columns and bytes of its states are {one}; {first.name} has {other}"
            yield Violation("kernel", stage.name, message)


def _neighbours(plan: Plan) -> Iterator[Violation]:
    """By the stage before it an output projection knows whether heads' outputs are attention's, a
    recurrent state's or channels; by the one behind it attention of a prompt pass knows the next
    weights.
    """
    makers = (StageKind.ATTENTION, StageKind.DELTA, StageKind.CONV_IN, StageKind.HEAD_OUT)
    for stage in plan.stages if plan.spec else ():
        before = plan.stages[stage.index - 1] if stage.index else stage
        if stage.kind is StageKind.O_PROJ and before.kind not in makers:
            message = f"follows {before.name}; it stands right behind what makes heads' outputs"
            yield Violation("kernel", stage.name, message)


def _expert_tiles(plan: Plan, stage: Stage, matrix: Matrix) -> Iterator[Violation]:
    """Tiles of low-bit weights lie in memory with their scales: of rows that blocks share, a block
    has whole ones, which lie in one expert.
    """
    if not matrix.pack or matrix.owned or stage.publishes is None:
        return
    high, owned = matrix.tile_rows, plan.values[stage.publishes].owned
    if matrix.rows % high or any(matrix.unit * lo % high for lo, _ in owned):
        message = f"blocks divide tiles of {high} of an expert's {matrix.rows} rows"
        yield Violation("kernel", stage.name, message)


def _stage(plan: Plan, stage: Stage) -> Iterator[Violation]:
    # the data flow says which stages are
    routed = plan.spec is not None and plan.spec.experts is not None
    recurs = plan.spec is not None and plan.spec.recurrence is not None
    scanning = [StageKind.DELTA] if recurs else []
    if plan.spec is not None and plan.spec.hyper:
        scanning += [StageKind.INDEX, StageKind.ATTENTION]
    for what, there in (
        ("chosen experts", stage.routed and not routed),
        ("a gate for its weights", stage.gate is not None and not routed),
        ("a scan of its own", stage.scan and stage.kind not in scanning),
        ("several matrices", stage.more),
        ("sums that stay in the block", stage.kept and not routed),
    ):
        if there:
            yield Violation("kernel", stage.name, f"has {what}, which can be simulated only")
    if stage.matrix is not None:
        yield from _matrix(plan, stage, stage.matrix)
    if stage.matrix is not None and stage.kind is StageKind.LM_HEAD:
        yield from _logits_buffer(plan, stage, stage.matrix)
    if stage.kind is StageKind.SAMPLE:
        yield from _sample(plan, stage)


def _probe_stage(stage: Stage) -> Iterator[Violation]:
    """Of a plan without a model, whose stages are compared with nothing else."""
    wanted = PROBE_STAGES.get(stage.kind)
    if wanted is None:
        yield Violation("kernel", stage.name, "a plan without a model has no such stage")
        return
    has = (stage.matrix is not None, bool(stage.reads), stage.publishes is not None)
    for what, there, needed in zip(
        ("a matrix", "reads", "a publication"), has, wanted, strict=True
    ):
        if needed is not None and there != needed:
            verdict = f"lacks {what}" if needed else f"has {what}, and takes none"
            yield Violation("kernel", stage.name, f"a probe's {stage.kind.value} stage {verdict}")


def _matrix(plan: Plan, stage: Stage, matrix: Matrix) -> Iterator[Violation]:
    if matrix.joined != 1:
        message = f"{matrix.joined} matrices side by side; those of experts alone become one"
        yield Violation("kernel", stage.name, message)
    if matrix.format is not None and matrix.format.name not in DECODED:
        yield Violation(
            "kernel",
            stage.name,
            f"its weights are stored as {matrix.format.name}; the kernel multiplies 16 or 32 "
            f"bits, or {', '.join(DECODED)}",
        )
    elif matrix.format is not None and in_blocks(matrix.format.name):
        if not plan.limits.oversubscribe:
            message = f"its weights are {matrix.format.name}, which only CPUs multiply"
            yield Violation("kernel", stage.name, message)
        wide = matrix.format.block[1]
        if matrix.cols % wide or matrix.tile_cols % wide:
            message = (
                f"{matrix.cols} columns in tiles of {matrix.tile_cols}: a block of "
                f"{matrix.format.name} has {wide}, and no tile divides it"
            )
            yield Violation("kernel", stage.name, message)
    for what, columns in (("columns", matrix.cols), ("columns a tile", matrix.tile_cols)):
        if columns % LOADED_AT_ONCE and columns < matrix.cols + (what == "columns"):
            yield Violation(
                "kernel",
                stage.name,
                f"{columns} {what}: must be a multiple of {LOADED_AT_ONCE}, {UNIT_BYTES} bytes of "
                "16-bit weights",
            )
    convolves = plan.spec is not None and plan.spec.convolution is not None
    most = 3 if convolves and stage.kind is StageKind.CONV_IN else 2
    if not 1 <= matrix.unit <= most:
        message = f"{matrix.unit} rows make an element; the kernel adds up at most {most} of them"
        yield Violation("kernel", stage.name, message)


def _lanes(plan: Plan) -> Iterator[Violation]:
    """Where weights are low-bit, all matrices of an input share its layout: a thread has as many
    elements of it in a row as one load brings of 8-bit weights."""
    coded = any(m.format is not None for stage in plan.stages for m in stage.matrices)
    pack = UNIT_BYTES if coded else 0
    shapes: dict[object, tuple[str, int, int]] = {}
    for stage, read in zip(plan.stages, _inputs(plan), strict=True):
        if stage.matrix is None:
            continue
        cols, tile = stage.matrix.cols, stage.matrix.tile_cols
        if stage.matrix.pack != pack:
            held = f"{stage.matrix.pack} elements of a row to a thread"
            yield Violation("kernel", stage.name, f"{held}; a load of 8-bit weights has {pack}")
        elif pack and (cols % pack or tile % pack):
            message = f"{cols} columns in tiles of {tile}: must be multiples of {pack}, a load"
            yield Violation("kernel", stage.name, message)
        if read is None:  # of a stage of cores, which lay out no input
            continue
        first = shapes.setdefault(read, (stage.name, cols, tile))
        if pack and first[1:] != (cols, tile):
            message = (
                f"tiles of {tile} of {cols} columns; {first[0]}, of the same input, has {first[2]}"
            )
            yield Violation("kernel", stage.name, message)


def _of_warps(plan: Plan) -> Iterator[Violation]:
    """What an NVIDIA block takes besides: its warps share rows, and it remembers a choice of
    experts within a launch.
    """
    yield from _teams(plan)
    resident = plan.options.execution is Execution.RESIDENT
    if any(stage.routed and stage.matrix for stage in plan.stages) and not resident:
        message = (
            f"execution={plan.options.execution.value} forgets between kernels which experts were "
            "chosen; use execution=resident"
        )
        yield Violation("kernel", THE_PLAN, message)
    for stage in plan.stages:
        if stage.matrix is not None:
            yield from _warps_matrix(stage, stage.matrix)
        if stage.scan and stage.scan.page > BLOCK_THREADS:
            message = (
                f"items of {stage.scan.page} columns of a state; the {BLOCK_THREADS} threads of an "
                "NVIDIA block have one each: use more blocks"
            )
            yield Violation("kernel", stage.name, message)


def _warps_matrix(stage: Stage, matrix: Matrix) -> Iterator[Violation]:
    if stage.routed and matrix.tile_rows > matrix.rows:
        message = (
            f"tiles of {matrix.tile_rows} rows of experts of {matrix.rows}; a tile has rows of "
            "two experts at most"
        )
        yield Violation("kernel", stage.name, message)
    if matrix.folded and matrix.tile_cols < matrix.cols:
        yield _unfolded(stage, matrix)
    if matrix.tile_rows > MOST_BATCH_ROWS:
        message = (
            f"tiles of {matrix.tile_rows} rows; a block adds up at most {MOST_BATCH_ROWS} at once"
        )
        yield Violation("kernel", stage.name, message)


def _of_threads(plan: Plan) -> Iterator[Violation]:
    """What blocks whose threads share no rows take besides."""
    for stage in plan.stages:
        if stage.matrix is not None and stage.matrix.folded:
            yield _unfolded(stage, stage.matrix)


def _unfolded(stage: Stage, matrix: Matrix) -> Violation:
    message = (
        f"folds of tiles of {matrix.tile_cols} of {matrix.cols} columns; an NVIDIA block's "
        "warp folds whole rows"
    )
    return Violation("kernel", stage.name, message)


def _teams(plan: Plan) -> Iterator[Violation]:
    """An NVIDIA block's warps are divided once for all matrices of an input."""
    shapes: dict[object, tuple[str, tuple[int, int, bool]]] = {}
    inputs = _inputs(plan)
    for stage, matrix in zip(plan.stages, multiplied_at_once(plan), strict=True):
        if matrix is None:
            continue
        has = (matrix.cols, matrix.tile_cols, matrix.folded)
        name, first = shapes.setdefault(inputs[stage.index], (stage.name, has))
        if has != first:
            message = f"(columns, of a tile, folded) {has}; {name}, of the same input, has {first}"
            yield Violation("kernel", stage.name, message)


def _logits_buffer(plan: Plan, stage: Stage, matrix: Matrix) -> Iterator[Violation]:
    """What blocks make of their logits for the full sampler lies in buffers of one size, that of
    an even share.
    """
    sizes = [hi - lo for lo, hi in matrix.owned]
    most = block_logits(plan)
    if plan.options.sampling is Sampling.FULL and max(sizes, default=0) > most:
        block = sizes.index(max(sizes))
        message = (
            f"block {block} has {sizes[block]} of {matrix.rows} rows; its logits buffer has "
            f"room for {most}, an even share"
        )
        yield Violation("kernel", stage.name, message)


def _sample(plan: Plan, stage: Stage) -> Iterator[Violation]:
    """Full: block 0 gathers all blocks' summaries of their logits, and publishes the token.
    Greedy: every block looks at all candidates and publishes nothing.
    """
    full = plan.options.sampling is Sampling.FULL
    if len(stage.reads) != 1:
        yield Violation(
            "kernel", stage.name, f"reads {len(stage.reads)} values; it chooses from one"
        )
        return
    if stage.publishes is not None:
        owned = plan.values[stage.publishes].owned
        alone: tuple[Span, ...] = ((0, 1),) + ((1, 1),) * (plan.blocks - 1)
        if plan.values[stage.publishes].elements != 1 or owned[0] != alone[0]:
            yield Violation(
                "kernel",
                stage.name,
                f"block 0 chooses the token, but publishes {owned[0]} of "
                f"{plan.values[stage.publishes].name}",
            )
        if not full and plan.blocks > 1:
            yield Violation(
                "kernel",
                stage.name,
                f"all {plan.blocks} blocks choose greedily, and one publishes; use sampling=full",
            )
    elements = plan.values[stage.reads[0].value].elements
    if not full and elements % 2:
        yield Violation(
            "kernel", stage.name, f"{elements} words: a greedy candidate has two, logit and token"
        )
    # a probe's one block publishes logits, and summarises them itself
    if full and not plan.spec and (plan.blocks > 1 or elements > block_logits(plan)):
        yield Violation(
            "kernel",
            stage.name,
            f"{elements} logits on {plan.blocks} blocks; a probe samples on one, whose "
            f"logits buffer has room for {block_logits(plan)}",
        )
    wanted = SUMMARY * plan.blocks
    if full and plan.spec and elements != wanted:
        yield Violation(
            "kernel",
            stage.name,
            f"{elements} words: {plan.blocks} blocks' summaries of their logits have {wanted}",
        )


def _ring(plan: Plan) -> Iterator[Violation]:
    """Warps of an NVIDIA block take weights ahead, and hold their slots until they have all of
    them: in a smaller ring they wait forever.

    A stage of each kind, because layers are alike.
    """
    schedule, seen = schedule_of(plan), set()
    for stage in plan.stages:
        prefetch = schedule.prefetch(stage)
        if stage.matrix is None or prefetch is None or (stage.kind, stage.matrix) in seen:
            continue
        seen.add((stage.kind, stage.matrix))
        needed, slots = prefetch.ring_slots(stage.matrix), plan.options.ring_slots
        if slots < needed:
            message = (
                f"its warps hold {needed} slots of weights before its inputs are there; "
                f"ring_slots={slots}, use at least {needed}"
            )
            yield Violation("ring", stage.name, message)
            return


def _extra_bytes(plan: Plan, sizes: Mapping[str, int | float]) -> int:
    """Bytes of a rank's arenas besides weights, caches and exchanged words: padding, counters,
    tables, what prompts and samplers need.
    """
    words = sum(buffer.elements * buffer.copies * buffer.parts for buffer in plan.buffers)
    floats = (
        sizes["exchange_floats"]
        - words
        + LINE_FLOATS * sizes["counters"]
        + sizes["prompt_floats"]
        + sizes["constant_floats"]
    )
    return int(4 * (floats + logits_buffers_floats(plan))) + PAGE_BYTES * plan.blocks


def _laid_out(plan: Plan) -> Iterator[Violation]:
    try:
        made = layout(plan)
        chooser_of(plan.limits).check_plan(plan)
    except PlanError as error:
        yield Violation("kernel", THE_PLAN, str(error))
        return
    yield from _ring(plan)
    yield from check_rounds(plan, made)
    needed, limit = plan.memory_bytes(), plan.limits.memory_bytes
    held = needed + plan.ranks_per_gpu * _extra_bytes(plan, made.sizes)
    if needed <= limit < held:  # more is refused elsewhere
        yield Violation(
            "budget",
            THE_PLAN,
            f"the engine holds {held} bytes of memory per GPU, the limit is {limit}",
        )
    columns = [(name, value) for name, value in made.sizes.items() if name not in FLOATS]
    for name, table in made.tables.items():
        numbers = list(chain.from_iterable(table))
        widest = max(max(numbers, default=0), -min(numbers, default=0))
        columns.append((f"a number in the table of {name}", widest))
    for name, value in columns:
        if abs(value) > MOST_NUMBER:
            yield Violation(
                "kernel",
                THE_PLAN,
                f"{name} is {value:.0f}; the kernel's tables hold at most {MOST_NUMBER}",
            )
