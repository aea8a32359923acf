"""Prompts read in passes give what token by token gives, whatever the model, the plan and the
length.
"""

from __future__ import annotations

import csv
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from studies.common.rows import cut
from tests.engine import test_cuda_engine as on_gpu
from tests.engine.families import AROUND, TOGETHER
from tests.engine.small_engine import LANED, LLAMA, QWEN2, QWEN3, SEED, engine, expected, planned
from tests.native.test_warps import build_warps
from twin.calibrate.node import calibrated_node
from twin.cost.prompt import prompt_time
from twin.engine import host
from twin.engine.cuda import CudaEngine
from twin.engine.cuda_build import compile_cubin
from twin.engine.hip_build import cached_code_object
from twin.engine.session import Session
from twin.engine.weights import random_weights
from twin.errors import PlanError, ToolchainError
from twin.hardware.load import load_node
from twin.models.load import load_model
from twin.models.spec import DType, LaneHead, Lanes, ModelSpec, Rope, RopeStyle
from twin.plan.options import CollectiveKind, Execution, HandOffKind, LateParts, Sampling
from twin.plan.types import Plan
from twin.reference.step import Reference
from twin.schedule.choose import schedule_of
from twin.schedule.options import plan_for
from twin.schedule.plans import build

CHUNK = 16
PROMPT = [int(t) for t in np.random.default_rng(1).integers(0, LLAMA.vocab, 45)]
TURNED = replace(
    LLAMA, name="interleaved", rope=Rope(10000.0, RopeStyle.INTERLEAVED), windows=(0, 5, 20)
)
FAMILIES = (LLAMA, QWEN2, QWEN3, TURNED)
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 40)  # of a prompt, around the borders of a chunk


def chunked(spec: ModelSpec = LLAMA, **chosen: Any) -> Plan:
    return planned(spec, **({"prompt_chunk": CHUNK} | chosen))


def error_after(
    running: Session, wanted: np.ndarray[Any, Any], lengths: Sequence[int], prompt: list[int]
) -> float:
    """Largest difference of the logits of two tokens after prompts of these lengths, relative to
    the largest logit.
    """
    found = {n: running.logits(prompt[n : n + 2], after=prompt[:n]) for n in lengths}
    return max(
        float(np.abs(logits - wanted[n : n + 2]).max()) for n, logits in found.items()
    ) / float(np.abs(wanted).max())


def error(plan: Plan, lengths: Sequence[int]) -> float:
    with engine(plan) as running:
        return error_after(running, expected(plan, PROMPT[: max(lengths) + 2]), lengths, PROMPT)


@pytest.mark.parametrize("spec", FAMILIES, ids=lambda s: s.name)
def test_passes_fill_the_cache_as_steps_do(spec: ModelSpec) -> None:
    assert error(chunked(spec), LENGTHS) < 1e-5


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("head", "delay", "early", "late"),
    [
        (LaneHead.SUM, 0, False, LateParts.EACH),
        (LaneHead.MEAN, 1, True, LateParts.EACH),
        (LaneHead.VOCABULARY, 2, False, LateParts.REDUCED),
        (LaneHead.SUM, 2, True, LateParts.REDUCED),
        (LaneHead.SUM, 2, False, LateParts.EACH),
        (LaneHead.SUM, 1, False, LateParts.REDUCED),
    ],
)
def test_lanes_read_each_others_delayed_parts(
    head: LaneHead, delay: int, early: bool, late: LateParts
) -> None:
    spec = replace(LANED, lanes=Lanes(4, delay, head, early))
    assert error(chunked(spec, gpus=2, blocks=4, late_parts=late), (7, 33)) < 1e-5


@pytest.mark.parametrize(
    ("gpus", "blocks", "handoff"),
    [
        (1, 1, HandOffKind.SENTINEL),
        (1, 3, HandOffKind.GRID),
        (2, 2, HandOffKind.COUNTER),
        (4, 2, HandOffKind.SENTINEL),
    ],
)
def test_blocks_ranks_and_hand_offs_do_not_matter(
    gpus: int, blocks: int, handoff: HandOffKind
) -> None:
    assert (
        error(
            chunked(gpus=gpus, blocks=blocks, handoff=handoff, attention_splits=1 + blocks // 2),
            (20,),
        )
        < 1e-5
    )


@pytest.mark.parametrize(
    ("execution", "collective"),
    [
        (Execution.GRAPH, CollectiveKind.PUSH),
        (Execution.GRAPH, CollectiveKind.LIBRARY),
        (Execution.LAUNCHES, CollectiveKind.LIBRARY),
    ],
)
def test_kernels_per_stage_follow_the_passes(
    execution: Execution, collective: CollectiveKind
) -> None:
    assert (
        error(
            chunked(execution=execution, collective=collective, gpus=2, sampling=Sampling.FULL),
            (20,),
        )
        < 1e-5
    )


def test_generation_goes_on_where_the_passes_end() -> None:
    plan = chunked()
    with engine(plan) as running:
        for length in (1, 2, 16, 17, 18, 40):
            made = running.generate(PROMPT[:length], max_tokens=6)
            assert made.tokens == Reference(plan, random_weights(LLAMA, SEED, DType.FP32)).generate(
                PROMPT[:length], 6
            )
            assert (
                len(made.pass_ns)
                == schedule_of(plan).of_passes().count(length)
                == -(-(length - 1) // CHUNK)
            )
            assert len(made.step_ns) == 6
            assert (made.step_ns > 0).all()
            assert (made.pass_ns > 0).all()
            assert made.pass_ns.sum() <= made.prompt_ns


@pytest.mark.parametrize("chunk", [3, 64])
def test_any_number_of_tokens_a_pass(chunk: int) -> None:
    assert error(chunked(prompt_chunk=chunk), (1, 8, 40)) < 1e-5


def test_logits_after_a_prompt_need_no_passes() -> None:
    assert error(planned(), (3, 20)) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_the_host_computes_stored_types_in_fp32(dtype: DType) -> None:
    # as one of test_host_engine.py, so that it is compiled once
    plan = chunked(weight_dtype=dtype, kv_dtype=dtype)
    # a cached value may round to its other neighbour
    assert error(plan, (20,)) < (1e-3 if dtype is DType.FP16 else 8e-3)


def test_wide_vectors_and_many_slices() -> None:
    spec = replace(
        LLAMA, hidden=328, heads=16, kv_heads=8, head_dim=24, ffn=1000, layers=2, windows=(0, 0)
    )
    assert error(chunked(spec, blocks=3, slot_bytes=2048, tile_rows=4), (20,)) < 1e-5
    assert error(chunked(spec, blocks=3, slot_bytes=65536), (20,)) < 1e-5


def test_a_pass_streams_all_layers_but_what_follows_the_last_keys() -> None:
    plan = chunked()
    layer = sum(s.matrix.rows * s.matrix.cols for s in plan.stages if s.matrix and s.layer == 0)
    qkv = next(s.matrix.rows * s.matrix.cols for s in plan.stages if s.matrix)
    assert schedule_of(plan).of_passes().weight_bytes() == 4 * ((LLAMA.layers - 1) * layer + qkv)


@pytest.mark.slow  # of experts in the gate: test_routed_prompts.py
@pytest.mark.parametrize(
    ("spec", "more"),
    [
        (QWEN3, {"gpus": 2, "blocks": 1}),
        (replace(TOGETHER, layers=2, windows=(0, 5)), {}),
        (LANED, {"blocks": 4, "attention_splits": 2}),
    ],
    ids=["qwen3", "together", "lanes"],
)
def test_blocks_of_many_warps_and_threads(
    spec: ModelSpec, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "build_host", build_warps)
    plan = chunked(spec, slot_bytes=512, prompt_chunk=4, **more)
    assert error(plan, (6,)) < 1e-5


@pytest.mark.parametrize("execution", [Execution.RESIDENT, Execution.GRAPH])
def test_cancel_ends_the_passes(execution: Execution) -> None:
    plan = chunked(max_context=100_000, attention_splits=1, execution=execution)
    with engine(plan) as running:
        threading.Timer(0.2, running.cancel).start()
        made = running.generate([1] * 60_000, max_tokens=5)
        assert made.tokens == []
        assert made.stop_reason == "cancelled"
        assert len(made.pass_ns) == 0
        assert len(running.generate(PROMPT, max_tokens=5).tokens) == 5


# ---- the prediction ------------------------------------------------------------------------------


PROMPTS = Path(__file__).resolve().parents[2] / "studies" / "prompts"


def measured_ms() -> list[tuple[str, int, float]]:
    with (PROMPTS / "measured.csv").open(encoding="utf-8") as table:
        return [
            (row["model"], int(row["tokens"]), float(row["prompt_ms"]))
            for row in csv.DictReader(table)
        ]


@pytest.mark.few(4)
@pytest.mark.parametrize(("model", "tokens", "measured_ms"), measured_ms())
def test_prompts_take_what_an_h200_took(model: str, tokens: int, measured_ms: float) -> None:
    """They rest on latencies fitted to probes too, so a new fit of those moves them."""
    node = load_node("1xh200")
    found = prompt_time(plan_for(load_model(model), node, max_context=33000), node, tokens)
    assert found.seconds == pytest.approx(measured_ms * 1e-3, rel=0.2)


def test_families_of_other_norms_take_what_a_gpu_took() -> None:
    """Capped scores, heads normed together, heads of 256 elements; by the fit in force."""
    with (PROMPTS / "families.csv").open(encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    for row in rows:
        node = calibrated_node(row["node"])
        plan = plan_for(load_model(row["model"]), node, context=4096, max_context=4160)
        found = prompt_time(plan, node, int(row["tokens"])).seconds
        assert found == pytest.approx(float(row["ms"]) * 1e-3, rel=0.1), row


@pytest.mark.few(1)
@pytest.mark.parametrize("node", ["1xh200", "8xh200", "8xmi300x", "1xhost"])
def test_longer_prompts_take_longer_and_none_is_faster_than_its_weights(node: str) -> None:
    machine = load_node(node)
    plan = plan_for(load_model("llama-3.2-1b"), machine, max_context=2048)
    times = [prompt_time(plan, machine, tokens) for tokens in (1, 2, 16, 17, 18, 500, 2000)]
    assert times[0].seconds == 0
    assert [t.seconds for t in times] == sorted(t.seconds for t in times)
    assert all(t.seconds >= t.floor_s for t in times)


def test_predictions_that_make_no_sense_are_refused() -> None:
    node = load_node("1xh200")
    spec = load_model("llama-3.2-1b")
    with pytest.raises(
        PlanError, match="a prompt of 5000 tokens: must lie between 1 and max_context=1024"
    ):
        prompt_time(plan_for(spec, node), node, 5000)
    with pytest.raises(PlanError, match="prompt_chunk=1 reads prompts by ordinary steps"):
        prompt_time(plan_for(spec, node, prompt_chunk=1), node, 50)


# ---- without a GPU -------------------------------------------------------------------------------


def test_what_the_tensor_cores_do_not_take_is_refused() -> None:
    with pytest.raises(
        PlanError,
        match=r"prompt_chunk=48: a pass of this plan takes 16, 32, 64.*use one of them, or 1",
    ):
        compile_cubin(on_gpu.planned(prompt_chunk=48))
    with pytest.raises(PlanError, match="prompt_chunk=0: must be at least 1"):
        on_gpu.planned(prompt_chunk=0)
    with pytest.raises(ToolchainError, match="prompt_chunk=16: HIP reads prompts token by token"):
        cached_code_object(on_gpu.planned(prompt_chunk=16), "gfx942")


def test_a_gpu_reads_as_many_tokens_a_pass_as_fit_a_cpu_16_and_hip_one() -> None:
    spec = load_model("llama-3.2-1b")
    chosen = {
        name: plan_for(spec, load_node(name)).options.prompt_chunk
        for name in ("1xh200", "8xmi300x", "1xhost")
    }
    assert chosen == {"1xh200": 1024, "8xmi300x": 1, "1xhost": 16}


# ---- on a GPU ------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(bool(on_gpu.REASON), reason=on_gpu.REASON or "a GPU")
TYPES = (DType.FP16, DType.BF16, DType.FP32)
# inputs of matrices are rounded to the weights' type
ON_GPU = {DType.FP16: 5e-3, DType.BF16: 3e-2, DType.FP32: 2e-5}


GPU_CHUNK = {DType.FP16: 16, DType.BF16: 32, DType.FP32: 64}


def gpu_plan(spec: ModelSpec, dtype: DType, **chosen: Any) -> Plan:
    return on_gpu.planned(
        spec,
        **({"prompt_chunk": GPU_CHUNK[dtype], "weight_dtype": dtype, "kv_dtype": dtype} | chosen),
    )


def wide(name: str, layers: int) -> Plan:
    """A real model's matrices, in passes."""
    plan = on_gpu.wide(name, layers)
    assert plan.spec is not None
    return build(plan.spec, replace(plan.options, prompt_chunk=64), plan.limits)


def otherwise(name: str) -> Plan:
    """The same of a family with other norms."""
    return build(cut(load_model(name)), wide("llama-3.2-1b", 1).options, on_gpu.H200)


def long(name: str, chunk: int) -> Plan:
    """Passes of several tiles of tokens, which neighbouring blocks share."""
    options = on_gpu.wide("llama-3.2-1b", 2).options
    options = replace(options, prompt_chunk=chunk, max_context=1100)
    return build(cut(load_model(name)), options, on_gpu.H200)


MATRIX = [
    (s, d, x)
    for s in (*FAMILIES, AROUND, TOGETHER, on_gpu.LANED)
    for d in TYPES
    for x in on_gpu.EXECUTIONS
]
# norms behind modules, of all heads together, capped scores; heads of 256 elements
OTHERWISE = ("olmo-2-7b", "gemma-2-2b", "gemma-3-1b")
# heads of 64 elements; of 256 with capped scores, with three query heads a KV head, with windows
# that end within a prompt
LONG = ("llama-3.2-1b", "gemma-2-2b", "falcon3-7b", "gemma-3-1b")


def all_plans() -> list[Plan]:
    """What these tests compile, for who wants to compile it in advance and in parallel."""
    made = [gpu_plan(s, d, execution=x) for s, d, x in MATRIX]
    return [
        *made,
        *(wide(*one) for one in on_gpu.WIDE),
        *(long(name, chunk) for name in LONG for chunk in (1024, 1)),
        *map(otherwise, OTHERWISE),
    ]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("spec", "dtype", "execution"), MATRIX, ids=lambda v: getattr(v, "name", str(v))
)
def test_gpu_passes_fill_the_cache_as_steps_do(
    spec: ModelSpec, dtype: DType, execution: Execution
) -> None:
    plan = gpu_plan(spec, dtype, execution=execution)
    wanted = on_gpu.expected(plan, PROMPT[:42])
    with CudaEngine(plan, on_gpu.weights_of(plan)) as running:
        assert error_after(running, wanted, LENGTHS, PROMPT) < ON_GPU[dtype]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("name", "layers"), on_gpu.WIDE)
def test_gpu_real_widths_and_the_same_bits_every_time(name: str, layers: int) -> None:
    plan = wide(name, layers)
    prompt = [t * 80 for t in PROMPT[:35]]
    wanted = on_gpu.expected(plan, prompt)
    with CudaEngine(plan, on_gpu.weights_of(plan)) as running:
        assert error_after(running, wanted, (33, 16, 5), prompt) < ON_GPU[plan.options.weight_dtype]
        made = [running.generate(prompt, max_tokens=20).tokens for _ in range(5)]
        assert all(one == made[0] for one in made)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", OTHERWISE)
def test_gpu_families_of_other_norms_read_prompts_in_passes(name: str) -> None:
    plan = otherwise(name)
    prompt = [t * 80 for t in PROMPT[:35]]
    wanted = on_gpu.expected(plan, prompt)
    with CudaEngine(plan, on_gpu.weights_of(plan)) as running:
        assert error_after(running, wanted, (33, 16, 5), prompt) < ON_GPU[plan.options.weight_dtype]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", LONG)
def test_gpu_long_prompts_in_passes_are_those_read_by_steps(name: str) -> None:
    fast, slow = long(name, 1024), long(name, 1)
    assert fast.spec is not None
    prompt = [int(t) for t in np.random.default_rng(2).integers(0, fast.spec.vocab, 1002)]
    found = []
    for plan in (slow, fast):
        with CudaEngine(plan, on_gpu.weights_of(plan)) as running:
            found.append(
                {
                    n: running.logits(prompt[n : n + 2], after=prompt[:n])
                    for n in (64, 129, 200, 600, 1000)
                }
            )
    wanted, made = found
    assert (
        max(float(np.abs(made[n] - wanted[n]).max() / np.abs(wanted[n]).max()) for n in wanted)
        < ON_GPU[DType.BF16]
    )


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("execution", on_gpu.EXECUTIONS)
def test_gpu_generation_goes_on_where_the_passes_end(execution: Execution) -> None:
    plan = gpu_plan(LLAMA, DType.FP32, execution=execution)
    with CudaEngine(plan, on_gpu.weights_of(plan)) as running:
        for length in (1, 2, 16, 17, 18, 40):
            made = running.generate(PROMPT[:length], max_tokens=6)
            assert made.tokens == Reference(plan, on_gpu.weights_of(plan)).generate(
                PROMPT[:length], 6
            )
            assert len(made.pass_ns) == schedule_of(plan).of_passes().count(length)
            assert (made.step_ns > 0).all()
