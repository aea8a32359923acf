"""Plans whose order, evenness or places are changed: what the kernel takes by its place, the proof
must not compare as a set.

A plan of the builder's, of any family, is changed as somebody would who moves work from block to
block: reads, owners, items, values, stages, ranks and shapes exchange places, are divided unevenly,
doubled or dropped; in one stage or in all of a kind, in one table or in all that say the same. What
the proof accepts is the same plan to the kernel, or gives the reference's logits on the CPU engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tests.attack.bases import LANED
from tests.attack.defect import Defect
from tests.attack.plans import WATCHDOG_S, accepted, describe
from tests.engine.hf_cases import ALL
from tests.engine.small_engine import FULL, planned, small_weights
from tests.proof.mutations import MUTATIONS
from twin.engine.host import HostEngine
from twin.engine.sampling import SamplingParams, sample
from twin.errors import PlanError, TwinError
from twin.kernel.tables import layout
from twin.models.formats import format_named
from twin.models.load import from_config
from twin.models.quantized import requantized
from twin.models.spec import ModelSpec
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix, Span
from twin.plan.options import CollectiveKind, Execution, HandOffKind, LateParts, Sampling
from twin.plan.types import Plan, Read, Stage, Value
from twin.proof.prove import prove
from twin.reference.step import Reference

NAME = "places"
CASES = 20
TOLERANCE = 2e-5  # of the largest logit
GREEDY = SamplingParams()
TOKENS = [5, 74, 0, 33, 100, 2, 61]
CODED = ("int8", "int4-g32-zp", "mxfp4")
MIXES: tuple[dict[str, Any], ...] = (
    {"blocks": 3, "attention_splits": 2, "kv_page": 2},
    {"blocks": 4, "attention_splits": 3, "kv_page": 2, "sampling": Sampling.FULL},
    {"blocks": 5, "sampling": Sampling.FULL, "prompt_chunk": 4},
    {"blocks": 3, "handoff": HandOffKind.COUNTER, "prompt_chunk": 16},
    {"gpus": 2, "blocks": 3, "attention_splits": 2, "sampling": Sampling.FULL},
    {"gpus": 2, "blocks": 2, "prompt_chunk": 4},
    {
        "gpus": 2,
        "blocks": 2,
        "execution": Execution.GRAPH,
        "collective": CollectiveKind.LIBRARY,
        "sampling": Sampling.FULL,
    },
    {"gpus": 4, "blocks": 2, "handoff": HandOffKind.GRID},
)


def attack(chance: random.Random, folder: Path) -> str:
    """One changed plan."""
    plan = base = some_base(chance)
    while plan == base:
        plan, done = changed(base, chance)
    what = f"{done} of {describe(base)}"
    if not accepted(plan, what):
        return "refused"
    if plan.simulation_only():
        return "accepted for the twin"
    if np.array_equal(layout(plan).image(), layout(base).image()):
        return "the same to the kernel"
    compute(plan, what)
    return "accepted and right"


# ---- plans and what they compute -----------------------------------------------------------------


def some_base(chance: random.Random) -> Plan:
    names = [*ALL, "lanes", *CODED]
    while True:
        found = base_of(chance.choice(names), chance.randrange(len(MIXES)))
        if found is not None:
            return found


@lru_cache(maxsize=512)
def base_of(name: str, mix: int) -> Plan | None:
    """A proven plan; None where the model cannot be divided so."""
    more = dict(MIXES[mix])
    if name == "lanes":
        more |= {"blocks": 2 * more["blocks"], "late_parts": (None, *LateParts)[mix % 3]}
        more.setdefault("collective", CollectiveKind.PUSH)
    try:
        plan = planned(spec_of(name), slot_bytes=4096, **more)
    except PlanError:
        return None
    prove(plan)
    return plan


@lru_cache(maxsize=64)
def spec_of(name: str) -> ModelSpec:
    if name == "lanes":
        return LANED
    if name in CODED:  # low-bit experts
        wide = {"moe_intermediate_size": 64, "mlp_only_layers": [], "num_hidden_layers": 2}
        spec = from_config(ALL["qwen3-moe"] | wide, name)
        return requantized(spec, format_named(name))
    return from_config(ALL[name], name)


@lru_cache(maxsize=64)
def reference_of(spec: ModelSpec) -> NDArray[np.float32]:
    """Logits after each of TOKENS."""
    base = planned(spec, slot_bytes=4096, blocks=spec.lanes.count if spec.lanes else 1)
    reference: Any = Reference(base, small_weights(spec, base.options.weight_dtype))
    reference.turn(len(TOKENS))
    return np.stack([reference.step(token).copy() for token in TOKENS])


def compute(plan: Plan, what: str) -> None:
    """Raises Defect where the CPU engine does not give the reference's logits, and tokens drawn
    from them.
    """
    assert plan.spec is not None
    wanted = reference_of(plan.spec)
    how = FULL if plan.options.sampling is Sampling.FULL else GREEDY
    rows: list[NDArray[np.float32]] = []
    try:
        weights = small_weights(plan.spec, plan.options.weight_dtype)
        with HostEngine(plan, weights, watchdog_s=WATCHDOG_S) as engine:
            logits = engine.logits(TOKENS)
            made = engine.generate(
                TOKENS, max_tokens=3, sampling=how, on_logits=lambda row: rows.append(row.copy())
            ).tokens
    except TwinError as error:
        raise Defect(f"accepted, and cannot run: {error}; {what}") from error
    worst = max(
        float(np.abs(logits - wanted).max()), float(np.abs(rows[0] - wanted[-1]).max())
    ) / float(np.abs(wanted).max())
    if not worst <= TOLERANCE:
        raise Defect(f"accepted, and its logits are off by {worst:.2g} of the largest; {what}")
    drawn = [sample(row, how, number) for number, row in enumerate(rows)]
    if made != drawn:
        raise Defect(f"accepted, and its tokens are {made}, not {drawn}; {what}")


# ---- changes -------------------------------------------------------------------------------------

T = TypeVar("T")
Change = Callable[[Plan, random.Random], Plan | None]  # None: nothing to change here


def changed(plan: Plan, chance: random.Random) -> tuple[Plan, str]:
    """The plan with one change, or two; what was done."""
    names = []
    for _ in range(chance.choice((1, 1, 1, 2))):
        change = chance.choice(CHANGES) if chance.random() < 0.9 else chance.choice(MUTATIONS)
        try:
            made = change(plan, chance)
        except (ValueError, LookupError, ArithmeticError):
            continue  # a change before took what this one changes
        if made is not None:
            names.append(change.__name__)
            plan = made
    return plan, " + ".join(names)


def _stages(plan: Plan, new: Iterable[Stage]) -> Plan:
    at = {stage.index: stage for stage in new}
    return replace(plan, stages=tuple(at.get(s.index, s) for s in plan.stages))


def _values(plan: Plan, new: Iterable[Value]) -> Plan:
    at = {value.id: value for value in new}
    return replace(plan, values=tuple(at.get(v.id, v) for v in plan.values))


def _some(plan: Plan, chance: random.Random, has: Callable[[Stage], object]) -> tuple[Stage, ...]:
    """A stage, or all of its kind, for which `has` holds."""
    found = [stage for stage in plan.stages if has(stage)]
    if not found:
        return ()
    one = chance.choice(found)
    alike = tuple(s for s in found if s.kind is one.kind)
    return alike if chance.random() < 0.5 else (one,)


def _order(count: int, chance: random.Random) -> list[int]:
    """Another order of so many things."""
    order = list(range(count))
    match chance.choice(("reverse", "rotate", "exchange", "shuffle")):
        case "reverse":
            order.reverse()
        case "rotate":
            by = chance.randrange(count)
            order = order[by:] + order[:by]
        case "exchange":
            a, b = chance.randrange(count), chance.randrange(count)
            order[a], order[b] = order[b], order[a]
        case _:
            chance.shuffle(order)
    return order


def _taken(items: tuple[T, ...], order: list[int]) -> tuple[T, ...]:
    return tuple(items[at] for at in order)


def order_of_reads(plan: Plan, chance: random.Random) -> Plan | None:
    return _stages(
        plan,
        (
            replace(s, reads=_taken(s.reads, _order(len(s.reads), chance)))
            for s in _some(plan, chance, lambda s: len(s.reads) > 1)
        ),
    )


def order_of_resets(plan: Plan, chance: random.Random) -> Plan | None:
    return _stages(
        plan,
        (
            replace(s, resets=_taken(s.resets, _order(len(s.resets), chance)))
            for s in _some(plan, chance, lambda s: len(s.resets) > 1)
        ),
    )


def doubled_read(plan: Plan, chance: random.Random) -> Plan | None:
    made = []
    for stage in _some(plan, chance, lambda s: s.reads):
        reads = list(stage.reads)
        reads.insert(chance.randrange(len(reads) + 1), chance.choice(reads))
        made.append(replace(stage, reads=tuple(reads)))
    return _stages(plan, made)


def _with_spans(plan: Plan, chance: random.Random, new: Callable[[Read], Read | None]) -> Plan:
    made = []
    for stage in _some(plan, chance, lambda s: s.reads):
        at = chance.randrange(len(stage.reads))
        read = new(stage.reads[at])
        if read is not None:
            made.append(replace(stage, reads=(*stage.reads[:at], read, *stage.reads[at + 1 :])))
    return _stages(plan, made)


def blocks_of_reads(plan: Plan, chance: random.Random) -> Plan | None:
    """Blocks read what others should."""
    order = _order(plan.blocks, chance)
    return _with_spans(plan, chance, lambda r: replace(r, spans=_taken(r.spans, order)))


def edges_of_reads(plan: Plan, chance: random.Random) -> Plan | None:
    """All blocks' spans, or one's, begin or end elsewhere."""
    by, which = chance.choice((-16, -8, -4, -1, 1, 4, 8, 16)), chance.randrange(3)
    victim = chance.choice((None, chance.randrange(plan.blocks)))

    def moved(read: Read) -> Read:
        return replace(
            read,
            spans=tuple(
                tuple((lo + by * (which != 1), hi + by * (which != 0)) for lo, hi in spans)
                if victim in (None, block)
                else spans
                for block, spans in enumerate(read.spans)
            ),
        )

    return _with_spans(plan, chance, moved)


def pieces_of_reads(plan: Plan, chance: random.Random) -> Plan | None:
    """The same elements in other pieces, or pieces in another order."""

    def cut(read: Read) -> Read:
        made = []
        for spans in read.spans:
            pieces: list[Span] = []
            for lo, hi in spans:
                middle = chance.randrange(lo, hi + 1)
                pieces += [(lo, middle), (middle, hi)] if lo < middle < hi else [(lo, hi)]
            if chance.random() < 0.2:
                chance.shuffle(pieces)
            made.append(tuple(pieces))
        return replace(read, spans=tuple(made))

    return _with_spans(plan, chance, cut)


def _division(owned: tuple[Span, ...], count: int, chance: random.Random) -> tuple[Span, ...]:
    """The same elements among blocks in another order, or unevenly."""
    blocks = len(owned)
    match chance.choice(("order", "uneven", "uneven", "one", "empty places")):
        case "order":
            return _taken(owned, _order(blocks, chance))
        case "uneven":
            edges = sorted(chance.randrange(count + 1) for _ in range(blocks - 1))
        case "one":
            edges = [0] * (at := chance.randrange(blocks)) + [count] * (blocks - 1 - at)
        case _:
            place = chance.randrange(count + 1)
            return tuple((place, place) if lo == hi else (lo, hi) for lo, hi in owned)
    return tuple(zip((0, *edges), (*edges, count), strict=True))


def divided(plan: Plan, chance: random.Random) -> Plan | None:
    """Elements, rows or items, with all that follows from them, or alone."""
    alone, made, values = chance.random() < 0.3, [], []
    chosen = _some(plan, chance, lambda s: s.publishes is not None or s.matrix or s.items)
    for stage in chosen:
        value = plan.values[stage.publishes] if stage.publishes is not None else None
        if stage.items:
            own = plan.kernel_attention()
            count = stage.scan.items if stage.scan else own.items_of(stage.window)
            items = _division(stage.items, count, chance)
            made.append(replace(stage, items=items))
            if value is None or alone:
                continue
            width = value.elements // count
            values.append(replace(value, owned=tuple((lo * width, hi * width) for lo, hi in items)))
            made[-1] = replace(made[-1], reads=_reads_of_items(plan, stage, items))
        elif stage.kind is StageKind.LM_HEAD and stage.matrix:
            owned = _division(stage.matrix.owned, stage.matrix.rows, chance)
            made.append(replace(stage, matrix=replace(stage.matrix, owned=owned)))
        elif value is not None:
            owned = _division(value.owned, value.elements, chance)
            values.append(replace(value, owned=owned))
            if stage.matrix and stage.matrix.owned and not alone:
                unit = stage.matrix.unit
                rows = tuple((unit * lo, unit * hi) for lo, hi in owned)
                made.append(replace(stage, matrix=replace(stage.matrix, owned=rows)))
            elif stage.kind in (StageKind.COLLECTIVE, StageKind.REDUCE) and not alone:
                spans = tuple((span,) if span[0] < span[1] else () for span in owned)
                made.append(replace(stage, reads=(replace(stage.reads[0], spans=spans),)))
                if chance.random() < 0.7:
                    values.append(replace(plan.values[stage.reads[0].value], owned=owned))
        elif stage.matrix and stage.matrix.owned:
            owned = _division(stage.matrix.owned, stage.matrix.rows, chance)
            made.append(replace(stage, matrix=replace(stage.matrix, owned=owned)))
    return _values(_stages(plan, made), values)


def _reads_of_items(plan: Plan, stage: Stage, items: tuple[Span, ...]) -> tuple[Read, ...]:
    """What blocks with these items of attention read; of others' items what their blocks read."""
    if stage.scan:
        by_items = dict(zip(stage.items, range(len(items)), strict=True))
        return tuple(
            replace(r, spans=tuple(r.spans[by_items.get(span, 0)] for span in items))
            for r in stage.reads
        )
    own = plan.kernel_attention()
    dim, splits = own.head_dim, own.splits_of(stage.window)
    found = []
    for lo, hi in items:
        first, last = lo // splits, (hi - 1) // splits + 1
        q, k = own.heads * dim, own.kv_heads * dim
        spans = (
            (first * own.group * dim, last * own.group * dim),
            (q + first * dim, q + last * dim),
            (q + k + first * dim, q + k + last * dim),
        )
        found.append(spans if lo < hi else ())
    every = (0, (own.heads + own.kv_heads) * dim)
    rest = tuple(
        replace(r, spans=tuple((every,) if lo < hi else () for lo, hi in items))
        for r in stage.reads[1:]
    )
    return (replace(stage.reads[0], spans=tuple(found)), *rest)


def fields_of_values(plan: Plan, chance: random.Random) -> Plan | None:
    """Two values exchange where they lie, who owns them, or who makes them."""
    one = chance.choice(plan.values)
    alike = [v for v in plan.values if v.elements == one.elements and v is not one]
    if not alike:
        return None
    other, field = chance.choice(alike), chance.choice(("copy", "buffer", "owned", "stage"))
    made = (
        replace(one, **{field: getattr(other, field)}),
        replace(other, **{field: getattr(one, field)}),
    )
    plan = _values(plan, made)
    if field != "stage":
        return plan
    a, b = plan.stages[one.stage], plan.stages[other.stage]
    return _stages(plan, (replace(a, publishes=b.publishes), replace(b, publishes=a.publishes)))


FIELDS = ("matrix", "items", "window", "reads", "resets", "layer", "scan", "gate", "more", "kept")


def fields_of_stages(plan: Plan, chance: random.Random) -> Plan | None:
    """Two stages of a kind exchange something."""
    one = chance.choice(plan.stages)
    alike = [s for s in plan.stages if s.kind is one.kind and s is not one]
    if not alike:
        return None
    other, field = chance.choice(alike), chance.choice(FIELDS)
    return _stages(
        plan,
        (
            replace(one, **{field: getattr(other, field)}),
            replace(other, **{field: getattr(one, field)}),
        ),
    )


def order_of_stages(plan: Plan, chance: random.Random) -> Plan | None:
    """A stage goes elsewhere, twice or nowhere; all are numbered anew."""
    stages = list(plan.stages)
    late = [s for s in stages if s.late]
    stage = chance.choice(late if late and chance.random() < 0.5 else stages)
    match chance.choice(("move", "move", "twice", "drop")):
        case "move":
            stages.remove(stage)
            near = stage.index + chance.choice((-3, -2, -1, 1, 2, 3))
            stages.insert(chance.choice((near, chance.randrange(len(stages)))), stage)
        case "twice":
            stages.insert(chance.randrange(len(stages)), stage)
        case _:
            stages.remove(stage)
    numbered = tuple(replace(s, index=at) for at, s in enumerate(stages))
    where = {s.publishes: s.index for s in numbered if s.publishes is not None}
    values = tuple(replace(v, stage=where.get(v.id, v.stage)) for v in plan.values)
    return replace(plan, stages=numbered, values=values)


def shape_of_matrix(plan: Plan, chance: random.Random) -> Plan | None:
    """Tiles, and how matrices are seen."""
    matrices = [s.matrix for s in plan.stages if s.matrix]
    field = chance.choice(
        ("tile_rows", "tile_cols", "unit", "joined", "folded", "pack", "format", "cols", "owned")
    )
    given = chance.choice(matrices)

    def other(matrix: Matrix) -> Matrix:
        old = getattr(matrix, field)
        if type(old) is not int:
            new: Any = not old if isinstance(old, bool) else getattr(given, field)
        else:
            new = chance.choice((old + 1, old - 1, 2 * old, old // 2, getattr(given, field), 2, 8))
        return replace(matrix, **{field: new})

    return _stages(
        plan,
        (
            replace(s, matrix=other(s.matrix))
            for s in _some(plan, chance, lambda s: s.matrix)
            if s.matrix
        ),
    )


def shape_of_scan(plan: Plan, chance: random.Random) -> Plan | None:
    """Of recurrent states, in one layer or in all; or of attention."""
    if chance.random() < 0.5 and plan.attention:
        own = plan.attention
        field = chance.choice(
            ("splits", "item_positions", "window_positions", "together", "first_pages", "heads")
        )
        value = getattr(own, field)
        new = chance.choice((value + 1, value - 1, 2 * value, value // 2))
        return replace(plan, attentions=(replace(own, **{field: new}), *plan.attentions[1:]))
    fields = ("dim", "page", "splits", "held_bytes", "heads", "entries", "group", "written_bytes")
    field, by = chance.choice(fields), chance.choice((-4, -1, 1, 4))
    return _stages(
        plan,
        (
            replace(s, scan=replace(s.scan, **{field: getattr(s.scan, field) + by}))
            for s in _some(plan, chance, lambda s: s.scan)
            if s.scan
        ),
    )


def ranks_and_dies(plan: Plan, chance: random.Random) -> Plan | None:
    """Who holds what: dies of blocks, ranks of a GPU, whose parts are read, who is pushed to."""
    match chance.choice(("dies", "ranks", "parts", "pushed")):
        case "dies":
            dies = _taken(plan.die_of_block, _order(len(plan.die_of_block), chance))
            return replace(plan, die_of_block=dies)
        case "ranks":
            each = chance.choice((1, 2, plan.ranks))
            options = replace(plan.options, gpus=max(1, plan.ranks // each))
            return replace(plan, ranks_per_gpu=each, options=options)
        case "parts":
            read = chance.choice([r for s in plan.stages for r in s.reads])
            return _with_spans(plan, chance, lambda r: replace(r, parts=read.parts))
        case _:
            value = chance.choice(plan.values)
            return _values(plan, (replace(value, pushed=not value.pushed),))


CHANGES: tuple[Change, ...] = (
    order_of_reads,
    order_of_resets,
    doubled_read,
    blocks_of_reads,
    edges_of_reads,
    pieces_of_reads,
    divided,
    divided,
    fields_of_values,
    fields_of_stages,
    order_of_stages,
    shape_of_matrix,
    shape_of_scan,
    ranks_and_dies,
)
