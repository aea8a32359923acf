"""Choose hardware numbers so that simulated probes take as long as measured ones.

Groups are fitted one after the other, each on its own probes, because a later question (a hand-off) rests on the
answer to an earlier one (the time to touch an element). Inside a group: least squares on log(simulated / measured)
over the logarithms of the numbers, so a factor of two too slow weighs as much as one too fast. Of chains of layers that
were traced, the kinds of stages count beside the step: a step alone does not tell what its stages have of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.calibrate import store
from twin.calibrate.probes import Probe
from twin.calibrate.reading import settled
from twin.calibrate.recipe import Recipe, recipe_of
from twin.calibrate.simulated import Simulated, simulated
from twin.errors import CalibrationError
from twin.hardware import override
from twin.hardware.override import apply_fit
from twin.hardware.types import Device, Kind, Node, Number
from twin.plan.types import Plan

Vector = NDArray[np.float64]

BOOTSTRAP = 400
INTERVAL = (5.0, 95.0)  # percent
PRIOR = 0.01  # weight of staying at the start, per e-fold: numbers that no probe touches stay put
REACH = math.log(300.0)  # a fitted number lies within this factor of its starting value
BOUND = 0.02  # a number whose e-fold changes all its probes by less is not settled by them
UNBOUND = math.log(2.0)  # and gets this range instead of a bootstrap's
UNSETTLED = "of which none is bound by this number"
WEAKEST = 0.1  # directions seen less well are not drawn together: a linear step along them went to factors of a thousand
TOGETHER = 64  # of the bootstrap's draws are kept: numbers that probes know only as a sum are wrong in opposite directions
STEP = 0.05  # e-folds between two evaluations for a slope: over kinks where another cost begins to bind
EVALUATIONS = 20  # at most; from a start read off the probes a few suffice
STAGE_WEIGHT = 0.5  # of a kind of stage beside its whole step, of which it is a part


@dataclass(frozen=True, slots=True)
class Fit:
    numbers: dict[str, Number]
    residuals: dict[str, float]  # log(simulated / measured) of each probe
    run: str
    groups: dict[str, str]  # of each probe
    failed: dict[str, str] = field(default_factory=dict)  # probes that did not run, and why
    together: dict[str, list[float]] = field(default_factory=dict)  # factors on each number; the same place is the same draw

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.residuals.items(), key=lambda item: abs(item[1]))

    def rms(self, group: str) -> float:
        """Root mean square of a group's residuals."""
        return float(np.sqrt(np.mean([left**2 for name, left in self.residuals.items() if self.groups[name] == group])))


def fit_device(device: Device, probes: list[Probe], run: store.Run, progress: Callable[[str], None]) -> Fit:
    """Fit all groups in order; probes of a group without numbers are only compared.

    A number of better kind than assumed that no probe settles is left alone. Raises CalibrationError when the run lacks a probe.
    """
    failed: dict[str, str] = run.meta.get("failed") or {}
    later = [p.name for p in probes if p.name not in run.meta.get("steps", {p.name: 0})]
    if later:
        progress(f"left out, because {run.id} is older than they: {', '.join(later)}")
    missing = [p.name for p in probes if p.name not in run.samples and p.name not in failed and p.name not in later]
    if missing:
        raise CalibrationError(f"run {run.id} lacks the probe {missing[0]}: it was made by another version, probe again")
    probes = [p for p in probes if p.name in run.samples]
    recipe = recipe_of(device)
    numbers: dict[str, Number] = {}
    residuals: dict[str, float] = {}
    together: dict[str, list[float]] = {}
    present = override.numbers(device)
    with _simulators(probes, frozenset(one.run for one in run.stages)) as simulators:
        for group, wanted in recipe.groups.items():
            chosen = [p for p in probes if p.group == group]
            paths = tuple(path for path in wanted if path in present)
            if not chosen or not paths:
                continue
            progress(f"fitting {group}: {len(paths)} numbers to {len(chosen)} probes")
            known = apply_fit(device, numbers)
            starts = recipe.starts(group, chosen, settled(run), known)
            begun = apply_fit(known, {path: _fitted(starts[path], "read off a probe") for path in paths if path in starts})
            fitted = _fit_group(begun, paths, chosen, run, simulators, recipe)
            numbers |= {path: number for path, number in fitted[0].items() if _worth(number, device, path)}
            residuals |= fitted[1]
            together |= {path: factors for path, factors in fitted[2].items() if path in numbers}
        rest = [p for p in probes if p.name not in residuals]
        progress(f"comparing {len(rest)} probes that settle no number")
        took = simulators(apply_fit(device, numbers), rest)
        residuals |= {p.name: math.log(s.step_s / settled(run)[p.name]) for p, s in zip(rest, took, strict=True)}
    return Fit(numbers, residuals, run.id, {p.name: p.group for p in probes}, failed, together)


def _worth(number: Number, device: Device, path: str) -> bool:
    """Did the probes settle the number, or was there nothing but an assumption before?"""
    return UNSETTLED not in number.source or _number(device, path).kind is Kind.ASSUMED


def _fitted(value: float, source: str) -> Number:
    return Number(value, Kind.FITTED, source, value, value)


def _fit_group(
    device: Device, paths: tuple[str, ...], probes: list[Probe], run: store.Run, simulators: Simulators, recipe: Recipe
) -> tuple[dict[str, Number], dict[str, float], dict[str, list[float]]]:
    """The numbers of a group, what remains of each probe's logarithm, and the bootstrap's first draws of all numbers that are settled."""
    start = np.array([math.log(_value(device, path)) for path in paths])
    middle = settled(run)
    target = np.array([math.log(middle[p.name]) for p in probes])

    wanted = stage_targets(probes, run)

    def residual(point: Vector) -> Vector:
        trial = apply_fit(device, dict(zip(paths, _plain(point), strict=True)))
        took = {p.name: one for p, one in zip(probes, simulators(trial, probes), strict=True)}
        stages = [STAGE_WEIGHT * math.log(took[name].spans_s[kind] / span) for name, kind, span in wanted]
        return np.concatenate([np.log([took[p.name].step_s for p in probes]) - target, stages, PRIOR * (point - start)])

    def slopes(point: Vector) -> Vector:
        """Of every residual over every logarithm. A step relative to the logarithm itself, as least_squares would take it, is an e-fold of
        some numbers and a tenth of others."""
        here = residual(point)
        return np.column_stack([(residual(point + STEP * unit) - here) / STEP for unit in np.eye(len(point))])

    from scipy.optimize import least_squares  # slow to load, and only a fit needs it

    reach = (start - REACH, start + REACH)
    found = least_squares(
        residual, start, jac=slopes, bounds=reach, max_nfev=EVALUATIONS,
        ftol=recipe.enough, xtol=recipe.enough,
        loss="linear" if math.isinf(recipe.outlier) else "soft_l1", f_scale=min(1.0, recipe.outlier),
    )  # fmt: skip
    left = found.fun[: len(probes)]
    # A linear step along a direction that probes hardly see goes far beyond where the model is linear: no further than the fit itself.
    draws = np.clip(_bootstrap(found.x, found.jac, left, probes, run), *reach)
    seen = np.clip(_bootstrap(found.x, found.jac, left, probes, run, weakest=WEAKEST), *reach)
    low, high = np.percentile(draws, INTERVAL, axis=0)
    low, high = np.minimum(low, found.x), np.maximum(high, found.x)
    source = f"fit of {run.id}, {len(probes)} probes"
    numbers, together = {}, {}
    for at, path in enumerate(paths):
        slope = float(np.linalg.norm(found.jac[: len(probes), at]))
        if slope < BOUND:
            low[at], high[at] = found.x[at] - UNBOUND, found.x[at] + UNBOUND
        else:
            together[path] = [round(factor, 5) for factor in np.exp(seen[:TOGETHER, at] - found.x[at]).tolist()]
        said = source if slope >= BOUND else f"{source}, {UNSETTLED}"
        numbers[path] = Number(math.exp(found.x[at]), Kind.FITTED, said, math.exp(low[at]), math.exp(high[at]))
    return numbers, dict(zip((p.name for p in probes), left.tolist(), strict=True)), together


def stage_targets(probes: list[Probe], run: store.Run) -> list[tuple[str, str, float]]:
    """(probe, kind, seconds of a step) of what was traced of layers: each kind's share, of the step without marks."""
    middle, found = settled(run), []
    for probe in probes:
        spans = {one.stage: one.span_s for one in run.stages if one.run == probe.name}
        by = middle[probe.name] / sum(spans.values()) if spans else 0.0
        found += [(probe.name, kind, by * span) for kind, span in spans.items() if span and _of_layers(probe.plan, kind)]
    return found


def _of_layers(plan: Plan, kind: str) -> bool:
    """Once in a step is too short for a clock that ticks in 256 ns."""
    return sum(stage.kind.value == kind for stage in plan.stages) > 1


Simulators = Callable[[Device, list[Probe]], list[Simulated]]  # a step of each probe on a device
_worker_probes: dict[str, Probe] = {}  # of a worker process: plans are large, and sent once


@contextmanager
def _simulators(probes: list[Probe], traced: frozenset[str]) -> Iterator[Simulators]:
    """Probes simulated on all cores; of the `traced` ones their stages too."""
    workers = len(os.sched_getaffinity(0))
    if workers == 1:
        yield lambda device, chosen: [_simulate(device, probe, probe.name in traced) for probe in chosen]
        return
    with ProcessPoolExecutor(workers, initializer=_remember, initargs=(probes,)) as pool:
        yield lambda device, chosen: list(pool.map(_simulate_known, ((device, probe.name, probe.name in traced) for probe in chosen)))


def _remember(probes: list[Probe]) -> None:
    _worker_probes.update((probe.name, probe) for probe in probes)


def _simulate_known(work: tuple[Device, str, bool]) -> Simulated:
    device, name, stages = work
    return _simulate(device, _worker_probes[name], stages)


def _simulate(device: Device, probe: Probe, stages: bool) -> Simulated:
    return simulated(probe.plan, Node("probe", device, 1), stages=stages)


def simulated_step_s(device: Device, probe: Probe) -> float:
    """Seconds that the twin gives one step of a probe."""
    return _simulate(device, probe, False).step_s


def _value(device: Device, path: str) -> float:
    return float(_number(device, path).value)


def _number(device: Device, path: str) -> Number:
    """The device's present number at a dotted path."""
    found: Any = device
    for name in path.split("."):
        found = getattr(found, name)
        if found is None:
            raise CalibrationError(f"{device.name} has no {path}: this device cannot be fitted by these probes")
    assert isinstance(found, Number)
    return found


def _plain(point: Vector) -> list[Number]:
    return [_fitted(math.exp(x), "trial") for x in point]


def _bootstrap(point: Vector, jacobian: Vector, left: Vector, probes: list[Probe], run: store.Run, *, weakest: float = 1e-15) -> Vector:
    """[draws][numbers] logarithms: samples of each probe and residuals over probes drawn again, one linear step each.

    A full fit per draw would cost minutes; near the optimum the model is close to linear in the logarithms. Directions that the probes
    see less than `weakest` times as well as the best one are left where they are.
    """
    random = np.random.default_rng(0)
    inverse = np.linalg.pinv(jacobian, rcond=weakest)
    logs = [np.log(run.samples[p.name]) for p in probes]
    middle = np.array([np.median(values) for values in logs])
    draws = []
    for _ in range(BOOTSTRAP):
        noise = np.array([np.median(random.choice(values, len(values))) for values in logs]) - middle
        misfit = random.choice(left, len(left))
        change = np.concatenate([noise + misfit, np.zeros(jacobian.shape[0] - len(left))])
        draws.append(point + inverse @ change)
    return np.array(draws)
