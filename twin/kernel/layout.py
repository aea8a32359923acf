"""Where everything of a plan lies in memory: the tables that the kernel walks, the arenas, the
packed weight streams.

All tables hold 4-byte fields, so that they can be compiled in (`header`) or passed at run time
(`image`): the same structs either way. Offsets count floats, except where the name says pages or
bytes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.kernel import experts
from twin.kernel.coded import STORAGE as STORAGE
from twin.kernel.coded import coded_fields, pack_coded, stored_bytes
from twin.kernel.prompt import chip_bytes, prompt_of, tensor_pass
from twin.kernel.scan import cache_tile, scan_heads, scanning_warps, tensor_scan
from twin.kernel.teams import ahead_pieces, teams_of
from twin.models.codes import Coded
from twin.models.spec import LaneHead, ModelSpec, RopeStyle
from twin.plan import shards
from twin.plan.biases import bias_shape, stage_bias, stage_sinks
from twin.plan.catalogue import BY_INPUT, ROWS
from twin.plan.shards import Weights
from twin.plan.types import (
    MOST_WARPS,
    PARTIAL_EXTRA,
    STAGGERED_LANES,
    Execution,
    HandOffKind,
    Matrix,
    Parts,
    Plan,
    Read,
    Sampling,
    Span,
    Stage,
    StageKind,
    Value,
    tiles,
)

PAGE_BYTES = 4096  # streams of blocks start on a page
BARRIER_BYTES = 8  # an mbarrier; each ring position has two: full and empty
PROGRESS_BYTES = 32  # Progress in block.cuh
# Signals in cuda_core.cuh besides the values of its warps; the sum is checked there
SIGNAL_BYTES = 32 * 16 + 48
UNIT_BYTES = 16  # a row of any tile is a multiple of it
STATE_EXTRA = 32  # floats that a block keeps between kernels besides its residual
# exchange rows and counters never share a 128-byte line, the widest of the targets
LINE_FLOATS = 32
VECTOR_FLOATS = 16  # constants start on a 64-byte line
SCAN_FLOATS = 4096  # the full sampler's sums of each thread

Table = list[tuple[int | float, ...]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows of each table in the field order of FIELDS, and the sizes of the arenas."""

    sizes: dict[str, int | float]
    stages: Table
    reads: Table
    resets: Table
    values: Table
    owned: Table  # [blocks][sets] spans: those of a block lie together
    rows: Table  # [sets][blocks] (first, count) into `spans`
    spans: Table
    streams: Table  # [blocks] first page of each block's stream
    # one kernel per stage: [stages][blocks] where a stage's tiles start in the stream; else empty
    starts: Table
    stage_fields: tuple[str, ...]  # FIELDS, and those of STAGE_EXTRAS that the model's family uses
    placed: dict[int, experts.Place]  # the experts of each stage that has some

    def fields(self, table: str) -> tuple[str, ...]:
        """The names of a table's columns."""
        return self.stage_fields if table == "stages" else FIELDS[table][1]

    @property
    def tables(self) -> dict[str, Table]:
        return {name: getattr(self, name) for name in FIELDS}


# table -> (struct, fields); a field is an int unless in FLOATS
FIELDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stages": (
        "Stage",
        (
            "kind",
            "layer",
            "first_read",
            "reads",
            "first_reset",
            "resets",
            "publishes",
            "rows",
            "cols",
            "unit",
            "tile_rows",
            "tile_cols",
            "tile_inverse",
            "batch",
            "owned",
            "items",
            "window",
            "kv",
            "norm",
            "bias",
            "q_norm",
            "k_norm",
            "pushes",
            "next",
        ),
    ),
    "reads": (
        "Read",
        ("value", "parts", "pass_parts", "spans", "previous_step", "residual", "scale"),
    ),
    "resets": ("Reset", ("value", "previous_step")),
    "values": (
        "Value",
        (
            "offset",
            "part_stride",
            "parts",
            "elements",
            "pushed",
            "owned",
            "counter",
            "arrivals",
            "arrivals_per_step",
            "prompt",
        ),
    ),
    "owned": ("Span", ("lo", "hi")),
    "rows": ("SpanRow", ("first", "count")),
    "spans": ("Span", ("lo", "hi")),
    "streams": ("StreamStart", ("page",)),
    "starts": ("StageStart", ("units",)),
}
# where the model norms what modules add; where layers are rotated differently; where heads have
# sinks
STAGE_EXTRAS = ("post_norm", "rope", "sinks")
# of a plan with coded weights: twin/kernel/coded.py
CODED_FIELDS = ("code", "row_bytes", "last_bytes", "row_scales", "last_scales")
# of a stage's fields
SHAPE = ("rows", "cols", "unit", "tile_rows", "tile_cols", "tile_inverse", "batch")
FLOATS = {"scale", "norm_eps"}
TEAM_SIZES = (  # of NVIDIA's blocks
    "consumer_warps",
    "scan_heads",
    "cache_tile",
    "tensor_scan",
    *(
        f"{use}_{what}"
        for use in BY_INPUT
        for what in ("cols", "tile", "vector", "team", "ahead_chunks", "ahead_groups")
    ),
)


@lru_cache(maxsize=8)
def layout(plan: Plan) -> Layout:
    """All tables of a plan."""
    sets = _Sets(plan.blocks)
    reads: Table = []
    resets: Table = []
    stages: Table = []
    constants, vectors = _constants(plan)
    extras, codes = stage_extras(plan), CODED_FIELDS if plan.coded else ()
    routed = experts.fields_of(plan)
    fields = (*FIELDS["stages"][1], *extras, *codes, *routed)
    streams, pages = _streams(plan)
    placed, pages = experts.places(plan, pages, page_bytes=PAGE_BYTES, unit_bytes=UNIT_BYTES)
    kv = 0
    for stage in plan.stages:
        matrix = experts.multiplied(plan, stage)
        at = vectors.get(stage.index, {})
        stages.append(
            in_order(
                fields,
                dict(
                    kind=NUMBERS[stage.kind],
                    layer=stage.layer,
                    first_read=len(reads),
                    reads=len(stage.reads),
                    first_reset=len(resets),
                    resets=len(stage.resets),
                    publishes=-1 if stage.publishes is None else stage.publishes,
                    **_shape(matrix),
                    owned=sets.own(matrix.owned) if matrix else -1,
                    items=sets.own(stage.items) if stage.items else -1,
                    window=stage.window,
                    kv=kv,
                    **{name: at.get(name, -1) for name in ("norm", "bias", "q_norm", "k_norm")},
                    pushes=int(_pushes(plan, stage)),
                    next=_next_stage(plan, stage),
                    **{name: at.get(name, -1) for name in extras},
                    **(coded_fields(plan, matrix) if codes else {}),
                    **experts.fields(placed.get(stage.index), routed),
                ),
            )
        )
        kv += stage.kind is StageKind.ATTENTION
        reads += [
            _row(
                "reads",
                value=r.value,
                parts=PARTS[r.parts],
                pass_parts=PARTS[_pass_parts(plan, r)],
                spans=sets.read(r),
                previous_step=int(r.previous_step),
                residual=int(r.residual),
                scale=r.scale,
            )
            for r in stage.reads
        ]
        resets += [
            _row("resets", value=r.value, previous_step=int(r.previous_step)) for r in stage.resets
        ]
    values, exchange, counters = _values(plan, sets)
    sizes = _sizes(plan) | {
        "kv_stages": kv,
        "exchange_floats": exchange,
        "counters": counters + 3,
        "grid_counter": counters,
        "prompt_counter": counters + 2,
        "owned_sets": len(sets.sets),
        "constant_floats": constants,
        "stream_pages": pages,
        "rope": vectors.get(-1, {}).get("rope", -1),
    }
    sizes |= {"choice": int(sizes["scratch_floats"]) - _choice_floats(plan)} if routed else {}
    return Layout(
        sizes,
        stages,
        reads,
        resets,
        values,
        sets.owned,
        sets.rows,
        sets.spans,
        streams,
        _starts(plan),
        fields,
        placed,
    )


def stage_extras(plan: Plan) -> tuple[str, ...]:
    """What the model's family has a stage say besides FIELDS."""
    spec = plan.spec
    used = (
        spec is not None and spec.variant.norms.after,
        spec is not None and len(spec.rotations) > 1,
        spec is not None and spec.sinks and plan.attention is not None,
    )
    return tuple(name for name, wanted in zip(STAGE_EXTRAS, used, strict=True) if wanted)


def _row(table: str, **named: int | float) -> tuple[Any, ...]:
    return in_order(FIELDS[table][1], named)


def in_order(fields: Sequence[str], named: Mapping[str, int | float]) -> tuple[Any, ...]:
    """A record in the order of its struct. Raises KeyError unless it names every field, and no
    other.
    """
    if unknown := named.keys() - set(fields):
        raise KeyError(f"no such fields: {', '.join(sorted(unknown))}")
    return tuple(named[field] for field in fields)


def _next_stage(plan: Plan, stage: Stage) -> int:
    """The one that consumers run next where keepers make sums of late parts."""
    return next((s.index for s in plan.stages[stage.index + 1 :] if not s.late), len(plan.stages))


def _shape(matrix: Matrix | None) -> dict[str, int]:
    """A stage's fields of its matrix; zeros where it has none."""
    if matrix is None:
        return dict.fromkeys(SHAPE, 0)
    own = {
        name: getattr(matrix, name) for name in ("rows", "cols", "unit", "tile_rows", "tile_cols")
    }
    return own | {"tile_inverse": tile_inverse(matrix.tile_rows), "batch": matrix.batch_rows}


def tile_inverse(tile_rows: int) -> int:
    """n * this >> 16 is n // tile_rows for the rows of a batch and a tile beside it."""
    return -(-(1 << 16) // tile_rows)


NUMBERS = {kind: at for at, kind in enumerate(StageKind)}
PARTS = {parts: at for at, parts in enumerate(Parts)}
HANDOFFS = {kind: at for at, kind in enumerate(HandOffKind)}


def image(plan: Plan) -> NDArray[np.int32]:
    """The sizes and all tables as one array of 4-byte words: a word offset per table first."""
    made = layout(plan)
    parts = [_words([tuple(made.sizes.values())], tuple(made.sizes))]
    parts += [_words(table, made.fields(name)) for name, table in made.tables.items()]
    starts = np.cumsum([len(parts), *(len(p) for p in parts)])[:-1]
    return np.concatenate([starts.astype(np.int32), *parts])


def stream_bytes(plan: Plan) -> list[int]:
    """[blocks] weights that one step streams through each."""
    if plan.coded:
        return [
            sum(
                sum(tile_bytes(plan, stage, block))
                for stage in plan.stages
                if stage.matrix and not stage.routed
            )
            for block in range(plan.blocks)
        ]
    # of all matrices whose rows the blocks share alike
    columns: Counter[tuple[Span, ...]] = Counter()
    for stage in plan.stages:
        if stage.matrix and not stage.routed:
            columns[stage.matrix.owned] += stage.matrix.cols
    size = plan.options.weight_dtype.bytes
    return [
        size * sum((owned[block][1] - owned[block][0]) * cols for owned, cols in columns.items())
        for block in range(plan.blocks)
    ]


def pack(plan: Plan, weights: Weights, rank: int, out: NDArray[np.uint8]) -> None:
    """Write the streams of all blocks of a rank into `out` [stream_pages * PAGE_BYTES], in the
    order of `types.tiles`, and the experts behind them.
    """
    storage = STORAGE[plan.options.weight_dtype]
    made = layout(plan)
    starts = [int(row[0]) * PAGE_BYTES for row in made.streams]
    for stage in plan.stages:
        if stage.matrix is None:
            continue
        if stage.routed:
            place = made.placed[stage.index]
            first = place.page * PAGE_BYTES
            size = stage.routed.experts * place.units * UNIT_BYTES
            experts.pack(plan, stage, rank, weights, place, out[first : first + size])
            continue
        found = shards.stage_matrix(plan, stage, rank, weights)
        if plan.coded:
            starts = pack_coded(plan, stage, found, starts, out)
            continue
        assert not isinstance(found, Coded)
        source = np.ascontiguousarray(found).astype(storage, copy=False)
        for block, (lo, hi) in enumerate(stage.matrix.owned):
            size = (hi - lo) * stage.matrix.cols * source.itemsize
            target = out[starts[block] : starts[block] + size].view(storage)
            _tile(stage.matrix, source[lo:hi], target)
            starts[block] += size


def pack_constants(plan: Plan, weights: Weights, rank: int) -> NDArray[np.float32]:
    """Norm scales, biases and rotary tables of a rank, at the offsets that the stage table
    gives.
    """
    total, vectors = _constants(plan)
    out = np.zeros(total, np.float32)

    def put(at: int, vector: NDArray[np.float32]) -> None:
        out[at : at + vector.size] = vector.reshape(-1)

    for stage in plan.stages:
        for name, at in vectors.get(stage.index, {}).items():
            if name != "rope":
                put(at, _vector(plan, stage, name, rank, weights))
    assert plan.spec is not None
    for number, tables in enumerate(shards.rope_tables(plan.spec, plan.options.max_context)):
        for at, table in zip(_rope_offsets(plan, vectors[-1]["rope"], number), tables, strict=True):
            put(at, table)
    return out


def embedding(plan: Plan, weights: Weights) -> NDArray[Any]:
    """[vocab, hidden] in the plan's weight type; one copy serves all ranks of a GPU."""
    return np.ascontiguousarray(weights["embed"]).astype(
        STORAGE[plan.options.weight_dtype], copy=False
    )


# ---- tables --------------------------------------------------------------------------------------


class _Sets:
    """Per-block tables, each distinct one stored once."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.sets: list[tuple[Span, ...]] = []
        self.rows: Table = []
        self.spans: Table = []
        self._owned: dict[tuple[Span, ...], int] = {}
        self._rows: dict[tuple[tuple[Span, ...], ...], int] = {}
        self._spans: dict[tuple[Span, ...], int] = {}

    def own(self, spans: tuple[Span, ...]) -> int:
        if spans not in self._owned:
            self._owned[spans] = len(self.sets)
            self.sets.append(spans)
        return self._owned[spans]

    @property
    def owned(self) -> Table:
        return [spans[block] for block in range(self.blocks) for spans in self.sets]

    def read(self, read: Read) -> int:
        if read.spans not in self._rows:
            self._rows[read.spans] = len(self.rows)
            self.rows += [(self._list(spans), len(spans)) for spans in read.spans]
        return self._rows[read.spans]

    def _list(self, spans: tuple[Span, ...]) -> int:
        if spans not in self._spans:
            self._spans[spans] = len(self.spans)
            self.spans += spans
        return self._spans[spans]


def _values(plan: Plan, sets: _Sets) -> tuple[Table, int, int]:
    """(rows, floats of the exchange arena of a rank, counters).

    A (buffer, copy) has one counter per part for pushed values and one more for local values. A
    reader waits for all arrivals of the steps before, and for those of this step up to its value.
    """
    base, floats, counters = {}, 0, {}
    for buffer in plan.buffers:
        base[buffer.id], counters[buffer.id] = (
            floats,
            sum((b.parts + 1) * b.copies for b in plan.buffers[: buffer.id]),
        )
        floats += buffer.copies * buffer.parts * _up(buffer.elements, LINE_FLOATS)
    writers = {v.id: sum(lo < hi for lo, hi in v.owned) for v in plan.values}
    prompts = prompt_of(plan).values
    shared: dict[tuple[int, int, bool], list[Value]] = defaultdict(list)
    for value in plan.values:
        shared[value.buffer, value.copy, value.pushed].append(value)
    rows: Table = []
    for value in plan.values:
        buffer = plan.buffers[value.buffer]
        stride = _up(buffer.elements, LINE_FLOATS)
        same = shared[value.buffer, value.copy, value.pushed]
        counter = counters[value.buffer] + value.copy * (buffer.parts + 1)
        rows.append(
            _row(
                "values",
                offset=base[value.buffer] + value.copy * buffer.parts * stride,
                part_stride=stride,
                parts=buffer.parts,
                elements=value.elements,
                pushed=int(value.pushed),
                owned=sets.own(value.owned),
                counter=counter + (0 if value.pushed else buffer.parts),
                arrivals=sum(writers[v.id] for v in same if v.stage <= value.stage),
                arrivals_per_step=sum(writers[v.id] for v in same),
                prompt=prompts[value.id],
            )
        )
    return rows, max(floats, LINE_FLOATS), sum((b.parts + 1) * b.copies for b in plan.buffers)


def _streams(plan: Plan) -> tuple[Table, int]:
    rows: Table = []
    page = 0
    for size in stream_bytes(plan):
        rows.append((page,))
        page += -(-size // PAGE_BYTES)
    return rows, page


def _starts(plan: Plan) -> Table:
    """In units of UNIT_BYTES, from the start of the block's stream."""
    if plan.options.execution is Execution.RESIDENT:
        return []
    size = plan.options.weight_dtype.bytes
    at = [0] * plan.blocks
    rows: Table = []
    for stage in plan.stages:
        rows += [(a // UNIT_BYTES,) for a in at]
        if stage.matrix and plan.coded and not stage.routed:
            at = [a + sum(tile_bytes(plan, stage, block)) for block, a in enumerate(at)]
        elif stage.matrix and not stage.routed:
            at = [
                a + (hi - lo) * stage.matrix.cols * size
                for a, (lo, hi) in zip(at, stage.matrix.owned, strict=True)
            ]
    return rows


def _sizes(plan: Plan) -> dict[str, int | float]:
    """Everything about a plan that is one number. `*_floats` of a block's own memory come from the
    worst stage.
    """
    spec, shard, options, lanes = (
        plan.spec,
        plan.shard,
        plan.options,
        plan.spec.lanes if plan.spec else None,
    )
    own = plan.attention
    return (
        {
            "ranks": plan.ranks,
            "ranks_per_gpu": plan.ranks_per_gpu,
            "blocks": plan.blocks,
            "stage_count": len(plan.stages),
            "handoff": HANDOFFS[options.handoff],
            "full": int(options.sampling is Sampling.FULL),
            "probe": int(spec is None),
            "kinds": sum(1 << NUMBERS[kind] for kind in {stage.kind for stage in plan.stages}),
            "resident": int(options.execution is Execution.RESIDENT),
            "hidden": shard.hidden,
            "heads": own.heads if own else 0,
            "kv_heads": own.kv_heads if own else 0,
            "shard_vocab": shard.vocab,
            "vocab": spec.vocab if spec else shard.vocab,
            "splits": own.splits if own else 1,
            "page": options.kv_page,
            "item_positions": own.item_positions if own else 0,
            "kv_items": own.items if own else 0,
            "context": options.context,
            "max_context": options.max_context,
            "interleaved": int(spec is not None and spec.rope.style is RopeStyle.INTERLEAVED),
            "mean_of": lanes.count if lanes and lanes.head is LaneHead.MEAN else 1,
            "norm_eps": spec.norm_eps if spec else 0.0,
            "biased": int(spec is not None and _biased(spec)),
            "slot_bytes": options.slot_bytes,
            "ring_slots": options.ring_slots,
            "window_slots": options.window_slots,
            "stagger_ns": options.lane_stagger_ns,
            "staggered": STAGGERED_LANES,
            # of all tiles' heights; 0: no tiles
            "tile_step": math.gcd(
                *(stage.matrix.tile_rows for stage in plan.stages if stage.matrix)
            ),
            "state_floats": _up(shard.hidden, LINE_FLOATS) + STATE_EXTRA,
            "input_floats": _input_floats(plan),
            "scratch_floats": _scratch_floats(plan),
            "half_floats": _half_floats(plan),
        }
        | _team_sizes(plan)
        | _prompt_sizes(plan)
    )


def _biased(spec: ModelSpec) -> bool:
    """Do products of the residual have biases, besides those of experts?"""
    return spec.qkv_bias or (spec.experts is not None and spec.experts.router_bias)


def _team_sizes(plan: Plan) -> dict[str, int]:
    """NVIDIA: warps that compute, and how they share the matrices of each input. Zero where a
    device has no such warps.
    """
    if not plan.limits.teams:
        return dict.fromkeys(TEAM_SIZES, 0)
    teams = teams_of(plan)
    sizes = {
        "consumer_warps": teams.warps,
        "scan_heads": scan_heads(plan),
        "cache_tile": cache_tile(plan),
        "tensor_scan": int(tensor_scan(plan)),
    }
    for name, team in (("hidden", teams.hidden), ("heads", teams.heads), ("ffn", teams.ffn)):
        sizes |= {
            f"{name}_cols": team.cols,
            f"{name}_tile": team.tile,
            f"{name}_vector": team.vector,
            f"{name}_team": team.size,
        }
        sizes[f"{name}_ahead_chunks"], sizes[f"{name}_ahead_groups"] = ahead_pieces(plan, name)
    return sizes


def _prompt_sizes(plan: Plan) -> dict[str, int]:
    prompt = prompt_of(plan)
    return {
        "prompt_chunk": plan.options.prompt_chunk if plan.spec else 1,
        "prompt_floats": prompt.floats,
        "prompt_residual": prompt.residual,
        "prompt_normed": prompt.normed,
        "prompt_stages": prompt.stages,
        "prompt_chip_floats": prompt.chip_floats,
        "prompt_bytes": prompt_chip(plan),
        "prompt_queries": prompt.queries,
        "tensor_pass": int(tensor_pass(plan)),
    }


def prompt_chip(plan: Plan) -> int:
    """NVIDIA: bytes of a block's shared memory during a prompt pass."""
    if not plan.limits.teams:
        return 0
    return chip_bytes(plan)


def beside_bytes(plan: Plan) -> int:
    """NVIDIA: mbarriers, what a block's warps tell each other, and its progress."""
    warps = teams_of(plan).warps
    # Ring::BARRIERS in cuda_ring.cuh
    barriers = plan.options.ring_slots + 2 * warps + (plan.options.window_slots | 1)
    return (
        2 * BARRIER_BYTES * barriers + _up(SIGNAL_BYTES + 16 * warps, UNIT_BYTES) + PROGRESS_BYTES
    )


def step_bytes(plan: Plan) -> int:
    """NVIDIA: shared memory of a block's ring and vectors during a step."""
    vectors = _up(4 * _scratch_floats(plan), UNIT_BYTES)
    # models keep them in registers
    vectors += _up(4 * _input_floats(plan), UNIT_BYTES) if plan.spec is None else 0
    return plan.options.ring_slots * plan.options.slot_bytes + vectors


def _input_floats(plan: Plan) -> int:
    """The vector that a stage computes with: a matrix's input, or what a probe gathers."""
    wanted = [matrix.cols for s in plan.stages if (matrix := experts.multiplied(plan, s))]
    wanted += [
        2 * sum(plan.values[r.value].elements for r in s.reads)
        for s in plan.stages
        if s.kind is StageKind.EXCHANGE
    ]
    return _up(max([plan.shard.hidden, 1, *wanted]), LINE_FLOATS)


def _scratch_floats(plan: Plan) -> int:
    """What a stage needs besides its input: gathered q, k, v; partials of heads; sums of rows; the
    sampler's sums.
    """
    wanted = [1024, 2 * _half_floats(plan)]
    scanned = scanning_warps(plan) * scan_heads(plan) if plan.limits.teams else 0
    for stage in plan.stages:
        if stage.kind is StageKind.ATTENTION:
            own = plan.kernel_attention()
            partials = max(scanned, MOST_WARPS, own.group)
            merge = _up(partials * (own.head_dim + PARTIAL_EXTRA), VECTOR_FLOATS)
            heads = (own.group + 2) * own.head_dim  # without reads, one constant head
            gathered = max(
                [
                    heads,
                    *(sum(hi - lo for lo, hi in spans) for r in stage.reads for spans in r.spans),
                ]
            )
            # behind them the sinks of their queries
            sinks = gathered // heads * own.group if "sinks" in stage_extras(plan) else 0
            wanted.append(merge + gathered + sinks)
        if stage.kind is StageKind.SAMPLE and plan.options.sampling is Sampling.FULL:
            wanted.append(SCAN_FLOATS)
        if stage.kind is StageKind.EMBED and stage.reads:
            wanted.append(LINE_FLOATS)
        if stage.kind is StageKind.LANE_MEAN and stage.publishes is not None:
            wanted += [hi - lo for lo, hi in plan.values[stage.publishes].owned]
        if stage.kind is StageKind.ROUTE:
            wanted += [
                sum(
                    plan.values[read.value].elements
                    * (plan.ranks if read.parts is Parts.ALL else 1)
                    for read in stage.reads
                )
            ]
        if stage.late:
            wanted += [hi - lo for read in stage.reads for spans in read.spans for lo, hi in spans]
    return _up(max(wanted), LINE_FLOATS) + _choice_floats(plan)


def _choice_floats(plan: Plan) -> int:
    """Behind all else in the scratch: a token's experts, from ROUTE on until ROUTED_DOWN is
    over.
    """
    top_k = max((stage.routed.top_k for stage in plan.stages if stage.routed), default=0)
    return (
        _up(experts.CHOICE_WORDS * top_k + experts.COUNTS, LINE_FLOATS)
        if experts.has_experts(plan)
        else 0
    )


def _half_floats(plan: Plan) -> int:
    """Partial sums of one batch of rows."""
    matrices = [experts.multiplied(plan, stage) for stage in plan.stages]
    return _up(max([0, *(matrix.sums_floats for matrix in matrices if matrix)]), LINE_FLOATS)


def _pass_parts(plan: Plan, read: Read) -> Parts:
    """Of the value's memory in a prompt pass: a sum of late parts is not made, the parts themselves
    are added.
    """
    value = plan.values[read.value]
    return (
        Parts.OTHERS if plan.stages[value.stage].late else read.parts if value.pushed else Parts.OWN
    )


def _pushes(plan: Plan, stage: Stage) -> bool:
    return stage.publishes is not None and plan.values[stage.publishes].pushed


# ---- constants -----------------------------------------------------------------------------------


def _constants(plan: Plan) -> tuple[int, dict[int, dict[str, int]]]:
    """(floats, offset by stage and vector name); the rotary tables, cos then sin of each rotation,
    stand at stage -1.
    """
    if plan.spec is None:
        return 1, {}
    total = 0
    offsets: dict[int, dict[str, int]] = {}
    for stage in plan.stages:
        for name, size in _vector_sizes(plan, stage):
            offsets.setdefault(stage.index, {})[name] = total
            total += _up(size, VECTOR_FLOATS)
    offsets[-1] = {"rope": total}
    if "rope" in stage_extras(plan):
        for stage in plan.stages:
            if stage.kind is StageKind.ATTENTION:
                offsets.setdefault(stage.index, {})["rope"] = _rope_offsets(
                    plan, total, plan.spec.rotation(stage.layer)
                )[0]
    return total + 2 * _rope_floats(plan) * len(plan.spec.rotations), offsets


def _vector_sizes(plan: Plan, stage: Stage) -> Iterable[tuple[str, int]]:
    assert plan.spec is not None
    mean = plan.spec.lanes is not None and plan.spec.lanes.head is LaneHead.MEAN
    # lanes are normed where they meet, or in the head
    unnormed = StageKind.LM_HEAD if mean else StageKind.LANE_MEAN
    if ROWS[stage.kind].norm and stage.kind is not unnormed:
        if plan.spec.variant.norms.before or stage.kind is StageKind.LM_HEAD:
            yield "norm", plan.shard.hidden
        if plan.spec.variant.norms.after and stage.reads:
            yield "post_norm", plan.shard.hidden
    if shape := bias_shape(plan.spec, stage):
        yield "bias", math.prod(shape)
    if ROWS[stage.kind].sinks and plan.spec.sinks:
        yield "sinks", plan.kernel_attention().heads
    if stage.kind is StageKind.ATTENTION and plan.spec.qk_norm:
        own, together = plan.kernel_attention(), plan.spec.variant.whole_qk_norm
        yield "q_norm", own.head_dim * (own.heads if together else 1)
        yield "k_norm", own.head_dim * (own.kv_heads if together else 1)


def _vector(
    plan: Plan, stage: Stage, name: str, rank: int, weights: Weights
) -> NDArray[np.float32]:
    if name == "norm":
        found = shards.stage_norm(stage, weights)
    elif name == "post_norm":
        found = shards.stage_post_norm(stage, weights)
    elif name == "bias":
        found = stage_bias(plan, stage, rank, weights)
    elif name == "sinks":
        found = stage_sinks(plan, stage, rank, weights)
    else:
        norms = shards.query_key_norms(stage, weights)
        found = norms[name == "k_norm"] if norms else None
    assert found is not None, f"{stage.name} has room for {name}, but the model has none"
    return found


def _rope_floats(plan: Plan) -> int:
    return _up(plan.options.max_context * plan.kernel_attention().head_dim // 2, VECTOR_FLOATS)


def _rope_offsets(plan: Plan, at: int, number: int) -> tuple[int, int]:
    """Of the cosines and of the sines of a rotation."""
    at += 2 * number * _rope_floats(plan)
    return at, at + _rope_floats(plan)


# ---- packing -------------------------------------------------------------------------------------


def _tile(matrix: Matrix, rows: NDArray[Any], out: NDArray[Any]) -> None:
    """Copy [rows, cols] into tile order: row groups, inside a group column slices, inside a slice
    row-major.
    """
    if matrix.tile_cols >= matrix.cols:
        out[:] = rows.reshape(-1)
        return
    height, cols = matrix.tile_rows, matrix.cols
    whole = len(rows) // height * height
    for part, target, high in (
        (rows[:whole], out[: whole * cols], height),
        (rows[whole:], out[whole * cols :], len(rows) - whole),
    ):
        if not len(part):
            continue
        groups = part.reshape(-1, high, cols)
        stream = target.reshape(len(groups), high * cols)
        for lo in range(0, cols, matrix.tile_cols):
            hi = min(lo + matrix.tile_cols, cols)
            stream[:, high * lo : high * hi].reshape(len(groups), high, hi - lo)[:] = groups[
                :, :, lo:hi
            ]


def tile_bytes(plan: Plan, stage: Stage, block: int) -> list[int]:
    """Bytes of each ring slot of a block, in stream order."""
    assert stage.matrix is not None
    return [
        stored_bytes(plan, stage.matrix, r[1] - r[0], c[1] - c[0])
        for r, c in tiles(stage.matrix, block)
    ]


def _words(table: Sequence[tuple[int | float, ...]], fields: tuple[str, ...]) -> NDArray[np.int32]:
    if not table:
        return np.zeros(0, np.int32)
    columns = list(zip(*table, strict=True))
    words = [
        np.array(column, np.float32).view(np.int32)
        if name in FLOATS
        else np.array(column, np.int32)
        for name, column in zip(fields, columns, strict=True)
    ]
    return np.stack(words, axis=1).reshape(-1)


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
