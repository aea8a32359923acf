"""What design questions cost and how good their surrogate is:

    python studies/best-plans/questions.py [KIND ...]

Kinds are `surrogate` (a million machines each) and `what-if` (core-seconds a point); each writes
its file of results/. Core-seconds are of this computer, also where other work shares it.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from twin.study.point import Point, compute
from twin.study.surrogate import WITHIN

RESULTS = Path(__file__).parent / "results"
VARY = "memory.stream,kernel.stage,handoff.hop,block.load"
SURROGATES = (
    ("llama-3.2-1b", "1xh200", VARY),
    ("gpt-oss-120b", "8xh200", VARY),
    ("laneformer-2b", "8xmi300x", VARY),
)
MACHINES = 1_000_000
POINTS = 12  # of each kind of what-if
SWEPT, EXPERTS = Point("laneformer-2b", "8xh200"), Point("gpt-oss-120b", "8xh200")
Line = dict[str, Any]


def surrogates() -> Iterator[Line]:
    for model, node, vary in SURROGATES:
        line = ["surrogate", model, node, "--vary", vary, "--points", str(MACHINES), "--json"]
        said = subprocess.run(
            [sys.executable, "-m", "twin", *line], stdout=subprocess.PIPE, check=True
        )
        data = json.loads(said.stdout)
        errors = [abs(one["error"]) for one in data["checked"]]
        held = [abs(one["error"]) for one in data["checked"] if one["bound"] <= WITHIN]
        yield {
            "model": model,
            "node": node,
            "machines": data["machines"],
            "simulated": data["simulated"],
            "core_s": round(data["simulating_core_s"] + data["predicting_core_s"], 1),
            "held": round(data["held_share"], 4),
            "checked": len(errors),
            "median": round(median(errors), 5),
            "worst": round(max(errors), 5),
            "checked_held": len(held),
            "held_within": sum(one <= WITHIN for one in held),
        }


def what_ifs() -> Iterator[Line]:
    changes: tuple[tuple[str, Point, str], ...] = (
        ("lane model, a rate of memory", SWEPT, "memory.stream"),
        ("lane model, a cost of the kernel", SWEPT, "kernel.stage"),
        ("experts, a rate of memory", EXPERTS, "memory.stream"),
        ("experts, a cost of the kernel", EXPERTS, "kernel.stage"),
        ("experts, a cost of the kernel, one GPU for all", EXPERTS, "kernel.stage"),
    )
    for name, point, path in changes:
        one = replace(point, representative=name.endswith("for all"))
        compute([one])  # its plan, proof and program
        spent = [
            _core_s(one.with_settings((path, f"x{1 - 0.01 * (at + 1):.2f}")))
            for at in range(POINTS)
        ]
        yield {
            "what": name,
            "model": point.model,
            "node": point.node,
            "points": POINTS,
            "median_core_s": round(median(spent), 3),
            "least_core_s": round(min(spent), 3),
        }


def _core_s(point: Point) -> float:
    begun = time.process_time()
    (row,) = compute([point])
    assert not row.problem, row.problem
    return time.process_time() - begun


KINDS: dict[str, Callable[[], Iterator[Line]]] = {"surrogate": surrogates, "what-if": what_ifs}


def main(kinds: list[str]) -> None:
    for kind in kinds or list(KINDS):
        lines = list(KINDS[kind]())
        with (RESULTS / f"{kind}.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
