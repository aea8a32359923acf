"""Run the probes of this computer and store what they said."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.calibrate import store
from twin.calibrate.probes import Probe, host_probes
from twin.engine.host import HostEngine
from twin.hardware.load import load_node
from twin.plan.defaults import limits_of
from twin.plan.validate import validate

Progress = Callable[[str], None]

REPEATS = 7
QUICK_REPEATS = 3
WARMUP_STEPS = 3
SEED = 0  # of the probes' weights
QUIET_PERCENT = 25


def probe_host(progress: Progress, *, quick: bool = False) -> store.Run:
    """Measure every probe, in rounds over all of them so that a slow minute touches each alike."""
    node = load_node("1xhost")
    probes = host_probes(limits_of(node), node.device.blocks, quick=quick)
    for probe in probes:
        validate(probe.plan)
    meta: dict[str, Any] = {**store.conditions(), "device": "host", "quick": quick, "steps": {p.name: p.steps for p in probes}}
    rounds = QUICK_REPEATS if quick else REPEATS
    samples: dict[str, list[float]] = {p.name: [] for p in probes}
    with ExitStack() as stack:
        # Each probe keeps its memory for all rounds, as an engine does: memory that a virtual machine returned and took
        # again streamed a third slower.
        engines = [_prepared(stack, probe) for probe in probes]
        for turn in range(rounds):
            for done, (probe, engine) in enumerate(zip(probes, engines, strict=True), start=1):
                progress(f"probing host: round {turn + 1}/{rounds}, {done}/{len(probes)} {probe.name}")
                samples[probe.name].append(quiet(engine.step_seconds(steps=probe.steps, warmup=WARMUP_STEPS)))
    meta["load_after"] = store.conditions()["load_before"]
    return store.write_run("host", "quick" if quick else "probes", meta, samples)


def _prepared(stack: ExitStack, probe: Probe) -> HostEngine:
    engine = stack.enter_context(HostEngine(probe.plan, None))
    engine.fill_random(SEED)
    return engine


def quiet(seconds: NDArray[Any]) -> float:
    """The lower quartile of the steps of one call.

    Other processes only ever add time, and on a shared computer they do so to more than every second step. Repeats are
    compared by their medians instead: a virtual machine's memory was seen to change between 40 and 60 GB/s for minutes.
    Probes and held-out runs are read alike.
    """
    return float(np.percentile(seconds, QUIET_PERCENT))


def settled(run: store.Run) -> dict[str, float]:
    """The middle repeat of each probe."""
    return {name: float(np.median(values)) for name, values in run.samples.items()}
