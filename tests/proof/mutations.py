"""Broken plans: each mutation is a mistake that a builder, or somebody who edits one, could make.

Some mutants are harmless, and that is the point: the proof has to distinguish them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix, Span
from twin.plan.options import CollectiveKind, Execution, HandOffKind
from twin.plan.types import Parts, Plan, Read, Reset, Stage, Value
from twin.schedule.choose import schedule_of

Mutation = Callable[[Plan, random.Random], Plan | None]  # None: nothing to break here


# ---- editing frozen data -------------------------------------------------------------------------


def _with_stage(plan: Plan, stage: Stage) -> Plan:
    return replace(plan, stages=tuple(stage if s.index == stage.index else s for s in plan.stages))


def _with_value(plan: Plan, value: Value) -> Plan:
    return replace(plan, values=tuple(value if v.id == value.id else v for v in plan.values))


def _some_stage(plan: Plan, chance: random.Random, has: Callable[[Stage], object]) -> Stage | None:
    found = [stage for stage in plan.stages if has(stage)]
    return chance.choice(found) if found else None


def _replaced(items: tuple[Read, ...], index: int, item: Read) -> tuple[Read, ...]:
    return (*items[:index], item, *items[index + 1 :])


# ---- resets --------------------------------------------------------------------------------------


def drop_reset(plan: Plan, chance: random.Random) -> Plan | None:
    stage = _some_stage(plan, chance, lambda s: s.resets)
    if not stage:
        return None
    lost = chance.randrange(len(stage.resets))
    return _with_stage(plan, replace(stage, resets=stage.resets[:lost] + stage.resets[lost + 1 :]))


def repeat_reset(plan: Plan, chance: random.Random) -> Plan | None:
    stage = _some_stage(plan, chance, lambda s: s.resets)
    if not stage:
        return None
    other = chance.choice(plan.stages)
    return _with_stage(plan, replace(other, resets=(*other.resets, chance.choice(stage.resets))))


def move_reset(plan: Plan, chance: random.Random) -> Plan | None:
    """Earlier or later on the time line of two steps."""
    stage = _some_stage(plan, chance, lambda s: s.resets)
    if not stage:
        return None
    reset = chance.choice(stage.resets)
    count = len(plan.stages)
    at = (
        stage.index
        + count * reset.previous_step
        + chance.choice((-3, -2, -1, -1, 1, 1, 2, 3, chance.randrange(count)))
    )
    if not 0 <= at < 2 * count:
        return None
    plan = _with_stage(plan, replace(stage, resets=tuple(r for r in stage.resets if r != reset)))
    step, index = divmod(at, count)
    target = plan.stages[index]
    return _with_stage(
        plan, replace(target, resets=(*target.resets, Reset(reset.value, previous_step=step == 1)))
    )


def flip_reset_step(plan: Plan, chance: random.Random) -> Plan | None:
    stage = _some_stage(plan, chance, lambda s: s.resets)
    if not stage:
        return None
    flipped = chance.choice(stage.resets)
    resets = tuple(
        replace(r, previous_step=not r.previous_step) if r is flipped else r for r in stage.resets
    )
    return _with_stage(plan, replace(stage, resets=resets))


def swap_resets(plan: Plan, chance: random.Random) -> Plan | None:
    a, b = (
        _some_stage(plan, chance, lambda s: s.resets),
        _some_stage(plan, chance, lambda s: s.resets),
    )
    if not a or not b or a is b:
        return None
    return _with_stage(_with_stage(plan, replace(a, resets=b.resets)), replace(b, resets=a.resets))


# ---- reads ---------------------------------------------------------------------------------------


def _change_read(change: Callable[[Plan, Read, random.Random], Read | None]) -> Mutation:
    def mutation(plan: Plan, chance: random.Random) -> Plan | None:
        stage = _some_stage(plan, chance, lambda s: s.reads)
        if not stage:
            return None
        index = chance.randrange(len(stage.reads))
        read = change(plan, stage.reads[index], chance)
        return (
            _with_stage(plan, replace(stage, reads=_replaced(stage.reads, index, read)))
            if read
            else None
        )

    mutation.__name__ = change.__name__.strip("_")
    return mutation


def drop_read(plan: Plan, chance: random.Random) -> Plan | None:
    stage = _some_stage(plan, chance, lambda s: s.reads)
    if not stage:
        return None
    lost = chance.randrange(len(stage.reads))
    return _with_stage(plan, replace(stage, reads=stage.reads[:lost] + stage.reads[lost + 1 :]))


def repeat_read(plan: Plan, chance: random.Random) -> Plan | None:
    source = _some_stage(plan, chance, lambda s: s.reads)
    if not source:
        return None
    target = chance.choice((source, chance.choice(plan.stages)))
    return _with_stage(plan, replace(target, reads=(*target.reads, chance.choice(source.reads))))


def _other_spans(plan: Plan, read: Read, chance: random.Random) -> Read | None:
    """One block, or all, poll less, more, or elsewhere."""
    elements = plan.values[read.value].elements
    victim = chance.randrange(plan.blocks)
    spans = list(read.spans)
    for block in range(plan.blocks) if chance.random() < 0.3 else (victim,):
        old = spans[block]
        lo, hi = old[0] if old else (0, elements)
        kind = chance.choice(("less", "less", "shift", "none", "hole", "all"))
        if kind == "less":
            lo, hi = chance.choice(((lo + 1, hi), (lo, hi - 1)))
            spans[block] = ((lo, hi), *old[1:]) if lo < hi else old[1:]
        elif kind == "shift":
            spans[block] = (*old[:-1], (old[-1][0] + 1, old[-1][1] + 1)) if old else old
        elif kind == "hole" and hi - lo > 2:
            middle = chance.randrange(lo + 1, hi - 1)
            spans[block] = ((lo, middle), (middle + 1, hi), *old[1:])
        else:
            spans[block] = () if kind == "none" else ((0, elements),)
    return replace(read, spans=tuple(spans))


def _other_parts(plan: Plan, read: Read, chance: random.Random) -> Read | None:
    return replace(read, parts=chance.choice([parts for parts in Parts if parts is not read.parts]))


def _other_value(plan: Plan, read: Read, chance: random.Random) -> Read | None:
    same = [
        v
        for v in plan.values
        if v.elements == plan.values[read.value].elements and v.id != read.value
    ]
    return replace(read, value=chance.choice(same).id) if same else None


def _other_read_step(plan: Plan, read: Read, chance: random.Random) -> Read | None:
    return replace(read, previous_step=not read.previous_step)


def _other_scale(plan: Plan, read: Read, chance: random.Random) -> Read | None:
    return replace(read, scale=chance.choice((0.0, 1.0, 2.0, -1.0, read.scale * 1.5)))


def _other_residual(plan: Plan, read: Read, chance: random.Random) -> Read | None:
    return replace(read, residual=not read.residual)


# ---- values and buffers --------------------------------------------------------------------------


def other_copy(plan: Plan, chance: random.Random) -> Plan | None:
    if not plan.values:
        return None
    value = chance.choice(plan.values)
    copies = plan.buffers[value.buffer].copies
    return _with_value(
        plan,
        replace(
            value, copy=chance.choice((chance.randrange(copies), (value.copy + 1) % copies, copies))
        ),
    )


def other_copies(plan: Plan, chance: random.Random) -> Plan | None:
    """Fewer or more rotating copies, used in turn."""
    if not plan.buffers:
        return None
    buffer = chance.choice(plan.buffers)
    copies = max(1, buffer.copies + chance.choice((-3, -2, -2, -1, -1, 1)))
    order = {v.id: i for i, v in enumerate(v for v in plan.values if v.buffer == buffer.id)}
    values = tuple(
        replace(v, copy=order[v.id] % copies) if v.id in order else v for v in plan.values
    )
    return replace(
        plan,
        values=values,
        buffers=tuple(replace(b, copies=copies) if b is buffer else b for b in plan.buffers),
    )


def all_copies(plan: Plan, chance: random.Random) -> Plan | None:
    """Fewer copies everywhere."""
    copies = chance.choice((1, 1, 2))
    counts: dict[int, int] = {}
    values = []
    for value in plan.values:
        counts[value.buffer] = counts.get(value.buffer, -1) + 1
        values.append(
            replace(
                value, copy=counts[value.buffer] % min(copies, plan.buffers[value.buffer].copies)
            )
        )
    return replace(
        plan,
        values=tuple(values),
        buffers=tuple(replace(b, copies=min(copies, b.copies)) for b in plan.buffers),
    )


def other_buffer(plan: Plan, chance: random.Random) -> Plan | None:
    """Two kinds of values share one buffer."""
    if not plan.values:
        return None
    value = chance.choice(plan.values)
    same = [
        b
        for b in plan.buffers
        if b.elements == value.elements and b.id != value.buffer and (b.parts > 1) >= value.pushed
    ]
    if not same:
        return None
    buffer = chance.choice(same)
    return _with_value(plan, replace(value, buffer=buffer.id, copy=chance.randrange(buffer.copies)))


def other_pushed(plan: Plan, chance: random.Random) -> Plan | None:
    if not plan.values:
        return None
    value = chance.choice(plan.values)
    return _with_value(plan, replace(value, pushed=not value.pushed))


def _spans(owned: tuple[Span, ...], chance: random.Random, count: int) -> tuple[Span, ...]:
    """An overlap, a gap, a shifted border or exchanged owners."""
    spans = list(owned)
    block = chance.randrange(len(spans))
    lo, hi = spans[block]
    match chance.choice(("overlap", "gap", "border", "border", "exchange", "exchange", "empty")):
        case "overlap":
            spans[block] = (max(0, lo - 1), min(count, hi + 1))
        case "gap":
            spans[block] = (lo + (lo < hi), hi)
        case "border" if block and spans[block - 1][1] == lo < hi:
            spans[block - 1 : block + 1] = [(spans[block - 1][0], lo + 1), (lo + 1, hi)]
        case "exchange":
            other = chance.randrange(len(spans))
            spans[block], spans[other] = spans[other], spans[block]
        case _:
            spans[block] = (lo, lo)
    return tuple(spans)


def other_owners(plan: Plan, chance: random.Random) -> Plan | None:
    """Of elements alone, or consistently of elements, rows and items."""
    if not plan.values:
        return None
    value = chance.choice(plan.values)
    owned = _spans(value.owned, chance, value.elements)
    stage = plan.stages[value.stage]
    plan = _with_value(plan, replace(value, owned=owned))
    if stage.matrix and stage.matrix.owned and chance.random() < 0.7:
        unit = stage.matrix.unit
        rows = tuple((unit * lo, unit * hi) for lo, hi in owned)
        plan = _with_stage(plan, replace(stage, matrix=replace(stage.matrix, owned=rows)))
    return plan


def other_items(plan: Plan, chance: random.Random) -> Plan | None:
    stage = _some_stage(plan, chance, lambda s: s.items and s.publishes is not None)
    if not stage:
        return None
    own = plan.attention
    count = stage.scan.items if stage.scan else own.items_of(stage.window) if own else 0
    if not count:  # an edit before took the heads
        return None
    items = _spans(stage.items, chance, count)
    plan = _with_stage(plan, replace(stage, items=items))
    if chance.random() < 0.7:
        value = plan.values[stage.publishes or 0]
        width = value.elements // count
        plan = _with_value(
            plan, replace(value, owned=tuple((lo * width, hi * width) for lo, hi in items))
        )
    return plan


# ---- stages --------------------------------------------------------------------------------------


def swap_stages(plan: Plan, chance: random.Random) -> Plan | None:
    if len(plan.stages) < 2:
        return None
    first = chance.randrange(len(plan.stages) - 1)
    second = chance.choice((first + 1, chance.randrange(len(plan.stages))))
    if first == second:
        return None
    stages = list(plan.stages)
    stages[first], stages[second] = (
        replace(stages[second], index=first),
        replace(stages[first], index=second),
    )
    where = {s.publishes: s.index for s in stages if s.publishes is not None}
    return replace(
        plan,
        stages=tuple(stages),
        values=tuple(replace(v, stage=where.get(v.id, v.stage)) for v in plan.values),
    )


def other_matrix(plan: Plan, chance: random.Random) -> Plan | None:
    stage = _some_stage(plan, chance, lambda s: s.matrix and s.matrix.owned)
    if not stage or not stage.matrix:
        return None
    matrix: Matrix = stage.matrix
    changes: tuple[Matrix, ...] = (
        replace(matrix, owned=_spans(matrix.owned, chance, matrix.rows)),
        replace(matrix, tile_rows=chance.choice((2, 64, 1000))),
        replace(matrix, tile_cols=2 * matrix.tile_cols),
        replace(matrix, rows=matrix.rows + 1),
        replace(matrix, cols=matrix.cols + 8),
        replace(matrix, unit=3 - matrix.unit),
    )
    return _with_stage(plan, replace(stage, matrix=chance.choice(changes)))


def other_window(plan: Plan, chance: random.Random) -> Plan | None:
    stage = _some_stage(plan, chance, lambda s: s.kind is StageKind.ATTENTION)
    return (
        _with_stage(plan, replace(stage, window=stage.window + 4)) if stage and plan.spec else None
    )


def other_gate(plan: Plan, chance: random.Random) -> Plan | None:
    """Experts fetched too soon, too late, or at once."""
    stage = _some_stage(plan, chance, lambda s: s.routed)
    if not stage or stage.gate is None:
        return None
    return _with_stage(
        plan, replace(stage, gate=chance.choice((None, stage.gate - 1, stage.gate + 1, 0)))
    )


def other_kept(plan: Plan, chance: random.Random) -> Plan | None:
    stage = _some_stage(plan, chance, lambda s: s.kept)
    return _with_stage(plan, replace(stage, kept=False)) if stage else None


def other_words(plan: Plan, chance: random.Random) -> Plan | None:
    """Of a value alone."""
    value = chance.choice(plan.values) if plan.values else None
    return _with_value(plan, replace(value, words=value.words + 1)) if value else None


def other_layer(plan: Plan, chance: random.Random) -> Plan | None:
    stage = chance.choice(plan.stages)
    return (
        _with_stage(plan, replace(stage, layer=stage.layer + chance.choice((-1, 1))))
        if plan.spec
        else None
    )


def other_publication(plan: Plan, chance: random.Random) -> Plan | None:
    if not plan.values:
        return None
    stage = chance.choice(plan.stages)
    return _with_stage(
        plan, replace(stage, publishes=chance.choice((None, chance.choice(plan.values).id)))
    )


# ---- options and budgets -------------------------------------------------------------------------


def other_options(plan: Plan, chance: random.Random) -> Plan | None:
    o = plan.options
    changed = chance.choice(
        (
            replace(o, window_slots=o.ring_slots + 1),
            replace(o, slot_bytes=16),
            replace(o, ring_slots=1 << 20),
            replace(o, context=o.max_context + 1),
            replace(o, handoff=chance.choice(list(HandOffKind))),
            replace(o, execution=chance.choice(list(Execution))),
            replace(o, collective=chance.choice(list(CollectiveKind))),
        )
    )
    return replace(plan, options=changed)


def other_limits(plan: Plan, chance: random.Random) -> Plan | None:
    limits = plan.limits
    changed = chance.choice(
        (
            replace(limits, blocks=plan.options.blocks - 1),
            replace(limits, memory_bytes=plan.memory_bytes() - 1),
            replace(limits, on_chip_bytes=schedule_of(plan).block_bytes - 1),
            replace(limits, memory_bytes=plan.memory_bytes()),
            replace(limits, blocks=plan.options.blocks),
        )
    )
    return replace(plan, limits=changed)


def other_dies(plan: Plan, chance: random.Random) -> Plan | None:
    return replace(
        plan, die_of_block=chance.choice((plan.die_of_block[:-1], (99, *plan.die_of_block[1:])))
    )


RESETS: tuple[Mutation, ...] = (drop_reset, repeat_reset, move_reset, flip_reset_step, swap_resets)
READS: tuple[Mutation, ...] = (
    drop_read,
    repeat_read,
    *(
        _change_read(c)
        for c in (
            _other_spans,
            _other_parts,
            _other_value,
            _other_read_step,
            _other_scale,
            _other_residual,
        )
    ),
)
VALUES: tuple[Mutation, ...] = (
    other_copy,
    other_copies,
    all_copies,
    other_buffer,
    other_pushed,
    other_owners,
    other_items,
)
REST: tuple[Mutation, ...] = (
    swap_stages,
    other_matrix,
    other_window,
    other_gate,
    other_kept,
    other_words,
    other_layer,
    other_publication,
    other_options,
    other_limits,
    other_dies,
)
# Reuse is where a mistake hides best, so its mutations come up more often.
MUTATIONS: tuple[Mutation, ...] = (
    *RESETS,
    *RESETS,
    move_reset,
    move_reset,
    *READS,
    *VALUES,
    other_copies,
    other_owners,
    *REST,
)


def mutants(plan: Plan, seed: int, count: int) -> list[tuple[str, Plan]]:
    """`count` plans with one mistake each, some with two."""
    chance = random.Random(seed)
    found: list[tuple[str, Plan]] = []
    while len(found) < count:
        names, broken = [], plan
        for _ in range(1 if chance.random() < 0.8 else 2):
            mutation = chance.choice(MUTATIONS)
            changed = mutation(broken, chance)
            if changed is not None:
                names.append(mutation.__name__)
                broken = changed
        if broken != plan:
            found.append((" + ".join(names), broken))
    return found
