"""The monokernel's first run on an H200: `predict` asks the twin, `build` compiles, `measure` times; see README.md.

python studies/h200-first-run/first_run.py predict predictions.json
python studies/h200-first-run/first_run.py measure measured.json [group ...]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from twin.engine.cuda import CudaEngine, run_probe
from twin.engine.cuda_build import compile_cubin, shared_bytes
from twin.engine.weights import NUMPY
from twin.kernel.marks import of_consumers
from twin.models.decoder import canonical_shape
from twin.models.load import load_model
from twin.models.spec import DType, ModelSpec
from twin.plan.build import build
from twin.plan.probe import exchange_probe, stream_probe
from twin.plan.types import CollectiveKind, Execution, HandOffKind, Limits, Options, Plan

H200 = Limits(blocks=132, dies=1, on_chip_bytes=232448, memory_bytes=141 * 10**9, oversubscribe=False, teams=True)
CEILING = 4.61e12  # bytes a second that the copy ring of the first probes streamed
TOKENS, REPEATS, PROMPT = 320, 3, 32
SEED = 5
TOO_SLOW_NS = 10e6  # a step that takes longer is recorded from a few tokens: device time is short


@dataclass(frozen=True)
class Case:
    group: str
    label: str
    plan: Plan
    prompt: int = PROMPT
    tokens: int = TOKENS
    repeats: int = REPEATS

    @property
    def name(self) -> str:
        o = self.plan.options
        return f"{self.group} | {self.label} | {o.handoff.value} | {o.execution.value} | {o.blocks} x {o.ring_slots} x {o.slot_bytes}"


def fitted(make: Any, slot_bytes: int) -> Plan:
    """The plan whose ring fills what the vectors leave of a block's shared memory."""
    lone = make(slot_bytes=slot_bytes, ring_slots=1, window_slots=1)
    barriers = 4 * 192  # bytes for 12 slots, as many of them under way
    slots = 1 + (H200.on_chip_bytes - shared_bytes(lone) - barriers) // slot_bytes
    made: Plan = make(slot_bytes=slot_bytes, ring_slots=slots, window_slots=slots)
    return made


@lru_cache(maxsize=64)
def model_plan(name: str, slot_bytes: int, handoff: HandOffKind, execution: Execution, blocks: int, context: int) -> Plan:
    spec = load_model(name)
    dtype = DType.FP16 if spec.lanes else DType.BF16

    def make(**ring: int) -> Plan:
        options = Options(
            blocks=blocks, handoff=handoff, execution=execution, weight_dtype=dtype, kv_dtype=dtype, context=context,
            max_context=context + 512, collective=CollectiveKind.PUSH if spec.lanes else CollectiveKind.NONE, **ring,
        )  # fmt: skip
        return build(spec, options, H200)

    return fitted(make, slot_bytes)


def probe_plan(kind: str, slot_bytes: int, handoff: HandOffKind = HandOffKind.SENTINEL, **sizes: int) -> Plan:
    def make(**ring: int) -> Plan:
        options = Options(blocks=132, handoff=handoff, **ring)
        return (stream_probe if kind == "stream" else exchange_probe)(options, H200, **sizes)

    return fitted(make, slot_bytes)


def cases() -> Iterator[Case]:
    resident, graph = Execution.RESIDENT, Execution.GRAPH
    for slot in (16384, 32768):
        yield Case("stream", "4 x 1.08 GB", probe_plan("stream", slot, rows=132 * 1000, cols=4096, stages=4), tokens=20)
        yield Case("stream", "4 x 8.6 MB, in L2", probe_plan("stream", slot, rows=1056, cols=4096, stages=4), tokens=200)
    for handoff in HandOffKind:
        yield Case("exchange", "15 x 2112 floats", probe_plan("exchange", 16384, handoff, elements=2112, stages=15), tokens=200)
    for name, blocks, prompt in (("laneformer-2b", 128, 32), ("llama-3.2-1b", 132, 32), ("qwen3-8b", 132, 896)):
        context = prompt + TOKENS // 2
        for slot in (16384, 32768):
            plan = model_plan(name, slot, HandOffKind.SENTINEL, resident, blocks, context)
            yield Case("model", name, plan, prompt)
        for handoff in (HandOffKind.COUNTER, HandOffKind.GRID) if name != "qwen3-8b" else ():
            yield Case("model", name, model_plan(name, 16384, handoff, resident, blocks, context), prompt)
        if name != "qwen3-8b":
            yield Case("model", name, model_plan(name, 16384, HandOffKind.SENTINEL, graph, blocks, context), prompt)
    yield Case("model", "llama-3.2-1b", model_plan("llama-3.2-1b", 16384, HandOffKind.SENTINEL, resident, 128, PROMPT + TOKENS // 2))


class Vectors:
    """Norms of one and a repeated random table: what the engine asks for when its matrices are filled on the device."""

    def __init__(self, spec: ModelSpec, dtype: DType) -> None:
        self.spec, self.dtype = spec, dtype

    def __getitem__(self, name: str) -> Any:
        shape = canonical_shape(self.spec, name)
        if len(shape) == 1:
            return np.ones(shape, NUMPY[self.dtype])
        chunk = np.random.default_rng(SEED).standard_normal((1000, shape[1]), np.float32).astype(NUMPY[self.dtype])
        return np.resize(chunk, shape)


def predict(path: Path) -> None:
    from twin.hardware.load import load_node
    from twin.sim.run import simulate

    node, rows = load_node("1xh200"), {}
    for case in cases():
        result = simulate(case.plan, node, steps=2)
        rows[case.name] = {"step_s": result.step_s, "bytes": case.plan.bytes_per_step(), "stream_fraction": result.stream_fraction}
        print(f"{case.name:80} {result.step_s * 1e6:9.1f} us", flush=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")


def build_all(wanted: list[Plan], traced: list[Plan]) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = [pool.submit(compile_cubin, plan) for plan in wanted] + [pool.submit(compile_cubin, plan, trace=True) for plan in traced]
        for one in made:
            one.result()


def measure_model(case: Case) -> dict[str, Any]:
    plan = case.plan
    assert plan.spec is not None
    prompt = [int(t) for t in np.random.default_rng(SEED).integers(0, plan.spec.vocab, case.prompt)]
    with CudaEngine(plan, Vectors(plan.spec, plan.options.weight_dtype), random_streams=SEED) as engine:
        runs = [engine.generate(prompt[:4], max_tokens=12)]
        if np.median(runs[0].step_ns) < TOO_SLOW_NS:
            runs = [engine.generate(prompt, max_tokens=case.tokens) for _ in range(case.repeats)]
        report = engine.report
    medians = [float(np.median(run.step_ns[4:])) / 1e9 for run in runs]
    means = [float(np.mean(run.step_ns[4:])) / 1e9 for run in runs]
    return {
        "step_s": statistics.median(medians), "medians_s": medians, "means_s": means,
        "p5_s": float(np.percentile(runs[-1].step_ns, 5)) / 1e9, "p95_s": float(np.percentile(runs[-1].step_ns, 95)) / 1e9,
        "prompt_s": [run.prompt_ns / 1e9 for run in runs], "same_tokens": all(run.tokens == runs[0].tokens for run in runs),
        "tokens": runs[0].tokens[:8], "registers": report.registers, "shared_bytes": report.shared_bytes,
        "step_ns": [[int(t) for t in run.step_ns] for run in runs],
    }  # fmt: skip


def measure_probe(case: Case) -> dict[str, Any]:
    runs = [run_probe(case.plan, steps=case.tokens, warmup=5) for _ in range(case.repeats)]
    medians = [float(np.median(run)) for run in runs]
    return {"step_s": statistics.median(medians), "medians_s": medians}


def trace_of(case: Case) -> dict[str, Any]:
    """Mean microseconds a step of a block: waiting for inputs and working, by kind of stage."""
    plan = case.plan
    assert plan.spec is not None
    prompt = [int(t) for t in np.random.default_rng(SEED).integers(0, plan.spec.vocab, PROMPT)]
    with CudaEngine(plan, Vectors(plan.spec, plan.options.weight_dtype), random_streams=SEED, trace=True) as engine:
        made = engine.generate(prompt, max_tokens=48)
    assert made.trace is not None
    marks = made.trace[PROMPT + 8 : -1].astype(np.float64)  # [steps][ranks][blocks][stages][2]
    trace, steps = of_consumers(plan, marks), marks.shape[0]
    helped = {s.kind: (marks[..., s.index, 1] - marks[..., s.index, 0]).mean() / 1e3 for s in plan.stages if plan.aside(s)}
    flat = trace.transpose(1, 2, 0, 3, 4).reshape(plan.ranks * plan.blocks, steps * len(plan.stages), 2)
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
            "stages": count, "wait_us": float(wait[:, at].mean() * count / 1e3), "work_us": float(work[:, at].mean() * count / 1e3),
            "slowest_work_us": float(work[:, at].max(axis=0).mean() * count / 1e3), "finish_spread_us": float(spread[at].mean() / 1e3),
        }  # fmt: skip
    for kind, took in helped.items():
        out[kind.value]["beside_the_others_us"] = float(took)  # of the last such stage
    return out


def row(case: Case, made: dict[str, Any]) -> str:
    moved = case.plan.bytes_per_step() / made["step_s"]
    return f"{case.name:80} {made['step_s'] * 1e6:9.1f} us {1 / made['step_s']:7.0f}/s {moved / 1e12:6.3f} TB/s {moved / CEILING:6.1%}"


def measure(path: Path, groups: list[str]) -> None:
    chosen = [case for case in cases() if not groups or any(g in case.name for g in groups)]
    traced = [
        c for c in chosen if c.group == "model" and c.plan.options.handoff is HandOffKind.SENTINEL and c.plan.options.slot_bytes == 16384
    ]
    begun = time.monotonic()
    build_all([case.plan for case in chosen], [case.plan for case in traced])
    print(f"built {len(chosen) + len(traced)} kernels in {time.monotonic() - begun:.0f} s", flush=True)
    done: dict[str, Any] = {}
    table = []
    for case in chosen:
        try:
            made = measure_model(case) if case.plan.spec else measure_probe(case)
        except Exception as error:  # a failed variant must not cost the others their turn
            made = {"error": str(error)}
        done[case.name] = made
        table.append(f"{case.name:80} {made['error']}" if "error" in made else row(case, made))
        print(table[-1], flush=True)
        path.write_text(json.dumps(done) + "\n")
    for case in traced:
        if case.plan.options.execution is Execution.RESIDENT:
            done[f"trace | {case.name}"] = trace_of(case)
            print(json.dumps({f"trace | {case.name}": done[f"trace | {case.name}"]}), flush=True)
            path.write_text(json.dumps(done) + "\n")
    print("\n".join(["", *table]))


if __name__ == "__main__":
    verb, path, *rest = sys.argv[1:]
    if verb == "predict":
        predict(Path(path))
    else:
        measure(Path(path), rest)
