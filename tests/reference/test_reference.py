"""The reference: the same numbers from every plan of a model, and a refusal of plans that are
wrong.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from twin.engine.weights import random_weights
from twin.errors import EngineError, InvalidPlan, PlanError
from twin.models.spec import DType, LaneHead, Lanes, ModelSpec, Rope, RopeScaling, RopeStyle
from twin.plan.attention import Attention
from twin.plan.catalogue import StageKind
from twin.plan.matrices import stage_matrix
from twin.plan.options import CollectiveKind, Execution, HandOffKind, Limits, Options, Sampling
from twin.plan.shards import Array, rope_table
from twin.plan.types import Plan
from twin.reference.step import Reference, dealt_pages, slots_before
from twin.schedule.plans import build
from twin.schedule.probe import exchange_probe

LIMITS = Limits(64, 1, 2**30, 2**40, True)
DENSE = ModelSpec(
    name="dense",
    family="qwen3",
    layers=3,
    hidden=32,
    heads=8,
    kv_heads=4,
    head_dim=8,
    ffn=64,
    vocab=75,
    context=64,
    norm_eps=1e-5,
    rope=Rope(10000.0),
    windows=(0, 5, 0),
    qk_norm=True,
)
LANED = replace(
    DENSE,
    family="laneformer",
    layers=4,
    kv_heads=8,
    head_dim=4,
    windows=(3, 0, 5, 0),
    qk_norm=False,
    lanes=Lanes(4, 1, LaneHead.SUM, True),
)
PROMPT = [5, 74, 0, 33, 33, 2, 61, 9, 10]
WEIGHTS = {spec.name + spec.family: random_weights(spec, 11, DType.FP32) for spec in (DENSE, LANED)}


def options(**more: Any) -> Options:
    gpus = more.get("gpus", 1)
    base: dict[str, Any] = {
        "context": 8,
        "max_context": 24,
        "kv_page": 2,
        "weight_dtype": DType.FP32,
    }
    if gpus > 1:
        base["collective"] = CollectiveKind.PUSH
    return Options(**(base | more))


def logits(spec: ModelSpec, chosen: Options, dtype: Any = np.float64) -> Array:
    reference = Reference(
        build(spec, chosen, LIMITS), WEIGHTS[spec.name + spec.family], dtype, kv_dtype=None
    )
    return np.array([reference.step(token) for token in PROMPT])


@cache
def expected(family: str) -> Array:
    if family == DENSE.family:
        return logits(DENSE, options(blocks=1))
    return logits(LANED, options(blocks=4, collective=CollectiveKind.PUSH))


@pytest.mark.parametrize("spec", [DENSE, LANED], ids=["dense", "lanes"])
def test_how_partial_outputs_are_stored_changes_no_number(spec: ModelSpec) -> None:
    """Pairs with a cache of 16 bits, whose rounding the reference leaves out here, single words
    with one of FP32.
    """
    chosen = options(
        blocks=4, kv_dtype=DType.FP32, attention_splits=3, collective=CollectiveKind.PUSH
    )
    np.testing.assert_allclose(logits(spec, chosen), expected(spec.family), rtol=1e-9, atol=1e-12)


@drawn(30)
@given(
    spec=st.sampled_from([DENSE, LANED]),
    gpus=st.sampled_from([1, 2, 4]),
    blocks=st.integers(1, 6),
    splits=st.integers(1, 6),
    window_splits=st.none() | st.integers(1, 4),
    first=st.integers(0, 3),
    page=st.integers(1, 4),
    handoff=st.sampled_from(list(HandOffKind)),
    sampling=st.sampled_from(list(Sampling)),
    library=st.booleans(),
)
def test_every_plan_of_a_model_gives_the_same_logits(
    spec: ModelSpec,
    gpus: int,
    blocks: int,
    splits: int,
    window_splits: int | None,
    first: int,
    page: int,
    handoff: HandOffKind,
    sampling: Sampling,
    library: bool,
) -> None:
    ranks = spec.lanes.count if spec.lanes else gpus
    collective = (
        CollectiveKind.NONE
        if ranks == 1
        else CollectiveKind.LIBRARY
        if library
        else CollectiveKind.PUSH
    )
    chosen = options(
        gpus=gpus,
        blocks=blocks * ranks // gpus,
        attention_splits=splits,
        window_splits=window_splits,
        split_positions=first * page,
        kv_page=page,
        handoff=handoff,
        sampling=sampling,
        collective=collective,
        execution=Execution.GRAPH if library else Execution.RESIDENT,
    )
    assert np.allclose(logits(spec, chosen), expected(spec.family), rtol=0, atol=1e-11)


def test_fp32_is_close_to_fp64() -> None:
    assert np.abs(logits(DENSE, options(gpus=2), np.float32) - expected(DENSE.family)).max() < 1e-5


@pytest.mark.parametrize(
    ("dtype", "limit"), [(DType.FP32, 1e-6), (DType.FP16, 1e-2), (DType.BF16, 1e-1)]
)
def test_cached_keys_and_values_are_rounded_to_the_plans_type(dtype: DType, limit: float) -> None:
    plan = build(DENSE, options(kv_dtype=dtype), LIMITS)
    reference = Reference(plan, WEIGHTS[DENSE.name + DENSE.family], np.float64)
    found = np.array([reference.step(token) for token in PROMPT])
    assert 0 < np.abs(found - expected(DENSE.family)).max() < limit
    assert {keys.dtype.itemsize for keys in reference.keys.values()} == {dtype.bytes}


@pytest.mark.parametrize("sampling", list(Sampling))
def test_generation_feeds_back_what_it_sampled(sampling: Sampling) -> None:
    plan = build(DENSE, options(gpus=4, blocks=2, sampling=sampling), LIMITS)
    weights = WEIGHTS[DENSE.name + DENSE.family]
    tokens = Reference(plan, weights).generate(PROMPT[:3], 5)
    assert tokens == Reference(plan, weights).generate(
        PROMPT[:3], 5, lambda logits, step: int(np.argmax(logits))
    )
    again = Reference(plan, weights)
    forced = [again.step(token) for token in PROMPT[:3] + tokens[:-1]]
    assert [int(np.argmax(row)) for row in forced[2:]] == tokens
    assert Reference(plan, weights).generate(PROMPT[:3], 5, stop={tokens[1]})[-1] == tokens[1]


# ---- refusals ------------------------------------------------------------------------------------


def broken(plan: Plan, kind: StageKind, **changes: Any) -> Plan:
    """The plan with the fields of one stage changed."""
    stages = list(plan.stages)
    index = next(s.index for s in stages if s.kind is kind and s.layer == 1)
    stages[index] = replace(stages[index], **changes)
    return replace(plan, stages=tuple(stages))


def run(plan: Plan, steps: int = 8) -> None:
    reference = Reference(plan, WEIGHTS[DENSE.name + DENSE.family])
    for token in PROMPT[:steps]:
        reference.step(token)


def stage(plan: Plan, kind: StageKind) -> Any:
    return next(s for s in plan.stages if s.kind is kind and s.layer == 1)


def test_a_value_that_nobody_published_is_refused() -> None:
    plan = build(DENSE, options(blocks=3), LIMITS)
    value = plan.values[stage(plan, StageKind.DOWN).reads[0].value]
    values = list(plan.values)
    values[value.id] = replace(value, owned=((0, 20), (21, 40), (40, 64)))
    with pytest.raises(InvalidPlan, match="rows that blocks own are not those"):
        run(replace(plan, values=tuple(values)))
    matrix = replace(stage(plan, StageKind.GATE_UP).matrix, owned=((0, 40), (42, 80), (80, 128)))
    with pytest.raises(InvalidPlan, match=r"down\[1\]: gate_up\[1\]\[20\].*not published"):
        run(broken(replace(plan, values=tuple(values)), StageKind.GATE_UP, matrix=matrix))


def test_an_element_published_twice_is_refused() -> None:
    plan = build(DENSE, options(blocks=2), LIMITS)
    values = list(plan.values)
    value = values[stage(plan, StageKind.ATTENTION).publishes]
    values[value.id] = replace(value, owned=((0, value.elements), (0, value.elements)))
    with pytest.raises(InvalidPlan, match="by two blocks"):
        Reference(replace(plan, values=tuple(values)), WEIGHTS[DENSE.name + DENSE.family])


def test_a_forgotten_reset_is_refused() -> None:
    plan = build(DENSE, options(), LIMITS)
    index = next(s for s in plan.stages if s.resets and s.layer == 1)
    with pytest.raises(InvalidPlan, match="before its copy"):
        run(broken(plan, index.kind, resets=()))


def test_a_reset_before_the_last_read_is_refused() -> None:
    plan = build(DENSE, options(), LIMITS)
    target = stage(plan, StageKind.O_PROJ)
    qkv = stage(plan, StageKind.QKV)
    moved = [r for s in plan.stages for r in s.resets if r.value == qkv.publishes]
    with pytest.raises(InvalidPlan, match="not published"):
        run(
            broken(
                broken(plan, StageKind.O_PROJ, resets=(*target.resets, *moved)),
                StageKind.ATTENTION,
                reads=_late(plan),
            )
        )


def _late(plan: Plan) -> Any:
    """The attention stage waiting for the layer's own o_proj, which comes later."""
    later = stage(plan, StageKind.O_PROJ).publishes
    return tuple(replace(read, value=later) for read in stage(plan, StageKind.ATTENTION).reads)


def test_a_head_that_a_block_does_not_poll_poisons_the_logits() -> None:
    plan = build(DENSE, options(blocks=3), LIMITS)
    read = stage(plan, StageKind.ATTENTION).reads[0]
    blind = replace(read, spans=(read.spans[0][:-1], *read.spans[1:]))
    reference = Reference(
        broken(plan, StageKind.ATTENTION, reads=(blind,)), WEIGHTS[DENSE.name + DENSE.family]
    )
    assert np.isnan(reference.step(1)).all()
    assert reference.sampled == -1


def test_probes_and_impossible_steps_are_refused() -> None:
    weights = WEIGHTS[DENSE.name + DENSE.family]
    with pytest.raises(PlanError, match="probe"):
        Reference(exchange_probe(options(), LIMITS, elements=8), weights)
    reference = Reference(build(DENSE, options(), LIMITS), weights)
    with pytest.raises(EngineError, match="token 75"):
        reference.step(75)
    with pytest.raises(EngineError, match="empty"):
        reference.generate([], 3)
    with pytest.raises(EngineError, match="max_context=24"):
        reference.generate([1], 30)


def attention_of(splits: int, first: int) -> Attention:
    return Attention(
        heads=1,
        kv_heads=1,
        head_dim=8,
        kv_replicas=1,
        splits=splits,
        item_positions=64,
        window_splits=splits,
        window_positions=64,
        together=4,
        first_pages=first,
    )


# ---- pieces --------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))
def test_slots_before_counts_the_positions_of_a_split(
    position: int, splits: int, page: int, first: int
) -> None:
    own = attention_of(splits, first)
    dealt = dealt_pages(own, 0, position // page + 1)
    for split in range(splits):
        held = [p for p in range(position) if dealt[p // page] == split]
        assert slots_before(position, split, dealt, page) == len(held)


@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 40))
def test_pages_are_dealt_as_the_plan_counts_them(splits: int, first: int, pages: int) -> None:
    own = attention_of(splits, first)
    dealt = dealt_pages(own, 0, pages)
    assert own.splits_below(pages) == len(set(dealt))
    for split in range(splits):
        assert own.pages_below(pages, split) == dealt.count(split)


def test_padding_rows_of_the_vocabulary_are_zero_and_never_chosen() -> None:
    plan = build(DENSE, options(gpus=4, blocks=2), LIMITS)
    weights = WEIGHTS[DENSE.name + DENSE.family]
    head = next(s for s in plan.stages if s.kind is StageKind.LM_HEAD)
    matrix = stage_matrix(plan, head, 3, weights)
    assert plan.shard.vocab * 4 == 76
    assert not matrix[-1].any()
    assert np.array_equal(matrix[:-1], weights["lm_head"][57:])


def test_ranks_that_share_a_kv_head_hold_the_same_rows() -> None:
    spec = replace(DENSE, kv_heads=2)
    weights = random_weights(spec, 1, DType.FP32)
    plan = build(spec, options(gpus=8), LIMITS)
    qkv = plan.stages[1]
    parts = [stage_matrix(plan, qkv, rank, weights) for rank in range(8)]
    size = spec.head_dim
    assert all(np.array_equal(parts[r][size:], parts[0][size:]) for r in range(4))
    assert np.array_equal(parts[5][size : 2 * size], weights["layers.0.k"][size:])
    assert np.array_equal(parts[5][:size], weights["layers.0.q"][5 * size : 6 * size])


def test_llama3_scaling_keeps_fast_and_divides_slow_frequencies() -> None:
    scaled = replace(
        DENSE,
        head_dim=64,
        rope=Rope(5e5, RopeStyle.HALF, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
    )
    plain = replace(scaled, rope=Rope(5e5))
    fast, slow = (
        np.arctan2(t[1][1], t[0][1]) for t in (rope_table(plain, 2), rope_table(scaled, 2))
    )
    assert slow[0] == fast[0]
    assert np.isclose(slow[-1] * 8, fast[-1], rtol=1e-5)
    assert np.all(np.diff(slow) < 0)
