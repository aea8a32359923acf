"""A fit moved by engine runs: where probes leave numbers open, shapes that seeds drew decide.

Probes ask for one cost at a time, and the twin's laws lack what none of them asks for. So shapes
that a seed draws are predicted too fast or too slow alike. Each such record, once it has judged the
fit that was made before it, may move the numbers for the next one. The numbers move as little as
the probes' own uncertainty allows: the least of

    (errors of the runs / NOISE)^2 + (numbers' move) C^-1 (numbers' move)

over the logarithms of the numbers, with C the covariance of the fit's draws (`together`), and with
errors beyond OUTLIER weighing less and less. Slopes are taken once, of two short models for each
run where its layers repeat. The draws move by the same rule, each with errors of its own (a
Kalman filter of an ensemble), so that intervals stay what the probes and the runs leave open.

Each seed ran on one card, and cards of one name read memory at different speeds (CARD). So each
seed has a factor on the memory's rate of its own, which is found with the numbers and not kept: the
fit's rate is that of a card between them.

Runs that have moved a fit are not held out any more. What is kept of them are the errors by the
numbers that the other records alone give (`left_out`), or of a single record other shapes of it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.calibrate import store
from twin.calibrate.experiment import Experiment
from twin.calibrate.gpu_formats import CHOOSING, DECODING
from twin.calibrate.gpu_layers import CHAIN
from twin.calibrate.kernel_id import is_superseded
from twin.calibrate.recipe import recipe_of
from twin.calibrate.recorded import measured, recorded
from twin.errors import CalibrationError, InvalidPlan
from twin.hardware.number import Number
from twin.hardware.override import apply_fit
from twin.hardware.types import Node
from twin.models.depth import first_layers, line, repeated_layers
from twin.plan.types import Plan
from twin.sim.run import step_s

Vector = NDArray[np.floating[Any]]

# of a run's logarithm, one standard deviation: what the laws lack of a shape, whose four runs err
# together
NOISE = 0.03
OUTLIER = 0.05  # of a run's logarithm, from which it pulls less and less, as of probes
CARD = 0.03  # of the logarithm of a card's memory rate, one standard deviation
RATE = "memory.stream_bytes_per_s"
FLOOR = 0.02  # standard deviation of a number that the fit's draws hold more narrowly
# Of numbers that probes see less of than engine runs do: they have ten slots under way, and their
# fences have no stores of a layer to wait for. The rate has its draws' alone: what runs differ from
# it by is their cards' first, else it would follow whatever cards were lent most often.
OPEN = {"kernel.group_s": 0.5, "handoff.fence_s": 0.5, RATE: 0.0}
OF_LAYERS = (CHAIN, DECODING, CHOOSING)  # groups
ALONE = (RATE, "kernel.stage_s", "handoff.fence_s")
STEP = 0.1  # e-folds between two simulations for a slope
REACH = math.log(3.0)  # that a number moves at most
STEPS = 2  # simulated of a run: the first is cold
FOLDS = 6  # of a single record's shapes, left out in turn
INTERVAL = (5.0, 95.0)  # percent


@dataclass(frozen=True, slots=True)
class Timed:
    """A run of a record, and what is simulated for its slopes."""

    record: str
    run: Experiment
    plan: Plan
    short: tuple[Plan, ...]  # at two numbers of layers; the plan itself where layers do not repeat
    depths: tuple[int, int] | None

    @property
    def shape(self) -> str:
        """A seed's shape, of which all runs err together."""
        found = re.match(r"s\d+-\d+", self.run.name)
        return found[0] if found else self.run.name

    def line(self, times: Sequence[float]) -> float:
        """Seconds of all layers, from those of `short`."""
        if self.depths is None:
            return times[0]
        return line(self.run.spec.layers, self.depths, (times[0], times[1]))


@dataclass(frozen=True, slots=True)
class Moved:
    """A fit's numbers, moved; errors of the speed by record and run, positive where the twin is too
    fast: before, after, and by a fit that the run did not move.
    """

    numbers: dict[str, Number]
    together: dict[str, list[float]]
    before: dict[str, dict[str, float]]
    after: dict[str, dict[str, float]]
    left_out: dict[str, dict[str, float]]


def timed_runs(
    node: Node, records: Sequence[store.Run], *, names: Collection[str] | None = None
) -> list[Timed]:
    """All runs of the records that were timed, of kernels that the engine still has and of plans
    that it still takes; with `names` only these. Raises CalibrationError for a record without any.
    """
    found = []
    for record in records:
        if (there := store.measured_on(record.meta)) != store.name_of(node.name):
            raise CalibrationError(
                f"{record.folder} was measured on {there}, not on {store.name_of(node.name)}: name "
                "that node, or another folder"
            )
        own = []
        for run in measured(recorded(record.folder, record.meta) or (), record):
            if names is not None and run.name not in names:
                continue
            if is_superseded(run, node.device.name):
                continue
            try:
                plan = run.plan(node.device.name)
            except InvalidPlan:
                continue
            depths = repeated_layers(run.spec)
            short = (
                tuple(_cut(run, layers).plan(node.device.name) for layers in depths)
                if depths
                else (plan,)
            )
            own.append(Timed(record.id, run, plan, short, depths))
        if not own:
            raise CalibrationError(
                f"{record.folder}: holds no engine run that says what it was; name a folder of "
                "`twin validate NODE --shapes N --seed S`"
            )
        found += own
    return found


def _cut(run: Experiment, layers: int) -> Experiment:
    return replace(run, spec=first_layers(run.spec, layers))


def move(
    node: Node,
    kept: tuple[Mapping[str, Number], Mapping[str, list[float]]],
    records: Sequence[store.Run],
    progress: Callable[[str], None],
) -> Moved:
    """`node`: without the fit; `kept`: the fit on file, its numbers and their draws."""
    fit, together = kept
    runs = timed_runs(node, records)
    paths = [path for path in movable(node) if path in fit and path in together]
    with _simulators(runs) as simulated:
        progress(f"simulating {len(runs)} engine runs")
        base = np.log(simulated(apply_fit(node, fit), False))
        errors = np.log([one.run.measured_s for one in runs]) - base
        slopes = _slopes(node, fit, paths, simulated, progress)
        seen = [at for at in range(len(paths)) if np.abs(slopes[:, at]).max() > 1e-3]
        paths, slopes = [paths[at] for at in seen], slopes[:, seen]
        draws = np.log(np.array([together[path] for path in paths]))  # [numbers][draws]
        inverse = np.linalg.inv(
            np.cov(draws) + np.diag([OPEN.get(path, FLOOR) ** 2 for path in paths])
        )
        cards = _cards(runs, slopes[:, paths.index(RATE)] if RATE in paths else np.zeros(len(runs)))
        both = _Both(slopes, cards, inverse)
        found = both.least(errors)
        numbers, factors = _written(fit, paths, found, draws, both, errors, records)
        progress("simulating the engine runs by the moved numbers")
        after = np.log(simulated(apply_fit(node, numbers), False))
    crossed = np.empty(len(runs))
    for left in _folds(runs):
        rest = ~left
        crossed[left] = errors[left] - slopes[left] @ both.least(errors, rest)
    # what the straight line misses of the numbers that were found
    crossed += np.log([one.run.measured_s for one in runs]) - after - (errors - slopes @ found)
    return Moved(
        numbers,
        {**together, **factors},
        _by_record(runs, errors),
        _by_record(runs, np.log([one.run.measured_s for one in runs]) - after),
        _by_record(runs, crossed),
    )


def movable(node: Node) -> list[str]:
    """The numbers of what layers do: those that probes of layers settle, and two more."""
    groups = recipe_of(node.device).groups
    return [*ALONE, *(path for name in OF_LAYERS for path in groups.get(name, ()))]


def _cards(runs: Sequence[Timed], slopes: Vector) -> Vector:
    """Slopes over the rate of memory of each seed's card, [runs][cards]; none of a single seed,
    whose card is that of all its runs.
    """
    seeds = [_seed(one) for one in runs]
    names = sorted(set(seeds))
    if len(names) < 2:
        return np.empty((len(runs), 0))
    return np.column_stack([slopes * [seed == name for seed in seeds] for name in names])


@dataclass(frozen=True, slots=True)
class _Both:
    """What runs know of numbers, and of the cards that they ran on."""

    slopes: Vector  # [runs][numbers]
    cards: Vector  # [runs][cards]
    inverse: Vector  # of the numbers' covariance

    def least(self, errors: Vector, some: NDArray[np.bool_] | slice = slice(None)) -> Vector:
        """The numbers' move, [numbers] logarithms, by `some` of the runs."""
        slopes = np.hstack([self.slopes, self.cards])[some]
        wanted = self.slopes.shape[1]
        inverse = np.zeros((slopes.shape[1],) * 2)
        inverse[:wanted, :wanted] = self.inverse
        inverse[wanted:, wanted:] = np.eye(self.cards.shape[1]) / CARD**2
        return np.clip(least(slopes, errors[some], inverse)[:wanted], -REACH, REACH)


def least(slopes: Vector, errors: Vector, inverse: Vector) -> Vector:
    """The move of all columns of `slopes`; wild runs weigh little."""
    weights = np.ones(len(errors))
    found: Vector = np.zeros(slopes.shape[1])
    for _ in range(20):
        weighed = slopes * (weights / NOISE**2)[:, None]
        found = np.linalg.solve(weighed.T @ slopes + inverse, weighed.T @ errors)
        weights = 1 / np.sqrt(1 + ((errors - slopes @ found) / OUTLIER) ** 2)
    return found


def _written(
    fit: Mapping[str, Number],
    paths: Sequence[str],
    found: Vector,
    draws: Vector,
    both: _Both,
    errors: Vector,
    records: Sequence[store.Run],
) -> tuple[dict[str, Number], dict[str, list[float]]]:
    """The fit's numbers with those of `paths` moved, and factors for draws about them."""
    random = np.random.default_rng(0)
    cards = both.cards.shape[1]
    moved: Vector = np.array(
        [
            draw
            + both.least(
                errors
                + random.normal(0.0, NOISE, len(errors))
                - both.slopes @ draw
                - both.cards @ random.normal(0.0, CARD, cards)
            )
            for draw in draws.T
        ]
    ).T
    by = ", ".join(record.id for record in records)
    numbers = dict(fit)
    factors = {}
    for at, path in enumerate(paths):
        number = fit[path]
        value = number.value * math.exp(found[at])
        low, high = np.percentile(moved[at], INTERVAL)
        source = number.source.split(", moved by")[0]
        numbers[path] = Number(
            value,
            number.kind,
            f"{source}, moved by {by}",
            min(value, number.value * math.exp(low)),
            max(value, number.value * math.exp(high)),
        )
        factors[path] = [round(one, 5) for one in np.exp(moved[at] - found[at]).tolist()]
    return numbers, factors


def _folds(runs: Sequence[Timed]) -> Iterator[NDArray[np.bool_]]:
    """Runs that are left out together: of one seed, which may have had one device; of a single
    seed some of its shapes.
    """
    seeds = [_seed(one) for one in runs]
    names = sorted(set(seeds))
    if len(names) > 1:
        for name in names:
            yield np.array([seed == name for seed in seeds])
        return
    shapes = sorted({one.shape for one in runs})
    for fold in range(FOLDS):
        some = set(shapes[fold::FOLDS])
        if some:
            yield np.array([one.shape in some for one in runs])


def _seed(one: Timed) -> str:
    return one.shape.rpartition("-")[0]


def _slopes(
    node: Node,
    fit: Mapping[str, Number],
    paths: Sequence[str],
    simulated: Simulated,
    progress: Callable[[str], None],
) -> Vector:
    """Of the logarithm of each run's step over that of each number: [runs][numbers]."""
    here = np.log(simulated(apply_fit(node, fit), True))
    columns = []
    for done, path in enumerate(paths, start=1):
        progress(f"slopes of engine runs: {done}/{len(paths)} {path}")
        number = fit[path]
        value = number.value * math.exp(STEP)
        changed = {**fit, path: replace(number, value=value, low=value, high=value)}
        columns.append((np.log(simulated(apply_fit(node, changed), True)) - here) / STEP)
    return np.column_stack(columns)


def _by_record(runs: Sequence[Timed], errors: Vector) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for one, error in zip(runs, errors, strict=True):
        found.setdefault(one.record, {})[one.run.name] = math.expm1(error)
    return found


# seconds of a step of every run on a node; with True from its short plans
Simulated = Callable[[Node, bool], list[float]]
_worker_runs: list[Timed] = []  # of a worker process: plans are large, and sent once


@contextmanager
def _simulators(runs: list[Timed]) -> Iterator[Simulated]:
    """On all cores."""
    workers = len(os.sched_getaffinity(0))
    numbers = range(len(runs))
    with ProcessPoolExecutor(workers, initializer=_remember, initargs=(runs,)) as pool:
        yield lambda node, short: list(
            pool.map(_simulate, ((node, at, short) for at in numbers), chunksize=4)
        )


def _remember(runs: list[Timed]) -> None:
    _worker_runs[:] = runs


def _simulate(work: tuple[Node, int, bool]) -> float:
    node, at, short = work
    one = _worker_runs[at]
    if not short:
        return step_s(one.plan, node, steps=STEPS)
    return one.line([step_s(plan, node, steps=STEPS) for plan in one.short])
