"""Run the probes on a device of this computer. Needs no simulator: measuring and fitting may happen
on different computers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from twin.calibrate import store
from twin.calibrate.busy import ACTIVITY, COUNTED, LEAST_COUNTED, Round, activity, quieter
from twin.calibrate.gpu_probes import traced
from twin.calibrate.kernel_id import kernel_id
from twin.calibrate.probes import Probe
from twin.calibrate.recipe import recipe_of
from twin.calibrate.tracing import traced_stages
from twin.engine.choose import check_present, compile_all, open_engine, open_random
from twin.engine.session import Session
from twin.errors import CalibrationError, TwinError
from twin.hardware.activity import look, usable
from twin.hardware.types import Device, Node
from twin.proof.prove import prove
from twin.schedule.choose import schedule_of
from twin.schedule.ring import limits_of
from twin.text import shown

T = TypeVar("T")
Progress = Callable[[str], None]
# called after every round with what is known so far
Keep = Callable[[dict[str, Any], store.Samples], None]

WARMUP_STEPS = 3
SEED = 0  # of the probes' weights


def measure_probes(
    node: Node,
    progress: Progress,
    keep: Keep,
    *,
    quick: bool = False,
    groups: Collection[str] = (),
    also: Sequence[Callable[[], None]] = (),
) -> tuple[store.StageTimes, ...]:
    """Measure every probe, or those of some `groups`, in rounds over all of them so that a slow
    minute touches each alike; then the stages of some chains of layers. Each of `also` is called
    once in every round, between the probes.

    A probe that does not compile or run is left out; the meta data say why. Raises CalibrationError
    when none is left.
    """
    device = node.device
    recipe = recipe_of(device, node.gpus)
    require(device, node.gpus)
    probes = of_groups(recipe.probes(limits_of(node), quick), groups)
    for probe in probes:
        prove(probe.plan)
    failed: dict[str, str] = {}
    meta: dict[str, Any] = {
        **store.conditions(),
        **recipe.conditions(),
        store.KERNEL_ID: kernel_id(device),
        store.SCHEDULES: {p.name: schedule_of(p.plan).id for p in probes},
        "node": node.name,
        "quick": quick,
        **({"groups": sorted(groups)} if groups else {}),
        "steps": {p.name: p.steps for p in probes},
        "failed": failed,
    }
    refused = compile_all(device, [p.plan for p in probes], progress)
    failed |= {probes[at].name: said for at, said in refused.items()}
    rounds = recipe.quick_repeats if quick else recipe.repeats
    samples: store.Samples = {}
    seen: list[Round] = []
    began = time.monotonic()
    with ExitStack() as stack:
        # Each probe keeps its memory for all rounds, as an engine does: memory that a virtual
        # machine returned and took again streamed a third slower.
        engines: dict[str, Session] = {}
        for turn in range(rounds):
            if turn >= LEAST_COUNTED and time.monotonic() - began > recipe.most_s:
                break
            before, own = look(), _Own()
            for done, probe in enumerate(probes, start=1):
                for call in between(also, done, len(probes)):
                    call()
                if probe.name in failed:
                    continue
                progress(
                    f"probing {node.name}: round {turn + 1}/{rounds}, {done}/{len(probes)} "
                    f"{probe.name}"
                )
                try:
                    if probe.name not in engines:
                        engines[probe.name] = stack.enter_context(_open(device, probe))
                    with own.of(probe):
                        seconds = _step_seconds(engines[probe.name], probe)
                except TwinError as error:
                    # the engine turns Ctrl-C into the end of its run
                    if str(error).startswith("cancelled"):
                        raise KeyboardInterrupt from error
                    failed[probe.name] = str(error)
                    samples.pop(probe.name, None)
                    progress(f"{probe.name} failed: {error}")
                    continue
                samples.setdefault(probe.name, []).append(recipe.read(seconds))
            seen.append(Round.of(look().since(before), len(usable()), own.share()))
            if recipe.quieter:
                chosen = quieter(samples)
                meta |= {COUNTED: chosen, ACTIVITY: activity(seen, samples, chosen)}
            keep(meta | {"rounds": turn + 1}, samples)
    if not samples:
        raise CalibrationError(
            f"no probe of {device.name} ran; the first one: {next(iter(failed.values()))}"
        )
    stages = traced_stages(
        device, traced(p for p in probes if p.name not in failed), failed, progress
    )
    keep(
        meta
        | {
            "rounds": len(seen),
            "load_after": store.conditions()["load_before"],
            "after": recipe.conditions(),
        },
        samples,
    )
    return stages


def between(calls: Sequence[T], done: int, of: int) -> Sequence[T]:
    """Those of `calls` that come before probe number `done` (from 1) of so many, evenly spread."""
    return calls[(done - 1) * len(calls) // of : done * len(calls) // of]


class _Own:
    """CPU time that probes' threads had, over the time of the cores that they were on."""

    def __init__(self) -> None:
        self.had = self.wanted = 0.0

    @contextmanager
    def of(self, probe: Probe) -> Iterator[None]:
        cores = min(probe.plan.ranks * probe.plan.blocks, len(usable()))
        wall, own = time.perf_counter(), time.process_time()
        yield
        self.wanted += cores * (time.perf_counter() - wall)
        self.had += time.process_time() - own

    def share(self) -> float:
        return self.had / self.wanted if self.wanted else 1.0


def of_groups(probes: list[Probe], groups: Collection[str]) -> list[Probe]:
    """Those of some groups, or all. Raises CalibrationError for a group without probes."""
    known = {probe.group for probe in probes}
    if unknown := [group for group in groups if group not in known]:
        raise CalibrationError(
            f"no probes of the group {shown(unknown[0])}; there are {', '.join(sorted(known))}"
        )
    return [probe for probe in probes if not groups or probe.group in groups]


def require(device: Device, gpus: int = 1) -> None:
    """Raises CalibrationError unless so many of `device` are in this computer."""
    try:
        check_present(device, gpus)
    except TwinError as error:
        raise CalibrationError(
            f"{device.name} cannot be measured here: {error}; `twin calibrate host` measures this "
            "CPU"
        ) from error


def _open(device: Device, probe: Probe) -> Session:
    """An engine with random weights."""
    if probe.plan.spec is not None:
        return open_random(device, probe.plan, SEED)
    engine = open_engine(device, probe.plan, None)
    engine.fill_random(SEED)
    return engine


def _step_seconds(engine: Session, probe: Probe) -> NDArray[np.floating[Any]]:
    """Of each step that counts; a chain of layers decodes after a prompt, as long as its plan's
    context says.
    """
    if probe.plan.spec is None:
        return engine.step_seconds(steps=probe.steps, warmup=_warmup(probe))
    prompt = [
        7 + position % 97 for position in range(probe.plan.options.context - probe.steps // 2)
    ]
    made = engine.generate(prompt, max_tokens=_warmup(probe) + probe.steps)
    if made.stop_reason == "cancelled":
        raise KeyboardInterrupt
    return made.step_ns[_warmup(probe) :] * 1e-9


def _warmup(probe: Probe) -> int:
    """A tenth of the steps: clocks that rested need some milliseconds."""
    return max(WARMUP_STEPS, probe.steps // 10)
