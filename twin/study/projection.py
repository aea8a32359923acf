"""Studies of kind `projection`: models x nodes x axes, simulated, with intervals, beside the
roofline and what others have published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from twin.calibrate.known_error import known_error
from twin.errors import ConfigError, OutputError, PlanError
from twin.files import check_stems
from twin.study import interval, ladder, on_chip, projection_parts
from twin.study.depth import Depths, times
from twin.study.fields import Fields
from twin.study.grid import MODEL, NODE, Cell, Grid, read_grid
from twin.study.interval import Draws, Interval
from twin.study.options import Plain
from twin.study.outcome import Outcome
from twin.study.point import Point, Row
from twin.study.projection_parts import Answer, Close, Published, Roofline
from twin.study.runner import Runner
from twin.study.sensitivity import Trial, effects, trials
from twin.text import shown
from twin.units import parse_quantity

REFUSE, SHOW = "refuse", "show"
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

    def run(self, runner: Runner) -> Outcome:
        cells = list(self.grid.cells())
        close = [cell for cell in cells if (cell.model, cell.node) in self.closely]
        _check_tables(close)
        self._check(cells, runner)
        ladders = [ladder.rungs(cell.point) for cell in close]
        tried = [trials(cell.point) for cell in close]
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
                effects(cell.point, trial, runner, self._depths),
            )
            for cell, rungs, trial in zip(close, ladders, tried, strict=True)
        ]
        found = projection_parts.outcome(
            answers, looked, columns=self.columns, draws=self.draws, roofline=self.roofline
        )
        if not self.machines:
            return found
        beside = on_chip.part(self.machines, self.grid.models, dict(self.grid.options))
        return dataclasses.replace(found, parts=(*found.parts[:-1], beside, found.parts[-1]))

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

    def _compute_all(
        self,
        cells: Sequence[Cell],
        rows: dict[Cell, Row],
        ladders: list[list[tuple[str, Point]]],
        tried: list[list[Trial]],
        runner: Runner,
    ) -> None:
        """Everything else in one go, so that no core waits between the parts."""
        varied = [trial.ways[0][1] for trial_list in tried for trial in trial_list]
        varied += [point for cell in cells if not rows[cell].problem for point in self._drawn(cell)]
        depths = self._depths
        points = [point for rungs in ladders for _, point in rungs]
        points += [short for point in varied for short in depths.short(point)] if depths else varied
        runner.rows(points, "intervals and details")

    def _drawn(self, cell: Cell) -> list[Point]:
        """The hardware as it is on file, then every draw; none where held-out runs say more."""
        if self.draws is None or known_error(cell.point.on_node(), cell.point.spec()):
            return []
        return [
            cell.point,
            *(
                cell.point.with_settings(*one)
                for one in interval.settings(cell.point.on_node(), self.draws)
            ),
        ]

    @property
    def _depths(self) -> Depths | None:
        return Depths(*self.draws.depths) if self.draws and self.draws.depths else None

    def _interval(self, cell: Cell, row: Row, draws: Draws, runner: Runner) -> Interval:
        base, *drawn = times(self._drawn(cell), runner, self._depths, "draws")
        speeds = [row.tokens_per_s * base.step_s / one.step_s for one in drawn]
        node = cell.point.on_node()
        return interval.summary(node, draws, row.tokens_per_s, speeds, drawn[0].assumed)

    def _answer(self, cell: Cell, row: Row, runner: Runner) -> Answer:
        found: Interval | None = None
        if not row.problem:
            known = known_error(cell.point.on_node(), cell.point.spec())
            if known is not None:
                found = interval.held(known, row.tokens_per_s)
            elif self.draws:
                found = self._interval(cell, row, self.draws, runner)
        published = tuple(figure for figure in self.published if figure.of(cell))
        return Answer(cell, row, found, published)


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


def read(fields: Fields) -> Projection:
    grid, draws = read_grid(fields), interval.read_draws(fields)
    if draws and grid.size * draws.count > MOST_POINTS:
        raise fields.error(
            "intervals.draws",
            f"{draws.count:,} draws of {grid.size:,} cells: at most {MOST_POINTS:,} together; "
            "take fewer",
        )
    axes = [MODEL, NODE, *(axis.name for axis in grid.axes)]
    labels = [model.label for model in grid.models]
    return Projection(
        grid,
        columns=fields.choice("columns", axes, NODE),
        draws=draws,
        roofline=_roofline(fields, grid),
        published=tuple(_published(one, labels, grid) for one in fields.mappings("published", ())),
        closely=tuple(_pair(one, labels, grid.nodes) for one in fields.mappings("closely", ())),
        machines=on_chip.read_machines(fields),
        impossible=fields.choice("impossible", (REFUSE, SHOW), REFUSE),
    )


def _pair(one: Fields, models: Sequence[str], nodes: Sequence[str]) -> tuple[str, str]:
    pair = one.choice(MODEL, models), one.choice(NODE, nodes)
    one.done()
    return pair


def _published(one: Fields, models: Sequence[str], grid: Grid) -> Published:
    at = one.mapping("at")
    axes = {axis.name: axis.values for axis in grid.axes if axis.name in at}
    places = tuple((name, _place(at, name, values)) for name, values in axes.items())
    at.done()
    figure = Published(
        one.choice(MODEL, models),
        one.choice(NODE, grid.nodes),
        places,
        one.number("tokens_per_s"),
        one.choice("kind", ("measured", "vendor", "third-party", "projection")),
        one.text("source"),
        one.quantity("bytes", "0 B"),
    )
    one.done()
    return figure


def _place(at: Fields, name: str, values: Sequence[Plain]) -> Plain:
    value: Plain = at.take(name)
    if not isinstance(value, str | int | float | None) or value not in values:
        raise at.error(name, f"{shown(value)} is not on that axis; it has {shown(values)}")
    return value


def _roofline(fields: Fields, grid: Grid) -> Roofline | None:
    """`roofline: {utilisation: 36%, bytes_per_s: {8xh200: "30.7 TB/s"}}`: a share of a bandwidth,
    by default the datasheet's.
    """
    if "roofline" not in fields:
        return None
    one = fields.mapping("roofline")
    share = one.number("utilisation", low=0.001, high=1)
    given = one.mapping("bytes_per_s")
    rates = {node: _rate(given, node) for node in grid.nodes if node in given}
    given.done()
    one.done()
    return Roofline(share, rates)


def _rate(given: Fields, node: str) -> float:
    text = given.text(node)
    try:
        return parse_quantity(text, "B/s")
    except ConfigError as error:
        raise given.error(node, str(error)) from error
