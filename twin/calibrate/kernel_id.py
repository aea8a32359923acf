"""Which kernel an engine run had.

A record holds the id of its kernel: a digest of the sources that the device's main file includes,
and of the packages that make the generated header of a plan, all without comments and blanks.
Sources and not machine code: they are at hand wherever a record is written, also without a compiler
(a host's code differs by CPU), and of a commit. The options of each run stand next to the id.

`calibration/kernels.csv` names for each kernel of a record what the kernel in force does otherwise,
so that its other runs still count. Who changes the speed of some plans adds a name to CHANGES and
to those rows. Records of 2026-11 name their commit alone, whose kernel the table has, too:
`python -m twin.calibrate.kernel_id` adds the rows that records on file lack.
"""

from __future__ import annotations

import csv
import hashlib
import posixpath
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path

from twin import kernel, schedule
from twin.calibrate.experiment import Experiment
from twin.calibrate.store import KERNEL_ID, Run, home, measured_on, read_run
from twin.data import data_dir
from twin.errors import InvalidPlan
from twin.files import csv_text, write
from twin.hardware.load import load_node
from twin.hardware.types import Device
from twin.plan.catalogue import StageKind
from twin.plan.options import Options
from twin.schedule.choose import schedule_of
from twin.schedule.types import Schedule

FILE = "kernels.csv"
DIGITS = 12
IN_SCHEDULE = "schedule/"  # before the names of its files
# of a checkout; what older kernels have of the schedule lies in twin/kernel
NATIVE, HEADER, SCHEDULE = "native", "twin/kernel", "twin/schedule"
INCLUDED = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
BLANK = {"c": re.compile(r"//[^\n]*|/\*.*?\*/|\s+", re.DOTALL), "py": re.compile(r"#[^\n]*|\s+")}


def kernel_id(device: Device) -> str:
    """Of the kernel in force on a device."""
    return _id_of(_main_of(device), *_in_force())


@lru_cache(maxsize=1)
def _in_force() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Native sources and the packages that make headers, by path and name."""
    root = data_dir(NATIVE)
    native = {
        file.relative_to(root).as_posix(): file.read_text(encoding="utf-8")
        for folder in ("monokernel", "platform")
        for file in (root / folder).iterdir()
    }
    made_by = {
        before + file.name: file.read_text(encoding="utf-8")
        for package, before in ((kernel, ""), (schedule, IN_SCHEDULE))
        for file in Path(package.__path__[0]).glob("*.py")
    }
    return native, made_by


def _main_of(device: Device) -> str:
    if device.nvidia:
        return "platform/cuda_main.cu"
    return "platform/hip_main.hip" if device.amd else "platform/host_main.cpp"


def _id_of(main: str, native: Mapping[str, str], made_by: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    used = _included(main, native)
    for name, text in (
        *((name, BLANK["c"].sub("", native[name])) for name in sorted(used)),
        *((name, BLANK["py"].sub("", text)) for name, text in sorted(made_by.items())),
    ):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()[:DIGITS]


def _included(main: str, native: Mapping[str, str]) -> set[str]:
    """The main file, and what it and they include; without generated headers."""
    found, left = set(), [main]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for other in INCLUDED.findall(native[name]):
            next_to = posixpath.normpath(posixpath.join(posixpath.dirname(name), other))
            left += [one for one in (next_to, f"platform/{other}") if one in native][:1]
    return found


# ---- runs of older kernels -----------------------------------------------------------------------


def _splits_in_turn(schedule: Schedule) -> bool:
    """Did threads without columns make a round of attention's splits wait for each slice?"""
    stages = schedule.plan.stages
    projections = [s.matrix for s in stages if s.kind is StageKind.O_PROJ and s.matrix]
    if not projections or projections[0].format is not None:
        return False
    team = schedule.team("heads")
    return team.portions > 1 and not team.full


SPLITS = "splits-at-once"
# What changed for some plans, by name: the plans whose speed it changed.
CHANGES: Mapping[str, Callable[[Schedule], bool]] = {
    # narrow residuals on one NVIDIA GPU by fours of each thread (cuda_activation.cuh): -2 to -15 %
    "residual-by-fours": attrgetter("by_fours"),
    # all slices of a round of splits requested at once (ALL_LOOK in cuda_activation.cuh): to -8 %
    SPLITS: _splits_in_turn,
}


def is_superseded(run: Experiment, device: str) -> bool:
    """Does the kernel in force run the plan of a run otherwise than the run's kernel? False for a
    kernel that is not on file.
    """
    found = next((row for row in kernels() if row.id == run.kernel), None)
    if found is None or not found.lacks:
        return False
    # slots of the usual size hold tiles of whole teams: no plan is built to learn that
    if found.lacks == (SPLITS,) and run.options.slot_bytes % Options().slot_bytes == 0:
        return False
    try:
        plan = run.plan(device)
    except InvalidPlan:
        return False
    return any(CHANGES[name](schedule_of(plan)) for name in found.lacks)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A row of the table."""

    id: str
    commits: tuple[str, ...]  # of records without an id
    lacks: tuple[str, ...]  # names of CHANGES


def kernel_of(record: Run) -> str:
    """The id of a record's kernel, by its commit where it holds none; empty for one that is not on
    file.
    """
    own, commit = record.meta.get(KERNEL_ID), record.meta.get("commit")
    by_commit = (row.id for row in kernels() if commit in row.commits)
    return str(own) if own is not None else next(by_commit, "")


@lru_cache(maxsize=1)
def kernels() -> tuple[Kernel, ...]:
    with (data_dir("calibration") / FILE).open(encoding="utf-8", newline="") as table:
        return tuple(
            Kernel(row["kernel"], tuple(row["commits"].split()), tuple(row["lacks"].split()))
            for row in csv.DictReader(table)
        )


# ---- records without an id -----------------------------------------------------------------------


def id_at(commit: str, device: Device, checkout: Path) -> str:
    """Of the kernel that a commit has for a device."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(checkout), *words], capture_output=True, text=True, check=True
        )
        return done.stdout

    def files(folder: str) -> dict[str, str]:
        names = git("ls-tree", "-r", "--name-only", commit, f"{folder}/").split()
        return {name.removeprefix(f"{folder}/"): git("show", f"{commit}:{name}") for name in names}

    scheduled = {IN_SCHEDULE + name: text for name, text in files(SCHEDULE).items()}
    made_by = files(HEADER) | scheduled
    made_by = {name: text for name, text in made_by.items() if name.endswith(".py")}
    return _id_of(_main_of(device), files(NATIVE), made_by)


def main() -> None:
    rows = {row.id: row for row in kernels()}
    for folder in sorted((home() / "runs").glob("*/*")):
        if not (folder / "meta.yaml").is_file():
            continue
        record = read_run(folder)
        commit = str(record.meta.get("commit") or "")
        if KERNEL_ID in record.meta or not commit or kernel_of(record):
            continue
        name = measured_on(record.meta)
        device = load_node(name if name[0].isdigit() else f"1x{name}").device
        own = id_at(commit, device, home().parent)
        row = rows.setdefault(own, Kernel(own, (), ()))
        rows[own] = replace(row, commits=tuple(dict.fromkeys((*row.commits, commit))))
    text = csv_text(
        ("kernel", "commits", "lacks"),
        [(row.id, " ".join(row.commits), " ".join(row.lacks)) for row in rows.values()],
    )
    write({home() / FILE: text})


if __name__ == "__main__":
    main()
