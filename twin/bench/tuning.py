"""Plans of whole models and probes by short names, timed on one NVIDIA GPU: what the tuning scripts
share.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.calibrate.gpu_heldout import qwen2_half
from twin.calibrate.gpu_probes import gpu_probes
from twin.engine.cuda import CudaEngine, run_probe
from twin.engine.safetensors import NUMPY
from twin.errors import ConfigError
from twin.kernel.budget import shared_bytes
from twin.kernel.marks import of_consumers
from twin.models.decoder import canonical_shape
from twin.models.load import load_model
from twin.models.spec import DType, ModelSpec
from twin.plan.build import build
from twin.plan.types import CollectiveKind, Execution, HandOffKind, LateParts, Limits, Options, Plan
from twin.text import shown

H200 = Limits(
    blocks=132,
    dies=1,
    on_chip_bytes=232448,
    memory_bytes=141 * 10**9,
    oversubscribe=False,
    teams=True,
)
TOKENS, REPEATS, PROMPT = 320, 3, 32
SEED = 5
TOO_SLOW_NS = 10e6  # a step that takes longer is recorded from a few tokens: device time is short
SLOT_BYTES = 16384
MODELS = {
    "llama": ("llama-3.2-1b", 132),
    "lane": ("laneformer-2b", 128),
    "qwen8": ("qwen3-8b", 132),
    "qwen2": ("qwen2-0.5b", 132),
}
PROBE = "probe:"
RING = ("slot_bytes", "ring_slots", "window_slots")
# options that are no numbers
KINDS = {"handoff": HandOffKind, "execution": Execution, "late_parts": LateParts}


@dataclass(frozen=True)
class Case:
    """A plan and how it is timed."""

    name: str
    plan: Plan
    prompt: int = PROMPT
    tokens: int = TOKENS
    repeats: int = REPEATS


def fitted(make: Any, slot_bytes: int) -> Plan:
    """The plan whose ring fills what the vectors leave of a block's shared memory."""
    lone = make(slot_bytes=slot_bytes, ring_slots=1, window_slots=1)
    barriers = 4 * 192  # bytes for 12 slots, as many of them under way
    slots = 1 + (H200.on_chip_bytes - shared_bytes(lone) - barriers) // slot_bytes
    made: Plan = make(slot_bytes=slot_bytes, ring_slots=slots, window_slots=slots)
    return made


def plan_of(text: str) -> Plan:
    """`llama,slot_bytes=8192,splits=4,handoff=grid`, or `probe:NAME`: by default with a ring that
    fills the block.
    """
    if text.startswith(PROBE):
        return next(
            probe.plan
            for probe in gpu_probes(H200, quick=False)
            if probe.name == text[len(PROBE) :]
        )
    key, *chosen = text.split(",")
    if key not in MODELS:
        raise ConfigError(
            f"{shown(text)}: no model {shown(key)}; choose from {', '.join(MODELS)}, or {PROBE}NAME"
        )
    name, blocks = MODELS[key]
    spec = qwen2_half() if key == "qwen2" else load_model(name)
    dtype = DType.FP16 if spec.lanes else DType.BF16
    collective = CollectiveKind.PUSH if spec.lanes else CollectiveKind.NONE
    options: dict[str, Any] = {
        "blocks": blocks,
        "weight_dtype": dtype,
        "kv_dtype": dtype,
        "collective": collective,
    }
    options |= {"context": PROMPT + TOKENS // 2} | _chosen(chosen)
    options.setdefault("max_context", int(options["context"]) + 512)
    slot, slots, window = (options.pop(name, None) for name in RING)

    def make(**ring: Any) -> Plan:
        return build(spec, Options(**options, **ring), H200)

    slot = slot or SLOT_BYTES
    most = slots or fitted(make, slot).options.ring_slots
    return make(slot_bytes=slot, ring_slots=most, window_slots=min(window or most, most))


def _chosen(words: list[str]) -> dict[str, Any]:
    """Options by name; `splits` is short for attention_splits."""
    pairs = (word.split("=") for word in words)
    found: dict[str, Any] = {
        name: KINDS[name](value) if name in KINDS else int(value) for name, value in pairs
    }
    return {
        "attention_splits" if name == "splits" else name: value for name, value in found.items()
    }


class Vectors:
    """Norms of one and a repeated random table: what the engine asks for when its matrices are
    filled on the device.
    """

    def __init__(self, spec: ModelSpec, dtype: DType) -> None:
        self.spec, self.dtype = spec, dtype

    def __getitem__(self, name: str) -> Any:
        shape = canonical_shape(self.spec, name)
        if len(shape) == 1:
            return np.ones(shape, NUMPY[self.dtype])
        pattern = (
            np.random.default_rng(SEED)
            .standard_normal((1000, shape[1]), np.float32)
            .astype(NUMPY[self.dtype])
        )
        return np.resize(pattern, shape)


def measure_model(case: Case) -> dict[str, Any]:
    plan = case.plan
    assert plan.spec is not None
    prompt = [int(t) for t in np.random.default_rng(SEED).integers(0, plan.spec.vocab, case.prompt)]
    with CudaEngine(
        plan, Vectors(plan.spec, plan.options.weight_dtype), random_streams=SEED
    ) as engine:
        runs = [engine.generate(prompt[:4], max_tokens=12)]
        if np.median(runs[0].step_ns) < TOO_SLOW_NS:
            runs = [engine.generate(prompt, max_tokens=case.tokens) for _ in range(case.repeats)]
        report = engine.report
    medians = [float(np.median(run.step_ns[4:])) / 1e9 for run in runs]
    means = [float(np.mean(run.step_ns[4:])) / 1e9 for run in runs]
    return {
        "step_s": statistics.median(medians),
        "medians_s": medians,
        "means_s": means,
        "p5_s": float(np.percentile(runs[-1].step_ns, 5)) / 1e9,
        "p95_s": float(np.percentile(runs[-1].step_ns, 95)) / 1e9,
        "prompt_s": [run.prompt_ns / 1e9 for run in runs],
        "same_tokens": all(run.tokens == runs[0].tokens for run in runs),
        "tokens": runs[0].tokens[:8],
        "registers": report.registers,
        "shared_bytes": report.shared_bytes,
        "step_ns": [[int(t) for t in run.step_ns] for run in runs],
    }


def measure_probe(case: Case) -> dict[str, Any]:
    runs = [run_probe(case.plan, steps=case.tokens, warmup=5) for _ in range(case.repeats)]
    medians = [float(np.median(run)) for run in runs]
    return {"step_s": statistics.median(medians), "medians_s": medians}


def trace_of(case: Case) -> dict[str, Any]:
    """Mean microseconds a step of a block: waiting for inputs and working, by kind of stage."""
    plan = case.plan
    assert plan.spec is not None
    prompt = [int(t) for t in np.random.default_rng(SEED).integers(0, plan.spec.vocab, PROMPT)]
    with CudaEngine(
        plan, Vectors(plan.spec, plan.options.weight_dtype), random_streams=SEED, trace=True
    ) as engine:
        made = engine.generate(prompt, max_tokens=48)
    assert made.trace is not None
    marks = made.trace[PROMPT + 8 : -1].astype(np.float64)  # [steps][ranks][blocks][stages][2]
    trace, steps = of_consumers(plan, marks), marks.shape[0]
    helped = {
        s.kind: (marks[..., s.index, 1] - marks[..., s.index, 0]).mean() / 1e3
        for s in plan.stages
        if plan.by_keeper(s)
    }
    flat = trace.transpose(1, 2, 0, 3, 4).reshape(
        plan.ranks * plan.blocks, steps * len(plan.stages), 2
    )
    before = np.concatenate([flat[:, :1, 0], flat[:, :-1, 1]], axis=1)
    wait, work = flat[:, :, 0] - before, flat[:, :, 1] - flat[:, :, 0]
    done = flat[:, :, 1]
    spread = done.max(axis=0) - done.min(axis=0)
    out: dict[str, Any] = {"step_us": float(np.median(made.step_ns[8:])) / 1e3}
    kinds = [stage.kind for stage in plan.stages] * steps
    for kind in dict.fromkeys(kinds):
        at = np.array([k is kind for k in kinds])
        count = at.sum() / steps
        out[kind.value] = {
            "stages": count,
            "wait_us": float(wait[:, at].mean() * count / 1e3),
            "work_us": float(work[:, at].mean() * count / 1e3),
            "slowest_work_us": float(work[:, at].max(axis=0).mean() * count / 1e3),
            "finish_spread_us": float(spread[at].mean() / 1e3),
        }
    for kind, took in helped.items():
        out[kind.value]["beside_the_others_us"] = float(took)  # of the last such stage
    return out
