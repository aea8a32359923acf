"""One command for a bare machine of several GPUs: probes, rows of models with their checks, an
all-reduce by size, a soak; `studies/many-gpus/run.sh NODE --out FOLDER`.

Each step leaves one file in the folder and is passed by where that file is there, so a run that was
cut off goes on. On a CPU (2xhost) the same steps run on emulated GPUs with small shapes.
"""

from __future__ import annotations

import dataclasses
import statistics
import tarfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from studies.common import rows
from studies.common.rows import (
    EQUAL_TOKENS,
    KEPT,
    REPEATS,
    SEED,
    Prepared,
    alike,
    checked,
    first_tokens,
    keep,
    prepared,
    repeated,
)
from twin.calibrate.peer_probes import peer_probes
from twin.calibrate.probes import Probe
from twin.calibrate.store import conditions
from twin.engine.choose import compile_all, gpu_conditions, open_engine, open_random
from twin.engine.opening import plan_run
from twin.errors import TwinError
from twin.files import MOST_RECORD_BYTES, read_json
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.models.spec import DType, ModelSpec
from twin.plan.types import Plan
from twin.schedule.ring import limits_of

WARM_UP_STEPS = 20
CHECKED = 6  # positions of which the reference's logits are computed
ROOM = CHECKED + EQUAL_TOKENS + 2  # positions of a check's plan
PREPARING = 3  # checks that the host prepares side by side
ALIKE = 0.02  # largest difference from the reference's logits in 16 bits, of the largest logit
MEASURED = "measured"  # the file of everything that was found
SOAK_TOKENS = 200_000
SOAK_RUN = 2000  # tokens of one of its requests


@dataclass(frozen=True, slots=True)
class Row:
    """A model that is timed."""

    name: str
    model: str  # a name, or a folder next to the study
    context: int = 128
    options: dict[str, Any] = field(default_factory=dict)


FP16 = {"weight_dtype": DType.FP16, "kv_dtype": DType.FP16}
ROWS = (
    Row("laneformer-2b, delay 2", "laneformer-2b", options=FP16),
    Row("its shapes as a Llama", "shapes", options=FP16),
    Row("llama-3.2-1b", "llama-3.2-1b"),
    Row("qwen3-8b", "qwen3-8b", context=1000),
    Row("llama-3.1-70b", "llama-3.1-70b"),
    Row("gpt-oss-120b", "gpt-oss-120b"),
    Row("qwen3-235b-a22b FP8", "qwen3-235b-a22b@fp8-128x128"),  # two H200 hold it, two H100 do not
)
BY_TWO = "predictions-by-two-gpus.json"  # of the nodes that had not run when two H100 had
BY_TWO_H200 = "predictions-by-two-h200.json"  # of four and eight H200, before four had run
# of the nodes that had not run when four H200 had, by the law of further ranks
BY_FOUR_H200 = "predictions-by-four-h200.json"
# published by Kog for FP16, delay 2, batch 1 (blog.kog.ai); on eight H200
KOG = {("laneformer-2b, delay 2", "8xh200-sxm"): 2100.0}


def spec_of(row: Row, folder: Path | None = None) -> ModelSpec:
    next_to = (folder or study()) / row.model
    return load_model(str(next_to) if next_to.is_dir() else row.model)


def study() -> Path:
    """The study's folder."""
    return Path(__file__).resolve().parent


def small(spec: ModelSpec) -> ModelSpec:
    """The same kind of model, in a size that emulated GPUs run in no time."""
    lanes = spec.lanes
    return dataclasses.replace(
        spec,
        layers=6 if lanes else 2,
        windows=spec.windows[: 6 if lanes else 2],
        hidden=256,
        heads=16,
        kv_heads=8,
        head_dim=16,
        ffn=512,
        vocab=512,
        context=256,
    )


def cut(spec: ModelSpec) -> ModelSpec:
    """As many layers as show everything that a layer does, for the reference."""
    return rows.cut(spec, 2 * spec.lanes.delay + 2) if spec.lanes else rows.cut(spec)


@dataclass(slots=True)
class Run:
    """Where a run stands: its node, its folder, and whether it is only tried."""

    node: Node
    out: Path
    tiny: bool
    show: Callable[[str], None]

    def file(self, name: str) -> Path:
        return self.out / f"{name}.json"

    def step(self, name: str, make: Callable[[], Any]) -> Any:
        """What the step found, now or in an earlier run; a refusal is a finding."""
        file = self.file(name)
        if file.is_file():
            return read_json(file, MOST_RECORD_BYTES)
        self.show(name)
        began = time.monotonic()
        try:
            found = make()
        except TwinError as error:
            found = {"refused": str(error)}
        found = {**found, "seconds": time.monotonic() - began}
        keep(file, found)
        return found

    # ---- plans -----------------------------------------------------------------------------------

    def spec(self, row: Row) -> ModelSpec:
        found = spec_of(row)
        return small(found) if self.tiny and not found.layout else found

    def plan(self, row: Row, spec: ModelSpec, positions: int) -> Plan:
        options = dict(row.options)
        if self.tiny:
            options["blocks"] = 1 if spec.lanes is None else spec.lanes.count // self.node.gpus
        return plan_run(spec, self.node, options, positions=positions, greedy=True)

    def context(self, row: Row) -> int:
        return min(row.context, 32) if self.tiny else row.context

    @property
    def tokens(self) -> int:
        return 16 if self.tiny else 128

    def probes(self) -> list[Probe]:
        limits = limits_of(self.node)
        if not self.tiny:
            return peer_probes(limits, self.node.gpus)
        few = peer_probes(dataclasses.replace(limits, blocks=3), self.node.gpus)
        return [dataclasses.replace(probe, steps=3) for probe in few]


# ---- the steps -----------------------------------------------------------------------------------


def machine(run: Run) -> dict[str, Any]:
    node = run.node
    return {
        "node": node.name,
        "gpus": node.gpus,
        "tiny": run.tiny,
        "date": conditions()["date"],
        "commit": conditions()["commit"],
        "conditions": gpu_conditions(),
    }


def measure_probe(run: Run, probe: Probe) -> dict[str, Any]:
    with open_engine(run.node.device, probe.plan, None) as engine:
        engine.fill_random(SEED)
        warm_up = 1 if run.tiny else WARM_UP_STEPS
        times = [engine.step_seconds(steps=probe.steps, warmup=warm_up) for _ in range(REPEATS)]
    return {"median_s": float(np.median(np.concatenate(times))), "samples": REPEATS * probe.steps}


def measure_row(run: Run, row: Row) -> dict[str, Any]:
    """Tokens per second, and whether all repeats gave the same tokens."""
    spec, context = run.spec(row), run.context(row)
    plan = run.plan(row, spec, context + run.tokens)
    made = repeated(run.node.device, plan, first_tokens(spec.vocab, context), run.tokens)
    speeds = [one.tokens_per_s for one in made[1:]]
    return {
        "tokens_per_s": statistics.median(speeds),
        "samples": speeds,
        "same_tokens": alike(made),
        "bytes_per_step": plan.bytes_per_step(),
    }


def prepare(run: Run, row: Row) -> Prepared:
    """The row's layers with weights of their own, and the reference's logits; by the host alone."""
    spec = cut(run.spec(row))
    plan = run.plan(row, spec, ROOM)
    return prepared(plan, [(5 + 17 * at) % spec.vocab for at in range(CHECKED)], keep=KEPT)


def check_row(run: Run, small: Future[Prepared]) -> dict[str, Any]:
    """The row's layers with packed weights, next to the reference, and several runs of them."""
    found = checked(run.node.device, small.result())
    right = found["logit_difference"] < ALIKE and found["bitwise_equal"]
    return {**found, "correct": bool(right)}


def soak(run: Run) -> dict[str, Any]:
    """Many tokens of chained requests, each of which must give the first one's."""
    row = next(row for row in ROWS if row.name == "llama-3.2-1b")
    spec, each = run.spec(row), 64 if run.tiny else SOAK_RUN
    wanted, made = (2 * each if run.tiny else SOAK_TOKENS), 0
    first: list[int] | None = None
    plan = run.plan(row, spec, each + 8)
    with open_random(run.node.device, plan, SEED) as engine:
        while made < wanted:
            found = engine.generate([1, 2, 3], max_tokens=each).tokens
            first = first or found
            if found != first:
                return {"tokens": made, "same_tokens": False}
            made += len(found)
    return {"tokens": made, "same_tokens": True}


def everything(run: Run) -> dict[str, Any]:
    """All steps in order of their worth: a run that is cut off has measured the links first. The
    host prepares the checks meanwhile.
    """
    found: dict[str, Any] = {"machine": run.step("machine", partial(machine, run))}
    probes = run.probes()
    compile_all(run.node.device, [probe.plan for probe in probes] + _plans(run), run.show)
    with ThreadPoolExecutor(PREPARING) as pool:
        small = {
            row.name: pool.submit(prepare, run, row)
            for row in ROWS
            if not run.file(f"check-{slug(row.name)}").is_file()
        }
        found["probes"] = {
            probe.name: run.step(f"probe-{probe.name}", partial(measure_probe, run, probe))
            for probe in probes
        }
        found["row"] = {
            row.name: run.step(f"row-{slug(row.name)}", partial(measure_row, run, row))
            for row in ROWS
        }
        found["check"] = {
            row.name: run.step(f"check-{slug(row.name)}", partial(_checked, run, small, row.name))
            for row in ROWS
        }
    found["soak"] = run.step("soak", partial(soak, run))
    keep(run.file(MEASURED), found)
    return found


def _checked(run: Run, small: Mapping[str, Future[Prepared]], name: str) -> dict[str, Any]:
    return check_row(run, small[name])


def _plans(run: Run) -> list[Plan]:
    """Of all rows and checks that can be planned: their kernels are compiled side by side."""
    plans = []
    for row in ROWS if run.node.device.nvidia else ():
        for spec, positions in (
            (run.spec(row), run.context(row) + run.tokens),
            (cut(run.spec(row)), ROOM),
        ):
            with suppress(TwinError):
                plans.append(run.plan(row, spec, positions))
    return plans


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name).strip("-")


def pack(run: Run) -> Path:
    """All files of the run, as one to carry away."""
    made = run.out.with_suffix(".tar.gz")
    with tarfile.open(made, "w:gz") as archive:
        archive.add(run.out, arcname=run.out.name)
    return made
