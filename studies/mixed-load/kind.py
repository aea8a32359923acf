"""Studies of kind mixed-load: long and short requests on nodes that serve one request each, or many
in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from twin.batching.costs import Load
from twin.batching.prices import HOUR_S
from twin.batching.step import IDEAL, predict
from twin.batching.tables import stack_names
from twin.errors import ConfigError, OutputError, TwinError
from twin.files import check_stems
from twin.hardware.load import load_node
from twin.hardware.override import interval
from twin.models.load import load_model
from twin.reading import SOME, FieldError, Reader, one_of
from twin.study.fields import (
    MOST_NUMBER,
    MOST_WHOLE,
    Count,
    Head,
    ModelName,
    NodeName,
    check_context,
)
from twin.study.outcome import Cell, Column, Lines, Outcome, Part, Series, Shown, Table
from twin.study.point import Point
from twin.study.runner import Runner
from twin.text import shown
from twin.units import format_quantity

from .bill import Bill, Prices
from .closed_forms import mean_wait_mmc
from .queueing import COUNTED, EXPONENTIAL, Served, StepTime, Traffic, serve

RESIDENT = "resident"
Stack = Annotated[str, one_of(lambda: [*stack_names(), IDEAL, RESIDENT])]
COST, STEPS, THEORY = "cost", "steps", "theory"  # tables; each class has one as well, by its name
SEEN = 300  # requests of every class that are counted, for each seed
CHECKED = 30_000  # arrivals when the queue is held to theory
MOST_ARRIVALS = 2e6  # of one run: they are all in memory
LEAST_LOAD, MOST_LOAD = 1e-6, 1e6
MOST_HOURS = 1e6  # of one run: later the clock would be too coarse for a request of a millisecond
MOST_NODES = 10_000  # of a group
SHORTEST_WAIT_S = 1e-3  # below it almost nobody waits and a run sees none of it
LARGEST_SIMULATED = 16  # a step of more takes minutes to simulate
LARGEST_BATCH = 128  # kernels were measured up to it


@dataclass(frozen=True, slots=True)
class Group:
    """Equal nodes that serve some classes: `batch` requests at a time on each."""

    node: NodeName
    nodes: Annotated[int, Meta(ge=1, le=MOST_NODES)]
    stack: Stack
    serves: Annotated[tuple[str, ...], SOME]
    batch: Annotated[int, Meta(ge=1, le=LARGEST_BATCH)] = 1

    def __post_init__(self) -> None:
        if self.stack == RESIDENT and self.batch > LARGEST_SIMULATED:
            raise FieldError(
                "batch",
                f"{self.batch}: a resident kernel is simulated with up to {LARGEST_SIMULATED} "
                "sequences; take at most that many",
            )

    @property
    def gpus(self) -> int:
        return self.nodes * load_node(self.node).gpus


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    groups: Annotated[tuple[Group, ...], SOME]

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)


@dataclass(frozen=True, slots=True)
class Operation:
    """What one policy did at one load, all seeds together."""

    policy: Policy
    load: float
    utilisation: float  # of its busiest group
    served: tuple[tuple[Group, Served], ...]  # empty: overloaded

    def pooled(self, what: str, traffic: str) -> np.ndarray | None:
        """A property of every request of a class."""
        found = [
            getattr(served, what)(traffic)
            for group, served in self.served
            if traffic in group.serves
        ]
        return np.concatenate(found) if found else None

    def bill(self) -> Bill | None:
        if not self.served:
            return None
        per_gpu = [(group, served, load_node(group.node).gpus) for group, served in self.served]
        tokens_per_s = sum(served.tokens / served.elapsed_s for _, served, _ in per_gpu)
        busy = sum(served.busy_s / served.elapsed_s * gpus for _, served, gpus in per_gpu)
        seeds = len(self.served) // len(self.policy.groups)
        return Bill(tokens_per_s / seeds, self.policy.gpus, 1.0, busy / seeds)


@dataclass(frozen=True, slots=True)
class MixedLoad:
    model: str
    context: int
    classes: tuple[Traffic, ...]  # at load 1
    loads: tuple[float, ...]
    policies: tuple[Policy, ...]
    prices: Prices
    hours: float
    seeds: tuple[int, ...]

    def run(self, runner: Runner) -> Outcome:
        paces = self._paces(runner)
        cells = []
        for policy in self.policies:
            for load in self.loads:
                runner.progress(f"queues: {policy.name}, load {load:g}")
                cells.append(self._cell(policy, load, paces))
        parts = (
            *self._waiting(cells),
            self._cost(cells),
            self._speeds(paces),
            self._check(cells, paces),
        )
        return Outcome(parts, tuple(self._headline(cells)), tuple(self._notes()))

    # ---- simulation ------------------------------------------------------------------------------

    def _paces(self, runner: Runner) -> dict[Group, StepTime]:
        """Seconds of a step by sequences in the batch, of every group. Raises TwinError for what
        cannot be served.
        """
        groups = [group for policy in self.policies for group in policy.groups]
        points = {
            point: None
            for group in groups
            if group.stack == RESIDENT
            for _, point in self._batches(group)
        }
        rows = dict(
            zip(
                points, runner.rows(list(points), "resident kernels") if points else [], strict=True
            )
        )
        for point, row in rows.items():
            if row.problem:
                raise TwinError(f"{self.model} as a resident kernel on {point.node}: {row.problem}")
        return {
            group: self._pace(group, {point: row.step_s for point, row in rows.items()})
            for group in groups
        }

    def _batches(self, group: Group) -> list[tuple[int, Point]]:
        """The batches that are simulated: powers of two, and the largest."""
        sizes = sorted(
            {2**power for power in range(group.batch.bit_length()) if 2**power < group.batch}
            | {group.batch}
        )
        alone = Point(self.model, group.node, (("context", self.context),))
        return [(size, alone.with_options(batch=size) if size > 1 else alone) for size in sizes]

    def _pace(self, group: Group, simulated: dict[Point, float]) -> StepTime:
        if group.stack == RESIDENT:
            sizes, steps = zip(
                *((size, simulated[point]) for size, point in self._batches(group)), strict=True
            )
            return lambda sequences: float(np.interp(sequences, sizes, steps))
        spec, node = load_model(self.model), load_node(group.node)
        return lru_cache(maxsize=None)(
            lambda sequences: (
                predict(
                    spec, node, group.stack, Load(sequences=sequences, context=self.context)
                ).graph_s
            )
        )

    def run_hours(self, load: float) -> float:
        """Long enough that the rarest class is seen often."""
        rarest = min(traffic.per_s for traffic in self.classes) * load
        return max(self.hours, SEEN / ((COUNTED[1] - COUNTED[0]) * rarest * HOUR_S))

    def arrivals(self, load: float) -> float:
        """Requests that one run of the queues has to follow, on average."""
        return sum(traffic.per_s for traffic in self.classes) * load * self.run_hours(load) * HOUR_S

    def _traffic(self, group: Group, load: float) -> list[Traffic]:
        return [
            Traffic(c.name, c.per_s * load, c.tokens, c.distribution)
            for c in self.classes
            if c.name in group.serves
        ]

    def _utilisation(self, group: Group, load: float, pace: StepTime) -> float:
        """Offered tokens per second over what full batches generate."""
        offered = sum(traffic.per_s * traffic.tokens for traffic in self._traffic(group, load))
        return offered * pace(group.batch) / (group.batch * group.nodes)

    def _cell(self, policy: Policy, load: float, paces: dict[Group, StepTime]) -> Operation:
        used = max(self._utilisation(group, load, paces[group]) for group in policy.groups)
        if used >= 1:
            return Operation(policy, load, used, ())
        served = tuple(
            (
                group,
                serve(
                    self._traffic(group, load),
                    nodes=group.nodes,
                    batch=group.batch,
                    step_s=paces[group],
                    hours=self.run_hours(load),
                    seed=seed,
                ),
            )
            for seed in self.seeds
            for group in policy.groups
        )
        return Operation(policy, load, used, served)

    # ---- what is shown ---------------------------------------------------------------------------

    def _waiting(self, cells: Sequence[Operation]) -> Iterator[Part]:
        columns = (
            Column("policy", Shown.TEXT),
            Column("GPUs"),
            Column("load"),
            Column("used at most", Shown.PERCENT),
            Column("wait p50", Shown.QUANTITY, "s"),
            Column("wait p95", Shown.QUANTITY, "s"),
            Column("done p50", Shown.QUANTITY, "s"),
            Column("done p95", Shown.QUANTITY, "s"),
            Column("tokens/s a user sees, p50"),
        )
        for traffic in self.classes:
            rows: list[tuple[Cell, ...]] = []
            for cell in cells:
                numbers: list[Cell] = [None] * 5
                waits, took, speed = (
                    cell.pooled(what, traffic.name) for what in ("waits", "took", "speeds")
                )
                if waits is not None and took is not None and speed is not None:
                    numbers = [*_percentiles(waits), *_percentiles(took), float(np.median(speed))]
                rows.append(
                    (cell.policy.name, cell.policy.gpus, cell.load, cell.utilisation, *numbers)
                )
            series = tuple(
                Series(
                    policy.name,
                    tuple(self._p95(cells, policy, load, traffic.name) for load in self.loads),
                )
                for policy in self.policies
            )
            yield Part(
                f"{traffic.name}: {traffic.tokens:,.0f} tokens on average, "
                f"{traffic.per_s * HOUR_S:,.0f} an hour at load 1",
                "From arrival to the last token, 95th percentile. A line ends where its policy is "
                "overloaded and the queue never empties.",
                (
                    Lines(
                        self.loads,
                        series,
                        "load",
                        "seconds until done, p95",
                        log_x=True,
                        log_y=True,
                    ),
                ),
                (Table(_table_of(traffic.name), columns, tuple(rows)),),
            )

    def _p95(
        self, cells: Sequence[Operation], policy: Policy, load: float, traffic: str
    ) -> float | None:
        took = next(cell for cell in cells if cell.policy is policy and cell.load == load).pooled(
            "took", traffic
        )
        return None if took is None else float(np.percentile(took, 95))

    def _cost(self, cells: Sequence[Operation]) -> Part:
        price = self.prices.cents_per_hour
        low, high = interval(price)
        columns = (
            Column("policy", Shown.TEXT),
            Column("load"),
            Column("tokens/s, all"),
            Column("USD per million tokens"),
            Column("at the lowest price"),
            Column("at the highest"),
            Column("kWh per million tokens"),
        )
        rows: list[tuple[Cell, ...]] = []
        costs: dict[tuple[str, float], float] = {}
        for cell in cells:
            bill = cell.bill()
            if bill is None:
                rows.append((cell.policy.name, cell.load, None, None, None, None, None))
                continue
            usd = [bill.usd_per_million(cents / 100) for cents in (price.value, low, high)]
            costs[cell.policy.name, cell.load] = usd[0]
            rows.append(
                (cell.policy.name, cell.load, bill.tokens, *usd, bill.kwh_per_million(self.prices))
            )
        series = tuple(
            Series(policy.name, tuple(costs.get((policy.name, load)) for load in self.loads))
            for policy in self.policies
        )
        return Part(
            "Cost and energy per million tokens",
            "All GPUs are held and paid whether they work or not, so a higher load is cheaper per "
            "token until a policy is overloaded.",
            (Lines(self.loads, series, "load", "USD per million tokens", log_x=True, log_y=True),),
            (Table(COST, columns, tuple(rows)),),
        )

    def _speeds(self, paces: dict[Group, StepTime]) -> Part:
        columns = (
            Column("engine", Shown.TEXT),
            Column("node", Shown.TEXT),
            Column("sequences"),
            Column("step", Shown.QUANTITY, "s"),
            Column("tokens/s of each"),
            Column("tokens/s of all"),
        )
        shown: dict[tuple[str, str, int], float] = {}
        for group, pace in paces.items():
            for sequences in sorted({1, min(8, group.batch), group.batch}):
                shown[group.stack, group.node, sequences] = pace(sequences)
        rows = tuple(
            (stack, node, n, step, 1 / step, n / step) for (stack, node, n), step in shown.items()
        )
        return Part(
            "How fast the nodes are",
            "Steps as predicted, without a queue.",
            tables=(Table(STEPS, columns, rows, terminal=False),),
        )

    def _check(self, cells: Sequence[Operation], paces: dict[Group, StepTime]) -> Part:
        """Where theory has an answer: one class of exponential lengths, one request a node. Longer
        runs, for waits are alike for long.
        """
        columns = (
            Column("policy", Shown.TEXT),
            Column("load"),
            Column("class", Shown.TEXT),
            Column("mean wait, simulated", Shown.QUANTITY, "s"),
            Column("mean wait, M/M/c", Shown.QUANTITY, "s"),
        )
        rows: list[tuple[Cell, ...]] = []
        for cell in cells:
            for group in cell.policy.groups if cell.served else ():
                traffic = self._traffic(group, cell.load)
                if group.batch > 1 or len(traffic) > 1 or traffic[0].distribution != EXPONENTIAL:
                    continue
                theory = mean_wait_mmc(
                    traffic[0].per_s, traffic[0].tokens * paces[group](1), group.nodes
                )
                if theory < SHORTEST_WAIT_S:
                    continue
                hours = CHECKED / (traffic[0].per_s * HOUR_S)
                served = serve(
                    traffic,
                    nodes=group.nodes,
                    batch=1,
                    step_s=paces[group],
                    hours=hours,
                    seed=self.seeds[0],
                )
                rows.append(
                    (
                        cell.policy.name,
                        cell.load,
                        traffic[0].name,
                        float(served.waits(traffic[0].name).mean()),
                        theory,
                    )
                )
        return Part(
            "The simulation against queueing theory",
            "Nodes that serve one request each, one class of exponential lengths: M/M/c has a "
            f"closed form. {CHECKED:,} arrivals.",
            tables=(Table(THEORY, columns, tuple(rows), terminal=False),),
        )

    def _headline(self, cells: Sequence[Operation]) -> Iterator[tuple[str, str]]:
        first = self.classes[0].name
        for policy in self.policies:
            took = self._p95(cells, policy, self.loads[0], first)
            if took is not None:
                yield (
                    format_quantity(took, "s"),
                    f"until 95% of {first} requests are done at load {self.loads[0]:g}: "
                    f"{policy.name}",
                )

    def _notes(self) -> Iterator[str]:
        seen = (
            f"at least {self.hours:g} hours and {SEEN} requests of every class for each seed of "
            f"{list(self.seeds)}"
        )
        yield f"{self.model}, {self.context:,} cached positions a sequence; {seen}."
        for field in fields(self.prices):
            value, name = getattr(self.prices, field.name), field.name
            yield (
                f"{name.replace('_', ' ')} of a GPU: {value.value:g} ({value.kind.value}: "
                f"{value.source})."
            )
        yield (
            "Left out: reading prompts, memory that runs out at long contexts, requests that give "
            "up, power that follows the load."
        )


@dataclass(frozen=True, slots=True)
class Class:
    """Requests at load 1."""

    name: str
    tokens: Annotated[float, Meta(ge=1, le=MOST_NUMBER)]
    per_hour: Annotated[float, Meta(ge=1e-6, le=MOST_NUMBER)]
    distribution: Literal["fixed", "exponential"] = EXPONENTIAL


@dataclass(frozen=True, kw_only=True)
class File(Head):
    """A study file of this kind."""

    model: ModelName
    context: Count
    classes: Annotated[tuple[Class, ...], SOME]
    loads: Annotated[tuple[Annotated[float, Meta(ge=LEAST_LOAD, le=MOST_LOAD)], ...], SOME]
    policies: Annotated[tuple[Policy, ...], SOME]
    prices: Prices
    hours: Annotated[float, Meta(ge=1e-3, le=MOST_NUMBER)]
    seeds: Annotated[tuple[Annotated[int, Meta(ge=0, le=MOST_WHOLE)], ...], SOME]

    def asks(self, reader: Reader, folder: Path) -> MixedLoad:
        with reader.at("context"):
            check_context(self.model, self.context)
        names = [one.name for one in self.classes]
        try:
            check_stems([COST, STEPS, THEORY, *map(_table_of, names)])
        except OutputError as error:
            raise FieldError(
                "classes", f"each is a table with a file of its name, but {error}"
            ) from error
        for index, policy in enumerate(self.policies):
            with reader.at(f"policies[{index}].groups"):
                _check_policy(policy, names, self.model, self.context)
        made = MixedLoad(
            self.model,
            self.context,
            tuple(
                Traffic(one.name, one.per_hour / HOUR_S, one.tokens, one.distribution)
                for one in self.classes
            ),
            self.loads,
            self.policies,
            self.prices,
            self.hours,
            self.seeds,
        )
        for load in made.loads:
            with reader.at("classes"):
                _check_length(made, load)
        return made


def _check_policy(policy: Policy, classes: list[str], model: str, context: int) -> None:
    """Is every class served once, and can each group of another engine be predicted?"""
    served = [name for group in policy.groups for name in group.serves]
    for name in served:
        if name not in classes:
            raise ConfigError(f"{shown(name)} is not a class of this study: {shown(classes, 400)}")
    if sorted(served) != sorted(classes):
        raise ConfigError(
            f"they serve {shown(served, 400)}; each of {shown(classes, 400)} must be served by "
            "exactly one group"
        )
    for group in policy.groups:
        if group.stack != RESIDENT:
            load = Load(sequences=group.batch, context=context)
            predict(load_model(model), load_node(group.node), group.stack, load)


def _check_length(made: MixedLoad, load: float) -> None:
    """Does a simulation at this load end in a bearable time?"""
    if (hours := made.run_hours(load)) > MOST_HOURS:
        raise ConfigError(
            f"{hours:.3g} hours pass at load {load:g} until the rarest class has been seen often "
            f"enough: at most {MOST_HOURS:g}; choose fewer hours, a higher load or rate"
        )
    if (arrivals := made.arrivals(load)) > MOST_ARRIVALS:
        raise ConfigError(
            f"{arrivals:.3g} requests arrive at load {load:g} until the rarest class has been seen "
            f"often enough, and for all hours: at most {MOST_ARRIVALS:.0e}; choose fewer hours, or "
            "rates that differ less"
        )


def _table_of(traffic: str) -> str:
    """The name of a class's table."""
    return traffic.replace(" ", "-").lower()


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    p50, p95 = np.percentile(values, (50, 95))
    return float(p50), float(p95)
