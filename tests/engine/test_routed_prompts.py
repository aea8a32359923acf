"""Prompts of models with experts in passes: what token by token gives.

    pytest tests/engine/test_routed_prompts.py -m gpu

runs all of it that an NVIDIA GPU has to show.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine import test_choice_bias, test_coded_experts
from tests.engine import test_cuda_engine as on_gpu
from tests.engine.small_engine import SEED, engine, planned, sanitized
from tests.engine.test_coded_experts import coded, model
from tests.engine.test_coded_prompts import GPU_LENGTHS, gpu_plan, long_prompt_error
from tests.engine.test_convolution import convolved
from tests.engine.test_experts import FEED, MANY, SHARED, Tied, routed
from tests.engine.test_gpt_oss import model as gpt_oss
from tests.engine.test_prompt_chunks import (
    CHUNK,
    LENGTHS,
    PROMPT,
    error,
    error_after,
    needs_gpu,
)
from tests.models.codes.names import ON_EVERY_DEVICE, coded_names
from tests.native.test_warps import build_warps
from twin.cost.prompt import prompt_time
from twin.engine import host
from twin.engine.cuda import CudaEngine
from twin.engine.host import HostEngine
from twin.engine.weights import random_weights
from twin.hardware.load import load_node
from twin.kernel.prompt import prompt_of
from twin.kernel.room import check_room
from twin.kernel.tables import layout
from twin.models.feeds import Scoring
from twin.models.formats import format_named
from twin.models.load import load_model
from twin.models.quantized import requantized
from twin.models.spec import DType, ModelSpec
from twin.plan.catalogue import StageKind
from twin.plan.options import CollectiveKind, Common, Execution, HandOffKind, Sampling
from twin.plan.types import Plan
from twin.proof.prove import prove, violations
from twin.reference.step import Reference
from twin.schedule.choose import schedule_of
from twin.schedule.options import plan_for
from twin.schedule.passes import eight_bits

FEW = ("int4-g32-zp", "mxfp4", "nvfp4")


def mixtral() -> ModelSpec:
    spec = routed(replace(FEED, top_k=2))
    layout = [replace(one, mixer=replace(one.mixer, qk_norm=False)) for one in spec.layout]
    return replace(spec, name="mixtral", family="mixtral", qk_norm=False, layout=tuple(layout))


FAMILIES = {"qwen3_moe": routed(), "mixtral": mixtral(), "gpt_oss": gpt_oss()}
# experts that every token visits: next to routed ones, or chosen as they are; biases of the choice
VISITED = {
    "shared": routed(SHARED),
    "shared, without a gate": routed(replace(SHARED, shared_gate=False, shared_width=264)),
    "always chosen": routed(replace(SHARED, shared_width=40)),
    "two always chosen": routed(replace(MANY, shared_width=80, shared_gate=False)),
    "chosen by a bias": convolved(feed=test_choice_bias.FEED),
    "both": convolved(feed=replace(test_choice_bias.FEED, shared_width=56, experts=9)),
}


def chunked(spec: ModelSpec, **chosen: Any) -> Plan:
    plan = planned(spec, **({"prompt_chunk": CHUNK} | chosen))
    prove(plan)
    assert plan.options.prompt_chunk > 1
    return plan


# ---- on a CPU ------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_passes_fill_the_cache_as_steps_do(name: str) -> None:
    """Prompts shorter than a pass, as long as one or several, and longer."""
    assert error(chunked(FAMILIES[name]), LENGTHS) < 1e-5


@pytest.mark.few(3)
@pytest.mark.parametrize("more", [{"blocks": 5}, {"gpus": 2, "blocks": 3}], ids=str)
@pytest.mark.parametrize("name", VISITED)
def test_passes_visit_the_experts_of_steps(name: str, more: dict[str, Any]) -> None:
    assert error(chunked(VISITED[name], **more), (20, 33)) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("name", coded_names(FEW))
def test_shared_experts_of_few_bits_are_read_in_passes(name: str) -> None:
    plan = test_coded_experts.shared(name, prompt_chunk=CHUNK, blocks=5)
    prove(plan)
    assert error(plan, (5, 20)) < 1e-5


PLANS: list[dict[str, Any]] = [
    {"blocks": 5, "attention_splits": 2},
    {"blocks": 11},  # more than experts: some blocks have no rows of the router
    {"blocks": 3, "slot_bytes": 256, "tile_rows": 4},
    {"gpus": 2, "blocks": 3},
    {"gpus": 4, "blocks": 1, "handoff": HandOffKind.GRID},  # the last rank scores no expert
    {"gpus": 2, "common": Common.REPLICATED, "sampling": Sampling.FULL},
    {"handoff": HandOffKind.COUNTER, "sampling": Sampling.FULL, "prompt_chunk": 3},
    {"execution": Execution.GRAPH, "prompt_chunk": 64},
    {"gpus": 2, "execution": Execution.LAUNCHES, "collective": CollectiveKind.LIBRARY},
]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "more", PLANS, ids=lambda v: "-".join(str(getattr(x, "value", x)) for x in v.values())
)
def test_passes_do_not_depend_on_the_plan(more: dict[str, Any], name: str) -> None:
    assert error(chunked(FAMILIES[name], **more), (20,)) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("name", coded_names(FEW))
def test_experts_of_few_bits_are_read_in_passes(name: str) -> None:
    plan = coded(name, prompt_chunk=CHUNK, blocks=5)
    assert plan.options.prompt_chunk == CHUNK
    assert error(plan, (5, 20)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"width": 272, "blocks": 5, "slot_bytes": 2320},  # column slices; groups of fewer rows
        {"width": 136, "gpus": 2, "blocks": 3},  # the last rank's rows are filled up
        {"weight_dtype": DType.BF16, "blocks": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_tiles_of_few_bits_are_found_wherever_they_lie(name: str, more: dict[str, Any]) -> None:
    assert error(coded(name, prompt_chunk=CHUNK, **more), (20,)) < 1e-5


def test_layers_without_experts_stand_between() -> None:
    assert error(chunked(routed(dense=(0, 2)), gpus=2), (20,)) < 1e-5


@pytest.mark.slow  # each is a build of its own
@pytest.mark.parametrize(
    "feed",
    [
        replace(FEED, renormalise=False),
        replace(FEED, scoring=Scoring.SIGMOID, scaling=2.5),
        replace(FEED, experts=1, top_k=1),
        replace(FEED, top_k=6),
        replace(FEED, width=136),
    ],
    ids=str,
)
def test_every_way_of_weighing_is_that_of_steps(feed: Any) -> None:
    assert error(chunked(routed(feed), blocks=3), (20,)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_stored_types(dtype: DType) -> None:
    # the cache's rounding is FP32's
    assert error(chunked(gpt_oss(), weight_dtype=dtype), (20,)) < 1e-5


@pytest.mark.parametrize("other", [0, 4])
def test_experts_that_nobody_or_everybody_chooses(other: int) -> None:
    """Ties go to the lowest numbers, in a pass as in a step: the last experts have no tokens."""
    plan = chunked(routed(), blocks=4)
    weights = Tied(routed(), other)
    reference = Reference(plan, weights)
    wanted = np.stack([reference.step(token).copy() for token in PROMPT[:42]])
    with HostEngine(plan, weights) as running:
        assert error_after(running, wanted, (20, 40), PROMPT) < 1e-5


def test_a_router_without_numbers_ends_the_run_with_a_message() -> None:
    with (
        HostEngine(chunked(routed()), Tied(routed(), 1, float("inf"))) as running,
        pytest.raises(Exception, match="logit"),
    ):
        running.generate(PROMPT[:20], max_tokens=3)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_run_gives_the_same_bits_and_the_references_tokens(name: str) -> None:
    spec = FAMILIES[name]
    plan = chunked(spec, blocks=4)
    weights = random_weights(spec, SEED, DType.FP32)
    with engine(plan) as running:
        made = [running.generate(PROMPT[:20], max_tokens=8) for _ in range(3)]
        logits = [running.logits(PROMPT[33:35], after=PROMPT[:33]) for _ in range(2)]
    assert {len(one.pass_ns) for one in made} == {2}
    wanted = Reference(plan, weights).generate(PROMPT[:20], 8)
    assert all(one.tokens == wanted for one in made)
    assert np.array_equal(*logits)


def test_what_an_earlier_request_left_is_kept() -> None:
    plan = chunked(gpt_oss(), prompt_chunk=4)
    with engine(plan) as fresh, engine(plan) as running:
        first = running.generate(PROMPT[:14], max_tokens=6, reuse=True)
        second = [*PROMPT[:14], *first.tokens, 7, 8, 9, 10, 11, 12]
        again = running.generate(second, max_tokens=6, reuse=True)
        assert again.kept == 14 + len(first.tokens) - 1
        assert again.tokens == fresh.generate(second, max_tokens=6).tokens
        assert len(again.pass_ns) == 2


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("qwen3_moe", {"gpus": 2, "blocks": 1}),
        pytest.param("gpt_oss", {"blocks": 3}, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_many_warps_and_threads(
    name: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "build_host", build_warps)
    plan = chunked(FAMILIES[name], slot_bytes=512, prompt_chunk=4, **more)
    assert error(plan, (6,)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitize: str) -> None:
    script = (
        "from tests.engine.test_routed_prompts import *\n"
        "for name, more in (('qwen3_moe', {'gpus': 2}), ('gpt_oss', {'blocks': 5})):\n"
        "    with engine(chunked(FAMILIES[name], **more), sanitize=SANITIZE) as e:\n"
        "        e.generate(PROMPT[:20], max_tokens=2)\n"
        "print('clean')\n"
    )
    sanitized(script, sanitize)


# ---- the plan and the prediction -----------------------------------------------------------------

SERVED = ("gpt-oss-20b", "qwen3-30b-a3b", "qwen3-30b-a3b@fp8-128x128", "mixtral-8x7b@fp8")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SERVED)
def test_models_with_experts_read_1024_tokens_a_pass_on_an_h200(name: str) -> None:
    node = load_node("1xh200")
    plan = plan_for(load_model(name), node)
    assert plan.options.prompt_chunk == 1024
    assert not list(violations(plan))
    assert schedule_of(plan).memory.pass_bytes <= plan.limits.on_chip_bytes
    # what entries keep: a gate's and a down projection's output each
    feed = plan.spec.experts if plan.spec else None
    assert feed is not None
    least = 4 * 1024 * feed.top_k * (plan.shard.hidden + feed.width)
    assert least <= prompt_of(schedule_of(plan)).routed_bytes < 1.1 * least + 4 * 1024 * 1024
    full = plan.memory_bytes() + prompt_of(schedule_of(plan)).routed_bytes
    with pytest.raises(Exception, match="too few"):
        check_room(plan, node, free_bytes=full - 1)


@pytest.mark.parametrize("name", SERVED)
def test_batches_have_every_row_of_an_expert_once(name: str) -> None:
    plan = plan_for(load_model(name), load_node("1xh200"))
    sizes = layout(plan).sizes
    for kind in (StageKind.ROUTED_UP, StageKind.ROUTED_DOWN):
        one = next(one for one in schedule_of(plan).of_passes().stages if one.stage.kind is kind)
        stage, rows, count = one.stage, one.rows, one.batches
        assert stage.matrix is not None
        assert rows <= 256
        assert rows * count >= stage.matrix.rows > rows * (count - 1) * 0.9
        if plan.coded and not eight_bits(plan):
            assert rows * stage.matrix.cols // 2 <= sizes["prompt_normed_floats"]


def test_fp32_experts_and_none_in_a_pass_are_read_by_steps_on_nvidia() -> None:
    spec, node = load_model("gpt-oss-20b@bf16"), load_node("1xh200")
    chosen = {"weight_dtype": DType.FP32, "kv_dtype": DType.FP32}
    assert plan_for(spec, node, **chosen).options.prompt_chunk == 1
    plan = plan_for(spec, node, prompt_chunk=64, **chosen)
    assert any("experts of 16 bits or fewer" in str(found) for found in violations(plan))
    assert prompt_of(schedule_of(plan_for(spec, node, prompt_chunk=1))).routed_bytes == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SERVED)
def test_longer_prompts_take_longer_and_less_than_steps(name: str) -> None:
    node = load_node("1xh200")
    plan = plan_for(load_model(name), node, max_context=4096)
    times = [prompt_time(plan, node, n) for n in (1, 2, 17, 128, 512, 1024, 1026, 4096)]
    seconds = [one.seconds for one in times]
    assert seconds == sorted(seconds)
    assert all(one.seconds >= one.floor_s for one in times)
    # a step of each token, at the least what it reads of one token's experts
    rate = node.device.memory.peak_bytes_per_s.value
    assert seconds[4] < 511 * schedule_of(plan).of_passes().weight_bytes(1) / rate


def test_a_pass_streams_the_experts_that_its_tokens_choose() -> None:
    plan = chunked(routed())
    every = schedule_of(plan).of_passes().weight_bytes(10_000)
    layers = plan.spec.layers - 1 if plan.spec else 0
    expert = 4 * 3 * 64 * FEED.width
    assert (
        every - schedule_of(plan).of_passes().weight_bytes(1)
        == layers * (FEED.experts - FEED.top_k) * expert
    )


# ---- on a GPU ------------------------------------------------------------------------------------

# A rounding may decide a choice otherwise, whose key and value then differ for one token
GPU_BOUND = {DType.FP16: 1e-2, DType.BF16: 5e-2}
# Among 64 experts one choice is nearly a tie: where the reference's router logits move by 1e-4 of
# their spread, a fifth of FP16's rounding, its output moves by 1.4e-2
TIED, TIED_BOUND = "many experts", 2e-2


def wide(spec: ModelSpec, head_dim: int) -> ModelSpec:
    """Of heads that tensor cores compare."""
    layout = [replace(one, mixer=replace(one.mixer, head_dim=head_dim)) for one in spec.layout]
    return replace(spec, head_dim=head_dim, layout=tuple(layout))


ON_GPU: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "qwen3": (wide(routed(), 16), {}),
    "qwen3, narrow heads": (routed(), {"blocks": 5}),  # without tensor cores
    "mixtral": (wide(mixtral(), 32), {"prompt_chunk": 16}),
    "gpt-oss": (wide(gpt_oss(), 64), {}),
    "gpt-oss, narrow heads": (gpt_oss(), {"blocks": 3}),
    "many experts": (
        wide(routed(replace(FEED, experts=64, top_k=8, width=136)), 16),
        {"blocks": 40},
    ),
    "gates of whole slices": (wide(routed(replace(FEED, width=384)), 16), {"slot_bytes": 2048}),
    "sigmoids": (wide(routed(replace(FEED, scoring=Scoring.SIGMOID, scaling=2.5)), 16), {}),
    "sampling": (wide(gpt_oss(), 16), {"sampling": Sampling.FULL}),
    "counters": (wide(routed(), 16), {"handoff": HandOffKind.COUNTER}),
}


def agree(plan: Plan, bound: float = 0.0) -> None:
    """Logits of the reference after prompts of several passes, and the same bits every time.
    `bound`: if higher than the type's.
    """
    wanted = on_gpu.expected(plan, PROMPT[:42])
    with CudaEngine(plan, on_gpu.weights_of(plan)) as running:
        found = error_after(running, wanted, GPU_LENGTHS, PROMPT)
        made = [running.generate(PROMPT[:40], max_tokens=12) for _ in range(3)]
        logits = [running.logits(PROMPT[40:42], after=PROMPT[:40]) for _ in range(3)]
    assert len(made[0].pass_ns) == -(-39 // plan.options.prompt_chunk)
    assert found < max(bound, GPU_BOUND[plan.options.weight_dtype])
    assert [one.tokens for one in made[1:]] == [made[0].tokens] * 2
    assert all(np.array_equal(logits[0], one) for one in logits)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("name", ON_GPU)
def test_gpu_experts_are_read_in_passes(name: str, dtype: DType) -> None:
    spec, chosen = ON_GPU[name]
    agree(gpu_plan(spec, dtype, **chosen), TIED_BOUND if name == TIED else 0.0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("width", [64, 384])
@pytest.mark.parametrize("name", ON_EVERY_DEVICE)
def test_gpu_experts_of_every_format_are_read_in_passes(name: str, width: int) -> None:
    agree(gpu_plan(model(name, width=width), blocks=5))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["mxfp4", "fp8", "int4-g32"])
def test_gpu_gpt_oss_in_few_bits_is_read_in_passes(name: str) -> None:
    spec = wide(gpt_oss(replace(gpt_oss().experts or FEED, width=64)), 16)
    agree(gpu_plan(requantized(spec, format_named(name)), blocks=5))


@pytest.mark.gpu
@needs_gpu
def test_gpu_what_an_earlier_request_left_is_kept() -> None:
    plan = gpu_plan(wide(gpt_oss(), 64), DType.FP16, prompt_chunk=16)
    with CudaEngine(plan, on_gpu.weights_of(plan)) as running:
        first = running.generate(PROMPT[:20], max_tokens=4, reuse=True)
        second = [*PROMPT[:20], *first.tokens, *PROMPT[20:38]]
        again = running.generate(second, max_tokens=1, reuse=True)
        assert again.kept == 20 + len(first.tokens) - 1
        assert len(again.pass_ns) == 2
        assert len(running.generate(second, max_tokens=1).pass_ns) == 3


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "name", ["gpt-oss-20b", "gpt-oss-20b@bf16", "qwen3-30b-a3b", "qwen3-30b-a3b@fp8-128x128"]
)
def test_gpu_long_prompts_with_experts_are_those_read_by_steps(name: str) -> None:
    assert long_prompt_error(name) < GPU_BOUND[DType.BF16]
