"""Machines by name, from hwmodels/machines."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from twin.data import data_dir, did_you_mean, read_yaml
from twin.errors import HardwareError
from twin.hardware.schema import read
from twin.machines.types import Machine
from twin.text import shown


def machine_names() -> list[str]:
    """Every name that load_machine knows."""
    return sorted(path.stem for path in (data_dir("hwmodels") / "machines").glob("*.yaml"))


def load_machine(name: str) -> Machine:
    """The machine of that name. Raises HardwareError."""
    if name not in machine_names():
        raise HardwareError(f"unknown machine {name!r}; {did_you_mean(name, machine_names())}")
    return read_machine(data_dir("hwmodels") / "machines" / f"{name}.yaml")


@lru_cache(maxsize=32)
def read_machine(path: Path) -> Machine:
    """One machine file; its name must be the file's."""
    machine = read(read_yaml(path), Machine, path)
    if machine.name != path.stem:
        raise HardwareError(
            f"{path}: name: {shown(machine.name)} must be the file's name {path.stem!r}"
        )
    return machine
