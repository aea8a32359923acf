"""Who else uses this computer's CPUs: what the system counts of them, between two looks.

A load average is a minute old and counts what waits for a disk; these counters say who ran, and
what the hypervisor gave to somebody else, while something was measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from twin.frozen import frozen

_IDLE = (3, 4)  # of a line of /proc/stat: idle, and waiting for a disk
_STOLEN = 7
_COUNTED = 8  # guests are counted in user time already
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
NEEDED = 0.5  # of a core, from which somebody else has it


@frozen
class Look:
    """Counters since the computer started, in seconds."""

    at_s: float
    own_s: float  # CPU time of this process, all threads
    busy_s: dict[int, float]  # by CPU: of anybody, or stolen
    stolen_s: dict[int, float]

    def since(self, before: Look) -> Activity:
        wall = max(1e-9, self.at_s - before.at_s)
        busy, stolen = (
            {cpu: (new[cpu] - old[cpu]) / wall for cpu in new if cpu in old}
            for new, old in ((self.busy_s, before.busy_s), (self.stolen_s, before.stolen_s))
        )
        return Activity(wall, (self.own_s - before.own_s) / wall, busy, stolen)


@frozen
class Activity:
    """Cores in use between two looks."""

    wall_s: float
    own: float
    busy: dict[int, float]  # by CPU; empty where the system does not say
    stolen: dict[int, float]

    @property
    def others(self) -> float:
        """Cores that other programs or other virtual machines had."""
        return max(0.0, sum(self.busy.values()) - self.own) if self.busy else 0.0

    @property
    def lost(self) -> float:
        """Of these, cores that the hypervisor gave to somebody else."""
        return sum(self.stolen.values())


def look(cpus: Collection[int] | None = None, root: Path = Path("/")) -> Look:
    """The counters of the CPUs that this process may use, or of `cpus`."""
    wanted = usable() if cpus is None else set(cpus)
    busy: dict[int, float] = {}
    stolen: dict[int, float] = {}
    for cpu, ticks in _lines(root):
        if cpu in wanted:
            idle = sum(ticks[at] for at in _IDLE)
            busy[cpu] = (sum(ticks) - idle) / TICKS_PER_S
            stolen[cpu] = ticks[_STOLEN] / TICKS_PER_S
    return Look(time.perf_counter(), time.process_time(), busy, stolen)


def free(seen: Activity, cpus: Sequence[int]) -> list[int]:
    """Those of `cpus` that nobody else needed while this process slept; the least used one where
    all are in use.

    A program that nobody pinned moves to where it finds room, so as many CPUs are left to others as
    they used, those that they used most.
    """
    used = {cpu: seen.busy.get(cpu, 0.0) for cpu in cpus}
    needed = int(sum(used.values()) + NEEDED)
    ordered = sorted(cpus, key=lambda cpu: (used[cpu], cpu))
    return sorted(ordered[: max(1, len(cpus) - needed)])


def usable() -> set[int]:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _lines(root: Path) -> list[tuple[int, list[int]]]:
    """(CPU, its ticks) of /proc/stat; none where it cannot be read."""
    try:
        text = (root / "proc/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        name, *ticks = line.split()[: _COUNTED + 1] or [""]
        number = name.removeprefix("cpu")
        whole = len(ticks) == _COUNTED and all(tick.isdigit() for tick in ticks)
        if name.startswith("cpu") and number.isdigit() and whole:
            found.append((int(number), [int(tick) for tick in ticks]))
    return found
