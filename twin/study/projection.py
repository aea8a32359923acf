"""Studies of kind `projection`: models x nodes x axes, simulated, with intervals, next to the
roofline and what others have published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from twin.calibrate.known_error import first_error, known_error
from twin.data import did_you_mean
from twin.errors import ConfigError, OutputError, PlanError
from twin.files import check_stems
from twin.machines.load import load_machine
from twin.reading import Check, FieldError, Parse, Reader, one_of, quantity
from twin.study import interval, ladder, machines, projection_parts
from twin.study.depth import Depths, times
from twin.study.fields import MOST_NUMBER, Head, percent
from twin.study.grid import MODEL, NODE, Cell, Grid, GridFields
from twin.study.interval import Draws, Interval
from twin.study.optimise import Found, Steps, among, search, searched, together
from twin.study.options import Plain
from twin.study.outcome import Outcome
from twin.study.point import Point, Row
from twin.study.projection_parts import Answer, Close, Published, Roofline
from twin.study.runner import Runner
from twin.study.sensitivity import Trial, effects, trials
from twin.text import shown

REFUSE: Final = "refuse"
SHOW: Final = "show"
FIXED: Final = "fixed"
BEST: Final = "best"
RATIO_STEPS = 3  # the first is cold
MOST_POINTS = 1_000_000  # cells and their draws


@dataclass(frozen=True, slots=True)
class Projection:
    """What a study file of this kind asks."""

    grid: Grid
    columns: str  # the axis that the scaling table spreads over its columns
    draws: Draws | None
    roofline: Roofline | None
    published: tuple[Published, ...]
    closely: tuple[tuple[str, str], ...]  # (model, node) whose steps are looked into
    machines: tuple[str, ...]  # with weights on chip, for comparison
    impossible: str  # REFUSE or SHOW cells that cannot be planned
    # FIXED; BEST of every cell on several GPUs whose plan the study does not name; the same without
    # fewer GPUs than the node has
    plans: str = FIXED
    searched: tuple[str, ...] = ()  # nodes; elsewhere the plans found there are compared

    def run(self, runner: Runner) -> Outcome:
        cells = list(self.grid.cells())
        self._check(cells, runner)
        cells = self._planned(cells, runner)
        close = [cell for cell in cells if (cell.model, cell.node) in self.closely]
        _check_tables(close)
        ladders = [ladder.rungs(cell.point) for cell in close]
        tried = [trials(_for_ratios(cell.point)) for cell in close]
        rows = dict(zip(cells, runner.rows([cell.point for cell in cells], "cells"), strict=True))
        self._compute_all(cells, rows, ladders, tried, runner)
        answers = [self._answer(cell, rows[cell], runner) for cell in cells]
        looked = [
            Close(
                cell,
                [
                    (name, row)
                    for (name, _), row in zip(
                        rungs, runner.rows([p for _, p in rungs]), strict=True
                    )
                    if not row.problem
                ],
                effects(_for_ratios(cell.point), trial, runner, self._depths),
            )
            for cell, rungs, trial in zip(close, ladders, tried, strict=True)
        ]
        found = projection_parts.outcome(
            answers, looked, columns=self.columns, draws=self.draws, roofline=self.roofline
        )
        if not self.machines:
            return found
        next_to = machines.part(self.machines, self.grid.models, dict(self.grid.options))
        return dataclasses.replace(found, parts=(*found.parts[:-1], next_to, found.parts[-1]))

    def _check(self, cells: Sequence[Cell], runner: Runner) -> None:
        """Refuses what cannot be planned or does not fit before anything is simulated."""
        if self.impossible == SHOW:
            return
        unknown = [cell for cell in cells if not runner.known(cell.point)]
        plans = runner.rows(
            [
                Point(c.point.model, c.point.node, c.point.options, c.point.settings, steps=0)
                for c in unknown
            ],
            "plans",
        )
        problems = dict(zip(unknown, (row.problem for row in plans), strict=True))
        for cell in cells:
            problem = problems[cell] if cell in problems else runner.rows([cell.point])[0].problem
            if problem:
                raise PlanError(
                    f"{cell}: {problem}; change or remove it, or write `impossible: {SHOW}` to "
                    "show such cells as empty"
                )

    def _planned(self, cells: Sequence[Cell], runner: Runner) -> list[Cell]:
        """With the plans that are taken: node by node, so that a model's search begins with the
        plans found on earlier nodes. Nodes that are not `searched` compare these alone.
        """
        if self.plans == FIXED:
            return list(cells)
        taken: dict[Cell, Found] = {}
        for node in sorted(self.grid.nodes, key=lambda node: node not in self.searched):
            some = [cell for cell in cells if cell.node == node and searched(cell.point)]
            answers = together(
                [self._search(cell, taken) for cell in some], runner, f"plans on {node}"
            )
            taken |= {
                cell: found
                for cell, found in zip(some, answers, strict=True)
                if isinstance(found, Found)  # else it is shown as a cell that is not possible
            }
        return [_with_plan(cell, taken[cell]) if cell in taken else cell for cell in cells]

    def _search(self, cell: Cell, taken: Mapping[Cell, Found]) -> Steps[Found]:
        elsewhere = [found.best.way for one, found in taken.items() if one.model == cell.model]
        if self.searched and cell.node not in self.searched:
            return among(cell.point, elsewhere)
        starts = list(dict.fromkeys(way.options for way in elsewhere))
        return search(cell.point, gpus=self.plans == BEST, starts=starts, confirm=False)

    def _compute_all(
        self,
        cells: Sequence[Cell],
        rows: dict[Cell, Row],
        ladders: list[list[tuple[str, Point]]],
        tried: list[list[Trial]],
        runner: Runner,
    ) -> None:
        """Everything else in one go, so that no core waits between the parts."""
        defaults = [cell.default for cell in cells if cell.default]
        varied = [trial.ways[0][1] for trial_list in tried for trial in trial_list]
        varied += [point for cell in cells if not rows[cell].problem for point in self._drawn(cell)]
        depths = self._depths
        points = defaults + [point for rungs in ladders for _, point in rungs]
        points += [short for point in varied for short in depths.short(point)] if depths else varied
        runner.rows(points, "intervals and details")

    def _drawn(self, cell: Cell) -> list[Point]:
        """The hardware as it is on file, then every draw; none where held-out runs say more."""
        if self.draws is None or known_error(cell.point.on_node(), cell.point.spec()):
            return []
        point = _for_ratios(cell.point)
        drawn = interval.settings(cell.point.on_node(), self.draws)
        return [point, *(point.with_settings(*one) for one in drawn)]

    @property
    def _depths(self) -> Depths | None:
        return Depths(*self.draws.depths) if self.draws and self.draws.depths else None

    def _interval(self, cell: Cell, row: Row, draws: Draws, runner: Runner) -> Interval:
        base, *drawn = times(self._drawn(cell), runner, self._depths, "draws")
        speeds = [row.tokens_per_s * base.step_s / one.step_s for one in drawn]
        node = cell.point.on_node()
        new = first_error(node, cell.point.spec(), cell.point.chosen())
        return interval.summary(node, draws, row.tokens_per_s, speeds, drawn[0].assumed, new=new)

    def _answer(self, cell: Cell, row: Row, runner: Runner) -> Answer:
        found: Interval | None = None
        if not row.problem:
            known = known_error(cell.point.on_node(), cell.point.spec(), cell.point.chosen())
            if known is not None:
                found = interval.held(known, row.tokens_per_s)
            elif self.draws:
                found = self._interval(cell, row, self.draws, runner)
        published = tuple(figure for figure in self.published if figure.of(cell))
        default = runner.rows([cell.default])[0].tokens_per_s if cell.default else None
        return Answer(cell, row, found, published, default)


def _for_ratios(point: Point) -> Point:
    """The point where only the ratio to another one counts, whose steps draw the same experts: by
    one GPU for all, and few steps.
    """
    return dataclasses.replace(point, representative=True, steps=min(point.steps, RATIO_STEPS))


def _with_plan(cell: Cell, found: Found) -> Cell:
    """The cell by the best plan. One that deals experts to ranks is simulated by one GPU for all:
    all of eight take minutes (`simulate` says how close that is).
    """
    best = found.best
    point = best.way.of(cell.point)
    dealt = dict(best.way.options).get("expert_ranks", 1) != 1
    mark = " (simulator only)" if best.only_simulated else ""
    return dataclasses.replace(
        cell,
        point=dataclasses.replace(point, representative=dealt),
        plan=f"{best.way}{mark}",
        default=dataclasses.replace(found.standard.of(cell.point), representative=True),
    )


def _check_tables(close: Sequence[Cell]) -> None:
    """Cells that are looked into have tables of their own, and these have files. Raises ConfigError
    before anything is simulated.
    """
    try:
        check_stems(
            [
                projection_parts.table_of(what, cell)
                for what in projection_parts.CLOSELY
                for cell in close
            ]
        )
    except OutputError as error:
        raise ConfigError(
            f"closely: each cell is a table with a file of its name, but {error} (a model's label "
            "is part of it)"
        ) from error


@dataclass(frozen=True, slots=True)
class Pair:
    """A model, by its label, on a node of the study."""

    model: str
    node: str


@dataclass(frozen=True, slots=True)
class Figure:
    """Somebody else's, for a cell or for those `at` some places of the axes."""

    model: str
    node: str
    tokens_per_s: Annotated[float, Meta(ge=0, le=MOST_NUMBER)]
    kind: Literal["measured", "vendor", "third-party", "projection"]
    source: str
    at: dict[str, Plain] = field(default_factory=dict)
    bytes: Annotated[float, quantity(0.0, MOST_NUMBER)] = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """Of a bandwidth, by default the datasheet's; by node where another is meant."""

    utilisation: Annotated[float, Parse(percent), Meta(ge=0.001, le=1)]
    bytes_per_s: dict[str, Annotated[float, quantity(0.0, MOST_NUMBER, "B/s")]] = field(
        default_factory=dict
    )


@dataclass(frozen=True, kw_only=True)
class File(Head, GridFields):
    """A study file of this kind."""

    intervals: Draws | None = None
    columns: str = NODE
    roofline: Share | None = None
    published: tuple[Figure, ...] = ()
    closely: tuple[Pair, ...] = ()
    machines: tuple[Annotated[str, Check(load_machine)], ...] = ()
    impossible: Literal["refuse", "show"] = REFUSE
    plans: Literal["fixed", "best", "best-of-all-gpus"] = FIXED
    searched: tuple[str, ...] = ()

    def asks(self, reader: Reader, folder: Path) -> Projection:
        grid, draws = self.grid(reader), self.intervals
        if draws and grid.size * draws.draws > MOST_POINTS:
            raise FieldError(
                "intervals.draws",
                f"{draws.draws:,} draws of {grid.size:,} cells: at most {MOST_POINTS:,} together; "
                "take fewer",
            )
        axes = {axis.name: axis.values for axis in grid.axes}
        axes |= {MODEL: tuple(model.label for model in grid.models), NODE: grid.nodes}
        with reader.at("columns"):
            one_of(lambda: [MODEL, NODE, *axes]).call(self.columns)
        rates = self.roofline.bytes_per_s if self.roofline else {}
        places: list[tuple[str, Figure | Pair]] = [
            *((f"published[{i}]", one) for i, one in enumerate(self.published)),
            *((f"closely[{i}]", one) for i, one in enumerate(self.closely)),
        ]
        for where, one in places:
            _check_places({MODEL: one.model, NODE: one.node}, axes, reader, where)
            if isinstance(one, Figure):
                _check_places(one.at, axes, reader, f"{where}.at")
        for index, node in enumerate(self.searched):
            with reader.at(f"searched[{index}]"):
                one_of(lambda: grid.nodes).call(node)
        for node in rates:
            if node not in grid.nodes:
                with reader.at(f"roofline.bytes_per_s.{node}"):
                    raise ConfigError(f"unknown key; {did_you_mean(node, grid.nodes)}")
        return Projection(
            grid,
            self.columns,
            draws,
            Roofline(self.roofline.utilisation, rates) if self.roofline else None,
            tuple(_published(one, axes) for one in self.published),
            tuple((one.model, one.node) for one in self.closely),
            self.machines,
            self.impossible,
            self.plans,
            self.searched,
        )


Axes = Mapping[str, Sequence[Plain]]


def _check_places(at: Mapping[str, Plain], axes: Axes, reader: Reader, where: str) -> None:
    """Each on its axis."""
    for name, value in at.items():
        with reader.at(f"{where}.{name}"):
            if name not in axes:
                raise ConfigError(f"unknown key; {did_you_mean(name, axes)}")
            if value not in axes[name]:
                hint = did_you_mean(value, map(str, axes[name]))
                raise ConfigError(f"{shown(value)} is not on that axis; {hint}")


def _published(one: Figure, axes: Axes) -> Published:
    at = tuple((name, one.at[name]) for name in axes if name in one.at)
    return Published(one.model, one.node, at, one.tokens_per_s, one.kind, one.source, one.bytes)
