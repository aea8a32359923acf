"""The engine on an NVIDIA GPU: the reference's numbers from every protocol and execution, and the
same bits every time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from studies.common.rows import cut
from tests.engine.small_engine import LANED as FOUR_LANES
from tests.engine.small_engine import (
    LLAMA,
    QWEN2,
    QWEN3,
    SEED,
    TOKENS,
    after_the_first,
    probes,
    sums_what_comes_later,
)
from tests.engine.test_bias import Drawn
from tests.h200 import H200
from twin.engine.cuda import CudaEngine
from twin.engine.generate import Piece, Request, complete
from twin.engine.sampling import SamplingParams, sample
from twin.engine.weights import random_weights
from twin.errors import EngineError
from twin.kernel.tables import layout
from twin.models.load import load_model
from twin.models.spec import DType, LaneHead, Lanes, ModelSpec
from twin.plan.catalogue import StageKind
from twin.plan.options import CollectiveKind, Execution, HandOffKind, LateParts, Options, Sampling
from twin.plan.types import Parts, Plan
from twin.reference.step import Reference
from twin.schedule.choose import schedule_of
from twin.schedule.plans import build

LANED = replace(FOUR_LANES, heads=16, kv_heads=8, ffn=128, lanes=Lanes(8, 2))
FAMILIES = (LLAMA, QWEN2, QWEN3, LANED)
EXECUTIONS = (Execution.RESIDENT, Execution.GRAPH)
DTYPES = (DType.FP16, DType.BF16)
# a cached value may round to its other neighbour
TOLERANCE = {DType.FP16: 2e-3, DType.BF16: 1.2e-2, DType.FP32: 2e-5}


def missing() -> str:
    """Why no GPU can be used, or nothing."""
    try:
        from cuda.bindings import driver

        if int(driver.cuInit(0)[0]) or not driver.cuDeviceGetCount()[1]:
            return "no NVIDIA GPU"
    except (ImportError, RuntimeError) as error:
        return f"no NVIDIA driver: {error}"
    return ""


REASON = missing()
gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "a GPU")]
pytestmark = gpu


def planned(spec: ModelSpec = LLAMA, **chosen: Any) -> Plan:
    base: dict[str, Any] = {
        "context": 8,
        "max_context": 64,
        "kv_page": 4,
        "slot_bytes": 1024,
        "weight_dtype": DType.FP16,
        "kv_dtype": DType.FP16,
        "blocks": 6,
    }
    if spec.lanes:
        base |= {"collective": CollectiveKind.PUSH, "blocks": 16}
    return build(spec, Options(**(base | chosen)), H200)


def typed(dtype: DType) -> dict[str, DType]:
    return {"weight_dtype": dtype, "kv_dtype": dtype}


def wide(name: str, layers: int) -> Plan:
    """A real model's matrices on all blocks, with few layers and a small vocabulary."""
    spec = cut(load_model(name), layers)
    chosen: dict[str, Any] = {
        "blocks": 128 if spec.lanes else 132,
        "slot_bytes": 18432 if name == "gemma-3-1b" else 16384,  # rows of 1,152 columns lie whole
        "ring_slots": 6,
        "window_slots": 6,
        "max_context": 512,
        "kv_page": 16,
    }
    return planned(spec, **(chosen | typed(DType.FP16 if spec.lanes else DType.BF16)))


def folded_plan(hidden: int, blocks: int) -> Plan:
    """Slots in which eight rows of the residual's matrices lie whole."""
    spec = replace(LLAMA, hidden=hidden, qkv_bias=True)
    slot = -(-16 * hidden // 128) * 128
    return planned(spec, slot_bytes=slot, ring_slots=4, window_slots=2, blocks=blocks)


MATRIX = [(s, h, d, x) for s in FAMILIES for h in HandOffKind for d in DTYPES for x in EXECUTIONS]
STAGGERS = (0, 20_000)
WIDE = [
    *(("llama-3.2-1b", 2), ("qwen3-8b", 1), ("laneformer-2b", 4)),
    *(("gemma-2-2b", 2), ("gemma-3-1b", 2), ("olmo-2-7b", 1)),
]
# hidden columns, blocks: a last fold of eight columns, of half a warp's, of all; blocks of few rows
# and of several batches
FOLDED = [(1032, 6), (1152, 3), (1280, 20)]


SCANNED: list[tuple[ModelSpec, dict[str, Any]]] = [
    (replace(LLAMA, head_dim=64, heads=8, kv_heads=2), {"attention_splits": 1} | typed(DType.BF16)),
    (
        replace(LLAMA, head_dim=64, heads=6, kv_heads=2, windows=(0, 21, 0)),
        {"attention_splits": 3, "slot_bytes": 16384},
    ),
    (
        replace(LLAMA, head_dim=64, heads=3, kv_heads=3, windows=(40, 5, 0)),
        {"attention_splits": 1, "kv_page": 5},
    ),
    (
        replace(QWEN3, head_dim=128, heads=5, kv_heads=1),
        {"attention_splits": 2, "slot_bytes": 8192} | typed(DType.BF16),
    ),
    (
        replace(QWEN3, head_dim=128, heads=8, kv_heads=1),
        {"attention_splits": 1, "slot_bytes": 16384},
    ),
    (
        replace(LLAMA, head_dim=64, heads=24, kv_heads=2),
        {"attention_splits": 3} | typed(DType.BF16),
    ),
    (
        replace(LLAMA, head_dim=64, heads=9, kv_heads=1, windows=(0, 21, 0)),
        {"attention_splits": 1, "slot_bytes": 16384},
    ),
    (
        replace(QWEN3, head_dim=128, heads=12, kv_heads=1),
        {"attention_splits": 1, "slot_bytes": 8192},
    ),
    (
        replace(QWEN3, head_dim=128, heads=32, kv_heads=2),
        {"attention_splits": 2, "slot_bytes": 16384} | typed(DType.BF16),
    ),
]


# Heads, elements of one, bytes of a slot: output projections of one to three slices that give some
# threads no columns, the second one's last slice only.
SLICED = [
    (20, 128, 14336),
    (20, 128, 16384),
    (28, 128, 14336),
    (35, 64, 12288),
    (15, 96, 16384),
    (15, 64, 16384),
]


def scanned_plan(spec: ModelSpec, chosen: dict[str, Any], execution: Execution) -> Plan:
    base: dict[str, Any] = {
        "slot_bytes": 4096,
        "ring_slots": 4,
        "window_slots": 2,
        "max_context": 128,
        "prompt_chunk": 16,
    }
    return planned(spec, execution=execution, **(base | chosen))


def sliced_plan(heads: int, head_dim: int, slot_bytes: int) -> Plan:
    spec = replace(LLAMA, head_dim=head_dim, heads=heads, kv_heads=heads // (4 if heads % 5 else 5))
    chosen: dict[str, Any] = {
        "slot_bytes": slot_bytes,
        "ring_slots": 4,
        "window_slots": 2,
        "max_context": 128,
        "attention_splits": 5,
        "kv_page": 16,
    }
    return planned(spec, **(chosen | typed(DType.BF16)))


def hung_plan(handoff: HandOffKind) -> Plan:
    """DOWN of layer 0 asks for candidates that the LM head publishes later."""
    plan = planned(handoff=handoff)
    stages = list(plan.stages)
    at = next(s for s in stages if s.kind is StageKind.DOWN)
    value = next(s.publishes for s in stages if s.kind is StageKind.LM_HEAD)
    assert value is not None
    spans = (((0, plan.values[value].elements),),) * plan.blocks
    stages[at.index] = replace(
        at, reads=(*at.reads, replace(at.reads[0], value=value, parts=Parts.ALL, spans=spans))
    )
    return replace(plan, stages=tuple(stages))


FULL_PLAN = {"sampling": Sampling.FULL}
LANE_CASES = [(head, delay, early) for head in LaneHead for delay, early in ((1, True), (2, True))]


def all_plans() -> Iterator[Plan]:
    """What these tests compile, for who wants to compile it in advance and in parallel."""
    yield from (hung_plan(h) for h in (HandOffKind.SENTINEL, HandOffKind.COUNTER))
    yield sums_what_comes_later(planned(LANED))
    yield from (planned(s, handoff=h, execution=x, **typed(d)) for s, h, d, x in MATRIX)
    yield from (planned(LANED, lane_stagger_ns=stagger) for stagger in STAGGERS)
    yield from (
        planned(replace(LANED, lanes=Lanes(8, d, h, e)), late_parts=late)
        for h, d, e in LANE_CASES
        for late in LateParts
    )
    yield from (wide(*one) for one in WIDE)
    yield from (folded_plan(*one) for one in FOLDED)
    yield crowded_plan()
    yield from (scanned_plan(*one, x) for one in SCANNED for x in EXECUTIONS)
    yield from (
        planned(execution=x, handoff=h, **FULL_PLAN) for x in EXECUTIONS for h in HandOffKind
    )
    yield wide_drawing_plan()
    yield from (planned(max_context=100_000, attention_splits=1, execution=x) for x in EXECUTIONS)
    yield from (probe for x in EXECUTIONS for h in HandOffKind for probe in probes_of(x, h))


def probes_of(execution: Execution, handoff: HandOffKind) -> list[Plan]:
    return probes(H200, execution, handoff, blocks=5, vocab=5000)


def crowded_plan() -> Plan:
    spec = replace(LLAMA, hidden=320, heads=40, kv_heads=4, ffn=320)
    return build(spec, replace(planned().options, blocks=300), replace(H200, blocks=300))


class Kept(dict[str, Any]):
    """Random weights, each made once: ranks are packed one after the other, and real widths take
    seconds to make.
    """

    def __init__(self, spec: ModelSpec, dtype: DType) -> None:
        super().__init__()
        self.spec, self.dtype, self.source = spec, dtype, random_weights(spec, SEED, dtype)

    def __missing__(self, name: str) -> Any:
        self[name] = self.source[name]
        return self[name]


@functools.lru_cache(maxsize=1)
def kept(spec: ModelSpec, dtype: DType) -> Kept:
    return Kept(spec, dtype)


def wide_drawing_plan() -> Plan:
    plan = wide("llama-3.2-1b", 2)
    assert plan.spec is not None
    return build(plan.spec, replace(plan.options, sampling=Sampling.FULL), H200)


def weights_of(plan: Plan) -> Any:
    assert plan.spec is not None
    return kept(plan.spec, plan.options.weight_dtype)


def expected(plan: Plan, tokens: list[int]) -> np.ndarray[Any, Any]:
    reference = Reference(plan, weights_of(plan))
    return np.stack([reference.step(token).copy() for token in tokens])


def off(logits: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    """The largest difference, as a share of the largest logit."""
    return float(np.abs(logits - wanted).max() / np.abs(wanted).max())


# ---- hangs first: the tests after these rely on the watchdog -------------------------------------


@pytest.mark.parametrize("handoff", [HandOffKind.SENTINEL, HandOffKind.COUNTER])
def test_a_hang_ends_by_watchdog_with_the_stage_and_the_value(handoff: HandOffKind) -> None:
    plan = hung_plan(handoff)
    with (
        CudaEngine(plan, weights_of(plan), watchdog_s=0.2) as running,
        pytest.raises(EngineError) as caught,
    ):
        running.generate([1, 2, 3], max_tokens=3)
    assert "down[0]" in str(caught.value)
    assert "candidates" in str(caught.value)


def test_a_scheduler_warp_that_waits_for_parts_that_never_come_ends_by_watchdog() -> None:
    """Its consumer warps wait for the scheduler warp, not for the clock."""
    plan = sums_what_comes_later(planned(LANED))
    with (
        CudaEngine(plan, weights_of(plan), watchdog_s=0.2) as running,
        pytest.raises(EngineError, match=r"in reduce\[1\] at step 0"),
    ):
        running.generate([1, 2, 3], max_tokens=3)


# ---- the reference's numbers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "handoff", "dtype", "execution"),
    MATRIX,
    ids=lambda v: v.name if isinstance(v, ModelSpec) else v.value,
)
def test_numbers_match_the_reference_and_repeat(
    spec: ModelSpec, handoff: HandOffKind, dtype: DType, execution: Execution
) -> None:
    plan = planned(spec, handoff=handoff, execution=execution, **typed(dtype))
    wanted = expected(plan, TOKENS)
    with CudaEngine(plan, weights_of(plan)) as running:
        logits = running.logits(TOKENS)
        assert off(logits, wanted) < TOLERANCE[dtype]
        for _ in range(4):
            assert np.array_equal(logits, running.logits(TOKENS))
        made = running.generate(TOKENS[:5], max_tokens=40)
        assert running.generate(TOKENS[:5], max_tokens=40).tokens == made.tokens
        rows = running.logits(TOKENS[:5] + made.tokens[:-1])[4:]
    assert made.tokens == [int(row.argmax()) for row in rows]
    assert (made.step_ns > 0).all()


def test_every_protocol_and_execution_gives_the_same_bits() -> None:
    made = []
    for handoff in HandOffKind:
        for execution in EXECUTIONS:
            plan = planned(LANED, handoff=handoff, execution=execution)
            with CudaEngine(plan, weights_of(plan)) as running:
                made.append(running.logits(TOKENS))
    assert all(np.array_equal(made[0], other) for other in made)


@pytest.mark.parametrize("late", list(LateParts))
@pytest.mark.parametrize(("head", "delay", "early"), LANE_CASES)
def test_lanes_match_the_reference(
    head: LaneHead, delay: int, early: bool, late: LateParts
) -> None:
    plan = planned(replace(LANED, lanes=Lanes(8, delay, head, early)), late_parts=late)
    made = schedule_of(plan).scheduler_makes
    assert any(map(made, plan.stages)) == (late is LateParts.REDUCED)
    wanted = expected(plan, TOKENS)
    with CudaEngine(plan, weights_of(plan)) as running:
        assert off(running.logits(TOKENS), wanted) < TOLERANCE[DType.FP16]


def test_staggered_lanes_give_the_same_bits() -> None:
    made = []
    for stagger in STAGGERS:
        plan = planned(LANED, lane_stagger_ns=stagger)
        with CudaEngine(plan, weights_of(plan)) as running:
            made.append(running.logits(TOKENS))
    assert np.array_equal(*made)


@pytest.mark.parametrize(("name", "layers"), WIDE)
def test_real_widths_match_the_reference(name: str, layers: int) -> None:
    plan = wide(name, layers)
    tokens = [t * 80 for t in TOKENS[:6]]
    wanted = expected(plan, tokens)
    with CudaEngine(plan, weights_of(plan)) as running:
        logits = running.logits(tokens)
        assert off(logits, wanted) < TOLERANCE[plan.options.weight_dtype]
        assert all(np.array_equal(logits, running.logits(tokens)) for _ in range(4))
        made = running.generate(tokens, max_tokens=200)
        assert running.generate(tokens, max_tokens=200).tokens == made.tokens


@pytest.mark.parametrize(("hidden", "blocks"), FOLDED)
def test_rows_in_folds_match_the_reference(hidden: int, blocks: int) -> None:
    plan = folded_plan(hidden, blocks)
    assert schedule_of(plan).warps.teams["hidden"].folds > 1
    wanted = expected(plan, TOKENS)
    with CudaEngine(plan, weights_of(plan)) as running:
        logits = running.logits(TOKENS)
        assert off(logits, wanted) < TOLERANCE[plan.options.weight_dtype]
        assert all(np.array_equal(logits, running.logits(TOKENS)) for _ in range(4))


@pytest.mark.parametrize(
    ("execution", "max_context"),
    [(Execution.RESIDENT, 64), (Execution.RESIDENT, 512), (Execution.GRAPH, 64)],
)
@pytest.mark.parametrize("spec", [LLAMA, LANED], ids=lambda spec: spec.name)
def test_caches_of_several_tiles_match_the_reference(
    spec: ModelSpec, execution: Execution, max_context: int
) -> None:
    """Sixteen positions a tile; the newest is in none, and stands alone when all before fill
    theirs. Long scans: two heads a key.
    """
    plan = planned(
        spec,
        slot_bytes=512,
        ring_slots=4,
        window_slots=2,
        attention_splits=1,
        execution=execution,
        max_context=max_context,
    )
    tokens = (5 * TOKENS)[:60]
    wanted = expected(plan, tokens)
    with CudaEngine(plan, weights_of(plan)) as running:
        assert off(running.logits(tokens), wanted) < TOLERANCE[plan.options.weight_dtype]


@pytest.mark.parametrize(("heads", "head_dim", "slot_bytes"), SLICED)
def test_slices_of_fewer_columns_than_threads_match_the_reference(
    heads: int, head_dim: int, slot_bytes: int
) -> None:
    """Three rounds of splits, of which the last is not whole; some splits hold nothing at first."""
    plan = sliced_plan(heads, head_dim, slot_bytes)
    tokens = (6 * TOKENS)[:80]
    wanted = expected(plan, tokens)
    with CudaEngine(plan, weights_of(plan)) as running:
        logits = running.logits(tokens)
        assert off(logits, wanted) < TOLERANCE[plan.options.weight_dtype]
        assert all(np.array_equal(logits, running.logits(tokens)) for _ in range(2))


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(
    ("spec", "chosen"),
    SCANNED,
    ids=[f"{one.head_dim}-{one.heads // one.kv_heads}" for one, _ in SCANNED],
)
def test_scans_on_tensor_cores_match_the_reference(
    spec: ModelSpec, chosen: dict[str, Any], execution: Execution
) -> None:
    """Products of 16 positions: tiles of one and of four, some not full; the newest alone or among
    others; windows that begin anywhere.
    """
    plan = scanned_plan(spec, chosen, execution)
    assert layout(plan).sizes["tensor_scan"]
    tokens = (6 * TOKENS)[:80]
    wanted = expected(plan, tokens)
    with CudaEngine(plan, weights_of(plan)) as running:
        logits = running.logits(tokens)
        assert off(logits, wanted) < TOLERANCE[plan.options.weight_dtype]
        assert all(np.array_equal(logits, running.logits(tokens)) for _ in range(2))
        after = running.logits(tokens[70:], after=tokens[:70])  # what passes have cached
        assert off(after, wanted[70:]) < TOLERANCE[plan.options.weight_dtype]


def test_a_ring_that_is_filled_again_at_once_gives_the_same_bits() -> None:
    """Loads whose results nobody had used yet met the next copy into their slot, with six or more
    slots in flight.
    """
    plan = wide("llama-3.2-1b", 4)
    plans = [
        replace(plan, options=replace(plan.options, ring_slots=12, window_slots=window))
        for window in (2, 12)
    ]
    ids = [int(t) for t in np.random.default_rng(SEED).integers(0, plan.spec.vocab, 40)]
    seen = []
    for one in plans:
        with CudaEngine(one, weights_of(plan)) as running:
            seen += [running.logits(ids) for _ in range(4)]
    assert all(np.array_equal(seen[0], later) for later in seen[1:])


SAMPLED = (
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=7),
    SamplingParams(temperature=1.0, min_p=0.05, seed=8),
    SamplingParams(temperature=0.7, min_p=1.0, seed=9),
    SamplingParams(temperature=1.0, min_p=0.2, top_k=30, seed=10),
    SamplingParams(temperature=1.3, min_p=0.02, top_p=0.9, seed=11),
    SamplingParams(temperature=1.5, min_p=0.01, top_k=100, top_p=0.8, seed=12),
)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_sampled_tokens_are_those_of_the_python_sampler(execution: Execution) -> None:
    plan = planned(execution=execution, **FULL_PLAN)
    with CudaEngine(plan, weights_of(plan)) as running:
        for params in SAMPLED:
            tokens = running.generate(TOKENS[:5], max_tokens=30, sampling=params).tokens
            logits = running.logits(TOKENS[:5] + tokens[:-1])[4:]
            wanted = [sample(row, params, step) for step, row in enumerate(logits)]
            assert tokens == wanted, params


def test_min_p_over_a_wide_vocabulary_is_that_of_the_python_sampler() -> None:
    """All blocks have logits, and what min-p leaves ends inside a bucket of theirs."""
    plan = wide_drawing_plan()
    with CudaEngine(plan, weights_of(plan)) as running:
        for params in (params for params in SAMPLED if params.min_p > 0):
            tokens = running.generate(TOKENS[:5], max_tokens=100, sampling=params).tokens
            logits = running.logits([TOKENS[4], *tokens[:-1]], after=TOKENS[:4])
            wanted = [sample(row, params, step) for step, row in enumerate(logits)]
            assert tokens == wanted, params


def reference_logprobs(plan: Plan, tokens: list[int]) -> np.ndarray[Any, Any]:
    """[tokens, vocab], by NumPy alone."""
    logits = expected(plan, tokens).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("handoff", list(HandOffKind))
@pytest.mark.parametrize("top", [5, 20])
def test_log_probabilities_are_those_of_the_reference(
    execution: Execution, handoff: HandOffKind, top: int
) -> None:
    plan = planned(execution=execution, handoff=handoff, **FULL_PLAN)
    request = Request(
        TOKENS[:5],
        40,
        SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=7),
        logprobs=top,
    )
    with CudaEngine(plan, weights_of(plan)) as running:
        silent = complete(running, None, replace(request, logprobs=None)).made.tokens
        for late_s in (0.0, 0.002):  # the second one makes the kernel wait
            pieces = list[Piece]()

            def take(piece: Piece, late_s: float = late_s, to: list[Piece] = pieces) -> None:
                time.sleep(late_s)
                to.append(piece)

            assert complete(running, None, request, take).made.tokens == silent
            assert complete(running, None, replace(request, logprobs=None)).made.tokens == silent
            _check_scores(plan, [*TOKENS[:5], *silent], pieces, top)


def _check_scores(plan: Plan, tokens: list[int], pieces: list[Piece], top: int) -> None:
    """Of the tokens that follow the first five."""
    wanted = reference_logprobs(plan, tokens[:-1])[4:]
    found = [piece.scored for piece in pieces if piece.token is not None]
    assert len(found) == len(wanted)
    within = 4 * TOLERANCE[plan.options.weight_dtype] * np.abs(wanted).max()
    for one, row, token in zip(found, wanted, tokens[5:], strict=True):
        assert one is not None
        assert one.token == token
        assert one.logprob == pytest.approx(row[token], abs=within)
        assert [logprob for _, logprob in one.top] == pytest.approx(
            np.sort(row)[: -top - 1 : -1], abs=within
        )
        # each token's own, so that none has another one's place
        assert [row[at] for at, _ in one.top] == pytest.approx(
            [logprob for _, logprob in one.top], abs=within
        )


def test_rows_of_a_wide_model_are_whole_when_their_token_is_there() -> None:
    """Each row is that of its token in every element: 132 blocks write 32 KiB of it."""
    plan = wide_drawing_plan()
    params, rows = SamplingParams(temperature=1.0, top_k=100, seed=3), list[Any]()
    with CudaEngine(plan, weights_of(plan)) as running:
        silent = running.generate(TOKENS[:5], max_tokens=400, sampling=params).tokens
        made = running.generate(
            TOKENS[:5], max_tokens=400, sampling=params, on_logits=rows.append
        ).tokens
        again = running.generate(TOKENS[:5], max_tokens=400, sampling=params).tokens
        logits = running.logits([TOKENS[4], *made[:-1]], after=TOKENS[:4])
    assert made == silent == again
    assert np.array_equal(rows, logits)


def test_a_host_that_takes_no_logits_gets_an_error() -> None:
    plan, calls = planned(**FULL_PLAN), list[int]()

    def stay(token: int) -> None:
        calls.append(token)
        time.sleep(2.5 if len(calls) == 2 else 0)

    params = SamplingParams(temperature=1.0, seed=1)
    with CudaEngine(plan, weights_of(plan), watchdog_s=1) as running:
        with pytest.raises(EngineError, match=r"waited 0\.5 s for the logits of 8 tokens"):
            running.generate([1], max_tokens=40, sampling=params, on_token=stay, on_logits=len)
        made = running.generate([1], max_tokens=40, sampling=params, on_logits=len)
    assert len(made.tokens) == 40


def test_a_wide_model_draws_from_its_logits_and_their_bias() -> None:
    """132 blocks read the host's row of 8,192 words for each token."""
    plan = wide_drawing_plan()
    params, rows = SamplingParams(temperature=1.0, top_k=100, seed=3), list[Any]()
    assert plan.spec is not None
    for steady in (False, True):
        bias = Drawn(steady, vocab=plan.spec.vocab)
        with CudaEngine(plan, weights_of(plan)) as running:
            made = running.generate(
                TOKENS[:5], max_tokens=200, sampling=params, bias=bias, on_logits=rows.append
            ).tokens
        assert made == [sample(row + bias.of(at), params, at) for at, row in enumerate(rows)]
        rows.clear()


def test_a_greedy_plan_keeps_its_logits() -> None:
    plan = planned()
    with (
        CudaEngine(plan, weights_of(plan)) as running,
        pytest.raises(EngineError, match="plan with sampling=full"),
    ):
        running.generate([1], max_tokens=4, on_logits=len)


# ---- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_stop_token_ends_the_run(execution: Execution) -> None:
    plan = planned(execution=execution)
    with CudaEngine(plan, weights_of(plan)) as running:
        free = running.generate(TOKENS[:5], max_tokens=20).tokens
        made = running.generate(TOKENS[:5], max_tokens=20, stop={free[7]})
        assert running.generate(TOKENS[:5], max_tokens=20).tokens == free
    assert made.stop_reason == "stop"
    assert made.tokens == free[: free.index(free[7]) + 1]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_cancel_returns_what_was_generated(execution: Execution) -> None:
    plan = planned(max_context=100_000, attention_splits=1, execution=execution)
    with CudaEngine(plan, weights_of(plan)) as running:
        begun = time.monotonic()
        made = running.generate([1], max_tokens=90_000, on_token=after_the_first(running.cancel))
    assert made.stop_reason == "cancelled"
    assert 0 < len(made.tokens) == len(made.step_ns) < 90_000
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("handoff", list(HandOffKind))
def test_every_probe_runs(execution: Execution, handoff: HandOffKind) -> None:
    for probe in probes_of(execution, handoff):
        with CudaEngine(probe, None) as running:
            running.fill_random(0)
            seconds = running.step_seconds(steps=5, warmup=1)
        assert seconds.shape == (5,)
        assert (seconds > 0).all()


def test_a_plan_that_does_not_fit_is_refused_with_numbers() -> None:
    plan = planned()
    with pytest.raises(EngineError, match="the kernel itself pushes"):
        CudaEngine(replace(plan, options=replace(plan.options, gpus=2)), None)
    with pytest.raises(
        EngineError, match=r"300 blocks .* cannot be resident: \d+ multiprocessors hold \d each"
    ):
        CudaEngine(crowded_plan(), None)
