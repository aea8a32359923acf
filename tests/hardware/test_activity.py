"""Who else uses the cores is read off the system's counters, and those cores are left to them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from twin.hardware import activity
from twin.hardware.activity import Activity, free, look


def _stat(root: Path, cpus: dict[int, tuple[int, int, int]]) -> Path:
    """`cpus`: ticks in use, idle, stolen."""
    lines = ["cpu  1 2 3 4 5 6 7 8 9 10"]
    lines += [
        f"cpu{cpu} {used} 0 0 {idle} 0 0 0 {lost} 0 0" for cpu, (used, idle, lost) in cpus.items()
    ]
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/stat").write_text("\n".join([*lines, "intr 1 2 3", "ctxt 12"]))
    return root


def test_time_of_others_is_what_was_used_and_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick = activity.TICKS_PER_S
    clock = {"wall": 100.0, "own": 7.0}
    monkeypatch.setattr(time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(time, "process_time", lambda: clock["own"])
    before = look([0, 1], _stat(tmp_path, {0: (50, 50, 0), 1: (0, 100, 0), 2: (0, 0, 0)}))
    clock |= {"wall": 110.0, "own": 12.0}  # half a core
    moved = {0: (50 + 10 * tick, 50, 0), 1: (0, 100 + 9 * tick, tick), 2: (10 * tick, 0, 0)}
    seen = look([0, 1], _stat(tmp_path, moved)).since(before)
    assert seen.busy == {0: pytest.approx(1.0), 1: pytest.approx(0.1)}
    assert seen.own == pytest.approx(0.5)
    assert seen.others == pytest.approx(0.6)
    assert seen.lost == pytest.approx(0.1)


@pytest.mark.parametrize(
    "text", ["", "cpu", "cpu0 1 2", "cpu0 a b c d e f g h", "\x00\xff", "cpux 1"]
)
def test_a_system_that_does_not_say_has_no_others(tmp_path: Path, text: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(text, encoding="latin-1")
    seen = look([0], tmp_path).since(look([0], tmp_path / "nowhere"))
    assert (seen.busy, seen.others, seen.lost) == ({}, 0.0, 0.0)


@pytest.mark.parametrize(
    ("busy", "left"),
    [
        ([0.0, 0.0], [0, 1]),
        ([0.3, 0.1], [0, 1]),  # a desktop's own doings
        ([1.0, 0.0], [1]),
        ([0.5, 0.5], [0]),  # one program that moves about
        ([1.0, 1.0], [0]),  # nothing is free: the least used one
        ([0.0, 1.0, 0.0, 0.0], [0, 2, 3]),
        ([0.25, 0.25, 0.3, 0.25], [0, 1, 3]),
        ([1.0, 0.2, 1.0, 0.1], [1, 3]),
    ],
)
def test_as_many_cores_are_left_to_others_as_they_use(busy: list[float], left: list[int]) -> None:
    seen = Activity(1.0, 0.0, dict(enumerate(busy)), {})
    assert free(seen, range(len(busy))) == left


def test_this_process_knows_its_cores() -> None:
    assert activity.usable()
    if hasattr(os, "sched_getaffinity"):
        assert activity.usable() == set(os.sched_getaffinity(0))
