"""Marks of an engine's real steps on disk, with the plan that they belong to. Needs no simulator: a
GPU machine writes them.
"""

from __future__ import annotations

import dataclasses
import json
import types
import zipfile
import zlib
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from twin.engine.session import Generation
from twin.errors import CalibrationError
from twin.models.spec import ModelSpec
from twin.plan.types import Limits, Options, Plan
from twin.schedule.plans import build

# What NumPy, zip files and JSON raise for files that are none, or that somebody has changed.
DAMAGED = (
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    EOFError,
    OverflowError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)
STEPS = 32  # kept around the context that the plan is timed at
# what a plan is built from, and rebuilt from
PLANNED = {"spec": ModelSpec, "options": Options, "limits": Limits}


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """Consecutive steps of one run. The first is there for its end alone: the steps after it are
    complete.
    """

    plan: Plan
    # [steps][ranks][blocks][stages][inputs ready, finished] ns since the run's start
    marks: NDArray[np.int64]
    positions: NDArray[np.int64]  # [steps] cached positions that each step attended
    # device, driver, clocks, commit: whatever a later reader should know
    conditions: dict[str, Any]

    def save(self, path: Path) -> None:
        identity = {name: _encode(getattr(self.plan, name)) for name in PLANNED}
        np.savez_compressed(
            path,
            marks=self.marks,
            positions=self.positions,
            identity=json.dumps(identity),
            conditions=json.dumps(self.conditions),
        )


def record(
    plan: Plan, made: Generation, *, prompt: int, conditions: dict[str, Any], steps: int = STEPS
) -> Recording:
    """`steps` generated steps of a traced run after `prompt` tokens: those closest to the plan's
    context, and the one before.

    Raises CalibrationError for a run without a trace, too short a run, or a plan that its own
    options do not build.
    """
    if made.trace is None:
        raise CalibrationError("the run has no trace: make the engine with trace=True")
    if plan.spec is None or _rebuilt(plan) != plan:
        raise CalibrationError(
            f"{plan.name} is not what its model and options build: record a plan that `build` made"
        )
    count = len(made.tokens)
    if count < steps + 1:
        raise CalibrationError(
            f"{count} generated tokens: generate at least {steps + 1} to keep {steps} steps"
        )
    first = min(max(0, plan.options.context - prompt - steps // 2 - 1), count - steps - 1)
    chosen = slice(len(made.trace) - count + first, len(made.trace) - count + first + steps + 1)
    return Recording(
        plan,
        made.trace[chosen].copy(),
        np.arange(prompt + first, prompt + first + steps + 1),
        conditions,
    )


def load(path: Path) -> Recording:
    """Raises CalibrationError when the file is no recording, or when this version plans its model
    otherwise.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            marks, positions = stored["marks"], stored["positions"]
            identity, conditions = (
                json.loads(str(stored["identity"])),
                json.loads(str(stored["conditions"])),
            )
        parts = {name: _decode(kind, identity[name]) for name, kind in PLANNED.items()}
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot be read ({error.strerror or error}); record steps first: "
            "studies/h200-traces"
        ) from error
    except DAMAGED as error:
        raise CalibrationError(
            f"{path}: is no recording of this version ({error}); record the steps again"
        ) from error
    plan = build(parts["spec"], parts["options"], parts["limits"])
    wanted = (plan.ranks, plan.blocks, len(plan.stages), 2)
    if (
        marks.ndim != 5
        or marks.shape[1:] != wanted
        or len(positions) != len(marks)
        or len(marks) < 2
    ):
        raise CalibrationError(
            f"{path}: holds marks of shape {list(marks.shape)}, its plan now has {list(wanted)} a "
            "step; record the steps again with this version"
        )
    return Recording(plan, marks, positions, conditions)


def _rebuilt(plan: Plan) -> Plan:
    assert plan.spec is not None
    return build(plan.spec, plan.options, plan.limits)


# ---- frozen data as JSON -------------------------------------------------------------------------


def _encode(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {
            field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return [_encode(item) for item in value] if isinstance(value, tuple) else value


def _decode(kind: Any, value: Any) -> Any:
    """The inverse, by the declared types. Raises KeyError, TypeError or ValueError when they do not
    fit.
    """
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else _decode(_meant(kind, value), value)
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis:
            return tuple(_decode(kinds[0], item) for item in value)
        return tuple(_decode(one, item) for one, item in zip(kinds, value, strict=True))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() - hints.keys():
            raise ValueError(f"{kind.__name__} has other fields")
        return kind(**{name: _decode(hints[name], item) for name, item in value.items()})
    return kind(value)


def _meant(union: Any, value: Any) -> Any:
    """The type of a union that the value is one of: of data classes the one with its fields."""
    kinds = [kind for kind in get_args(union) if kind is not type(None)]
    if isinstance(value, dict):
        for kind in kinds:
            if dataclasses.is_dataclass(kind) and get_type_hints(kind).keys() == value.keys():
                return kind
    return kinds[0]
