"""1,000 what-if points of one model on one node, drawn at random: see README.md.

python studies/fast-simulator/points.py points.csv --workers 2
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twin.errors import TwinError
from twin.hardware.load import load_node
from twin.hardware.override import numbers, with_number
from twin.models.load import load_model
from twin.plan.types import Execution, HandOffKind, Placement
from twin.sim.batch import planned
from twin.sim.run import simulate

MODEL, NODE = "laneformer-2b", "8xh200"
SEED = 4
TOGETHER = 20  # points handed to a worker at once
OPTIONS: dict[str, tuple[Any, ...]] = {
    "blocks": (96, 112, 120, 128, 132),
    "slot_bytes": (8192, 16384),
    "ring_slots": (4, 6, 8, 10),
    "context": (128, 1024, 4096),
    "handoff": tuple(HandOffKind),
    "delay": (0, 1, 2),
    "execution": tuple(Execution),
    "placement": (Placement.DIE_AWARE, Placement.FLAT),
    "tile_rows": (4, 8),
}
# what is not scaled: the chip would be another one
COUNTS = ("structure.", "capacity_bytes", "reserved_bytes", "on_chip_bytes")


@dataclass(frozen=True)
class Point:
    number: int
    scaled: tuple[tuple[str, float], ...]  # hardware numbers and their factors
    chosen: tuple[tuple[str, Any], ...]  # engine options


@dataclass(frozen=True)
class Outcome:
    point: Point
    tokens_per_s: float | None  # None: refused
    refused: str
    executor: str
    cpu_s: float


def draw(seed: int) -> Iterator[Point]:
    """One to three numbers between half and twice their value; in half of the points one or two
    options as well.
    """
    rng = random.Random(seed)
    paths = [
        path for path in numbers(load_node(NODE)) if not any(count in path for count in COUNTS)
    ]
    for number in range(10**9):
        scaled = tuple(
            (path, round(2 ** rng.uniform(-1, 1), 3))
            for path in rng.sample(paths, rng.randint(1, 3))
        )
        names = rng.sample(sorted(OPTIONS), rng.randint(1, 2)) if rng.random() < 0.5 else []
        yield Point(number, scaled, tuple((name, rng.choice(OPTIONS[name])) for name in names))


def compute(points: list[Point]) -> list[Outcome]:
    return [_compute(point) for point in points]


def _compute(point: Point) -> Outcome:
    started = time.process_time()
    try:
        node = load_node(NODE)
        for path, factor in point.scaled:
            node = with_number(node, path, f"x{factor}")
        chosen = dict(point.chosen)
        if "ring_slots" in chosen:
            chosen["window_slots"] = chosen["ring_slots"]
        result = simulate(planned(load_model(MODEL), node, **chosen), node)
    except TwinError as error:
        return Outcome(point, None, str(error), "", time.process_time() - started)
    return Outcome(point, result.tokens_per_s, "", result.executor, time.process_time() - started)


def run(wanted: int, workers: int) -> list[Outcome]:
    """Until `wanted` points have been simulated; those that cannot be planned are kept too, and do
    not count.
    """
    source, done = draw(SEED), []
    with ProcessPoolExecutor(workers) as pool:
        while (missing := wanted - sum(outcome.tokens_per_s is not None for outcome in done)) > 0:
            points = [next(source) for _ in range(missing)]
            chunks = [points[i : i + TOGETHER] for i in range(0, len(points), TOGETHER)]
            for outcomes in pool.map(compute, chunks):
                done += outcomes
                print(f"{len(done)} points", flush=True)
    return done


def write(path: Path, outcomes: list[Outcome]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(
            ("number", "scaled", "chosen", "tokens_per_s", "executor", "cpu_s", "refused")
        )
        for o in outcomes:
            scaled = " ".join(f"{path}=x{factor}" for path, factor in o.point.scaled)
            chosen = " ".join(
                f"{name}={getattr(value, 'value', value)}" for name, value in o.point.chosen
            )
            speed = "" if o.tokens_per_s is None else f"{o.tokens_per_s:.4f}"
            rows.writerow(
                (o.point.number, scaled, chosen, speed, o.executor, f"{o.cpu_s:.3f}", o.refused)
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    started = time.perf_counter()
    outcomes = run(args.points, args.workers)
    wall = time.perf_counter() - started
    write(args.output, outcomes)
    simulated = sorted(o.cpu_s for o in outcomes if o.tokens_per_s is not None)
    print(
        f"{len(simulated)} points simulated and {len(outcomes) - len(simulated)} refused in "
        f"{wall:.0f} s of wall time"
    )
    middle, most = simulated[len(simulated) // 2], simulated[-1]
    print(
        f"{sum(o.cpu_s for o in outcomes):.0f} s of core time; a point: median {middle:.3f} s, "
        f"most {most:.3f} s"
    )
    print(
        f"load of the computer: {load:.1f} before, {os.getloadavg()[0]:.1f} after, on "
        f"{os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
