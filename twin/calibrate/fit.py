"""Choose hardware numbers so that simulated probes take as long as measured ones.

Groups are fitted one after the other, each on its own probes, because a later question (a hand-off)
rests on the answer to an earlier one (the time to touch an element). Inside a group: least squares
on log(simulated / measured) over the logarithms of the numbers, so a factor of two too slow weighs
as much as one too fast. Of chains of layers that were traced, the kinds of stages count next to the
step: a step alone does not tell what its stages have of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twin.calibrate import store
from twin.calibrate.bound import Binding, Group, noise
from twin.calibrate.busy import counted
from twin.calibrate.cross import Cross, crossed
from twin.calibrate.gpu_designed import PREFIX
from twin.calibrate.probes import Probe
from twin.calibrate.published import check_inputs
from twin.calibrate.reading import settled
from twin.calibrate.recipe import Recipe, fitted_by
from twin.calibrate.simulated import Simulated, simulated
from twin.errors import CalibrationError
from twin.hardware import override
from twin.hardware.number import Kind, Number
from twin.hardware.override import apply_fit
from twin.hardware.types import Node
from twin.plan.types import Plan

Vector = NDArray[np.float64]

BOOTSTRAP = 400
INTERVAL = (5.0, 95.0)  # percent
PRIOR = 0.01  # weight of staying at the start, per e-fold: numbers that no probe touches stay put
REACH = math.log(300.0)  # a fitted number lies within this factor of its starting value
# directions seen less well are not drawn together: a linear step along them went to factors of a
# thousand
WEAKEST = 0.1
# of the bootstrap's draws are kept: numbers that probes know only as a sum are wrong in opposite
# directions
TOGETHER = 64
# e-folds between two evaluations for a slope: over kinks where another cost begins to bind
STEP = 0.05
EVALUATIONS = 20  # at most; from a start read off the probes a few suffice
STAGE_WEIGHT = 0.5  # of a kind of stage next to its whole step, of which it is a part


@dataclass(frozen=True, slots=True)
class Fit:
    numbers: dict[str, Number]
    residuals: dict[str, float]  # log(simulated / measured) of each probe
    run: str
    groups: dict[str, str]  # of each probe
    failed: dict[str, str] = field(default_factory=dict)  # probes that did not run, and why
    # factors on each number; the same place is the same draw
    together: dict[str, list[float]] = field(default_factory=dict)
    # of each number that was fitted: from 1 on its probes bind it
    binding: dict[str, float] = field(default_factory=dict)
    cross: Cross = field(default_factory=Cross)  # over shapes; empty where too few were probed
    settled: tuple[str, ...] = ()  # groups that settle numbers, in order; others are only compared

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.residuals.items(), key=lambda item: abs(item[1]))

    def rms(self, group: str) -> float:
        """Root mean square of a group's residuals."""
        return float(
            np.sqrt(
                np.mean(
                    [left**2 for name, left in self.residuals.items() if self.groups[name] == group]
                )
            )
        )


def fit_node(
    node: Node, probes: list[Probe], run: store.Run, progress: Callable[[str], None]
) -> Fit:
    """Fit all groups in order; probes of a group without numbers are only compared.

    A number that its probes do not bind keeps the value and the kind that it has in `node`; where
    they refuse that value without saying another, it stands in the fit as unbound. Raises
    CalibrationError when the run lacks a probe, or holds figures that are held out.
    """
    check_inputs(run.folder, run.meta)
    run = counted(run)
    held = _probes_of(probes, run, progress)
    recipe = fitted_by(run, node)
    present = override.numbers(node)
    numbers: dict[str, Number] = {}
    residuals: dict[str, float] = {}
    together: dict[str, list[float]] = {}
    strengths: dict[str, float] = {}
    cross = Cross()
    with _simulators(held, frozenset(one.run for one in run.stages)) as simulators:
        for group, wanted in recipe.groups.items():
            chosen = [p for p in held if p.group == group]
            paths = tuple(path for path in wanted if full_path(path) in present)
            if not chosen or not paths:
                continue
            progress(f"fitting {group}: {len(paths)} numbers to {len(chosen)} probes")
            least, binding = _fit_group(
                apply_fit(node, numbers), group, paths, chosen, run, simulators, recipe, progress
            )
            strengths |= binding
            if least:
                numbers |= least.numbers([path for path in least.paths if binding[path] < 1])
                residuals |= least.residuals()
                together |= least.together()
                cross = least.crossed() if least.crossed().errors else cross
        rest = [p for p in held if p.name not in residuals]
        progress(f"comparing {len(rest)} probes that settle no number")
        residuals |= _residuals(rest, simulators(apply_fit(node, numbers), rest), run)
    return Fit(
        numbers,
        residuals,
        run.id,
        {p.name: p.group for p in held},
        run.meta.get("failed") or {},
        together,
        strengths,
        cross,
        tuple(recipe.groups),
    )


def _fit_group(
    known: Node,
    group: str,
    paths: tuple[str, ...],
    chosen: list[Probe],
    run: store.Run,
    simulators: Simulators,
    recipe: Recipe,
    progress: Callable[[str], None],
) -> tuple[_Least | None, dict[str, float]]:
    """The least misfit over the numbers that are not left as `known` has them, and how well each is
    bound; None where all are left.
    """
    strengths: dict[str, float] = {}
    begun = _read_off(known, recipe.starts(group, chosen, settled(run), known.device), paths)
    while paths:
        least = _least(begun, paths, chosen, run, simulators, recipe)
        judged = least.judged(known)
        strengths |= judged.strength
        if not judged.replaced:
            return least, strengths
        progress(f"fitting {group} again: its probes do not bind {', '.join(judged.replaced)}")
        paths = tuple(path for path in paths if path not in judged.replaced)
        begun = _read_off(known, least.values(), paths)
    return None, strengths


def _probes_of(probes: list[Probe], run: store.Run, progress: Callable[[str], None]) -> list[Probe]:
    """The probes that the run holds."""
    failed: dict[str, str] = run.meta.get("failed") or {}
    later = [p.name for p in probes if p.name not in run.meta.get("steps", {p.name: 0})]
    if later:
        progress(f"left out, because {run.id} is older than they: {', '.join(later)}")
    missing = [
        p.name
        for p in probes
        if p.name not in run.samples and p.name not in failed and p.name not in later
    ]
    if missing:
        raise CalibrationError(
            f"run {run.id} lacks the probe {missing[0]}: it was made by another version, probe "
            "again"
        )
    return [p for p in probes if p.name in run.samples]


def _read_off(node: Node, values: Mapping[str, float], paths: Collection[str]) -> Node:
    """The node with these starting values of a group's numbers, where there are any."""
    return apply_fit(
        node, {path: _fitted(values[path], "start of a fit") for path in paths if path in values}
    )


def _fitted(value: float, source: str) -> Number:
    return Number(value, Kind.FITTED, source, value, value)


def _residuals(probes: list[Probe], took: Sequence[Simulated], run: store.Run) -> dict[str, float]:
    middle = settled(run)
    return {
        p.name: math.log(one.step_s / middle[p.name]) for p, one in zip(probes, took, strict=True)
    }


@dataclass(frozen=True, slots=True)
class _Least:
    """A group at its least misfit: [numbers] logarithms, what is left of each residual, and its
    slopes (the prior's come last).
    """

    paths: tuple[str, ...]
    probes: list[Probe]
    run: store.Run
    start: Vector
    point: Vector
    left: Vector
    slopes: Vector
    residual: Callable[[Vector], Vector]
    outlier: float  # as the recipe's

    @property
    def reach(self) -> tuple[Vector, Vector]:
        return self.start - REACH, self.start + REACH

    def values(self) -> dict[str, float]:
        return {path: math.exp(x) for path, x in zip(self.paths, self.point, strict=True)}

    def judged(self, known: Node) -> Binding:
        """Which numbers the probes bind, against those that `known` has."""
        rows = len(self.left) - len(self.paths)  # without the prior's

        def misfit(point: Vector) -> float:
            return self._squares(self.residual(point)[:rows])

        level = noise(self._squares(self.left[:rows]), rows, len(self.paths), self._repeats())
        group = Group(self.paths, self.point, self.slopes[:rows], level, misfit)
        return group.judged([number_at(known, path) for path in self.paths])

    def _squares(self, left: Vector) -> float:
        """The sum that the fit makes least: of squares, those beyond `outlier` less and less."""
        if math.isinf(self.outlier):
            return float(left @ left)
        return float(2 * self.outlier**2 * np.sum(np.sqrt(1 + (left / self.outlier) ** 2) - 1))

    def _repeats(self) -> float:
        """The noise of a probe's middle repeat, as a logarithm."""
        spreads = [
            float(np.std(np.log(self.run.samples[p.name])))
            / math.sqrt(len(self.run.samples[p.name]))
            for p in self.probes
        ]
        return float(np.sqrt(np.mean(np.square(spreads))))

    def residuals(self) -> dict[str, float]:
        # stages and the prior follow
        return dict(zip((p.name for p in self.probes), self.left.tolist(), strict=False))

    def numbers(self, unbound: Collection[str]) -> dict[str, Number]:
        """With their intervals; those that are not bound are not called fitted."""
        # A linear step along a direction that probes hardly see goes far beyond where the model is
        # linear: no further than the fit itself.
        draws = np.clip(self._widened(_bootstrap(self)), *self.reach)
        low, high = np.percentile(draws, INTERVAL, axis=0)
        low, high = np.minimum(low, self.point), np.maximum(high, self.point)
        source = f"fit of {self.run.id}, {len(self.probes)} probes"
        return {
            path: Number(
                value,
                Kind.UNBOUND if path in unbound else Kind.FITTED,
                source,
                math.exp(low[at]),
                math.exp(high[at]),
            )
            for at, (path, value) in enumerate(self.values().items())
        }

    def crossed(self) -> Cross:
        """Over the shapes of a design, where the group has one."""
        names = [p.name for p in self.probes if p.name.startswith(PREFIX)]
        rows = [
            *(p.name for p in self.probes),
            *(name for name, _, _ in stage_targets(self.probes, self.run)),
        ]
        rows += [""] * (len(self.left) - len(rows))
        return crossed(names, rows, self.left, self.slopes)

    def _widened(self, draws: Vector) -> Vector:
        """All numbers further from the point together, as shapes that were left out need."""
        along = np.array(self.crossed().along)
        if not len(along):
            return draws
        return draws + np.outer(np.random.default_rng(1).normal(size=len(draws)), along)

    def together(self) -> dict[str, list[float]]:
        """The bootstrap's first draws, as factors."""
        seen = np.clip(self._widened(_bootstrap(self, weakest=WEAKEST)), *self.reach)
        return {
            path: [
                round(factor, 5) for factor in np.exp(seen[:TOGETHER, at] - self.point[at]).tolist()
            ]
            for at, path in enumerate(self.paths)
        }


def _least(
    node: Node,
    paths: tuple[str, ...],
    probes: list[Probe],
    run: store.Run,
    simulators: Simulators,
    recipe: Recipe,
) -> _Least:
    """The least misfit that is found from the node's numbers."""
    start = np.array([math.log(number_at(node, path).value) for path in paths])
    middle = settled(run)
    target = np.array([math.log(middle[p.name]) for p in probes])
    wanted = stage_targets(probes, run)

    def residual(point: Vector) -> Vector:
        trial = apply_fit(node, dict(zip(paths, _plain(point), strict=True)))
        took = {p.name: one for p, one in zip(probes, simulators(trial, probes), strict=True)}
        stages = [
            STAGE_WEIGHT * math.log(took[name].spans_s[kind] / span) for name, kind, span in wanted
        ]
        return np.concatenate(
            [
                np.log([took[p.name].step_s for p in probes]) - target,
                stages,
                PRIOR * (point - start),
            ]
        )

    def slopes(point: Vector) -> Vector:
        """Of every residual over every logarithm. A step relative to the logarithm itself, as
        least_squares would take it, is an e-fold of some numbers and a tenth of others.
        """
        here = residual(point)
        return np.column_stack(
            [(residual(point + STEP * unit) - here) / STEP for unit in np.eye(len(point))]
        )

    from scipy.optimize import least_squares  # slow to load, and only a fit needs it

    found = least_squares(
        residual,
        start,
        jac=slopes,
        bounds=(start - REACH, start + REACH),
        max_nfev=EVALUATIONS,
        ftol=recipe.enough,
        xtol=recipe.enough,
        loss="linear" if math.isinf(recipe.outlier) else "soft_l1",
        f_scale=min(1.0, recipe.outlier),
    )
    return _Least(
        paths, probes, run, start, found.x, found.fun, found.jac, residual, recipe.outlier
    )


def stage_targets(probes: list[Probe], run: store.Run) -> list[tuple[str, str, float]]:
    """(probe, kind, seconds of a step) of what was traced of layers: each kind's share, of the step
    without marks.
    """
    middle, found = settled(run), []
    for probe in probes:
        spans = {one.stage: one.span_s for one in run.stages if one.run == probe.name}
        by = middle[probe.name] / sum(spans.values()) if spans else 0.0
        found += [
            (probe.name, kind, by * span)
            for kind, span in spans.items()
            if span and _of_layers(probe.plan, kind)
        ]
    return found


def _of_layers(plan: Plan, kind: str) -> bool:
    """Once in a step is too short for a clock that ticks in 256 ns."""
    return sum(stage.kind.value == kind for stage in plan.stages) > 1


Simulators = Callable[[Node, list[Probe]], list[Simulated]]  # a step of each probe on a node
_worker_probes: dict[str, Probe] = {}  # of a worker process: plans are large, and sent once


@contextmanager
def _simulators(probes: list[Probe], traced: frozenset[str]) -> Iterator[Simulators]:
    """Probes simulated on all cores; of the `traced` ones their stages too."""
    workers = len(os.sched_getaffinity(0))
    if workers == 1:
        yield lambda node, chosen: [
            _simulate(node, probe, probe.name in traced) for probe in chosen
        ]
        return
    with ProcessPoolExecutor(workers, initializer=_remember, initargs=(probes,)) as pool:
        yield lambda node, chosen: list(
            pool.map(
                _simulate_known, ((node, probe.name, probe.name in traced) for probe in chosen)
            )
        )


def _remember(probes: list[Probe]) -> None:
    _worker_probes.update((probe.name, probe) for probe in probes)


def _simulate_known(work: tuple[Node, str, bool]) -> Simulated:
    node, name, stages = work
    return _simulate(node, _worker_probes[name], stages)


def _simulate(node: Node, probe: Probe, stages: bool) -> Simulated:
    return simulated(probe.plan, node, stages=stages, reading=probe.reading)


def full_path(path: str) -> str:
    """A number of a fit as a path of the node: those of the device are written without its
    prefix.
    """
    return path if path.startswith("link.") else f"device.{path}"


def number_at(node: Node, path: str) -> Number:
    """The node's present number at a path of a fit."""
    found = override.numbers(node).get(full_path(path))
    if found is None:
        raise CalibrationError(
            f"{node.name} has no {path}: this node cannot be fitted by these probes"
        )
    return found


def _plain(point: Vector) -> list[Number]:
    return [_fitted(math.exp(x), "trial") for x in point]


def _bootstrap(least: _Least, *, weakest: float = 1e-15) -> Vector:
    """[draws][numbers] logarithms: samples of each probe and residuals over probes drawn again, one
    linear step each.

    A full fit per draw would cost minutes; near the optimum the model is close to linear in the
    logarithms. Directions that the probes see less than `weakest` times as well as the best one are
    left where they are.
    """
    random = np.random.default_rng(0)
    inverse = np.linalg.pinv(least.slopes, rcond=weakest)
    logs = [np.log(least.run.samples[p.name]) for p in least.probes]
    middle = np.array([np.median(values) for values in logs])
    left = least.left[: len(logs)]
    again: list[list[Vector]] = [[] for _ in logs]  # samples of each probe, draw by draw
    misfits = []
    for _ in range(BOOTSTRAP):
        for values, drawn in zip(logs, again, strict=True):
            drawn.append(random.choice(values, len(values)))
        misfits.append(random.choice(left, len(left)))
    # of all draws at once: a median of five numbers takes numpy longer than drawing them
    noise = np.column_stack([np.median(drawn, axis=1) for drawn in again]) - middle
    settled = np.zeros(least.slopes.shape[0] - len(left))
    return np.array(
        [
            least.point + inverse @ np.concatenate([change, settled])
            for change in noise + np.array(misfits)
        ]
    )
