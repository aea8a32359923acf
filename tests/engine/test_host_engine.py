"""The host engine: the reference's numbers from every plan, the same bits in every run, and no hang without a report."""

from __future__ import annotations

import functools
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twin import toolchain
from twin.engine import host
from twin.engine.host import HostEngine, run_probe
from twin.engine.sampling import SamplingParams, sample
from twin.engine.weights import random_weights
from twin.errors import EngineError
from twin.models.spec import DType, LaneHead, Lanes, ModelSpec, Rope, RopeScaling, RopeStyle
from twin.plan.build import build
from twin.plan.probe import attention_probe, exchange_probe, sample_probe, stream_probe
from twin.plan.types import CollectiveKind, Execution, HandOffKind, LateParts, Limits, Options, Parts, Plan, Sampling, StageKind
from twin.reference.step import Reference

LIMITS = Limits(blocks=64, dies=1, on_chip_bytes=2**30, memory_bytes=2**40, oversubscribe=True)
LLAMA = ModelSpec(
    name="llama", family="llama", layers=3, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=96, vocab=101, context=64, norm_eps=1e-5,
    rope=Rope(10000.0, scaling=RopeScaling("llama3", 8.0)), windows=(0, 5, 0),
)  # fmt: skip
QWEN2 = replace(LLAMA, name="qwen2", family="qwen2", qkv_bias=True, rope=Rope(10000.0))
QWEN3 = replace(LLAMA, name="qwen3", family="qwen3", qk_norm=True, tied=True, head_dim=24)
LANED = replace(
    LLAMA, name="lanes", family="laneformer", layers=6, windows=(4,) * 4 + (0, 0), rope=Rope(10000.0, RopeStyle.INTERLEAVED),
    lanes=Lanes(4, 2),
)  # fmt: skip
TOKENS = [5, 74, 0, 33, 100, 2, 61, 9, 10, 11, 12, 5, 5, 80]
SEED = 3
FULL = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=7)


def planned(spec: ModelSpec = LLAMA, **chosen: Any) -> Plan:
    """A small plan; several ranks push unless told otherwise."""
    base: dict[str, Any] = {
        "context": 8, "max_context": 64, "kv_page": 4, "slot_bytes": 1024, "weight_dtype": DType.FP32, "kv_dtype": DType.FP32, "blocks": 2,
    }  # fmt: skip
    if spec.lanes or chosen.get("gpus", 1) > 1:
        base["collective"] = CollectiveKind.PUSH
    return build(spec, Options(**(base | chosen)), LIMITS)


def engine(plan: Plan, **more: Any) -> HostEngine:
    assert plan.spec is not None
    return HostEngine(plan, random_weights(plan.spec, SEED, plan.options.weight_dtype), **more)


def expected(plan: Plan, tokens: list[int]) -> np.ndarray[Any, Any]:
    assert plan.spec is not None
    reference = Reference(plan, random_weights(plan.spec, SEED, plan.options.weight_dtype))
    return np.stack([reference.step(token).copy() for token in tokens])


def error(plan: Plan, **more: Any) -> float:
    """Largest difference from the reference, relative to the largest logit."""
    wanted = expected(plan, TOKENS)
    with engine(plan, **more) as running:
        return float(np.abs(running.logits(TOKENS) - wanted).max() / np.abs(wanted).max())


# ---- the reference's numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [LLAMA, QWEN2, QWEN3], ids=lambda s: s.name)
def test_logits_of_each_family_match_the_reference(spec: ModelSpec) -> None:
    assert error(planned(spec)) < 1e-5


@pytest.mark.parametrize("handoff", list(HandOffKind))
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_logits_do_not_depend_on_blocks_ranks_and_hand_offs(blocks: int, gpus: int, handoff: HandOffKind) -> None:
    assert error(planned(blocks=blocks, gpus=gpus, handoff=handoff, attention_splits=1 + blocks // 2)) < 1e-5


@pytest.mark.parametrize("head", list(LaneHead))
@pytest.mark.parametrize(("delay", "early"), [(0, False), (1, True), (2, False), (2, True)])
def test_lanes_match_the_reference(head: LaneHead, delay: int, early: bool) -> None:
    spec = replace(LANED, lanes=Lanes(4, delay, head, early))
    assert error(planned(spec, gpus=2, blocks=4)) < 1e-5


@pytest.mark.parametrize(
    ("lanes", "chosen"),
    [
        (Lanes(4, 1, LaneHead.SUM, True), {"gpus": 1, "blocks": 12}),
        (Lanes(4, 2, LaneHead.VOCABULARY), {"gpus": 2, "blocks": 6}),
        (Lanes(4, 2, LaneHead.MEAN, True), {"gpus": 4, "blocks": 1}),
        (Lanes(4, 3), {"gpus": 2, "blocks": 4, "sampling": Sampling.FULL}),
        (Lanes(4, 2), {"blocks": 8, "handoff": HandOffKind.COUNTER}),
        (Lanes(4, 2), {"blocks": 8, "handoff": HandOffKind.GRID}),
        (Lanes(4, 2, LaneHead.VOCABULARY), {"gpus": 2, "blocks": 6, "execution": Execution.GRAPH, "collective": CollectiveKind.LIBRARY}),
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


@pytest.mark.parametrize("execution", [Execution.GRAPH, Execution.STREAM])
@pytest.mark.parametrize("collective", [CollectiveKind.PUSH, CollectiveKind.LIBRARY])
def test_kernels_per_stage_match_the_reference(execution: Execution, collective: CollectiveKind) -> None:
    plan = planned(execution=execution, collective=collective, gpus=2, sampling=Sampling.FULL)
    assert error(plan) < 1e-5
    with engine(plan) as running:
        made = running.generate(TOKENS[:4], max_tokens=8)
    assert made.tokens == Reference(plan, random_weights(LLAMA, SEED, DType.FP32)).generate(TOKENS[:4], 8)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_stored_types_are_computed_in_fp32(dtype: DType) -> None:
    plan = planned(weight_dtype=dtype, kv_dtype=dtype)
    assert error(plan) < (1e-3 if dtype is DType.FP16 else 8e-3)  # a cached value may round to its other neighbour
    exact = planned(weight_dtype=dtype, kv_dtype=DType.FP32)
    assert error(exact) < 1e-5


@pytest.mark.parametrize("sampling", list(Sampling))
@pytest.mark.parametrize("gpus", [1, 2])
def test_greedy_generation_matches_the_reference(sampling: Sampling, gpus: int) -> None:
    plan = planned(sampling=sampling, gpus=gpus)
    told: list[int] = []
    with engine(plan) as running:
        made = running.generate(TOKENS[:5], max_tokens=12, on_token=told.append)
    assert made.tokens == told == Reference(plan, random_weights(LLAMA, SEED, DType.FP32)).generate(TOKENS[:5], 12)
    assert made.stop_reason == "length"
    assert len(made.step_ns) == 12
    assert (made.step_ns > 0).all()
    assert made.prompt_ns > 0


def test_wide_vectors_and_many_slices_match_the_reference() -> None:
    spec = replace(LLAMA, hidden=328, heads=16, kv_heads=8, head_dim=24, ffn=1000, layers=1, windows=(0,))
    assert error(planned(spec, blocks=3, slot_bytes=2048, tile_rows=4)) < 1e-5
    assert error(planned(spec, blocks=3, slot_bytes=65536)) < 1e-5


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize(("isa", "dtype"), [("x86-64", DType.BF16), ("haswell", DType.FP16)])
def test_older_instruction_sets_give_the_reference_numbers(isa: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa == "haswell" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setattr(host, "build_host", functools.partial(toolchain.build_host, extra=(f"-march={isa}",)))
    assert error(planned(QWEN3, weight_dtype=dtype)) < 1e-5


# ---- sampling ------------------------------------------------------------------------------------------------


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
    with engine(planned()) as running, pytest.raises(EngineError, match=r"temperature=0\.8.*sampling=full"):
        running.generate(TOKENS[:5], max_tokens=3, sampling=FULL)


# ---- the same bits -------------------------------------------------------------------------------------------


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


# ---- ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", list(Sampling))
@pytest.mark.parametrize("execution", [Execution.RESIDENT, Execution.GRAPH])
def test_a_stop_token_ends_the_run(sampling: Sampling, execution: Execution) -> None:
    with engine(planned(sampling=sampling, execution=execution)) as running:
        free = running.generate(TOKENS[:5], max_tokens=20).tokens
        last = free[7]
        made = running.generate(TOKENS[:5], max_tokens=20, stop=frozenset({last, 9999}))
    assert made.stop_reason == "stop"
    assert made.tokens == free[: free.index(last) + 1]


def test_a_prompt_may_contain_stop_tokens() -> None:
    with engine(planned()) as running:
        made = running.generate([5, 6, 7], max_tokens=4, stop={6})
    assert len(made.tokens) == 4 or made.tokens[-1] == 6


def after_the_first(act: Callable[[], None]) -> Callable[[int], None]:
    """Acts from another thread, a little after the first token: a busy computer may take long to get there."""
    waiting = [threading.Timer(0.05, act)]

    def told(token: int) -> None:
        if waiting:
            waiting.pop().start()

    return told


@pytest.mark.parametrize("execution", [Execution.RESIDENT, Execution.GRAPH])
def test_cancel_returns_what_was_generated(execution: Execution) -> None:
    plan = planned(max_context=1_000_000, attention_splits=1, execution=execution)
    with engine(plan) as running:
        begun = time.monotonic()
        made = running.generate([1], max_tokens=900_000, on_token=after_the_first(running.cancel))
    assert made.stop_reason == "cancelled"
    assert 0 < len(made.tokens) == len(made.step_ns) < 900_000
    assert time.monotonic() - begun < 5


def test_an_interrupt_returns_what_was_generated() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignore"
    try:
        with engine(planned(max_context=1_000_000, attention_splits=1)) as running:
            interrupt = after_the_first(functools.partial(signal.raise_signal, signal.SIGINT))
            made = running.generate([1], max_tokens=900_000, on_token=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert made.stop_reason == "cancelled"
    assert made.tokens


def test_an_error_of_the_callback_ends_the_run() -> None:
    def refuse(token: int) -> None:
        raise ValueError(token)

    with engine(planned(max_context=1_000_000, attention_splits=1)) as running:
        with pytest.raises(ValueError, match=r"\d"):
            running.generate([1], max_tokens=900_000, on_token=refuse)
        assert len(running.generate([1], max_tokens=3).tokens) == 3


def test_weights_without_a_finite_logit_are_reported() -> None:
    weights = random_weights(LLAMA, SEED, DType.FP32)

    class Poisoned:
        spec, dtype = weights.spec, weights.dtype

        def __getitem__(self, name: str) -> Any:
            return weights[name] * (np.float32(np.nan) if name == "final_norm" else 1)

    for sampling in Sampling:
        with HostEngine(planned(sampling=sampling), Poisoned()) as running, pytest.raises(EngineError, match="not finite"):
            running.generate([1, 2], max_tokens=3)


# ---- hangs ---------------------------------------------------------------------------------------------------


def _waits_for_the_others(plan: Plan) -> Plan:
    """DOWN of layer 0 asks for parts that no other rank pushes."""
    stages = list(plan.stages)
    at = next(s for s in stages if s.kind is StageKind.DOWN)
    value = next(s.publishes for s in stages if s.kind is StageKind.LM_HEAD)
    assert value is not None
    spans = (((0, plan.values[value].elements),),) * plan.blocks
    stages[at.index] = replace(at, reads=(*at.reads, replace(at.reads[0], value=value, parts=Parts.ALL, spans=spans)))
    return replace(plan, stages=tuple(stages))


def sums_what_comes_later(plan: Plan) -> Plan:
    """The first sum of late parts is of parts that other ranks push later in the step."""
    first = next(s for s in plan.stages if s.late)
    last = max(read.value for s in plan.stages if s.late for read in s.reads)
    broken = replace(first, reads=(replace(first.reads[0], value=last),))
    return replace(plan, stages=tuple(broken if s is first else s for s in plan.stages))


def test_a_sum_of_parts_that_never_come_ends_by_watchdog() -> None:
    plan = sums_what_comes_later(planned(LANED, blocks=8, late_parts=LateParts.REDUCED))
    with engine(plan, watchdog_s=0.2) as running, pytest.raises(EngineError, match=r"in reduce\[1\] at step 0 for .*, part [0-3], element"):
        running.generate([1, 2, 3], max_tokens=3)


@pytest.mark.parametrize("handoff", [HandOffKind.SENTINEL, HandOffKind.COUNTER])
def test_a_hang_ends_by_watchdog_with_the_stage_and_the_value(handoff: HandOffKind) -> None:
    plan = _waits_for_the_others(planned(handoff=handoff))
    with engine(plan, watchdog_s=0.2) as running, pytest.raises(EngineError) as caught:
        running.generate([1, 2, 3], max_tokens=3)
    said = str(caught.value)
    assert "Rank[0].Block[" in said
    assert "down[0]" in said
    assert "candidates" in said
    assert ("element 0" in said) == (handoff is HandOffKind.SENTINEL)
    assert "step 0" in said


# ---- requests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "count", "said"),
    [
        ([], 1, "prompt is empty"),
        ([1, 101], 1, "token 1 is 101: must lie between 0 and 100"),
        ([-1], 1, "token 0 is -1"),
        ([1], 0, "max_tokens=0"),
        ([1] * 60, 6, "60 prompt tokens and max_tokens=6 exceed max_context=64"),
    ],
)
def test_wrong_requests_are_refused_with_the_limit(prompt: list[int], count: int, said: str) -> None:
    with engine(planned()) as running, pytest.raises(EngineError, match=said):
        running.generate(prompt, max_tokens=count)


def test_the_context_can_be_filled_to_its_end() -> None:
    plan = planned(attention_splits=2)
    with engine(plan) as running:
        made = running.generate(TOKENS[:4], max_tokens=61)
    assert made.tokens == Reference(plan, random_weights(LLAMA, SEED, DType.FP32)).generate(TOKENS[:4], 61)


# ---- trace and probes ----------------------------------------------------------------------------------------


def test_a_trace_orders_each_blocks_stages() -> None:
    with engine(planned(), trace=True) as running:
        trace = running.generate([1, 2], max_tokens=3).trace
    assert trace is not None
    assert trace.shape == (4, 1, 2, len(running.plan.stages), 2)
    flat = trace.transpose(1, 2, 0, 3, 4).reshape(2, -1)  # [blocks][steps, stages, (ready, finished)]
    inner = flat[:, :-2]  # the second block may leave before it marks its last stage
    assert (inner > 0).all()
    assert (np.diff(inner, axis=1) >= 0).all()


@pytest.mark.parametrize("execution", list(Execution))
@pytest.mark.parametrize("handoff", list(HandOffKind))
def test_every_probe_runs(execution: Execution, handoff: HandOffKind) -> None:
    options = Options(blocks=2, handoff=handoff, execution=execution, context=70, max_context=128, slot_bytes=2048)
    lone = replace(options, blocks=1, sampling=Sampling.FULL)
    probes = [
        stream_probe(options, LIMITS, rows=300, cols=256, stages=2),
        exchange_probe(options, LIMITS, elements=100),
        attention_probe(options, LIMITS, heads=8, kv_heads=2, head_dim=64, window=33),
        sample_probe(lone, LIMITS, vocab=1000),
    ]
    for probe in probes:
        seconds = run_probe(probe, steps=5, warmup=1)
        assert seconds.shape == (5,)
        assert (seconds > 0).all()


# ---- the kernel's own memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_bytes", [256, 512, 1024])
@pytest.mark.parametrize("blocks", [2, 6, 16])
def test_thin_tiles_leave_room_for_a_whole_batch_of_sums(slot_bytes: int, blocks: int) -> None:
    """Many column slices of few rows: the kernel strides by a batch of rows, also where a block has fewer of them."""
    plan = planned(replace(LLAMA, hidden=32, heads=4, kv_heads=2, ffn=512), slot_bytes=slot_bytes, blocks=blocks)
    down = next(stage.matrix for stage in plan.stages if stage.kind is StageKind.DOWN)
    assert down
    assert down.tile_cols < down.cols
    assert error(plan) < 1e-5


def test_a_block_that_writes_beyond_its_memory_is_told_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from twin.kernel import layout

    monkeypatch.setattr(layout, "_scratch_floats", lambda plan: 64)
    with engine(planned(LLAMA, blocks=1)) as running, pytest.raises(EngineError, match=r"Rank\[0\].Block\[0\] wrote beyond its memory"):
        running.generate(TOKENS[:3], max_tokens=3)


def test_the_kernel_ends_the_process_where_the_layout_leaves_no_room_for_its_sums(tmp_path: Path) -> None:
    script = (
        "from tests_engine import *\n"
        "from twin.kernel import layout\n"
        "layout._half_floats = lambda plan: 32\n"
        "engine(planned(blocks=1)).logits(TOKENS[:2])\n"
    )
    done = run_script(script, tmp_path)
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert "the layout breaks the kernel's law" in done.stderr


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with the names of this file."""
    (folder / "tests_engine.py").symlink_to(__file__)
    environment = os.environ | {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60, check=False)


# ---- one request at a time -----------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits a process's memory as Linux counts it")
@pytest.mark.parametrize("execution", [Execution.RESIDENT, Execution.GRAPH])
def test_an_engine_whose_threads_could_not_start_runs_the_next_request(execution: Execution, tmp_path: Path) -> None:
    """Stacks of 32 threads do not fit the memory that the process may take; then they do."""
    script = f"""
import resource
from tests_engine import *
running = engine(planned(blocks=32, execution=Execution.{execution.name}, slot_bytes=512))
wanted = running.generate(TOKENS[:4], max_tokens=6).tokens
pages = int(open("/proc/self/statm").read().split()[0])
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
for _ in range(3):
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (40 << 20), hard))
    try:
        running.generate(TOKENS[:4], max_tokens=6)
    except EngineError as error:
        assert "threads cannot be started" in str(error), error
    else:
        raise SystemExit("the limit did not hold")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    made = running.generate(TOKENS[:4], max_tokens=6)
    assert (made.tokens, made.stop_reason) == (wanted, "length"), made
print("right")
"""
    done = run_script(script, tmp_path)
    assert "right" in done.stdout, done.stdout + done.stderr


def test_a_cancel_before_the_kernel_starts_is_not_lost() -> None:
    """The start clears the control words, the cancel among them."""
    with engine(planned(replace(LLAMA, context=2**20), max_context=2**20, kv_page=1024)) as running:
        start = running._start

        def cancelled_first(request: Any) -> None:
            running.cancel()
            start(request)

        running._start = cancelled_first  # type: ignore[method-assign]
        began = time.monotonic()
        made = running.generate([1], max_tokens=900_000)
        assert made.stop_reason == "cancelled"
        assert time.monotonic() - began < 5
        running._start = start  # type: ignore[method-assign]
        assert running.generate([1], max_tokens=3).stop_reason == "length", "a cancel ends one request"


def test_a_cancel_between_requests_ends_none() -> None:
    with engine(planned()) as running:
        running.cancel()
        assert running.generate([1], max_tokens=3).stop_reason == "length"


def test_a_second_thread_is_told_that_the_engine_is_in_use() -> None:
    with engine(planned(replace(LLAMA, context=2**20), max_context=2**20, kv_page=1024)) as running:
        began, made = threading.Event(), []
        first = threading.Thread(target=lambda: made.append(running.generate([1], max_tokens=900_000, on_token=lambda _: began.set())))
        first.start()
        assert began.wait(30)
        for call in (lambda: running.generate([1], max_tokens=1), lambda: running.logits([1]), running.close):
            with pytest.raises(EngineError, match="the engine runs a request already"):
                call()
        running.cancel()
        first.join(30)
        assert made[0].stop_reason == "cancelled"
        assert made[0].tokens
        first_tokens = made[0].tokens[:3]  # a busy computer may have made fewer
        assert running.generate([1], max_tokens=len(first_tokens)).tokens == first_tokens


def test_a_request_within_on_token_is_refused_and_ends_the_first() -> None:
    with engine(planned()) as running:
        with pytest.raises(EngineError, match="the engine runs a request already"):
            running.generate([1], max_tokens=40, on_token=lambda _: running.generate([1], max_tokens=1) and None)
        assert len(running.generate([1], max_tokens=4).tokens) == 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: e.generate([1.5], max_tokens=1), "prompt token 0 is 1.5: must be a whole number"),
        (lambda e: e.generate([2**40], max_tokens=1), "prompt token 0 is 1099511627776"),
        (lambda e: e.generate([1], max_tokens=1, stop=[2**31]), "a stop token is 2147483648"),
        (lambda e: e.generate([1], max_tokens=1, stop=[-1]), "a stop token is -1"),
        (lambda e: e.run_steps(3), "is a model's plan, not a probe"),
    ],
)
def test_wrong_numbers_are_refused(call: Callable[[HostEngine], Any], words: str) -> None:
    with engine(planned()) as running, pytest.raises(EngineError, match=words):
        call(running)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e30])
def test_a_watchdog_waits_a_time(seconds: float) -> None:
    with pytest.raises(EngineError, match="watchdog_s="):
        engine(planned(), watchdog_s=seconds)


@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitize: str, tmp_path: Any) -> None:
    """A sanitizer must be there when the process starts, so the engine runs in one of its own."""
    name = {"address,undefined": "libasan.so", "thread": "libtsan.so"}[sanitize]
    runtime = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=False).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip(f"{name} is not installed")
    script = (
        "from tests_engine import *\n"
        "for more in ({'sampling': Sampling.FULL}, {'handoff': HandOffKind.COUNTER}, {'handoff': HandOffKind.GRID}):\n"
        "    with engine(planned(gpus=2, **more), sanitize=SANITIZE) as e:\n"
        "        e.generate(TOKENS[:3], max_tokens=4, sampling=FULL if 'sampling' in more else SamplingParams())\n"
        "        e.logits(TOKENS[:3])\n"
        "print('clean')\n"
    ).replace("SANITIZE", repr(sanitize))
    here = os.path.dirname(os.path.abspath(__file__))
    (tmp_path / "tests_engine.py").symlink_to(__file__)
    environment = os.environ | {
        "LD_PRELOAD": runtime,
        "PYTHONPATH": f"{tmp_path}:{here}/../..",
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "report_bugs=1 exitcode=66",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "clean" in done.stdout
