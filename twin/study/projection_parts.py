"""The answer of a projection as tables and charts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from twin.hardware.number import Kind, Number
from twin.hardware.override import SPREAD, numbers
from twin.hardware.override import interval as range_of
from twin.schedule.options import DEFAULT
from twin.study.grid import MODEL, NODE, Cell
from twin.study.interval import LEVELS, TELLING, WIDTHS, Draws, Interval, chance
from twin.study.options import Plain, option_value
from twin.study.outcome import (
    Bars,
    Chart,
    Column,
    Lines,
    Outcome,
    Part,
    Series,
    Shown,
    Table,
    Waterfall,
)
from twin.study.outcome import Cell as Entry
from twin.study.point import Row
from twin.study.sensitivity import STEP, Effect, effects_chart
from twin.units import format_quantity, unit_of

US = 1e6
STRONGEST = 15
WIDE_AXIS = 20  # highest over lowest place from which they are spaced by their ratio
CURVE = 5  # numeric places on an axis from which a line says more than bars
JUDGED = (
    Kind.ASSUMED.value,
    None,
    None,
    "a judgement of the simulator (twin/cost/consume.py): not a number of the node, and not drawn",
)
LADDER, SENSITIVITY = CLOSELY = "ladder", "sensitivity"  # tables of each cell that is looked into
CARRIERS = 3  # named for each cell


@dataclass(frozen=True, slots=True)
class Published:
    """Somebody else's figure for a cell, or for those of its cells that are `at` these places of
    the axes.

    `bytes` a step as they count them, 0 when they do not say.
    """

    model: str
    node: str
    at: tuple[tuple[str, Plain], ...]
    tokens_per_s: float
    kind: str
    source: str
    bytes: float

    def of(self, cell: Cell) -> bool:
        return (self.model, self.node) == (cell.model, cell.node) and set(self.at) <= set(cell.at)


@dataclass(frozen=True, slots=True)
class Roofline:
    """`utilisation` of a bandwidth, over bytes a step; `bytes_per_s` by node, the datasheet's where
    it is not given.
    """

    utilisation: float
    bytes_per_s: Mapping[str, float]

    def tokens_per_s(self, cell: Cell) -> float:
        node = cell.point.on_node()
        rate = self.bytes_per_s.get(
            cell.node, _gpus(cell) * node.device.memory.peak_bytes_per_s.value
        )
        return self.utilisation * rate / step_bytes(cell)


def _gpus(cell: Cell) -> int:
    """Of the cell's node, also where its plan takes fewer."""
    return dataclasses.replace(cell.point, node=cell.node).on_node().gpus


@dataclass(frozen=True, slots=True)
class Answer:
    """A cell with its result."""

    cell: Cell
    row: Row
    interval: Interval | None
    published: tuple[Published, ...]
    default: float | None = None  # tokens/s by default options, where a plan was found

    @property
    def possible(self) -> bool:
        return not self.row.problem


@dataclass(frozen=True, slots=True)
class Close:
    """A cell that is looked into: the ladder of engines, and the effect of each number."""

    cell: Cell
    ladder: list[tuple[str, Row]]
    effects: list[Effect]


Columns = dict[Column, Callable[[Answer], Entry]]
ENDS: Columns = {
    Column("p10"): lambda answer: answer.interval.p10 if answer.interval else None,
    Column("p90"): lambda answer: answer.interval.p90 if answer.interval else None,
}


def outcome(
    answers: Sequence[Answer],
    close: Sequence[Close],
    *,
    columns: str,
    draws: Draws | None,
    roofline: Roofline | None,
) -> Outcome:
    """All parts."""
    possible = [answer for answer in answers if answer.possible]
    parts = [_scaling(answers, columns), _cells(answers, roofline), _time(possible)]
    if any(answer.published for answer in answers):
        parts.insert(1, _compared(answers, roofline))
    if any(len(answer.row.step_times_s) > 1 for answer in possible):
        parts.append(_steps(possible))
    parts += [part for one in close for part in (_ladder(one), _sensitivity(one))]
    if draws and any(answer.interval and answer.interval.speeds for answer in possible):
        parts.append(_carriers(possible, draws))
    parts.append(_rests_on(possible))
    return Outcome(tuple(parts), _headline(possible), tuple(_notes(answers, draws, roofline)))


def _headline(possible: Sequence[Answer]) -> tuple[tuple[str, str], ...]:
    if not possible:
        return ()
    if len(possible) == 1:
        return (
            (f"{possible[0].row.tokens_per_s:,.0f}", f"tokens/s, predicted: {possible[0].cell}"),
        )
    best = max(possible, key=lambda answer: answer.row.tokens_per_s)
    worst = min(possible, key=lambda answer: answer.row.tokens_per_s)
    return (
        (f"{best.row.tokens_per_s:,.0f}", f"tokens/s at most, predicted: {best.cell}"),
        (f"{worst.row.tokens_per_s:,.0f}", f"tokens/s at least, predicted: {worst.cell}"),
        (
            f"{best.row.tokens_per_s / worst.row.tokens_per_s:.3g} x",
            f"between the two; {len(possible)} cells were simulated",
        ),
    )


def _notes(
    answers: Sequence[Answer], draws: Draws | None, roofline: Roofline | None
) -> Iterator[str]:
    yield (
        "Everything called predicted comes from the simulation of a plan; nothing was measured on "
        "these nodes unless a column says so."
    )
    yield (
        "tokens/s is one central value: the simulation with the numbers on file. Between p10 and "
        "p90 lie eight of ten: of held-out engine runs most like it, where there are any of the "
        "node's device. What never ran on an engine of ours makes them wider, by what first "
        "predictions were off."
    )
    if any(answer.cell.plan for answer in answers):
        yield (
            "plan: the best that a search finds for the cell (twin optimise). Simulator only: our "
            "engine has no code for one of its options."
        )
    if draws:
        yield (
            f"Elsewhere p10 and p90 are of {draws.draws} draws (seed {draws.seed}) of every rate "
            "and time of the node; low..high is a number's central 90%. What the twin's model "
            "leaves out is not in them."
        )
        if draws.depths:
            shallow, deep = draws.depths
            yield (
                f"Draws run on the first {shallow} and {deep} layers, extended to all by the "
                "difference; the prediction has all."
            )
    if roofline:
        yield (
            f"roofline: {roofline.utilisation:.0%} of a bandwidth over the bytes that the model's "
            "definition streams; nothing simulated."
        )
    for answer in answers:
        if not answer.possible:
            yield f"{answer.cell}: not possible: {answer.row.problem}"


def _scaling(answers: Sequence[Answer], columns: str) -> Part:
    stated = any(answer.interval for answer in answers)
    corner = "predicted (p10-p90), tokens/s" if stated else "predicted tokens/s"
    text = "Predicted tokens per second for one user" + (
        ", and an interval from p10 to p90." if stated else "."
    )
    tables = (_matrix(answers, columns, corner, "scaling", _speed),)
    return Part("Tokens per second", text, (_chart(answers, columns),), tables, long=True)


def _cells(answers: Sequence[Answer], roofline: Roofline | None) -> Part:
    """A row for each cell, with everything that is known about it."""
    columns: Columns = {
        Column(MODEL, Shown.TEXT): lambda a: a.cell.model,
        Column(NODE, Shown.TEXT): lambda a: a.cell.node,
    }
    for at, (name, _) in enumerate(answers[0].cell.at):
        columns[Column(name, Shown.TEXT)] = lambda a, at=at: _spoken(a.cell.at[at][1])  # type: ignore[misc]
    if any(answer.cell.plan for answer in answers):
        columns[Column("plan", Shown.TEXT)] = lambda a: a.cell.plan or "default options"
        columns[Column("by default options, tokens/s")] = lambda a: a.default
    columns[Column("tokens/s, predicted")] = _if_possible(lambda row: row.tokens_per_s)
    if any(answer.interval for answer in answers):
        columns |= ENDS
        columns[Column("interval from", Shown.TEXT)] = lambda a: (
            a.interval.rests if a.interval else None
        )
    if any(answer.row.sequences > 1 for answer in answers):
        columns[Column("all sequences, tokens/s")] = _if_possible(lambda r: r.total_tokens_per_s)
    columns |= {
        Column("us a step", Shown.MICROSECONDS): _if_possible(lambda row: row.step_s),
        Column("bytes a step", Shown.QUANTITY, "B"): _if_possible(lambda row: row.bytes_per_step),
        Column("floor, tokens/s"): _if_possible(lambda row: 1 / row.floor_s),
        Column("stream fraction", Shown.PERCENT): _if_possible(lambda row: row.stream_fraction),
        Column("mostly", Shown.TEXT): _if_possible(_mostly),
        Column("assumed numbers"): _if_possible(lambda row: len(row.assumed)),
    }
    if roofline:
        head = Column(f"{roofline.utilisation:.0%} roofline")
        columns[head] = lambda a: roofline.tokens_per_s(a.cell)
    text = (
        "Floor: all bytes of a step at the measured or published read bandwidth of all devices; "
        "stream fraction: floor over predicted time."
    )
    return Part("Every cell", text, (), (Table.of("cells", answers, columns),), long=True)


def _if_possible(read: Callable[[Row], Entry]) -> Callable[[Answer], Entry]:
    return lambda answer: read(answer.row) if answer.possible else None


def _compared(answers: Sequence[Answer], roofline: Roofline | None) -> Part:
    """Others' figures, one a row, next to our prediction, our roofline and our count of bytes."""
    Pair = tuple[Answer, Published]
    columns: dict[Column, Callable[[Pair], Entry]] = {
        Column("cell", Shown.TEXT): lambda pair: str(pair[0].cell),
        Column("published, tokens/s"): lambda pair: pair[1].tokens_per_s,
        Column("as", Shown.CHIP): lambda pair: pair[1].kind,
        Column("predicted, tokens/s"): lambda pair: _if_possible(lambda r: r.tokens_per_s)(pair[0]),
        **{column: lambda pair, read=read: read(pair[0]) for column, read in ENDS.items()},  # type: ignore[misc]
        Column("predicted against published", Shown.CHANGE): _against,
        Column("their bytes a step", Shown.QUANTITY, "B"): lambda pair: pair[1].bytes or None,
        Column("our bytes a step", Shown.QUANTITY, "B"): lambda pair: step_bytes(pair[0].cell),
    }
    if roofline:
        head = Column(f"our {roofline.utilisation:.0%} roofline")
        columns[head] = lambda pair: roofline.tokens_per_s(pair[0].cell)
    columns[Column("source", Shown.TEXT)] = lambda pair: pair[1].source
    pairs = [(answer, figure) for answer in answers for figure in answer.published]
    text = (
        "None of these figures is an input of the prediction. Bytes are what one step streams: "
        "weights, scales, caches and states."
    )
    tables = (Table.of("published", pairs, columns),)
    return Part("Next to published figures", text, (), tables, long=True)


def _against(pair: tuple[Answer, Published]) -> float | None:
    answer, figure = pair
    return answer.row.tokens_per_s / figure.tokens_per_s - 1 if answer.possible else None


def step_bytes(cell: Cell) -> int:
    """Bytes that a step of the model reads and writes, by its definition alone: no plan, no
    alignment, no redundancy.
    """
    spec = cell.point.spec()
    options = dict(cell.point.options)
    element = (
        option_value("kv_dtype", options["kv_dtype"]).bytes
        if "kv_dtype" in options
        else spec.dtype.bytes
    )
    context = options.get("context", DEFAULT.context)
    assert isinstance(context, int)
    moved = spec.traffic(context, element)
    return int(spec.streamed_bytes + moved.read_bytes + moved.written_bytes)


def _matrix(
    answers: Sequence[Answer], columns: str, corner: str, name: str, say: Callable[[Answer], str]
) -> Table:
    """The same for people: speeds with their intervals, one axis across."""
    across = list(dict.fromkeys(answer.cell.value(columns) for answer in answers))
    lines: dict[str, dict[Plain, str]] = {}
    for answer in answers:
        lines.setdefault(_line(answer.cell, columns), {})[answer.cell.value(columns)] = say(answer)
    head = (
        Column(corner, Shown.TEXT),
        *(Column(_place(columns, value), Shown.TEXT) for value in across),
    )
    return Table(
        name,
        head,
        tuple((line, *(found.get(value) for value in across)) for line, found in lines.items()),
    )


def _place(axis: str, value: Plain) -> str:
    """A value as the head of a column: models and nodes speak for themselves."""
    return str(value) if axis in (MODEL, NODE) else f"{axis} {_spoken(value)}"


def _speed(answer: Answer) -> str:
    if not answer.possible:
        return "not possible"
    mark = "*" if answer.row.assumed else ""
    if answer.interval:
        return (
            f"{answer.row.tokens_per_s:,.0f} "
            f"({answer.interval.p10:,.0f}-{answer.interval.p90:,.0f}){mark}"
        )
    return f"{answer.row.tokens_per_s:,.0f}{mark}"


def _line(cell: Cell, columns: str) -> str:
    """A cell's name without the axis that runs over the columns."""
    named = [cell.value(name) for name in (MODEL, NODE) if name != columns]
    placed = [f"{name} {_spoken(value)}" for name, value in cell.at if name != columns]
    return ", ".join([*(str(name) for name in named), *placed])


def _chart(answers: Sequence[Answer], columns: str) -> Chart:
    across = list(dict.fromkeys(answer.cell.value(columns) for answer in answers))
    lines: dict[str, dict[Plain, Answer]] = {}
    for answer in answers:
        if answer.possible:
            lines.setdefault(_line(answer.cell, columns), {})[answer.cell.value(columns)] = answer
    if len(across) >= CURVE and all(isinstance(value, int | float) for value in across):
        series = tuple(
            _series(name, [found.get(value) for value in across]) for name, found in lines.items()
        )
        x = tuple(value for value in across if isinstance(value, int | float))
        return Lines(
            x, series, columns, "tokens/s, predicted", log_x=0 < min(x) * WIDE_AXIS < max(x)
        )
    series = tuple(
        _series(_place(columns, value), [found.get(value) for found in lines.values()])
        for value in across
    )
    figures = [
        _figures(_place(columns, value), [found.get(value) for found in lines.values()])
        for value in across
    ]
    return Bars(
        tuple(lines),
        (*series, *(one for one in figures if any(one.values))),
        "tokens/s, predicted",
        log=_wide(answers),
    )


def _wide(answers: Sequence[Answer]) -> bool:
    """Whether speeds differ so much that the smaller bars could not be seen."""
    speeds = [answer.row.tokens_per_s for answer in answers if answer.possible]
    return bool(speeds) and max(speeds) > 12 * min(speeds)


def _series(label: str, answers: Sequence[Answer | None]) -> Series:
    found = [a.row.tokens_per_s if a else None for a in answers]
    if not any(a and a.interval for a in answers):
        return Series(label, tuple(found))
    low = tuple(a.interval.p10 if a and a.interval else None for a in answers)
    high = tuple(a.interval.p90 if a and a.interval else None for a in answers)
    return Series(label, tuple(found), low, high)


def _figures(label: str, answers: Sequence[Answer | None]) -> Series:
    found = tuple(a.published[0].tokens_per_s if a and a.published else None for a in answers)
    return Series(f"{label}, published", found, marks=True)


def _time(possible: Sequence[Answer]) -> Part:
    """Attribution of each cell."""
    names = tuple(str(answer.cell) for answer in possible)
    causes = list(dict.fromkeys(cause for answer in possible for cause in answer.row.attribution))
    chart = Bars(
        names,
        tuple(
            Series(c, tuple(a.row.attribution.get(c, 0.0) / a.row.step_s for a in possible))
            for c in causes
        ),
        "share of a step",
        stacked=True,
    )
    kinds = list(dict.fromkeys(kind for answer in possible for kind in answer.row.kinds))
    shares = tuple(
        Series(
            kind, tuple(sum(a.row.kinds.get(kind, {}).values()) / a.row.step_s for a in possible)
        )
        for kind in kinds
    )
    parts = [(str(a.cell), kind, of) for a in possible for kind, of in a.row.kinds.items()]
    columns: dict[Column, Callable[[tuple[str, str, dict[str, float]]], Entry]] = {
        Column("cell", Shown.TEXT): lambda part: part[0],
        Column("kind of stage", Shown.TEXT): lambda part: part[1],
        Column("us a step", Shown.MICROSECONDS): lambda part: sum(part[2].values()),
        Column("mostly", Shown.TEXT): lambda part: _most(part[2]),
    }
    table = Table.of("stages", parts, columns, terminal=False, page=False)
    text = (
        "Each microsecond of a step on its critical path has one cause (above) and belongs to one "
        "kind of stage (below)."
    )
    charts = (chart, Bars(names, shares, "share of a step", stacked=True))
    return Part("Where the time goes", text, charts, (table,), long=True)


def _steps(possible: Sequence[Answer]) -> Part:
    """How much steps differ from each other."""

    def level(at: float) -> Callable[[Answer], Entry]:
        return lambda answer: float(np.quantile(answer.row.step_times_s, at))

    columns: Columns = {
        Column("cell", Shown.TEXT): lambda answer: str(answer.cell),
        Column("steps"): lambda answer: len(answer.row.step_times_s),
        Column("p10, us", Shown.MICROSECONDS): level(LEVELS[0]),
        Column("p50, us", Shown.MICROSECONDS): level(LEVELS[1]),
        Column("p90, us", Shown.MICROSECONDS): level(LEVELS[2]),
        Column("slowest, us", Shown.MICROSECONDS): lambda answer: max(answer.row.step_times_s),
    }
    text = (
        "Tokens choose their experts anew in every step, so steps take different times; the "
        "prediction above is the median step."
    )
    return Part("How steps differ", text, (), (Table.of("steps", possible, columns),), long=True)


def _ladder(close: Close) -> Part:
    """From a launch for each operation to the monokernel."""
    names = tuple(name for name, _ in close.ladder)
    speeds = tuple(row.tokens_per_s for _, row in close.ladder)
    gains = (None, *(high / low - 1 for low, high in pairwise(speeds)))
    rungs = [(name, row, gain) for (name, row), gain in zip(close.ladder, gains, strict=True)]
    columns: dict[Column, Callable[[tuple[str, Row, float | None]], Entry]] = {
        Column("engine", Shown.TEXT): lambda rung: rung[0],
        Column("tokens/s, predicted"): lambda rung: rung[1].tokens_per_s,
        Column("gain", Shown.CHANGE): lambda rung: rung[2],
        Column("us a token", Shown.MICROSECONDS): lambda rung: rung[1].step_s,
        Column("stream fraction", Shown.PERCENT): lambda rung: rung[1].stream_fraction,
        Column("mostly", Shown.TEXT): lambda rung: _mostly(rung[1]),
    }
    return Part(
        f"What each idea buys: {close.cell}",
        "From kernels launched one by one to the whole monokernel, one idea at a time.",
        (Waterfall(names, speeds, "tokens/s, predicted"),),
        (Table.of(table_of(LADDER, close.cell), rungs, columns),),
    )


def _sensitivity(close: Close) -> Part:
    strong = [e for e in close.effects if e.tokens_per_s is not None and abs(e.effect) >= 5e-4][
        :STRONGEST
    ]
    columns: dict[Column, Callable[[Effect], Entry]] = {
        Column("number", Shown.TEXT): lambda e: e.label,
        Column("kind", Shown.CHIP): lambda e: e.kind,
        Column("from", Shown.TEXT): lambda e: _quantity(e.name, e.before),
        Column("to", Shown.TEXT): lambda e: _quantity(e.name, e.after),
        Column("tokens/s", Shown.CHANGE): lambda e: e.effect,
    }
    text = (
        f"Each number and option raised by {STEP:.0%}, one at a time; "
        f"{len(close.effects) - len(strong)} others do less, or nothing."
    )
    return Part(
        f"Sensitivity: {close.cell}",
        text,
        (effects_chart(strong),),
        (Table.of(table_of(SENSITIVITY, close.cell), strong, columns),),
    )


def _carriers(possible: Sequence[Answer], draws: Draws) -> Part:
    """Which numbers carry the intervals."""
    drawn = [(a, a.interval) for a in possible if a.interval and a.interval.speeds]

    def carrier(at: int) -> Callable[[tuple[Answer, Interval]], Entry]:
        def read(pair: tuple[Answer, Interval]) -> str | None:
            if at >= len(pair[1].carried_by):
                return None
            name, correlation = pair[1].carried_by[at]
            return f"{name.removeprefix('device.')} {correlation:+.2f}"

        return read

    columns: dict[Column, Callable[[tuple[Answer, Interval]], Entry]] = {
        Column("cell", Shown.TEXT): lambda pair: str(pair[0].cell),
        Column("p90 / p10"): lambda pair: pair[1].p90 / pair[1].p10,
        **{Column(f"number {i + 1}", Shown.TEXT): carrier(i) for i in range(CARRIERS)},
    }
    text = (
        f"Rank correlation of each number that the plan uses with the speed over {draws.draws} "
        "draws, the strongest first, each after what those before it explain; what may be chance "
        f"is not shown (among 20 numbers, below {chance(draws.draws, 20):.2f}). Numbers of one "
        "mechanism vary together: idle and loaded hop, arithmetic on each format."
    )
    if draws.draws < TELLING:
        text = (
            f"{draws.draws} draws are too few to tell which numbers carry an interval; from "
            f"{TELLING} on they are named here."
        )
    tables = (Table.of("carriers", drawn, columns),)
    return Part("What carries the intervals", text, (), tables, long=True)


def _rests_on(possible: Sequence[Answer]) -> Part:
    """Assumed numbers by node, and the width of each kind."""
    head = (
        Column(NODE, Shown.TEXT),
        Column("number", Shown.TEXT),
        Column("kind", Shown.CHIP),
        Column("value", Shown.TEXT),
        Column("range", Shown.TEXT),
        Column("source", Shown.TEXT),
    )
    rows: dict[tuple[str, str], tuple[Entry, ...]] = {}
    for answer in possible:
        known, node = numbers(answer.cell.point.on_node()), answer.cell.node
        for path in answer.row.assumed:
            number = known.get(path)
            rows[node, path] = _assumed(node, path, number) if number else (node, path, *JUDGED)
    columns: dict[Column, Callable[[Kind], Entry]] = {
        Column("kind", Shown.CHIP): lambda kind: kind.value,
        Column("+-", Shown.PERCENT): lambda k: SPREAD[k] if k is not Kind.ASSUMED else None,
        Column("why", Shown.TEXT): lambda kind: WIDTHS[kind],
    }
    kinds = Table.of("widths", Kind, columns, terminal=False)
    resting = sum(bool(answer.row.assumed) for answer in possible)
    text = (
        f"{resting} of {len(possible)} cells rest on assumed numbers: nobody has measured them, "
        "and a prediction is no better than that (marked * in the scaling table). The second "
        "table says how wide a number is taken to be that states no range of its own."
    )
    return Part(
        "What the cells rest on",
        text,
        (),
        (Table("assumed", head, tuple(rows.values()), terminal=False), kinds),
        long=True,
    )


def _assumed(node: str, path: str, number: Number) -> tuple[Entry, ...]:
    low, high = (_quantity(path, end) for end in range_of(number))
    return (
        node,
        path.removeprefix("device."),
        number.kind.value,
        _quantity(path, number.value),
        f"{low} .. {high}",
        number.source,
    )


def _mostly(row: Row) -> str:
    return _most(row.attribution)


def _most(parts: Mapping[str, float]) -> str:
    return max(parts, key=lambda cause: parts[cause]).replace("_", "-")


def _quantity(path: str, value: float) -> str:
    return format_quantity(value, unit_of(path.rsplit(".", 1)[-1]))


def _spoken(value: Plain) -> str:
    return "the model's own" if value is None else str(value)


def table_of(what: str, cell: Cell) -> str:
    """The name of a cell's own table: letters and digits that every file system distinguishes."""
    words = "".join(
        letter if letter.isascii() and letter.isalnum() else "-"
        for letter in str(cell).lower().replace(" on ", "-")
    )
    return "-".join([what, *(word for word in words.split("-") if word)])
