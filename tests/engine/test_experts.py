"""Mixtures of experts on the CPU engine: the reference's numbers from every plan, whatever a token
chooses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.hf_cases import FAMILIES
from tests.engine.plans import plans
from tests.engine.small_engine import (
    LIMITS,
    LLAMA,
    SEED,
    TOKENS,
    engine,
    error,
    expected,
    planned,
    sanitized,
)
from twin.engine.host import HostEngine
from twin.engine.weights import random_weights
from twin.errors import InvalidPlan
from twin.kernel import packing
from twin.kernel.header import header
from twin.models.feeds import DenseFeed, ExpertFeed, Scoring
from twin.models.layers import Layer
from twin.models.load import from_config
from twin.models.mixers import GroupedAttention
from twin.models.spec import DType, ModelSpec
from twin.models.variant import Activation, Variant
from twin.plan.catalogue import StageKind
from twin.plan.options import Execution
from twin.plan.shards import Array
from twin.plan.types import Plan
from twin.proof.prove import prove, violations
from twin.reference.experts import chosen
from twin.reference.step import Reference
from twin.schedule.choose import schedule_of
from twin.schedule.plans import build

FEED = ExpertFeed(experts=6, top_k=3, width=40)
SHARED = replace(FEED, shared_width=96, shared_gate=True)
MANY = replace(FEED, experts=135, top_k=5)  # compared in groups of 46, 46 and 43


def routed(feed: ExpertFeed = FEED, *, dense: tuple[int, ...] = ()) -> ModelSpec:
    """Layers of experts; those of `dense` are narrow and without."""
    mixers = [
        GroupedAttention(heads=8, kv_heads=4, head_dim=8, window=window, qk_norm=True)
        for window in LLAMA.windows
    ]
    feeds = [DenseFeed(width=48) if layer in dense else feed for layer in range(LLAMA.layers)]
    layers = tuple(Layer(mixer, its) for mixer, its in zip(mixers, feeds, strict=True))
    return replace(
        LLAMA, name="routed", family="qwen3_moe", qk_norm=True, ffn=feed.width, layout=layers
    )


def test_gates_of_experts_and_of_shared_ones_are_the_familys() -> None:
    gelu = replace(routed(SHARED), variant=Variant(activation=Activation.GELU))
    assert error(planned(gelu, blocks=3)) < 1e-5


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "spec",
    [routed(), routed(SHARED), from_config(FAMILIES["gpt-oss"], "biased")],
    ids=["plain", "shared", "biased"],
)
@pytest.mark.parametrize("more", plans(many=11, on_four=1).values(), ids=plans(many=11, on_four=1))
def test_the_references_logits_are_those_of_one_rank_however_a_model_is_divided(
    more: dict[str, Any], spec: ModelSpec
) -> None:
    """Ranks that each had the whole router scored it with another one's share, which was zeros for
    all but the first; engine and reference agreed.
    """
    few = TOKENS[:5]
    room = {"slot_bytes": 4096} | more
    alone, separate = (
        expected(planned(spec, slot_bytes=4096), few),
        expected(planned(spec, **room), few),
    )
    np.testing.assert_allclose(separate, alone, atol=1e-5 * float(np.abs(alone).max()))


@pytest.mark.slow  # each is a build of its own
@pytest.mark.parametrize(
    "feed",
    [
        replace(FEED, renormalise=False),
        replace(FEED, scoring=Scoring.SIGMOID, scaling=2.5),
        replace(FEED, scoring=Scoring.SIGMOID, renormalise=False),
        replace(FEED, experts=1, top_k=1),
        replace(FEED, top_k=6),
        replace(FEED, width=136),  # of which no two slices of a slot are equal
    ],
    ids=str,
)
def test_every_way_of_weighing_matches_the_reference(feed: ExpertFeed) -> None:
    assert error(planned(routed(feed), blocks=3)) < 1e-5


def test_layers_without_experts_stand_between() -> None:
    plan = planned(routed(dense=(0, 2)), gpus=2, blocks=2)
    prove(plan)
    assert error(plan) < 1e-5


# ---- shared experts ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        routed(replace(SHARED, shared_gate=False)),
        routed(replace(SHARED, shared_width=32), dense=(0,)),
        routed(replace(SHARED, scoring=Scoring.SIGMOID, scaling=2.5), dense=(1, 2)),
        routed(replace(SHARED, shared_width=2064)),
        routed(replace(SHARED, shared_width=72)),
    ],
    ids=("ungated", "narrow", "sigmoid", "wide", "uneven"),
)
def test_kinds_of_shared_experts(spec: ModelSpec) -> None:
    chosen: list[dict[str, Any]] = [
        {"blocks": 3},
        {"gpus": 2, "blocks": 2, "slot_bytes": 256, "tile_rows": 4},
    ]
    if all(isinstance(layer.feed, ExpertFeed) for layer in spec.layout):
        chosen.append({"gpus": 4, "blocks": 2})  # the last rank's columns may be filled up
    for more in chosen:
        plan = planned(spec, **more)
        prove(plan)
        assert error(plan) < 1e-5


def test_shared_experts_give_the_same_bits_in_every_run_and_the_references_tokens() -> None:
    plan = planned(routed(SHARED), blocks=4)
    weights = random_weights(routed(SHARED), SEED, DType.FP32)
    with engine(plan) as running:
        made = [running.generate(TOKENS[:5], max_tokens=10).tokens for _ in range(3)]
    assert made[0] == made[1] == made[2] == Reference(plan, weights).generate(TOKENS[:5], 10)


class Widened:
    """Shared experts with more columns, which are zeros and change no number."""

    def __init__(self, spec: ModelSpec, more: int) -> None:
        self.spec, self.dtype, self.more = spec, DType.FP32, more
        self.random = random_weights(spec, SEED, DType.FP32)

    def __getitem__(self, name: str) -> Array:
        made, leaf = self.random[name], name.rpartition(".")[2]
        if leaf in ("shared_gate", "shared_up"):
            return np.pad(made, ((0, self.more), (0, 0)))
        return np.pad(made, ((0, 0), (0, self.more))) if leaf == "shared_down" else made


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("feed", "more"),
    [
        (replace(SHARED, shared_width=40), {"blocks": 5}),
        (replace(SHARED, shared_width=80), {"gpus": 2, "blocks": 3}),
        (replace(MANY, shared_width=80, scoring=Scoring.SIGMOID, scaling=2.5), {"blocks": 7}),
    ],
    ids=("one", "two on two ranks", "two without a gate"),
)
def test_shared_experts_like_routed_ones_are_chosen_by_every_token(
    feed: ExpertFeed, more: dict[str, Any]
) -> None:
    """Their numbers are those of the stages that other shared experts have."""
    spec, wide = routed(feed), routed(replace(feed, shared_width=feed.shared_width + 8))
    plan, other = planned(spec, **more), planned(wide, **more)
    prove(plan)
    kinds = [{stage.kind for stage in one.stages} for one in (plan, other)]
    assert [StageKind.SHARED_UP in seen for seen in kinds] == [False, True]
    reference = Reference(other, Widened(spec, 8))
    separate = np.stack([reference.step(token).copy() for token in TOKENS])
    with engine(plan) as running:
        assert np.abs(running.logits(TOKENS) - separate).max() < 1e-5 * np.abs(separate).max()


def test_a_shared_expert_that_is_not_chosen_is_refused() -> None:
    plan = planned(routed(replace(SHARED, shared_width=40)), blocks=3)
    for kind in (StageKind.ROUTED_UP, StageKind.ROUTED_DOWN):
        stage = next(s for s in plan.stages if s.kind is kind)
        assert stage.routed is not None
        without = replace(stage, routed=replace(stage.routed, top_k=3, most=3, always=0))
        stages = tuple(without if s.index == stage.index else s for s in plan.stages)
        found = [str(one) for one in violations(replace(plan, stages=stages))]
        assert any("its experts are" in one for one in found), found


@pytest.mark.parametrize("name", ["shared_up", "shared_down", "shared_expert_gate"])
def test_a_wrong_shared_weight_is_noticed(name: str) -> None:
    class Turned:
        def __init__(self, spec: ModelSpec) -> None:
            self.spec, self.dtype = spec, DType.FP32
            self.random = random_weights(spec, SEED, DType.FP32)

        def __getitem__(self, wanted: str) -> Array:
            made = self.random[wanted]
            return np.roll(made, 1, axis=1) if wanted == f"layers.1.{name}" else made

    plan = planned(routed(SHARED), blocks=3)
    wanted = expected(plan, TOKENS)
    with HostEngine(plan, Turned(routed(SHARED))) as running:
        assert np.abs(running.logits(TOKENS) - wanted).max() > 1e-3 * np.abs(wanted).max()


def test_planted_faults_of_shared_experts_are_refused() -> None:
    """Sums thrown away, of other rows, of another value; a router without the gate's row."""
    plan = planned(routed(SHARED), blocks=3)
    down = next(s for s in plan.stages if s.kind is StageKind.SHARED_DOWN)
    router = next(s for s in plan.stages if s.kind is StageKind.ROUTER)
    assert down.matrix is not None
    assert router.matrix is not None
    lo, hi = down.matrix.owned[0]
    moved = ((lo, hi - 1), (hi - 1, down.matrix.owned[1][1]), *down.matrix.owned[2:])
    *others, last = router.matrix.owned
    wide = (*others, (last[0], last[1] + 1))
    wrong = {
        "throws the shared experts' sums away": replace(down, kept=False),
        "do not own the rows whose sums": replace(down, matrix=replace(down.matrix, owned=moved)),
        "does not read shared_up": replace(down, reads=router.reads),
        "(rows, cols, unit)": replace(router, matrix=replace(router.matrix, rows=8, owned=wide)),
    }
    for says, stage in wrong.items():
        stages = tuple(stage if s.index == stage.index else s for s in plan.stages)
        found = [str(one) for one in violations(replace(plan, stages=stages))]
        assert any(says in one for one in found), (says, found)


def test_an_nvidia_block_divides_its_warps_for_each_width() -> None:
    gpu = replace(LIMITS, teams=True)
    spec = routed(replace(SHARED, shared_width=64), dense=(1,))
    plan = build(spec, planned(spec).options, gpu)
    assert not violations(plan)
    teams = schedule_of(plan).warps.teams
    assert [teams[name].cols for name in ("ffn", "shared", "dense")] == [3 * 40, 64, 48]
    text = header(plan)
    assert "static constexpr int shared_cols = 64;" in text
    assert "static constexpr int dense_cols = 48;" in text
    alone = header(build(routed(), planned(routed()).options, gpu))
    assert "static constexpr int shared_cols = 0;" in alone


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_stored_types(dtype: DType) -> None:
    assert error(planned(routed(), weight_dtype=dtype)) < 1e-5


def test_every_run_gives_the_same_bits_and_the_references_tokens() -> None:
    plan = planned(routed(), blocks=4)
    weights = random_weights(routed(), SEED, DType.FP32)
    with engine(plan) as running:
        made = [running.generate(TOKENS[:5], max_tokens=10).tokens for _ in range(3)]
        logits = [running.logits(TOKENS) for _ in range(2)]
    assert made[0] == made[1] == made[2] == Reference(plan, weights).generate(TOKENS[:5], 10)
    assert np.array_equal(*logits)


# ---- the choice ----------------------------------------------------------------------------------


class Tied:
    """Weights whose routers score all experts zero, but for one."""

    def __init__(self, spec: ModelSpec, other: int, factor: float = 1.0) -> None:
        self.spec, self.dtype, self.other, self.factor = spec, DType.FP32, other, factor
        self.random = random_weights(spec, SEED, DType.FP32)

    def __getitem__(self, name: str) -> Array:
        made = self.random[name]
        if not name.endswith("router"):
            return made
        tied = np.zeros_like(made)
        tied[self.other] = made[self.other] * self.factor
        return tied


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("feed", "other"),
    [(FEED, 0), (FEED, 3), (FEED, 5), (MANY, 0), (MANY, 3), (MANY, 45), (MANY, 46), (MANY, 134)],
    ids=lambda v: str(getattr(v, "experts", v)),
)
def test_equal_experts_are_taken_from_the_lowest_number(feed: ExpertFeed, other: int) -> None:
    """In every block alike: an expert that not all of them multiply would make other logits."""
    plan = planned(routed(feed), blocks=4)
    weights = Tied(routed(feed), other)
    reference = Reference(plan, weights)
    wanted = np.stack([reference.step(token).copy() for token in TOKENS])
    with HostEngine(plan, weights) as running:
        assert np.abs(running.logits(TOKENS) - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [{"blocks": 5}, {"gpus": 2, "blocks": 2}], ids=["1", "2"])
def test_many_experts_are_chosen_as_by_the_reference(more: dict[str, Any]) -> None:
    plan = planned(routed(MANY), **more)
    prove(plan)
    assert error(plan) < 1e-5


def test_the_order_of_the_choice_is_total() -> None:
    nan = float("nan")
    assert chosen(FEED, np.array([1, 3, 3, -nan, 2, 3], np.float32)).experts == (3, 1, 2)
    assert chosen(FEED, np.array([1, 3, 3, 0, 2, 3], np.float32)).experts == (1, 2, 5)
    assert np.isnan(chosen(FEED, np.array([0, 0, 0, nan, 0, 0], np.float32)).weights).all()


def test_a_router_without_numbers_ends_the_run_with_a_message() -> None:
    plan = planned(routed(), blocks=2)
    with (
        HostEngine(plan, Tied(routed(), 1, float("inf"))) as running,
        pytest.raises(Exception, match="logit"),
    ):
        running.generate(TOKENS[:3], max_tokens=3)


# ---- sanitizers ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitize: str) -> None:
    script = (
        "from tests.engine.test_experts import *\nfrom twin.plan.options import HandOffKind\n"
        "for more in ({'gpus': 2}, {'handoff': HandOffKind.COUNTER, 'blocks': 5}, {'slot_bytes': "
        "256, 'tile_rows': 4}):\n    with engine(planned(routed(), **more), sanitize=SANITIZE) as "
        "e:\n        e.generate(TOKENS[:3], max_tokens=4)\n        e.logits(TOKENS[:3])\n"
        "with engine(planned(routed(SHARED), gpus=2), sanitize=SANITIZE) as e:\n"
        "    e.generate(TOKENS[:3], max_tokens=4)\n"
        "print('clean')\n"
    )
    sanitized(script, sanitize)


# ---- planted faults ------------------------------------------------------------------------------


def wrong(plan: Plan) -> float:
    """The largest error of the engine's logits, relative to the reference's, with whatever is
    planted.
    """
    wanted = expected(plan, TOKENS)
    with engine(plan) as running:
        return float(np.abs(running.logits(TOKENS) - wanted).max() / np.abs(wanted).max())


def test_a_wrong_expert_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert's down projection lies in another's place."""
    right = packing.pack_experts

    def swapped(plan: Plan, stage: Any, rank: int, weights: Any, place: Any, out: Array) -> None:
        right(plan, stage, rank, weights, place, out)
        size = len(out) // FEED.experts
        if stage.kind is StageKind.ROUTED_DOWN and stage.layer == 1:
            out[: 2 * size] = np.roll(out[: 2 * size], size)

    monkeypatch.setattr(packing, "pack_experts", swapped)
    assert wrong(planned(routed(), blocks=3)) > 1e-3


def test_a_stale_choice_is_refused_and_noticed() -> None:
    """A layer that fetches behind the router of the layer before it, and one that looks at its
    logits.
    """
    plan = planned(routed(), blocks=3)
    early = next(s.index for s in plan.stages if s.kind is StageKind.ROUTE)
    stages = [replace(s, gate=early) if s.routed and s.layer == 1 else s for s in plan.stages]
    assert any(
        "known behind" in str(found) for found in violations(replace(plan, stages=tuple(stages)))
    )
    logits = [s for s in plan.stages if s.kind is StageKind.ROUTE]
    stages = [replace(s, reads=logits[0].reads) if s is logits[1] else s for s in plan.stages]
    with pytest.raises(InvalidPlan):
        prove(replace(plan, stages=tuple(stages)))


def test_what_an_nvidia_block_does_not_do_with_experts_is_refused() -> None:
    gpu = replace(LIMITS, teams=True)
    plan = build(routed(), replace(planned(routed()).options, execution=Execution.GRAPH), gpu)
    assert any("use execution=resident" in str(found) for found in violations(plan))


# ---- the header ----------------------------------------------------------------------------------


def test_only_a_plan_with_experts_has_them_in_its_tables() -> None:
    text = header(planned(routed()))
    assert "static constexpr int TOP_K = 3;" in text
    assert "  int expert_units;" in text
    assert "static constexpr int expert_units = 0;" in header(planned())
