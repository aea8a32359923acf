"""The host engine: the reference's numbers from every plan, and the same bits in every run."""

from __future__ import annotations

import functools
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.small_engine import (
    FULL,
    LANED,
    LLAMA,
    QWEN2,
    QWEN3,
    SEED,
    TOKENS,
    engine,
    error,
    expected,
    planned,
)
from twin import toolchain
from twin.engine import host
from twin.engine.sampling import SamplingParams, sample
from twin.engine.weights import random_weights
from twin.errors import EngineError
from twin.models.spec import DType, LaneHead, Lanes, ModelSpec
from twin.plan.options import CollectiveKind, Execution, HandOffKind, LateParts, Sampling
from twin.reference.step import Reference

# ---- the reference's numbers ---------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", [LLAMA, QWEN2, QWEN3], ids=lambda s: s.name)
def test_logits_of_each_family_match_the_reference(spec: ModelSpec) -> None:
    assert error(planned(spec)) < 1e-5


@pytest.mark.few(4)
@pytest.mark.parametrize("handoff", list(HandOffKind))
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_logits_do_not_depend_on_blocks_ranks_and_hand_offs(
    blocks: int, gpus: int, handoff: HandOffKind
) -> None:
    assert (
        error(planned(blocks=blocks, gpus=gpus, handoff=handoff, attention_splits=1 + blocks // 2))
        < 1e-5
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("head", list(LaneHead))
@pytest.mark.parametrize(("delay", "early"), [(0, False), (1, True), (2, False), (2, True)])
def test_lanes_match_the_reference(head: LaneHead, delay: int, early: bool) -> None:
    spec = replace(LANED, lanes=Lanes(4, delay, head, early))
    assert error(planned(spec, gpus=2, blocks=4)) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("lanes", "chosen"),
    [
        (Lanes(4, 1, LaneHead.SUM, True), {"gpus": 1, "blocks": 12}),
        (Lanes(4, 2, LaneHead.VOCABULARY), {"gpus": 2, "blocks": 6}),
        (Lanes(4, 2, LaneHead.MEAN, True), {"gpus": 4, "blocks": 1}),
        (Lanes(4, 3), {"gpus": 2, "blocks": 4, "sampling": Sampling.FULL}),
        (Lanes(4, 2), {"blocks": 8, "handoff": HandOffKind.COUNTER}),
        (Lanes(4, 2), {"blocks": 8, "handoff": HandOffKind.GRID}),
        (
            Lanes(4, 2, LaneHead.VOCABULARY),
            {
                "gpus": 2,
                "blocks": 6,
                "execution": Execution.GRAPH,
                "collective": CollectiveKind.LIBRARY,
            },
        ),
    ],
    ids=str,
)
def test_sums_of_late_parts_match_the_reference(lanes: Lanes, chosen: dict[str, Any]) -> None:
    plan = planned(replace(LANED, lanes=lanes), late_parts=LateParts.REDUCED, **chosen)
    assert any(stage.late for stage in plan.stages)
    assert error(plan) < 1e-5
    each = planned(replace(LANED, lanes=lanes), late_parts=LateParts.EACH, **chosen)
    found, wanted = expected(plan, TOKENS), expected(each, TOKENS)
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_staggered_lanes_give_the_same_bits() -> None:
    made = []
    for stagger in (0, 20_000):
        with engine(planned(LANED, blocks=8, lane_stagger_ns=stagger)) as running:
            made.append(running.logits(TOKENS))
    assert np.array_equal(*made)


@pytest.mark.few(1)
@pytest.mark.parametrize("execution", [Execution.GRAPH, Execution.LAUNCHES])
@pytest.mark.parametrize("collective", [CollectiveKind.PUSH, CollectiveKind.LIBRARY])
def test_kernels_per_stage_match_the_reference(
    execution: Execution, collective: CollectiveKind
) -> None:
    plan = planned(execution=execution, collective=collective, gpus=2, sampling=Sampling.FULL)
    assert error(plan) < 1e-5
    with engine(plan) as running:
        made = running.generate(TOKENS[:4], max_tokens=8)
    assert made.tokens == Reference(plan, random_weights(LLAMA, SEED, DType.FP32)).generate(
        TOKENS[:4], 8
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_stored_types_are_computed_in_fp32(dtype: DType) -> None:
    plan = planned(weight_dtype=dtype, kv_dtype=dtype)
    # a cached value may round to its other neighbour
    assert error(plan) < (1e-3 if dtype is DType.FP16 else 8e-3)
    exact = planned(weight_dtype=dtype, kv_dtype=DType.FP32)
    assert error(exact) < 1e-5


@pytest.mark.parametrize("sampling", list(Sampling))
@pytest.mark.parametrize("gpus", [1, 2])
def test_greedy_generation_matches_the_reference(sampling: Sampling, gpus: int) -> None:
    plan = planned(sampling=sampling, gpus=gpus)
    streamed: list[int] = []
    with engine(plan) as running:
        made = running.generate(TOKENS[:5], max_tokens=12, on_token=streamed.append)
    assert (
        made.tokens
        == streamed
        == Reference(plan, random_weights(LLAMA, SEED, DType.FP32)).generate(TOKENS[:5], 12)
    )
    assert made.stop_reason == "length"
    assert len(made.step_ns) == 12
    assert (made.step_ns > 0).all()
    assert made.prompt_ns > 0


def test_wide_vectors_and_many_slices_match_the_reference() -> None:
    spec = replace(
        LLAMA, hidden=328, heads=16, kv_heads=8, head_dim=24, ffn=1000, layers=1, windows=(0,)
    )
    assert error(planned(spec, blocks=3, slot_bytes=2048, tile_rows=4)) < 1e-5
    assert error(planned(spec, blocks=3, slot_bytes=65536)) < 1e-5


@pytest.mark.few(1)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize(("isa", "dtype"), [("x86-64", DType.BF16), ("haswell", DType.FP16)])
def test_older_instruction_sets_give_the_reference_numbers(
    isa: str, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa == "haswell" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setattr(
        host, "build_host", functools.partial(toolchain.build_host, extra=(f"-march={isa}",))
    )
    assert error(planned(QWEN3, weight_dtype=dtype)) < 1e-5


# ---- sampling ------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "params",
    [
        FULL,
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_k=5, seed=2**64 - 1),
        SamplingParams(temperature=1.5, top_p=0.3, seed=3),
        SamplingParams(temperature=1e-3, seed=4),
        SamplingParams(),
    ],
    ids=str,
)
def test_sampled_tokens_are_those_of_the_python_sampler(params: SamplingParams) -> None:
    plan = planned(sampling=Sampling.FULL, gpus=2)
    with engine(plan) as running:
        tokens = running.generate(TOKENS[:5], max_tokens=30, sampling=params).tokens
        logits = running.logits(TOKENS[:5] + tokens[:-1])[4:]
    assert tokens == [sample(row, params, step) for step, row in enumerate(logits)]


def test_a_greedy_plan_refuses_a_temperature() -> None:
    with (
        engine(planned()) as running,
        pytest.raises(EngineError, match=r"temperature=0\.8.*sampling=full"),
    ):
        running.generate(TOKENS[:5], max_tokens=3, sampling=FULL)


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("handoff", list(HandOffKind))
def test_five_runs_give_the_same_bits(handoff: HandOffKind) -> None:
    with engine(planned(gpus=2, blocks=3, handoff=handoff)) as running:
        first = running.logits(TOKENS)
        for _ in range(4):
            assert np.array_equal(first, running.logits(TOKENS))


def test_every_protocol_gives_the_same_bits() -> None:
    made = []
    for handoff in HandOffKind:
        with engine(planned(gpus=2, handoff=handoff)) as running:
            made.append(running.logits(TOKENS))
    assert np.array_equal(made[0], made[1])
    assert np.array_equal(made[0], made[2])


def test_a_run_leaves_nothing_behind() -> None:
    with engine(planned(sampling=Sampling.FULL)) as running:
        fresh = running.generate(TOKENS[:5], max_tokens=20, sampling=FULL).tokens
        running.generate([1, 2, 3], max_tokens=40)
        assert running.generate(TOKENS[:5], max_tokens=20, sampling=FULL).tokens == fresh
