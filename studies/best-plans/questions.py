"""What design questions cost: results/questions.csv.

    python studies/best-plans/questions.py    # some core-minutes, on two cores

Sweeps of 1,000 machines: whole, and as the searches for machines compare them (a few layers, one
GPU that stands for all); what-ifs of experts on eight GPUs; points of 72 GPUs; a million machines
by the surrogate. Nothing is known beforehand, and no store keeps what is found.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from twin.study.depth import repeating, times
from twin.study.inverse import parse_varied
from twin.study.local import Batch, pool_of
from twin.study.point import Point, Row, compute
from twin.study.runner import Runner
from twin.study.surrogate import Sizes, surrogate

FILE = Path(__file__).parent / "results" / "questions.csv"
CORES = 2
FACTORS = tuple(f"x{0.5 + 0.1 * at:.1f}" for at in range(10))  # of each of three numbers
NAMES = ("device.memory.stream_bytes_per_s", "device.handoff.hop_s", "device.kernel.stage_s")
CONTEXT = (("context", 1024),)
SMALL, DENSE = (Point(model, "1xh200", CONTEXT) for model in ("llama-3.2-1b", "llama-3.1-8b"))
EXPERTS = Point("gpt-oss-120b", "8xh200", CONTEXT)
RACK = ("gpt-oss-120b", "deepseek-v4-flash", "deepseek-v4-pro", "kimi-k2.6")
EVERY = 20  # of the machines, one is simulated with all GPUs and layers where they have experts
MILLION = 1_000_000
SIZES = Sizes(trained=300, bounded=60, checked=40)


class Line(NamedTuple):
    """A question; seconds of the clock and of all cores."""

    question: str
    points: int
    wall_s: float
    core_s: float


def machines(point: Point) -> list[Point]:
    """1,000 of them."""
    return [
        point.with_settings(*zip(NAMES, factors, strict=True))
        for factors in product(FACTORS, repeat=len(NAMES))
    ]


class Cores:
    """Owns the processor time that workers have taken."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def work(self, batches: Sequence[Batch]) -> Iterator[tuple[int, list[Row]]]:
        with pool_of(CORES) as pool:
            futures = {pool.submit(_computed, batch): at for at, batch in enumerate(batches)}
            for future in as_completed(futures):
                rows, took_s = future.result()
                self.spent_s += took_s
                yield futures[future], rows


def _computed(batch: Batch) -> tuple[list[Row], float]:
    begun = time.process_time()
    return compute(batch), time.process_time() - begun


USED = Cores()


def runner() -> Runner:
    return Runner(USED.work, workers=CORES, store=None, progress=lambda _: None)


def swept(points: list[Point]) -> int:
    """Whole."""
    rows = runner().rows(points)
    assert not any(row.problem for row in rows)
    return len(points)


def compared(points: list[Point]) -> int:
    """As searches do."""
    few = [replace(point, representative=True) for point in points]
    found = times(few, runner(), repeating(few[0].spec()), "machines")
    assert not any(one.problem for one in found)
    return len(points)


def million() -> int:
    varied = parse_varied(",".join(NAMES), EXPERTS)
    made, _ = surrogate(EXPERTS, varied, SIZES, 1, runner())
    return sum(len(speeds) for _, speeds, _ in made.drawn(MILLION, 1))


def questions() -> Iterator[tuple[str, Callable[[], int]]]:
    yield "Llama-3.2-1B on one H200, whole", lambda: swept(machines(SMALL))
    yield "Llama-3.1-8B on one H200, by a few layers", lambda: compared(machines(DENSE))
    yield "GPT-OSS-120B on eight H200, by a few layers", lambda: compared(machines(EXPERTS))
    yield "GPT-OSS-120B on eight H200, whole", lambda: swept(machines(EXPERTS)[::EVERY])
    for model in RACK:
        yield f"{model} on 72 GB200", partial(swept, [Point(model, "72xgb200", CONTEXT)])
    yield "GPT-OSS-120B on a million machines, by the surrogate", million


def timed(question: str, answer: Callable[[], int]) -> Line:
    wall_s, core_s = time.monotonic(), _core_s()
    points = answer()
    line = Line(question, points, time.monotonic() - wall_s, _core_s() - core_s)
    took = f"{line.wall_s:.1f} s, {line.core_s:.1f} core-s"
    print(f"{question}: {points:,} points, {took}", flush=True)
    return line


def _core_s() -> float:
    return time.process_time() + USED.spent_s


def main() -> None:
    made = [timed(*one) for one in questions()]
    with FILE.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(Line._fields)
        table.writerows([line[0], line[1], f"{line[2]:.1f}", f"{line[3]:.1f}"] for line in made)


if __name__ == "__main__":
    main()
