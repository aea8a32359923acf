"""What GPT-OSS's layers have besides those of other experts: sinks, biases, clamped gates, YaRN.
The CPU engine gives the reference's numbers, whatever the plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.hf_cases import FAMILIES, weights
from tests.engine.small_engine import LLAMA, SEED, error, planned, sanitized
from tests.native.test_warps import build_warps
from twin.engine import host
from twin.engine.weights import random_weights
from twin.kernel.header import header
from twin.models.feeds import DenseFeed, ExpertFeed
from twin.models.layers import Layer
from twin.models.load import canonical, checkpoint, from_config, stored
from twin.models.mixers import GroupedAttention
from twin.models.spec import DType, ModelSpec, Rope, RopeScaling
from twin.plan.biases import stage_bias, stage_sinks
from twin.plan.catalogue import StageKind
from twin.plan.types import Plan
from twin.reference.step import with_sinks

FEED = ExpertFeed(
    experts=6,
    top_k=3,
    width=40,
    router_bias=True,
    bias=True,
    limit=1.0,  # which gates of random weights reach
    gain=1.702,
    offset=1.0,
)
YARN = RopeScaling("yarn", 32.0, original_context=16, truncate=False, magnitude=1.35)


def model(feed: ExpertFeed = FEED, **more: bool) -> ModelSpec:
    has = {"qkv_bias": True, "o_bias": True, "sinks": True} | more
    layers = tuple(
        Layer(GroupedAttention(heads=8, kv_heads=4, head_dim=8, window=window, **has), feed)
        for window in LLAMA.windows
    )
    return replace(
        LLAMA,
        name="oss",
        family="gpt_oss",
        qkv_bias=has["qkv_bias"],
        ffn=feed.width,
        layout=layers,
        rope=Rope(150000.0, scaling=YARN),
    )


@pytest.mark.slow  # each is a build of its own
@pytest.mark.parametrize(
    "spec",
    [
        model(qkv_bias=False, o_bias=False),
        model(sinks=False),
        model(replace(FEED, bias=False, router_bias=False)),
        model(replace(FEED, limit=None)),
        model(replace(FEED, gain=1.0, offset=0.0)),
    ],
    ids=str,
)
def test_each_addition_stands_alone(spec: ModelSpec) -> None:
    assert error(planned(spec, blocks=3)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_stored_types(dtype: DType) -> None:
    assert error(planned(model(), weight_dtype=dtype)) < 1e-5
    assert error(planned(model(), weight_dtype=dtype, kv_dtype=dtype)) < 2e-2


@pytest.mark.slow
def test_blocks_of_many_warps_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "build_host", build_warps)
    small = replace(model(), layers=2, windows=(0, 5), layout=model().layout[:2])
    assert error(planned(small, slot_bytes=512)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitize: str) -> None:
    script = (
        "from tests.engine.test_gpt_oss import *\n"
        "from tests.engine.small_engine import TOKENS, engine\n"
        "from twin.plan.options import HandOffKind\n"
        "for more in ({'gpus': 2}, {'handoff': HandOffKind.COUNTER, 'blocks': 5}):\n"
        "    with engine(planned(model(), **more), sanitize=SANITIZE) as e:\n"
        "        e.generate(TOKENS[:3], max_tokens=4)\n        e.logits(TOKENS[:3])\n"
        "print('clean')\n"
    )
    sanitized(script, sanitize)


# ---- what it is made of --------------------------------------------------------------------------


def test_a_layout_without_code_is_not_run() -> None:
    dense = replace(model(), layout=(*model().layout[:2], _dense()))
    assert model().runnable_reason() is None
    assert "simulated only" in str(dense.runnable_reason())


def _dense() -> Layer:
    """Its gate is not clamped: a kernel has gates of one kind."""
    return replace(model().layout[0], feed=DenseFeed(width=48))


def test_a_sink_takes_weight_and_brings_no_value() -> None:
    scores, values = np.array([0.5, -1.0, 2.0]), np.array([[1.0], [2.0], [4.0]])
    sink = np.array([1.5])
    most = scores.max()
    weights = np.exp(scores - most)
    part = np.concatenate([weights @ values, [most, weights.sum()]])[None]
    made = with_sinks(part, sink)
    everything = np.exp(np.append(scores, sink))
    assert made[0, 0] / made[0, 2] == pytest.approx(
        (everything[:3] @ values[:, 0]) / everything.sum()
    )
    nothing = with_sinks(np.array([[0.0, -np.inf, 0.0]]), sink)
    assert nothing.tolist() == [[0.0, 1.5, 1.0]]


def test_ranks_add_each_bias_once() -> None:
    """Where their sums meet the first one has it; what each makes for itself it has a part of."""
    plan, table = planned(model(), gpus=2), random_weights(model(), SEED, DType.FP32)
    layer = [stage for stage in plan.stages if stage.layer == 1]
    own: dict[StageKind, list[Any]] = {
        stage.kind: [stage_bias(plan, stage, rank, table) for rank in (0, 1)] for stage in layer
    }
    for kind in (StageKind.O_PROJ, StageKind.ROUTED_DOWN):
        assert own[kind][0].any()
        assert not own[kind][1].any()
    assert np.array_equal(own[StageKind.O_PROJ][0], table["layers.1.o_bias"])
    routers = np.concatenate(own[StageKind.ROUTER])
    assert np.array_equal(routers[: FEED.experts], table["layers.1.router_bias"])
    pairs = np.concatenate([made[4] for made in own[StageKind.ROUTED_UP]]).reshape(-1, 2)
    assert np.array_equal(pairs[: FEED.width, 1], table["layers.1.experts.4.up_bias"])
    attention = next(stage for stage in layer if stage.kind is StageKind.ATTENTION)
    sinks = [stage_sinks(plan, attention, rank, table) for rank in (0, 1)]
    assert np.array_equal(np.concatenate(sinks), table["layers.1.sinks"])


def test_only_a_plan_with_additions_has_them_in_its_tables() -> None:
    plan: Plan = planned(model())
    text = header(plan)
    for line in ("SINKS = true", "EXPERT_BIAS = true", "LIMIT = 1.0f", "OFFSET = 1.0f"):
        assert f"{line};" in text
    assert "  int sinks;" in text
    feed = ExpertFeed(experts=6, top_k=3, width=40)
    plain = header(planned(model(feed, sinks=False, o_bias=False)))
    assert "SINKS = false;" in plain
    assert "static constexpr int sinks = -1;" in plain


def test_a_checkpoints_tensors_are_those_of_all_experts() -> None:
    """Rows of gates and of what passes them take turns; there and back again."""
    config = FAMILIES["gpt-oss"]
    spec, table = from_config(config, "case"), weights(config)
    for tensor, names in checkpoint(spec).items():
        array = stored(spec, names, table)
        assert array.shape == tensor.shape, tensor.name
        for name in names:
            assert np.array_equal(canonical(spec, name, array), table[name])
    whole = stored(spec, *_of(spec, "model.layers.0.mlp.experts.gate_up_proj"), table)
    assert np.array_equal(whole[3, :, 1], table["layers.0.experts.3.up"][0])


def _of(spec: ModelSpec, name: str) -> list[list[str]]:
    return [names for tensor, names in checkpoint(spec).items() if tensor.name == name]
