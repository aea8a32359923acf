"""The plans of a benchmark, its weights and its prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command_line import TINY
from twin.bench.plans import (
    IDLE,
    LOADED,
    PROBE_BYTES,
    UNDISTURBED,
    Plans,
    make_plans,
    shape_peer,
)
from twin.bench.source import find_source, hold_random, make_prompts
from twin.engine.weights import random_weights
from twin.errors import ConfigError, PlanError, TwinError
from twin.hardware.load import load_node
from twin.models.load import load_model, tensors
from twin.models.spec import DType, RopeStyle
from twin.plan.options import CollectiveKind, Execution
from twin.schedule.choose import schedule_of

NODE = load_node("1xh200")


def plans(name: str, **chosen: Any) -> Plans:
    return make_plans(load_model(name), NODE, chosen, context=32, tokens=128, positions=160)


def test_rings_fit_the_kernel_that_is_built() -> None:
    made = plans("llama-3.2-1b")
    for plan in (made.resident, made.graph, made.ceiling):
        assert (
            0
            <= plan.limits.on_chip_bytes - schedule_of(plan).block_bytes
            < 2 * plan.options.slot_bytes
        )
    assert (made.resident.options.execution, made.graph.options.execution) == (
        Execution.RESIDENT,
        Execution.GRAPH,
    )


def test_the_ceiling_streams_the_model_s_bytes_with_every_block() -> None:
    made = plans("llama-3.2-1b")
    assert made.ceiling.options.blocks == NODE.device.blocks
    assert made.ceiling.bytes_per_step() == pytest.approx(made.resident.weight_bytes(), rel=0.02)


@pytest.mark.few(4)
@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "laneformer-2b"])
def test_the_engine_takes_every_plan_of_several_gpus(name: str, gpus: int) -> None:
    node = load_node(f"{gpus}xh100")
    made = make_plans(load_model(name), node, {}, context=32, tokens=128, positions=160)
    for plan in made.all():
        assert plan.options.gpus == 1 or plan.options.collective is CollectiveKind.PUSH
        assert schedule_of(plan).block_bytes <= plan.limits.on_chip_bytes
    assert list(made.exchanges) == [IDLE, LOADED, UNDISTURBED]
    assert made.exchanges[IDLE].ranks == made.gpus == gpus
    share = max(made.resident.weight_bytes() / gpus, PROBE_BYTES[0])
    assert made.ceiling.bytes_per_step() == pytest.approx(share, rel=0.03)


def test_an_exchange_that_leaves_the_stream_no_room_is_timed_alone() -> None:
    spec = load_model("llama-3.1-405b")
    node = load_node("8xh200")
    made = make_plans(
        spec, node, {"weight_dtype": DType.FP16, "blocks": 132}, context=8, tokens=8, positions=16
    )
    assert list(made.exchanges) == [IDLE]


def test_one_type_for_weights_and_cache() -> None:
    options = plans("llama-3.2-1b", weight_dtype=DType.FP16).resident.options
    assert (options.weight_dtype, options.kv_dtype) == (DType.FP16, DType.FP16)


def test_bytes_are_the_mean_of_the_timed_steps() -> None:
    plan = plans("llama-3.2-1b").resident
    spec, tokens = load_model("llama-3.2-1b"), 128
    cached = np.mean([spec.kv_bytes(32 + step, DType.BF16) for step in range(tokens)])
    assert plan.mean_bytes(context=32, tokens=tokens) == pytest.approx(plan.weight_bytes() + cached)


def test_a_window_bounds_the_cached_bytes() -> None:
    spec = replace(TINY, family="mistral", windows=(8, 8))
    plan = make_plans(spec, NODE, {"blocks": 4}, context=100, tokens=4, positions=104).resident
    assert plan.mean_bytes(context=100, tokens=4) == plan.weight_bytes() + spec.kv_bytes(
        8, DType.BF16
    )


@pytest.mark.parametrize("chosen", [{"execution": Execution.GRAPH}, {"max_context": 100}])
def test_what_the_benchmark_settles_cannot_be_chosen(chosen: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        plans("llama-3.2-1b", **chosen)


def test_a_context_beyond_the_model_s_is_refused() -> None:
    with pytest.raises(ConfigError, match="5000 positions, laneformer-2b reaches 4096"):
        make_plans(load_model("laneformer-2b"), NODE, {}, context=4500, tokens=500, positions=5000)


def test_a_model_too_large_for_the_gpu_is_refused_with_the_node_that_holds_it() -> None:
    with pytest.raises(
        PlanError,
        match=r"needs \d+ GB of memory per GPU, a h200-sxm has 150 GB, \d+ GB too few: "
        r"8xh200-sxm is "
        r"the smallest node",
    ):
        plans("llama-3.1-405b")


def test_lanes_are_timed_as_a_llama_of_the_same_dimensions() -> None:
    spec = load_model("laneformer-2b")
    peer = shape_peer(spec, DType.FP16)
    assert (peer.family, peer.lanes, peer.rope.style, peer.dtype) == (
        "llama",
        None,
        RopeStyle.HALF,
        DType.FP16,
    )
    assert peer.streamed_parameters == spec.streamed_parameters
    assert shape_peer(TINY, DType.FP16) == replace(TINY, dtype=DType.FP16)


def test_held_random_weights_are_those_of_twin_run() -> None:
    held, one_by_one = hold_random(TINY, 7, DType.FP16), random_weights(TINY, 7, DType.FP16)
    assert all(
        (held[name] == one_by_one[name]).all() and held[name].dtype == np.float16
        for name in tensors(TINY)
    )


def test_a_checkpoint_is_found_and_loaded_as_the_plan_has_it(checkpoint: Path) -> None:
    found = find_source(str(checkpoint), None)
    assert (found.spec.layers, found.folder) == (TINY.layers, checkpoint)
    assert found.load(DType.FP16).weights["layers.0.q"].dtype == np.float16
    assert (found.load(DType.BF16).weights["embed"] == random_weights(TINY, 1)["embed"]).all()


def test_prompts_differ_and_have_the_length_given(checkpoint: Path) -> None:
    for source in (
        find_source(str(checkpoint), None),
        find_source(str(checkpoint / "config.json"), 3),
    ):
        prompts = make_prompts(source.load(DType.BF16), 12, 90)
        assert all(
            len(prompt) == 90 and 0 <= min(prompt) <= max(prompt) < TINY.vocab for prompt in prompts
        )
        assert len({tuple(prompt) for prompt in prompts}) == 12
        assert prompts[:3] == make_prompts(source.load(DType.BF16), 3, 90)


@pytest.mark.parametrize(
    ("model", "seed"),
    [("llama-3.2-1b", None), ("llama-3.2-1b", -1), ("nowhere", None), ("nowhere", 1)],
)
def test_a_source_that_is_none_is_refused(model: str, seed: int | None) -> None:
    with pytest.raises(TwinError):
        find_source(model, seed)
