"""Marks of an engine's real steps on disk, with the plan that they belong to. Needs no simulator: a
GPU machine writes them.
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.calibrate.recorded import built, model_read, model_written, whole
from twin.engine.generation import Generation
from twin.errors import CalibrationError, ConfigError
from twin.plan.options import Limits, Options
from twin.plan.types import Plan
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
    ConfigError,
)
STEPS = 32  # kept around the context that the plan is timed at


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
        assert self.plan.spec is not None
        identity = {
            "spec": model_written(self.plan.spec),
            "options": whole(self.plan.options),
            "limits": whole(self.plan.limits),
        }
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
    if plan.spec is None or build(plan.spec, plan.options, plan.limits) != plan:
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
        spec = model_read(identity["spec"])
        options, limits = built(Options, identity["options"]), built(Limits, identity["limits"])
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot be read ({error.strerror or error}); record steps first: "
            "studies/h200-traces"
        ) from error
    except DAMAGED as error:
        raise CalibrationError(
            f"{path}: is no recording of this version ({error}); record the steps again"
        ) from error
    plan = build(spec, options, limits)
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
