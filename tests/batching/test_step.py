"""Ordinary engines: what they launch, and how the times of their kernels add up."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.batching.costs import Ideal, Load, Measured, visited
from twin.batching.kernels import AllReduce, LatentScan, Product, launched
from twin.batching.step import EAGER, IDEAL, predict
from twin.batching.tables import between, load_tables, stack_names
from twin.errors import ConfigError, HardwareError, PlanError
from twin.hardware.load import load_node
from twin.models.load import load_model
from twin.models.spec import ModelSpec
from twin.plan.options import Execution, Sampling
from twin.schedule.options import plan_for


def model(name: str) -> ModelSpec:
    return load_model(name)


@pytest.mark.parametrize(
    ("name", "gpus"), [("llama-3.2-1b", 1), ("llama-3.1-8b", 4), ("qwen3-8b", 8)]
)
def test_products_are_those_of_the_plan(name: str, gpus: int) -> None:
    plan = plan_for(
        model(name), load_node(f"{gpus}xh200"), execution=Execution.LAUNCHES, sampling=Sampling.FULL
    )
    planned = [(stage.matrix.rows, stage.matrix.cols) for stage in plan.stages if stage.matrix]
    products = [
        (work.rows, work.cols)
        for work in launched(model(name), gpus, rope_kernels=1)
        if isinstance(work, Product)
    ]
    assert products == planned


@pytest.mark.parametrize("gpus", [1, 8])
def test_as_many_kernels_as_the_plan_launches(gpus: int) -> None:
    """The attention's table holds the merging of its splits; the sum of the embedding's parts is a
    vocabulary-parallel engine's own.
    """
    spec = model("llama-3.1-8b")
    plan = plan_for(
        spec, load_node(f"{gpus}xh200"), execution=Execution.LAUNCHES, sampling=Sampling.FULL
    )
    work = list(launched(spec, gpus, rope_kernels=1))
    assert len(work) == plan.launches() - spec.layers + (1 if gpus > 1 else 0)
    assert sum(isinstance(item, AllReduce) for item in work) == (
        2 * spec.layers + 2 if gpus > 1 else 0
    )


def test_a_measured_shape_takes_its_measured_time() -> None:
    tables = load_tables("h200-sxm", "vllm")
    assert tables.gemm_s(rows=6144, cols=4096, tokens=1, dtype="bf16") == pytest.approx(
        tables.gemm["bf16", "1", "4096"][11][1]
    )


@given(st.floats(1, 1e6))
def test_times_between_points_stay_between_them(size: float) -> None:
    curve = ((10.0, 2.0), (100.0, 5.0), (1000.0, 30.0))
    time = between(curve, size)
    assert time == (2.0 if size <= 10 else time)
    assert 2.0 <= time <= max(30.0, 30.0 * size / 1000)
    assert between(curve, size * 1.5) >= time


def test_one_by_one_is_never_faster_than_a_graph_and_a_slow_host_decides() -> None:
    step = predict(model("llama-3.2-1b"), load_node("1xh200"), "vllm", Load())
    slow = dataclasses.replace(step, launch_s=1e-3)
    assert step.seconds(EAGER) >= step.graph_s
    assert slow.eager_s == pytest.approx(len(step.kernels) * 1e-3 + step.kernels[-1][1])
    assert sum(step.by_kind().values()) == pytest.approx(step.graph_s)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("stack", [*stack_names(), IDEAL])
def test_never_faster_than_the_floor(stack: str, gpus: int) -> None:
    spec, node = model("llama-3.1-8b"), load_node(f"{gpus}xh200")
    floor = spec.streamed_bytes / (gpus * node.device.memory.stream_bytes_per_s.value)
    assert predict(spec, node, stack, Load()).graph_s > floor


@pytest.mark.parametrize("stack", [*stack_names(), IDEAL])
def test_longer_contexts_and_larger_batches_take_longer(stack: str) -> None:
    spec, node = model("llama-3.1-8b"), load_node("1xh200")
    times = [
        predict(spec, node, stack, Load(sequences=b, context=c)).graph_s
        for b, c in ((1, 1024), (1, 16384), (8, 16384), (32, 16384))
    ]
    assert times == sorted(times)


def test_fp8_halves_the_bytes_and_not_the_time() -> None:
    spec, node = model("llama-3.1-70b"), load_node("4xh200")
    stored, fp8 = (
        predict(spec, node, "vllm", Load(), weights).graph_s for weights in ("as stored", "fp8")
    )
    assert 0.5 * stored < fp8 < 0.8 * stored


def test_tokens_visit_more_experts_until_all_are_visited() -> None:
    counts = [visited(128, 4, tokens) for tokens in (1, 2, 8, 64, 4096)]
    assert counts[0] == pytest.approx(4)
    assert counts == sorted(counts)
    assert counts[-1] == pytest.approx(128)


def test_latent_attention_computes_the_way_down_on_every_gpu() -> None:
    spec, node = model("deepseek-v3"), load_node("8xh200")
    products = [work for work in launched(spec, 8, rope_kernels=1) if isinstance(work, Product)]
    first = [(work.name, work.rows, work.cols) for work in products[:3]]
    assert first == [
        ("qkv_a_proj", 1536 + 576, 7168),
        ("q_b_proj", 128 * 192 // 8, 1536),
        ("o_proj", 7168, 128 * 128 // 8),
    ]
    floor = spec.streamed_bytes / (8 * node.device.memory.stream_bytes_per_s.value)
    assert all(
        predict(spec, node, stack, Load()).graph_s > floor for stack in ("sglang", "trtllm", IDEAL)
    )


def test_refusals_name_the_value_and_what_is_there() -> None:
    spec, node = model("llama-3.1-8b"), load_node("1xh200")
    with pytest.raises(ConfigError, match=r"vlm.*allowed are .*vllm"):
        predict(spec, node, "vlm", Load())
    with pytest.raises(ConfigError, match="131072 positions"):
        predict(spec, node, "vllm", Load(context=200_000))
    with pytest.raises(HardwareError, match=r"mi300x.*measured: h100-sxm, h200-sxm.*ideal"):
        predict(spec, load_node("1xmi300x"), "vllm", Load())
    with pytest.raises(HardwareError, match=r"needs 227 GB, 1xh200-sxm holds 150 GB.*more GPUs"):
        predict(model("llama-3.1-70b"), node, "vllm", Load(sequences=64, context=4096))
    with pytest.raises(PlanError, match="does not divide over 8 GPUs"):
        predict(model("qwen2.5-coder-1.5b"), load_node("8xh200"), "vllm", Load())
    with pytest.raises(PlanError, match="layer 0 mixes tokens by DeltaNet"):
        predict(model("qwen3-coder-next"), load_node("8xh200"), "vllm", Load())
    with pytest.raises(HardwareError, match="latent attention was measured for"):
        Measured(load_tables("h200-sxm", "vllm"), 1).seconds(
            LatentScan("attention", 16, 256, 64), Load()
        )
    with pytest.raises(HardwareError, match="no link"):
        Ideal(node).seconds(AllReduce("all_reduce", 4096), Load())
