"""Machines by name, from hwmodels/machines."""

from __future__ import annotations

import dataclasses
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from twin.data import data_dir, did_you_mean, read_yaml
from twin.errors import HardwareError
from twin.hardware.schema import check_keys, number
from twin.hardware.types import Kind
from twin.machines.types import Machine, Published, Spread, Use
from twin.models.load import model_names

E = TypeVar("E", bound=Enum)
_NUMBERS = ("step_s", "units", "most_units", "usable_bytes", "bytes_per_s", "crossing_s")
_TEXTS = ("name", "title", "unit", "spread", "stored", "only")
_REQUIRED = ("name", "title", "unit", "spread", "step_s", "not_modelled", "published")
_ROW = ("model", "tokens_per_s", "kind", "source", "use")
DEFAULT_CONTEXT = 1024  # of a published speed whose source tells none


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
    known = [field.name for field in dataclasses.fields(Machine)]
    data = check_keys(read_yaml(path), path, "", required=list(_REQUIRED), allowed=known)
    if data["name"] != path.stem:
        raise HardwareError(f"{path}: name: {data['name']!r} must be the file's name {path.stem!r}")
    values: dict[str, Any] = {key: number(data[key], path, key) for key in _NUMBERS if key in data}
    values |= {key: _text(data[key], path, key) for key in _TEXTS if key in data}
    values["spread"] = _choice(Spread, values["spread"], path, "spread")
    values["not_modelled"] = tuple(
        _text(item, path, "not_modelled")
        for item in _list(data["not_modelled"], path, "not_modelled")
    )
    values["published"] = tuple(
        _row(item, path, f"published[{i}]")
        for i, item in enumerate(_list(data["published"], path, "published"))
    )
    return _checked(Machine(**values), path)


def _checked(machine: Machine, path: Path) -> Machine:
    """Fields that need each other; every figure that step_s was fitted to must exist, and the other
    way round.
    """
    if (machine.usable_bytes is None) != bool(machine.only):
        raise HardwareError(
            f"{path}: usable_bytes: a hard-wired machine names its model in `only`, every other "
            "one its memory"
        )
    if (machine.units is None) == (machine.most_units is None):
        raise HardwareError(
            f"{path}: units: give units (installed) or most_units (as many as the weights need), "
            "one of the two"
        )
    fits = [row.model for row in machine.published if row.use is Use.FIT]
    if len(fits) != (machine.step_s.kind is Kind.FITTED):
        raise HardwareError(
            f"{path}: step_s: kind {machine.step_s.kind.value!r} with {len(fits)} figures of use "
            "fit; a fitted one has exactly one"
        )
    return machine


def _row(data: object, path: Path, key: str) -> Published:
    row = check_keys(data, path, key, required=list(_ROW), allowed=[*_ROW, "context", "conditions"])
    speed, context = row["tokens_per_s"], row.get("context", DEFAULT_CONTEXT)
    if not isinstance(speed, int | float) or isinstance(speed, bool) or speed <= 0:
        raise HardwareError(f"{path}: {key}.tokens_per_s: {speed!r} must be a number above zero")
    if not isinstance(context, int) or isinstance(context, bool) or context < 1:
        raise HardwareError(
            f"{path}: {key}.context: {context!r} must be a whole number of positions above zero"
        )
    if row["model"] not in model_names():
        raise HardwareError(
            f"{path}: {key}.model: {row['model']!r} is not a model on file; "
            f"{did_you_mean(str(row['model']), model_names())}"
        )
    return Published(
        model=row["model"],
        tokens_per_s=float(speed),
        kind=_choice(Kind, row["kind"], path, f"{key}.kind"),
        source=_text(row["source"], path, f"{key}.source"),
        use=_choice(Use, row["use"], path, f"{key}.use"),
        context=context,
        conditions=_text(row["conditions"], path, f"{key}.conditions")
        if "conditions" in row
        else "",
    )


def _choice(kinds: type[E], value: object, path: Path, key: str) -> E:
    allowed = [str(kind.value) for kind in kinds]
    if value not in allowed:
        raise HardwareError(
            f"{path}: {key}: {value!r} is unknown; {did_you_mean(str(value), allowed)}"
        )
    return kinds(value)


def _list(value: object, path: Path, key: str) -> list[object]:
    if not isinstance(value, list):
        raise HardwareError(f"{path}: {key}: {value!r} must be a list")
    return value


def _text(value: object, path: Path, key: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise HardwareError(f"{path}: {key}: {value!r} must be text, not empty")
    return value
