"""How far `twin optimise` ends from trying everything: 60 cases that a seed draws.

    python studies/best-plans/run.py    # half an hour of a core; takes all that it may run on

Each case is a model on a node at some context and batch. All ways to run it are simulated as the
search compares them, but those whose bytes alone take longer than a step that is known; the fastest
FASTEST with all layers, GPUs and steps. A case that is in results/cases.csv is not run again.
"""

from __future__ import annotations

import csv
import random
import time
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from twin.study.local import cores, pool_of
from twin.study.optimise import STANDARD, Found, Search, Steps, Way, found_by, search, ways
from twin.study.point import Point
from twin.study.runner import Runner

HERE = Path(__file__).parent
SEED, COUNT = 29112028, 60
CASES = HERE / "results" / "cases.csv"
FASTEST = 4  # of all ways, next to the one found
# One case in five has experts, on at most four NVIDIA GPUs: those of Kimi-K2.6 or DeepSeek-V4 on
# eight would take an hour of a core each.
DENSE = ("llama-3.2-1b", "llama-3.2-3b", "qwen3-8b", "llama-3.1-8b", "gemma-3-1b", "llama-3.1-70b")
EXPERTS = ("qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "qwen3-coder-next")
SHARE = 1 / 5
DEVICES = ("h100", "h200", "b200", "mi300x")
CONTEXTS = (128, 1024, 8192, 32768)
BATCHES = (1, 1, 1, 4)


class Case(NamedTuple):
    """What is drawn."""

    model: str
    node: str
    context: int
    batch: int

    def point(self) -> Point:
        chosen = {"context": self.context} | ({"batch": self.batch} if self.batch > 1 else {})
        return Point(self.model, self.node).with_options(**chosen)


class Row(NamedTuple):
    """A case and what came; speeds in tokens/s of one sequence."""

    case: Case
    standard: float
    found: float
    best: float
    plan: str
    best_plan: str
    looked: int  # plans that the search simulated
    ways: int  # of all

    @property
    def loss(self) -> float:
        """How much faster the best plan is than the one found."""
        return self.best / self.found - 1


def drawn(seed: int = SEED, count: int = COUNT) -> list[Case]:
    """Different cases, those that are planned."""
    draw, found = random.Random(seed), dict[Case, None]()
    while len(found) < count:
        experts = draw.random() < SHARE
        model = draw.choice(EXPERTS if experts else DENSE)
        device = draw.choice(DEVICES[:3] if experts else DEVICES)
        gpus = draw.choice((2, 4) if experts else (2, 4, 8))
        batch = 1 if experts else draw.choice(BATCHES)
        case = Case(model, f"{gpus}x{device}", draw.choice(CONTEXTS), batch)
        if _planned(case):
            found[case] = None
    return list(found)


def _planned(case: Case) -> bool:
    return not Runner.inline().rows([replace(case.point(), steps=0)])[0].problem


def everything(point: Point) -> Steps[Found]:
    """All ways, those of a number of GPUs at once."""
    made = Search(point)
    for gpus, some in groupby(ways(point), key=lambda way: way.gpus):
        standard = Way(gpus)
        if made.hopeless(standard):
            continue
        yield from made.time([standard])
        yield from made.time([way for way in some if way.options != STANDARD])
    return made.found(Way(point.on_node().gpus))


def compared(case: Case) -> Row:
    """The plan found next to the best of all: the fastest of them are simulated as a user would."""
    runner, point = Runner.inline(), case.point()
    found = found_by(search(point), runner, "search")
    ranking = found_by(everything(point), runner, "everything").ranking
    near = dict.fromkeys([found.best.way, found.standard, *(one.way for one in ranking[:FASTEST])])
    rows = runner.rows([way.of(point) for way in near])
    step_s = {way: row.step_s for way, row in zip(near, rows, strict=True) if not row.problem}
    fastest = min(step_s, key=step_s.__getitem__)
    return Row(
        case,
        1 / step_s[found.standard],
        1 / step_s[found.best.way],
        1 / step_s[fastest],
        str(found.best.way),
        str(fastest),
        found.simulated,
        len(list(ways(point))),
    )


NAMES = (*Case._fields, *Row._fields[1:])


def rows() -> list[Row]:
    """Those on file."""
    if not CASES.exists():
        return []
    with CASES.open(encoding="utf-8", newline="") as lines:
        return [_read(line) for line in csv.DictReader(lines)]


def _read(line: dict[str, str]) -> Row:
    case = Case(line["model"], line["node"], int(line["context"]), int(line["batch"]))
    speeds = (float(line[name]) for name in ("standard", "found", "best"))
    return Row(case, *speeds, line["plan"], line["best_plan"], *_counts(line))


def _counts(line: dict[str, str]) -> tuple[int, int]:
    return int(line["looked"]), int(line["ways"])


def write(some: Sequence[Row]) -> None:
    with CASES.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(NAMES)
        for row in some:
            speeds = (f"{speed:.1f}" for speed in row[1:4])
            table.writerow([*row.case, *speeds, *row[4:]])


def timed(case: Case) -> tuple[Row, float]:
    """With the seconds that it took."""
    begun = time.monotonic()
    return compared(case), time.monotonic() - begun


def left(done: Sequence[Row]) -> list[Case]:
    """Those with experts first: they take longest."""
    known = {row.case for row in done}
    return sorted((case for case in drawn() if case not in known), key=_dense)


def _dense(case: Case) -> bool:
    return case.model in DENSE


def main() -> None:
    CASES.parent.mkdir(exist_ok=True)
    done = rows()
    places = {case: at for at, case in enumerate(drawn())}
    with pool_of(cores()) as pool:
        for future in as_completed([pool.submit(timed, case) for case in left(done)]):
            row, took_s = future.result()
            done = sorted([*done, row], key=lambda one: places[one.case])
            write(done)
            print(
                f"{len(done)}/{COUNT} {' '.join(map(str, row.case))}: {row.loss:.2%} below the "
                f"best of {row.ways} by {row.looked}, {took_s:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
