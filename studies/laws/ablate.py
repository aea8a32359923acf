"""Which fitted numbers of an H200 earn their place: `python studies/laws/ablate.py` (an hour of a
core, on all that it may run on) writes laws.csv and kinds.csv.

A law is removed by giving its number the value at which it says nothing. The other numbers follow
as they do when engine runs move a fit (twin/calibrate/by_runs.py): as far as the probes' own
uncertainty allows. Errors are those of seeds that the moved numbers did not see. Runs are those
whose errors are on file (of records that moved the fit: by what the others give), every few of
them, on one H200 and on several; each is simulated at two short depths, of which its step is a
line.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twin.calibrate import by_runs, store
from twin.calibrate.known_error import kept_records
from twin.calibrate.node import calibrated_node
from twin.files import write
from twin.hardware.number import Kind, Number
from twin.hardware.override import apply_fit, numbers
from twin.hardware.types import Node
from twin.models.kind import kind_of
from twin.sim.run import step_s
from twin.study.local import cores, pool_of

Vector = NDArray[np.float64]
NODES = ("1xh200-sxm", "2xh200-sxm", "4xh200-sxm")  # the first one's fit has the draws
HERE = Path(__file__).resolve().parent
HEAD = ("removed", "alone_mean", "alone_p90", "all_mean", "all_p90", "kept")
# runs of a record of which one is simulated: a shape has four, so all hand-offs are among them
EVERY = 5
TOGETHER = 6  # runs, by one worker
SEEN = 1e-3  # of the logarithm of a run's step: a number that fewer move does not follow
LOSS = 0.001  # of the mean error, that a smaller set of laws may cost
NOTHING_S, NO_LIMIT = 1e-15, 1e15  # a time and a rate at which a law says nothing
ATTENTION = "device.kernel.attention."
# numbers that are the machine's own, without which there is no prediction
NEEDED = (
    *("device.memory.stream_bytes_per_s", "device.memory.latency_s", "device.l2.latency_s"),
    *("device.handoff.hop_s", "device.kernel.stage_s", "device.kernel.copy_s"),
    *("device.kernel.item_s", "device.kernel.round_s", "device.kernel.unit_s"),
    "device.kernel.sample_element_s",
)
# values at which a ratio, or a count, says nothing; `position_parts` goes with `round_parts`
LEAST_RATIO, MOST_PARTS = 1e-6, 1e6
NEUTRAL = {
    "device.memory.shortfall_ratio": LEAST_RATIO,
    f"{ATTENTION}in_layers_ratio": 1.0,
    f"{ATTENTION}later_heads_ratio": 1.0,
    f"{ATTENTION}first_parts": MOST_PARTS,
    f"{ATTENTION}round_parts": MOST_PARTS,
    f"{ATTENTION}sum_parts": MOST_PARTS,
    f"{ATTENTION}softmax_steps": 1.0,
    f"{ATTENTION}further_set_ratio": 1.0,
    f"{ATTENTION}crowded_rounds": 1.0,
    f"{ATTENTION}wider_head_ratio": 1.0,
    f"{ATTENTION}found_ratio": 1.0,
    f"{ATTENTION}further_round_ratio": LEAST_RATIO,
}


def laws(node: Node) -> dict[str, float]:
    """By the path of a fitted number the value at which it says nothing."""
    known = numbers(node)
    found = {}
    for path, number in known.items():
        prompt = path.startswith("device.kernel.prompt.")
        fitted = number.kind in (Kind.FITTED, Kind.UNBOUND)
        needed = path in NEEDED or path == f"{ATTENTION}position_parts" or _rate_of_weights(path)
        if not fitted or prompt or needed:
            continue
        found[path] = NEUTRAL.get(path, NO_LIMIT if path.endswith("_per_s") else NOTHING_S)
    # a hop that the stream does not slow; a stage by fours as any other
    return found | {
        "device.handoff.loaded_hop_s": known["device.handoff.hop_s"].value,
        "device.kernel.by_fours_s": known["device.kernel.stage_s"].value
        + known["device.kernel.vector_s"].value,
    }


def _rate_of_weights(path: str) -> bool:
    """No format without the rate at which a block multiplies it."""
    return path.endswith("_bytes_per_s") and "kernel." in path and "gather" not in path


@dataclasses.dataclass(frozen=True)
class Ran:
    """A run of the sample."""

    node: str
    shape: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Known:
    """What simulations say: logarithms of seconds, [runs]."""

    runs: Sequence[Ran]
    errors: Vector  # measured over predicted by the fit in force
    removed: Mapping[str, Vector]  # by law, what a step takes more without it
    slopes: Mapping[str, Vector]  # by number that may follow
    draws: Mapping[str, Sequence[float]]  # of these numbers: the fit's, as factors


@dataclasses.dataclass(frozen=True)
class Part:
    """Some runs of a record, with the logarithms of their errors on file."""

    node: str
    record: str
    errors: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Of a run."""

    ran: Ran
    error: float
    removed: Mapping[str, float]
    slopes: Mapping[str, float]


def known(nodes: Sequence[str]) -> Known:
    """One simulation of each run and law: the dear part."""
    found = store.read_fit(nodes[0])
    assert found is not None
    draws = found[1]["together"]
    with pool_of(cores()) as pool:
        some = [one for part in pool.map(simulated, parts(nodes)) for one in part]
    first = some[0]
    slopes = {path: np.array([one.slopes[path] for one in some]) for path in first.slopes}
    seen = [path for path in slopes if path in draws and np.abs(slopes[path]).max() > SEEN]
    return Known(
        [one.ran for one in some],
        np.array([one.error for one in some]),
        {path: np.array([one.removed[path] for one in some]) for path in first.removed},
        {path: slopes[path] for path in seen},
        {path: draws[path] for path in seen},
    )


def parts(nodes: Sequence[str]) -> list[Part]:
    """Every few runs of each record."""
    found = []
    for name in nodes:
        for record, _, errors in kept_records(calibrated_node(name)):
            if not (store.runs_folder(name) / record).is_dir():
                continue
            chosen = list(errors)[::EVERY]
            for at in range(0, len(chosen), TOGETHER):
                some = {run: math.log1p(errors[run]) for run in chosen[at : at + TOGETHER]}
                found.append(Part(name, record, some))
    return found


def simulated(part: Part) -> list[Simulated]:
    node = calibrated_node(part.node)
    record = store.read_run(store.runs_folder(node.name) / part.record)
    runs = by_runs.timed_runs(node, [record], names=part.errors)
    base = _seconds(runs, node)
    removed = {path: _seconds(runs, _with(node, path, value)) for path, value in laws(node).items()}
    slopes = {}
    for path in by_runs.movable(node):
        if f"device.{path}" in numbers(node):
            value = numbers(node)[f"device.{path}"].value * math.exp(by_runs.STEP)
            slopes[path] = _seconds(runs, _with(node, f"device.{path}", value))
    return [
        Simulated(
            Ran(node.name, one.shape, kind_of(one.run.spec).value),
            part.errors[one.run.name],
            {path: float(seconds[at] - base[at]) for path, seconds in removed.items()},
            {path: float(s[at] - base[at]) / by_runs.STEP for path, s in slopes.items()},
        )
        for at, one in enumerate(runs)
    ]


def _seconds(runs: Sequence[by_runs.Timed], node: Node) -> Vector:
    return np.log([one.line([step_s(plan, node) for plan in one.short]) for one in runs])


def _with(node: Node, path: str, value: float) -> Node:
    removed = Number(value, Kind.ASSUMED, "derived: removed", value, value)
    return apply_fit(node, {path: removed})


def left_out(found: Known, without: Collection[str]) -> Vector:
    """Errors of each seed by numbers that the other seeds moved, without some of the laws."""
    errors = found.errors - sum((found.removed[path] for path in without), np.zeros(1))
    paths = [path for path in found.slopes if f"device.{path}" not in without]
    slopes = np.column_stack([found.slopes[path] for path in paths])
    draws = np.log(np.array([found.draws[path] for path in paths]))
    prior = np.linalg.inv(np.cov(draws) + np.diag([by_runs.FLOOR**2] * len(paths)))
    seeds = np.array([one.shape.rpartition("-")[0].rpartition("-")[2] for one in found.runs])
    rest = np.empty(len(errors))
    for seed in sorted(set(seeds)):
        own = seeds == seed
        rest[own] = errors[own] - slopes[own] @ by_runs.least(slopes[~own], errors[~own], prior)
    return rest


def ablated(found: Known) -> Iterator[dict[str, object]]:
    """A row a law, in the order in which they go: the one that costs least first."""
    gone: list[str] = []
    first = _figures(left_out(found, gone))
    yield dict(zip(HEAD, ("nothing", *first, *first, ""), strict=True))
    alone = {path: _figures(left_out(found, [path])) for path in found.removed}
    while left := [path for path in found.removed if path not in gone]:
        after = {path: _figures(left_out(found, [*gone, path])) for path in left}
        least = min(left, key=lambda path: after[path])
        gone.append(least)
        kept = "yes" if after[least][0] > first[0] + LOSS else ""
        yield dict(zip(HEAD, (least, *alone[least], *after[least], kept), strict=True))


def _figures(errors: Vector) -> tuple[float, float]:
    sizes = np.abs(np.expm1(errors))
    return round(float(sizes.mean()), 5), round(float(np.quantile(sizes, 0.9)), 5)


def kinds(found: Known, without: Collection[str]) -> Iterator[dict[str, object]]:
    """Errors of each kind of models with all laws and without some."""
    both = [left_out(found, some) for some in ((), without)]
    of = np.array([f"{one.kind}, {one.node}" for one in found.runs])
    for kind in sorted(set(of)):
        row: dict[str, object] = {"kind": kind, "runs": int((of == kind).sum())}
        for name, errors in zip(("all", "fewer"), both, strict=True):
            mean, p90 = _figures(errors[of == kind])
            row |= {f"{name}_mean": mean, f"{name}_p90": p90}
        yield row


def main() -> None:
    found = known(NODES)
    rows = list(ablated(found))
    gone = [str(row["removed"]) for row in rows[1:] if not row["kept"]]
    write({HERE / "laws.csv": _csv(rows), HERE / "kinds.csv": _csv(list(kinds(found, gone)))})


def _csv(rows: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    main()
