"""The tables that the kernel walks, made of a plan: rows, then all of them as one array. Offsets
count floats, except where the name says pages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from twin.frozen import frozen
from twin.kernel import experts
from twin.kernel.coded import coded_fields
from twin.kernel.compressed import cached_bytes, compressed_numbers, compresses
from twin.kernel.constants import Constants, constants_of
from twin.kernel.fields import (
    CODED_FIELDS,
    FIELDS,
    FLOATS,
    NUMBERS,
    PARTS,
    SHAPE,
    Table,
    in_order,
    record,
)
from twin.kernel.prompt import prompt_of
from twin.kernel.sizes import sizes_of
from twin.kernel.streams import Streams, streams_of
from twin.plan.catalogue import CARRYING, StageKind
from twin.plan.matrix import Matrix, Span
from twin.plan.types import Parts, Plan, Read, Stage, Value
from twin.schedule.block import LINE_FLOATS, up
from twin.schedule.choose import schedule_of
from twin.schedule.memory import logits_buffers_floats
from twin.schedule.types import Schedule

STATE_ALIGNED = 256  # bytes: where states begin behind the cache


@frozen(kw_only=True)
class Layout:
    """All that the kernel of a plan gets, made once: rows of each table in the field order of
    FIELDS, the sizes of the arenas, where constants and weights lie.
    """

    schedule: Schedule
    constants: Constants
    weights: Streams
    # of a rank: keys and values, and the states behind them, FP32: of each stage DELTA [items][a
    # state of key_dim x columns, a history of conv - 1 positions], of each stage CONV_IN
    # [conv - 1 positions][channels]
    cache_bytes: int
    logits_buffers_floats: int  # of a rank: what its blocks make of logits for the full sampler
    sizes: dict[str, int | float]
    stages: Table
    reads: Table
    resets: Table
    values: Table
    owned: Table  # [blocks][sets] spans: those of a block lie together
    rows: Table  # [sets][blocks] (first, count) into `spans`
    spans: Table
    streams: Table  # as of `weights`
    starts: Table
    stage_fields: tuple[str, ...]  # FIELDS, and those of STAGE_EXTRAS that the model's family uses

    def fields(self, table: str) -> tuple[str, ...]:
        """The names of a table's columns."""
        return self.stage_fields if table == "stages" else FIELDS[table][1]

    @property
    def tables(self) -> dict[str, Table]:
        return {name: getattr(self, name) for name in FIELDS}

    def image(self) -> NDArray[np.int32]:
        """The sizes and all tables as one array of 4-byte words: a word offset per table first."""
        parts = [_words([tuple(self.sizes.values())], tuple(self.sizes))]
        parts += [_words(table, self.fields(name)) for name, table in self.tables.items()]
        starts = np.cumsum([len(parts), *(len(p) for p in parts)])[:-1]
        return np.concatenate([starts.astype(np.int32), *parts])


@lru_cache(maxsize=8)
def layout(plan: Plan) -> Layout:
    """All tables of a plan."""
    sets = _Sets(plan.blocks)
    reads: Table = []
    resets: Table = []
    stages: Table = []
    schedule = schedule_of(plan)
    constants, weights = constants_of(schedule), streams_of(schedule)
    scratch, prompt = schedule.memory.scratch, prompt_of(schedule)
    vectors, extras = constants.offsets, constants.extras
    codes = CODED_FIELDS if plan.coded else ()
    routed = (experts.FIELDS + (experts.CODED_FIELDS if codes else ())) if weights.experts else ()
    fields = (*FIELDS["stages"][1], *extras, *codes, *routed)
    kv = [0] * len(plan.attentions)  # stages of attention so far, by shape of heads
    states = compressed_end = 0
    for stage, matrix in zip(plan.stages, schedule.matrices, strict=True):
        at = vectors.get(stage.index, {}) | compressed_numbers(plan, stage, compressed_end)
        compressed_end += cached_bytes(plan, stage)
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
                    kv=states if stage.kind in CARRYING else sum(kv[stage.heads :][:1]),
                    **{name: at.get(name, -1) for name in ("norm", "bias", "q_norm", "k_norm")},
                    pushes=int(_pushes(plan, stage)),
                    next=_next_stage(plan, stage),
                    **{
                        name: stage.heads if name == "heads" else at.get(name, -1)
                        for name in extras
                    },
                    **(coded_fields(plan, matrix) if codes else {}),
                    **experts.fields(weights.experts.get(stage.index), routed),
                ),
            )
        )
        if stage.kind is StageKind.ATTENTION:
            kv[stage.heads] += 1
        states += stage.kind in CARRYING
        reads += [
            record(
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
            record("resets", value=r.value, previous_step=int(r.previous_step))
            for r in stage.resets
        ]
    cache_bytes = compressed_end
    for own, count in () if compresses(plan) else zip(plan.attentions, kv, strict=True):
        position = own.position_bytes(plan.options.kv_dtype)
        cache_bytes += count * own.items * own.item_positions * position
    if plan.kernel_recurs:
        cache_bytes += STATE_ALIGNED + plan.kernel_state_bytes
    values, exchange, counters = _values(plan, sets, prompt.values)
    sizes = sizes_of(schedule, prompt) | {
        "kv_stages": kv[0] if kv else 0,
        "exchange_floats": exchange,
        "counters": counters + 3,
        "grid_counter": counters,
        "prompt_counter": counters + 2,
        "owned_sets": len(sets.sets),
        "constant_floats": constants.floats,
        "stream_pages": weights.pages,
        "rope": vectors.get(-1, {}).get("rope", -1),
    }
    if prompt.rounds:
        sizes |= {"counters": counters + 4, "round_counter": counters + 3}
    behind = scratch.stages + scratch.held + scratch.whole
    sizes |= {"choice": behind} if routed else {}
    sizes |= {"kept": behind + scratch.choice} if scratch.kept else {}
    if scratch.channels:
        sizes |= {"channels": behind + scratch.choice + scratch.kept}
    if scratch.scored:
        sizes |= {"scored": behind + scratch.choice + scratch.kept + scratch.channels}
    if scratch.whole:
        sizes |= {"whole": behind - scratch.whole, "whole_units": scratch.whole_units}
    sizes |= {"held": scratch.stages} if scratch.held else {}
    if scratch.residuals:
        sizes |= {"residuals": scratch.floats - scratch.residuals}
    return Layout(
        schedule=schedule,
        constants=constants,
        weights=weights,
        cache_bytes=cache_bytes,
        logits_buffers_floats=logits_buffers_floats(plan),
        sizes=sizes,
        stages=stages,
        reads=reads,
        resets=resets,
        values=values,
        owned=sets.owned,
        rows=sets.rows,
        spans=sets.spans,
        streams=weights.blocks,
        starts=weights.starts,
        stage_fields=fields,
    )


def _next_stage(plan: Plan, stage: Stage) -> int:
    """The one that consumers run next where scheduler warps make sums of late parts."""
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
    """n * this >> 16 is n // tile_rows for the rows of a batch and one more tile."""
    return -(-(1 << 16) // tile_rows)


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


def _values(plan: Plan, sets: _Sets, prompts: tuple[int, ...]) -> tuple[Table, int, int]:
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
        floats += buffer.copies * buffer.parts * up(buffer.elements, LINE_FLOATS)
    writers = {v.id: sum(lo < hi for lo, hi in v.owned) for v in plan.values}
    shared: dict[tuple[int, int, bool], list[Value]] = defaultdict(list)
    for value in plan.values:
        shared[value.buffer, value.copy, value.pushed].append(value)
    rows: Table = []
    for value in plan.values:
        buffer = plan.buffers[value.buffer]
        stride = up(buffer.elements, LINE_FLOATS)
        same = shared[value.buffer, value.copy, value.pushed]
        counter = counters[value.buffer] + value.copy * (buffer.parts + 1)
        rows.append(
            record(
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
