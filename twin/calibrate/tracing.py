"""The time of each stage of an engine run, by a kernel that marks it. Needs no simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from twin.calibrate.experiment import Experiment
from twin.calibrate.stages import stage_times
from twin.calibrate.store import StageTimes
from twin.engine.choose import compile_all, open_random
from twin.errors import TwinError
from twin.hardware.types import Device

WARMUP_TOKENS = 4
TRACED_TOKENS = 48
SEED = 20261121


def prompt_of(run: Experiment) -> list[int]:
    return [7 + position % 97 for position in range(run.prompt)]


def traced_stages(
    device: Device,
    runs: Sequence[Experiment],
    failed: dict[str, str],
    progress: Callable[[str], None],
) -> tuple[StageTimes, ...]:
    """Every run once; what does not compile or run is added to `failed`."""
    if not runs:
        return ()
    plans = {run.name: run.plan(device.name) for run in runs}
    compile_all(device, [plans[run.name] for run in runs], progress, trace=True)
    found: list[StageTimes] = []
    for run in runs:
        progress(f"tracing {run.name} on {device.name}")
        try:
            with open_random(device, plans[run.name], SEED, trace=True) as engine:
                # as many tokens as were timed, of which the middle ones count: the same positions
                # are attended
                made = engine.generate(prompt_of(run), max_tokens=run.tokens + WARMUP_TOKENS)
        except TwinError as error:
            failed[f"{run.name}, traced"] = str(error)
            progress(f"tracing {run.name} failed: {error}")
            continue
        assert made.trace is not None
        middle, half = len(made.trace) - run.tokens // 2, min(TRACED_TOKENS, run.tokens - 2) // 2
        found += stage_times(
            run.name,
            plans[run.name],
            made.trace[middle - half : middle + half].astype(np.float64) * 1e-9,
        )
    return tuple(found)
