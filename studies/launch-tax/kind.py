"""Studies of kind launch-tax: how fast a step can be when each of its kernels costs a launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from twin.hardware.load import load_device
from twin.hardware.types import Device
from twin.reading import SOME, Check, FieldError, Reader, quantity
from twin.study.fields import MOST_NUMBER, Count, Head, ModelName, NodeName
from twin.study.ladder import rungs
from twin.study.outcome import Bars, Cell, Column, Lines, Outcome, Part, Series, Shown, Table
from twin.study.point import Point, Row
from twin.study.runner import Runner
from twin.text import shown

US = 1e6
LEAST_LAUNCH_S = 1e-12


@dataclass(frozen=True, slots=True)
class Tax:
    """Kernels a layer times layers times the cost of one launch."""

    layers: int
    launch_s: float

    def seconds(self, kernels: int) -> float:
        return self.layers * kernels * self.launch_s

    def cap(self, kernels: int) -> float:
        """Tokens per second if nothing else took time."""
        return 1 / self.seconds(kernels)

    def kernels_at(self, tokens_per_s: float) -> float:
        """Kernels a layer whose launches alone fill a step of that speed."""
        return 1 / (tokens_per_s * self.layers * self.launch_s)


@dataclass(frozen=True, slots=True)
class LaunchTax:
    layers: int
    kernels: tuple[int, ...]  # a layer
    launch_s: float
    published: dict[int, float]  # kernels a layer -> tokens per second
    goal_tokens_per_s: float
    devices: tuple[Device, ...]
    points: tuple[Point, ...]  # simulated from launches one by one to the resident kernel

    def run(self, runner: Runner) -> Outcome:
        tax = Tax(self.layers, self.launch_s)
        ladder = [(point, name, rung) for point in self.points for name, rung in rungs(point)]
        rows = runner.rows([rung for _, _, rung in ladder], "rungs") if ladder else []
        differences = [tax.cap(kernels) / speed - 1 for kernels, speed in self.published.items()]
        headline = [
            (
                f"{tax.kernels_at(self.goal_tokens_per_s):.1f}",
                f"kernels a layer fill the whole step of {self.goal_tokens_per_s:,.0f} tokens/s",
            ),
        ]
        if differences:
            headline.append(
                (
                    f"{100 * max(differences, key=abs):+.1f}%",
                    "largest difference of a cap from the published one",
                )
            )
        parts = [self._caps(tax), self._by_device()]
        if rows:
            parts.append(
                self._simulated(
                    [(point, name, row) for (point, name, _), row in zip(ladder, rows, strict=True)]
                )
            )
        return Outcome(tuple(parts), tuple(headline), tuple(self._notes(rows)))

    def _caps(self, tax: Tax) -> Part:
        columns = (
            Column("kernels a layer"),
            Column("launches a step"),
            Column("launches, us"),
            Column("cap, tokens/s"),
            Column("published cap"),
            Column("difference", Shown.CHANGE),
        )
        rows: list[tuple[Cell, ...]] = []
        for kernels in self.kernels:
            known = self.published.get(kernels)
            difference = tax.cap(kernels) / known - 1 if known else None
            rows.append(
                (
                    kernels,
                    kernels * self.layers,
                    tax.seconds(kernels) * US,
                    tax.cap(kernels),
                    known,
                    difference,
                )
            )
        caps = Series("cap", tuple(tax.cap(kernels) for kernels in self.kernels))
        known_series = Series(
            "published", tuple(self.published.get(kernels) for kernels in self.kernels), marks=True
        )
        return Part(
            f"{self.layers} layers, {self.launch_s * US:.2g} us a kernel",
            "The fastest a step could be if launches were all it did: weights, hand-offs and "
            "arithmetic come on top.",
            (
                Lines(
                    tuple(map(float, self.kernels)),
                    (caps, known_series),
                    "kernels a layer",
                    "tokens/s",
                ),
            ),
            (Table("caps", columns, tuple(rows)),),
        )

    def _by_device(self) -> Part:
        columns = (
            Column("device", Shown.TEXT),
            Column("kernel border", Shown.TEXT),
            Column("us", Shown.MICROSECONDS),
            Column("kind", Shown.CHIP),
            *(Column(f"cap at {kernels}") for kernels in self.kernels),
            Column("source", Shown.TEXT),
        )
        rows: list[tuple[Cell, ...]] = []
        for device in self.devices:
            for name, number in (
                ("stream", device.launch.stream_s),
                ("graph", device.launch.graph_edge_s),
            ):
                caps = [
                    Tax(self.layers, number.value).cap(kernels) if number.value else None
                    for kernels in self.kernels
                ]
                rows.append(
                    (device.name, name, number.value, number.kind.value, *caps, number.source)
                )
        return Part(
            "The same caps with each device's own kernel borders",
            "Queued launches overlap with what runs, so a border between queued kernels is "
            "shorter than a launch and its clean-up; in a graph it is shorter again.",
            tables=(Table("devices", columns, tuple(rows)),),
        )

    def _simulated(self, results: list[tuple[Point, str, Row]]) -> Part:
        columns = (
            Column("model", Shown.TEXT),
            Column("node", Shown.TEXT),
            Column("engine", Shown.TEXT),
            Column("us a step"),
            Column("launches, us"),
            Column("share of launches", Shown.PERCENT),
            Column("tokens/s, predicted"),
        )
        rows: list[tuple[Cell, ...]] = []
        for point, name, row in results:
            if row.problem:
                rows.append((point.model, point.node, name, None, None, None, None))
                continue
            launch = row.attribution.get("launch", 0.0)
            rows.append(
                (
                    point.model,
                    point.node,
                    name,
                    row.step_s * US,
                    launch * US,
                    launch / row.step_s,
                    row.tokens_per_s,
                )
            )
        names = tuple(f"{point.model} {point.node}, {name}" for point, name, _ in results)
        launch_us = Series(
            "launches", tuple(row.attribution.get("launch", 0.0) * US for _, _, row in results)
        )
        rest_us = Series(
            "all else",
            tuple((row.step_s - row.attribution.get("launch", 0.0)) * US for _, _, row in results),
        )
        return Part(
            "Simulated: a whole step, launch by launch and without launches",
            "Launches on the critical path of a step of a real model. What remains without them "
            "is weights, hand-offs and arithmetic.",
            (Bars(names, (launch_us, rest_us), "microseconds a step", stacked=True),),
            (Table("simulated", columns, tuple(rows)),),
        )

    def _notes(self, rows: list[Row]) -> Iterator[str]:
        yield (
            "A cap is arithmetic, not a measurement. The published caps come from the same product."
        )
        assumed = sorted({path for row in rows for path in row.assumed if "launch" in path})
        if assumed:
            yield f"Simulated launches rest on assumed numbers: {', '.join(assumed)}."
        for problem in sorted({row.problem for row in rows if row.problem}):
            yield f"Not simulated: {problem}"


@dataclass(frozen=True, slots=True)
class Cap:
    """A published speed of so many kernels a layer."""

    kernels: Count
    tokens_per_s: Annotated[float, Meta(ge=1, le=MOST_NUMBER)]


@dataclass(frozen=True, slots=True)
class Simulated:
    model: ModelName
    node: NodeName


@dataclass(frozen=True, kw_only=True)
class File(Head):
    """A study file of this kind."""

    layers: Count
    kernels: Annotated[tuple[Count, ...], SOME]
    launch_s: Annotated[float, quantity(LEAST_LAUNCH_S, 1.0)]
    goal_tokens_per_s: Annotated[float, Meta(ge=1, le=MOST_NUMBER)]
    devices: Annotated[tuple[Annotated[str, Check(load_device)], ...], SOME]
    published: tuple[Cap, ...] = ()
    simulate: tuple[Simulated, ...] = ()

    def __post_init__(self) -> None:
        if list(self.kernels) != sorted(set(self.kernels)):
            raise FieldError("kernels", f"{shown(list(self.kernels))} must be ascending")
        for index, cap in enumerate(self.published):
            if cap.kernels not in self.kernels:
                raise FieldError(
                    f"published[{index}].kernels",
                    f"{cap.kernels} is not among the study's kernels {shown(list(self.kernels))}",
                )

    def asks(self, reader: Reader, folder: Path) -> LaunchTax:
        return LaunchTax(
            self.layers,
            self.kernels,
            self.launch_s,
            {cap.kernels: cap.tokens_per_s for cap in self.published},
            self.goal_tokens_per_s,
            tuple(load_device(name) for name in self.devices),
            tuple(Point(one.model, one.node) for one in self.simulate),
        )
