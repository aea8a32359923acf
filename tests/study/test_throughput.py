"""How many what-if points two processes compute in a minute. Slow; the number is printed with `-s`,
and no speed is required.
"""

from __future__ import annotations

import time

import pytest

from twin.study.local import in_process, on_cores
from twin.study.point import Point, Row

WORKERS = 2
# points of each worker before the clock starts: its imports, its plan, the proof and the program
WARM = 2
MEASURED = 60  # points of each worker


def swept(node: str, count: int) -> list[Point]:
    """One plan, and a number of the hardware that its program does not depend on."""
    base = Point("laneformer-2b", node)
    return [
        base.with_settings(("memory.stream", f"x{1 - 1e-3 * number:.3f}"))
        for number in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("node", ["8xh200", "8xmi300x"])
def test_points_of_one_plan_in_two_processes(node: str, capsys: pytest.CaptureFixture[str]) -> None:
    points = swept(node, WORKERS * (WARM + MEASURED))
    first, rest = points[: WORKERS * WARM], points[WORKERS * WARM :]
    batches = [tuple(part[n::WORKERS]) for part in (first, rest) for n in range(WORKERS)]
    rows: dict[int, list[Row]] = {}
    done: list[float] = []
    for index, computed in on_cores(batches, WORKERS):
        rows[index] = computed
        done.append(time.perf_counter())
    rate = 60 * WORKERS * MEASURED / (done[-1] - done[WORKERS - 1])
    with capsys.disabled():
        print(f"\n{node}: {rate:.0f} points a minute in {WORKERS} processes")
    assert not [row.problem for computed in rows.values() for row in computed if row.problem]
    ((_, alone),) = in_process([batches[0][:1]])
    assert alone == rows[0][:1]
