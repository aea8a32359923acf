"""Choose hardware numbers so that simulated probes take as long as measured ones.

Groups are fitted one after the other, each on its own probes, because a later question (a hand-off) rests on the
answer to an earlier one (the time to touch an element). Inside a group: least squares on log(simulated / measured)
over the logarithms of the numbers, so a factor of two too slow weighs as much as one too fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from twin.calibrate import store
from twin.calibrate.measure import settled
from twin.calibrate.probes import Probe
from twin.errors import CalibrationError
from twin.hardware.override import apply_fit
from twin.hardware.types import Device, Kind, Node, Number
from twin.models.spec import DType
from twin.sim.run import simulate

Vector = NDArray[np.float64]

GROUPS: dict[str, tuple[str, ...]] = {
    "stream": (
        "block.bf16_bytes_per_s",
        "block.fp16_bytes_per_s",
        "block.fp32_bytes_per_s",
        "block.row_s",
        "block.load_bytes_per_s",
        "memory.stream_bytes_per_s",
        "llc.capacity_bytes",
        "llc.bytes_per_s",
        "l2.bytes_per_s",
    ),
    "exchange": ("handoff.hop_s", "handoff.atomic_s", "block.element_s", "block.stage_s"),
    "attention": ("block.kv_bytes_per_s",),
    "launch": ("launch.graph_edge_s", "launch.stream_s"),  # told apart by execution
    "sample": ("block.sample_element_s",),
    "turns": ("sharing.switch_s",),
}
BOOTSTRAP = 400
INTERVAL = (5.0, 95.0)  # percent
PRIOR = 0.01  # weight of staying at the start, per e-fold: numbers that no probe touches stay put
REACH = math.log(300.0)  # a fitted number lies within this factor of its starting value
BOUND = 0.02  # a number whose e-fold changes all its probes by less is not settled by them
UNBOUND = math.log(2.0)  # and gets this range instead of a bootstrap's
EVALUATIONS = 20  # at most; from a start read off the probes a few suffice
ENOUGH = 1e-3  # relative change of all numbers, or of the misfit, at which a fit ends


@dataclass(frozen=True, slots=True)
class Fit:
    numbers: dict[str, Number]
    residuals: dict[str, float]  # log(simulated / measured) of each probe
    run: str

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.residuals.items(), key=lambda item: abs(item[1]))


def fit_device(device: Device, probes: list[Probe], run: store.Run, progress: Callable[[str], None]) -> Fit:
    """Fit all groups in order. Raises CalibrationError when the run lacks a probe."""
    missing = [p.name for p in probes if p.name not in run.samples]
    if missing:
        raise CalibrationError(f"run {run.id} lacks the probe {missing[0]}: it was made by another version, probe again")
    numbers: dict[str, Number] = {}
    residuals: dict[str, float] = {}
    for group, wanted in GROUPS.items():
        chosen = [p for p in probes if p.group == group]
        paths = tuple(path for path in wanted if getattr(device, path.split(".")[0]) is not None)
        if not chosen or not paths:
            continue
        progress(f"fitting {group}: {len(paths)} numbers to {len(chosen)} probes")
        begun = apply_fit(device, numbers | starting_numbers(group, paths, chosen, run))
        fitted = _fit_group(begun, paths, chosen, run)
        numbers |= fitted.numbers
        residuals |= fitted.residuals
    return Fit(numbers, residuals, run.id)


def starting_numbers(group: str, paths: tuple[str, ...], probes: list[Probe], run: store.Run) -> dict[str, Number]:
    """Rates read straight off the stream probes. From a bad start a rate that does not bind yet has no slope to follow."""
    if group != "stream":
        return {}
    middle = settled(run)
    streams = [p for p in probes if p.name.startswith("stream")]
    size = {p.name: p.plan.weight_bytes() for p in streams}
    rate = {name: bytes_ / middle[name] for name, bytes_ in size.items()}
    alone = [p.name for p in streams if p.plan.blocks == 1]
    together = [p.name for p in streams if p.plan.blocks == max(q.plan.blocks for q in streams)]
    large, small = max(size.values()), min(size.values())
    read_off = {
        "memory.stream_bytes_per_s": [n for n in together if size[n] > large / 2],
        "block.load_bytes_per_s": [n for n in alone if size[n] > large / 2],
        "llc.bytes_per_s": [n for n in together if small * 2 < size[n] < large / 4],
        "l2.bytes_per_s": together,
    }
    for dtype in DType:
        same = [p.name for p in streams if p.plan.options.weight_dtype is dtype]
        read_off[f"block.{dtype.value}_bytes_per_s"] = [n for n in alone if n in same]
    found = {path: max(rate[n] for n in names) for path, names in read_off.items() if names}
    return {path: _fitted(value, "read off a probe") for path, value in found.items() if path in paths}


def _fitted(value: float, source: str) -> Number:
    return Number(value, Kind.FITTED, source, value, value)


def _fit_group(device: Device, paths: tuple[str, ...], probes: list[Probe], run: store.Run) -> Fit:
    start = np.array([math.log(_value(device, path)) for path in paths])
    middle = settled(run)
    target = np.array([math.log(middle[p.name]) for p in probes])

    def residual(point: Vector) -> Vector:
        trial = apply_fit(device, dict(zip(paths, _plain(point), strict=True)))
        simulated = np.array([math.log(simulated_step_s(trial, probe)) for probe in probes])
        return np.concatenate([simulated - target, PRIOR * (point - start)])

    found = least_squares(
        residual, start, bounds=(start - REACH, start + REACH), diff_step=0.02, max_nfev=EVALUATIONS, ftol=ENOUGH, xtol=ENOUGH
    )
    left = found.fun[: len(probes)]
    low, high = _bootstrap(found.x, found.jac, left, probes, run)
    source = f"fit of {run.id}, {len(probes)} probes"
    numbers = {}
    for at, path in enumerate(paths):
        slope = float(np.linalg.norm(found.jac[: len(probes), at]))
        if slope < BOUND:
            low[at], high[at] = found.x[at] - UNBOUND, found.x[at] + UNBOUND
        said = source if slope >= BOUND else f"{source}, of which none is bound by this number"
        numbers[path] = Number(math.exp(found.x[at]), Kind.FITTED, said, math.exp(low[at]), math.exp(high[at]))
    return Fit(numbers, dict(zip((p.name for p in probes), left.tolist(), strict=True)), run.id)


def simulated_step_s(device: Device, probe: Probe) -> float:
    """Seconds that the twin gives one step of a probe."""
    return simulate(probe.plan, Node("probe", device, 1), steps=2).step_s


def _value(device: Device, path: str) -> float:
    """The device's present number at a dotted path."""
    found: Any = device
    for name in path.split("."):
        found = getattr(found, name)
        if found is None:
            raise CalibrationError(f"{device.name} has no {path}: this device cannot be fitted by these probes")
    return float(found.value)


def _plain(point: Vector) -> list[Number]:
    return [_fitted(math.exp(x), "trial") for x in point]


def _bootstrap(point: Vector, jacobian: Vector, left: Vector, probes: list[Probe], run: store.Run) -> tuple[Vector, Vector]:
    """Interval of each number: samples of each probe and residuals over probes drawn again, one linear step each.

    A full fit per draw would cost minutes; near the optimum the model is close to linear in the logarithms.
    """
    random = np.random.default_rng(0)
    inverse = np.linalg.pinv(jacobian)
    logs = [np.log(run.samples[p.name]) for p in probes]
    middle = np.array([np.median(values) for values in logs])
    draws = []
    for _ in range(BOOTSTRAP):
        noise = np.array([np.median(random.choice(values, len(values))) for values in logs]) - middle
        misfit = random.choice(left, len(left))
        change = np.concatenate([noise + misfit, np.zeros(jacobian.shape[0] - len(left))])
        draws.append(point + inverse @ change)
    low, high = np.percentile(np.array(draws), INTERVAL, axis=0)
    return np.minimum(low, point), np.maximum(high, point)
