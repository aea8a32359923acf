"""Drafts by prompt lookup change how fast tokens come, and no token."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from studies.common.rows import cut, first_tokens
from tests.engine.families import AROUND, TOGETHER
from tests.engine.small_engine import (
    LANED,
    LLAMA,
    QWEN2,
    QWEN3,
    SEED,
    TOKENS,
    engine,
    planned,
    sanitized,
)
from tests.engine.test_prompt_chunks import TURNED, needs_gpu
from tests.engine.test_routed_prompts import FAMILIES
from tests.native.test_warps import build_warps
from twin.calibrate.node import calibrated_node
from twin.commands.drafts import EngineDraft, engine_draft
from twin.engine import host
from twin.engine.choose import open_random
from twin.engine.cuda import CudaEngine
from twin.engine.generation import Drafting
from twin.engine.sampling import SamplingParams
from twin.engine.session import address
from twin.engine.weights import random_weights
from twin.errors import PlanError
from twin.kernel.tables import layout
from twin.models.load import load_model
from twin.models.spec import DType, ModelSpec
from twin.plan.options import Execution, Sampling
from twin.plan.types import Plan
from twin.reference.step import Reference
from twin.schedule.options import plan_for

# A token follows from the one before alone, so what is generated soon repeats.
REPEATING = replace(LLAMA, name="repeating", windows=(1, 1, 1))
MOST = 7


def drafted(spec: ModelSpec = REPEATING, **chosen: Any) -> Plan:
    return planned(spec, **({"prompt_chunk": 16, "lookup": MOST} | chosen))


def referenced(plan: Plan, prompt: list[int], tokens: int) -> list[int]:
    assert plan.spec is not None
    weights = random_weights(plan.spec, SEED, plan.options.weight_dtype)
    return Reference(plan, weights).generate(prompt, max_tokens=tokens)


@pytest.mark.few(2)
@pytest.mark.parametrize("lookup", [1, 2, 3, MOST])
@pytest.mark.parametrize(
    "chosen", [{}, {"blocks": 3}, {"gpus": 2}, {"sampling": Sampling.FULL}], ids=str
)
def test_drafts_are_accepted_and_change_no_token(lookup: int, chosen: dict[str, Any]) -> None:
    plan = drafted(lookup=lookup, **chosen)
    wanted = referenced(plan, TOKENS, 50)
    with engine(plan) as running:
        made = running.generate(TOKENS, max_tokens=50)
        assert made.tokens == wanted
        # tokens of a round come together
        assert np.count_nonzero(made.step_ns) == len(made.round_ns)
        assert made.step_ns.sum() == made.round_ns.sum()
        assert 1.3 < made.tokens_per_round <= lookup + 1
        assert len(running.generate(TOKENS, max_tokens=50, drafting=Drafting(0)).round_ns) == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "spec", [LLAMA, AROUND, QWEN2, QWEN3, TURNED, TOGETHER], ids=lambda s: s.name
)
def test_rejected_drafts_leave_nothing_behind(spec: ModelSpec) -> None:
    """Pairs of the prompt stand in it twice with another successor, so most drafts are wrong."""
    plan, pairs = drafted(spec), [5, 74, 0, 33, 5, 74, 61, 9, 5, 74]
    with engine(plan) as running:
        for length in (1, 2, len(pairs)):
            wanted = referenced(plan, pairs[:length], 40)
            assert running.generate(pairs[:length], max_tokens=40).tokens == wanted
            # seven drafts a pass, all of them rejected
            assert (
                running.generate(
                    pairs[:length], max_tokens=40, drafting=Drafting(accepted=1.0)
                ).tokens
                == wanted
            )


def test_the_sum_of_a_row_does_not_depend_on_the_width_of_a_pass() -> None:
    """Bit by bit: the keys and values that rounds of eight tokens leave, rounds of fewer do."""
    spec = replace(LLAMA, name="attending", windows=(0, 6, 1), context=128)
    known, found = len(TOKENS) + 79, set()
    for lookup in (1, 2, MOST):
        plan = drafted(spec, lookup=lookup, max_context=128, attention_splits=1)
        own, layers = plan.kernel_attention(), spec.layers
        with engine(plan) as running:
            made = running.generate(TOKENS, max_tokens=80)
            assert made.tokens_per_round > 1
            cache = running._memory.caches[0].view(np.float32)
        rows = cache.reshape(layers, own.items, 2, own.item_positions, own.head_dim)
        found.add((tuple(made.tokens), rows[:, :, :, :known].tobytes()))
    assert len(found) == 1


def test_a_draft_never_passes_a_stop_token_or_the_end() -> None:
    plan = drafted()
    wanted = referenced(plan, TOKENS, 50)
    with engine(plan) as running:
        for length in range(1, 30, 4):
            assert running.generate(TOKENS, max_tokens=length).tokens == wanted[:length]
        stop = wanted[20]
        made = running.generate(TOKENS, max_tokens=50, stop={stop})
        assert made.tokens == wanted[: wanted.index(stop) + 1]
        assert made.stop_reason == "stop"


def test_the_next_request_finds_the_keys_of_accepted_tokens() -> None:
    plan = drafted()
    with engine(plan) as running:
        first = running.generate(TOKENS, max_tokens=20)
        longer = [*TOKENS, *first.tokens, 7]
        again = running.generate(longer, max_tokens=12, reuse=True)
        assert again.kept == len(longer) - 2
        assert again.tokens == referenced(plan, longer, 12)


def test_requests_for_logits_come_from_steps() -> None:
    seen: list[Any] = []
    with engine(drafted(sampling=Sampling.FULL)) as running:
        made = running.generate(TOKENS, max_tokens=8, on_logits=seen.append)
    assert len(made.round_ns) == 0
    assert len(seen) == 8


@pytest.mark.few(2)
@pytest.mark.parametrize("chosen", [{}, {"gpus": 2}, {"blocks": 3}], ids=str)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(0.05, seed=3),
        SamplingParams(0.6, top_k=5, seed=9),
        SamplingParams(1.0, top_p=0.7, seed=4),
    ],
    ids=str,
)
def test_drafts_change_no_token_that_is_drawn(
    sampling: SamplingParams, chosen: dict[str, Any]
) -> None:
    with engine(drafted(sampling=Sampling.FULL, **chosen)) as running:
        wanted = running.generate(TOKENS, max_tokens=50, sampling=sampling, drafting=Drafting(0))
        found = [
            running.generate(TOKENS, max_tokens=50, sampling=sampling, drafting=Drafting(most))
            for most in (1, 3, MOST)
        ]
    assert len(wanted.round_ns) == 0
    assert all(made.tokens == wanted.tokens for made in found)
    assert sampling.temperature > 0.1 or found[-1].tokens_per_round > 1.3


def test_a_cancel_ends_rounds() -> None:
    plan = drafted(max_context=4000, context=8)
    with engine(plan) as running:
        stop = threading.Event()

        def taken(_: int) -> None:
            if not stop.is_set():
                stop.set()
                running.cancel()

        made = running.generate(TOKENS, max_tokens=3000, on_token=taken)
        assert made.stop_reason == "cancelled"
        assert len(made.tokens) < 3000
        assert len(running.generate(TOKENS, max_tokens=5).tokens) == 5


@pytest.mark.parametrize(
    ("spec", "chosen", "reason"),
    [
        (LLAMA, {"prompt_chunk": 1}, "passes verify drafts"),
        (LLAMA, {"execution": Execution.GRAPH}, "ends each step on the host"),
        (LLAMA, {"lookup": 8}, "at most 7"),
        (LANED, {"gpus": 2, "blocks": 4}, "lanes"),
    ],
)
def test_what_cannot_draft_is_refused_with_a_reason(
    spec: ModelSpec, chosen: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        drafted(spec, **chosen)


@pytest.mark.parametrize("text", ["lookup", "lookup:0", "lookup:8", "mtp:2", "3", "lookup:x"])
def test_the_command_line_says_what_drafts_there_are(text: str) -> None:
    assert engine_draft("lookup:3") == EngineDraft(3)
    with pytest.raises(Exception, match="lookup:K"):
        engine_draft(text)


def test_weights_of_16_bits_draft_too() -> None:
    plan = drafted(weight_dtype=DType.BF16, kv_dtype=DType.BF16)
    with engine(plan) as running:
        one = running.generate(TOKENS, max_tokens=40)
        assert one.tokens_per_round > 2
        assert np.array_equal(one.tokens, running.generate(TOKENS, max_tokens=40).tokens)


@pytest.mark.parametrize("accepted", [1.0, 2.7, 8.0])
def test_a_timed_run_counts_so_many_tokens_a_pass(accepted: float) -> None:
    with engine(drafted()) as running:
        made = running.generate(TOKENS, max_tokens=40, drafting=Drafting(accepted=accepted))
    assert made.tokens_per_round == pytest.approx(accepted, rel=0.1)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-8b", "gemma-2-2b"])
def test_gpu_drafts_change_no_token(name: str) -> None:
    spec = cut(load_model(name))
    node = calibrated_node("1xh200")
    plan = plan_for(spec, node, context=300, max_context=1024, lookup=MOST)
    prompt = first_tokens(spec.vocab, 40)
    with open_random(node.device, plan, SEED) as running:
        wanted = running.generate(
            prompt, max_tokens=96, drafting=Drafting(accepted=1.0)
        ).tokens  # all rejected
        for most in (1, 3, MOST):
            assert running.generate(prompt, max_tokens=96, drafting=Drafting(most)).tokens == wanted


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-8b"])
def test_gpu_rounds_of_any_width_leave_the_same_keys_and_values(name: str) -> None:
    """Bit by bit and every time: of a tile that is left too early, tokens say nothing mostly."""
    node, spec = calibrated_node("1xh200"), cut(load_model(name))
    plan = plan_for(spec, node, context=300, max_context=1024, lookup=MOST)
    sizes = layout(plan).sizes
    count = sizes["kv_stages"] * sizes["kv_items"] * 2 * sizes["item_positions"]
    with open_random(node.device, plan, SEED) as running:
        assert isinstance(running, CudaEngine)
        gpu, kv = running._gpu_of(0), running._launch.ranks[0].kv

        def cache(length: int, drafting: Drafting) -> NDArray[np.uint16]:
            found = np.zeros(int(count) * plan.kernel_attention().head_dim, np.uint16)
            gpu.use()
            gpu._call("cuMemcpyHtoD", kv, address(found), found.nbytes)
            prompt = first_tokens(spec.vocab, length)
            running.generate(prompt, max_tokens=60, drafting=drafting)
            gpu.use()
            gpu._call("cuMemcpyDtoH", address(found), kv, found.nbytes)
            return found

        for length in (3, 40, 600):
            there = cache(length, Drafting(0)) != 0  # rejected drafts lie elsewhere
            wanted = cache(length, Drafting(1))[there]
            for drafts in (1, 3, *[MOST] * 8):
                assert (cache(length, Drafting(drafts, 1.0))[there] == wanted).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_of_several_tokens_are_those_of_each(name: str) -> None:
    spec = replace(FAMILIES[name], windows=(1,) * FAMILIES[name].layers)
    with engine(drafted(spec)) as running:
        rejected = running.generate(TOKENS, max_tokens=40, drafting=Drafting(accepted=1.0))
        made = running.generate(TOKENS, max_tokens=40)
        alone = running.generate(TOKENS, max_tokens=40, drafting=Drafting(0))
    assert made.tokens == rejected.tokens == alone.tokens
    assert made.tokens_per_round > 1


def test_blocks_of_many_warps_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "build_host", build_warps)
    plan = drafted(slot_bytes=512, prompt_chunk=4, lookup=3)
    with engine(plan) as running:
        made = running.generate(TOKENS[:9], max_tokens=24)
    assert made.tokens == referenced(plan, TOKENS[:9], 24)
    assert made.tokens_per_round > 1


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_the_sanitizers_find_nothing(sanitize: str) -> None:
    sanitized(SCRIPT, sanitize)


SCRIPT = """
from tests.engine.small_engine import TOKENS, small_weights
from tests.engine.test_drafts import REPEATING, drafted
from twin.engine.generation import Drafting
from twin.engine.host import HostEngine
from twin.engine.sampling import SamplingParams
from twin.plan.options import Sampling

plan = drafted(gpus=2, sampling=Sampling.FULL)
weights = small_weights(REPEATING, plan.options.weight_dtype)
with HostEngine(plan, weights, sanitize=SANITIZE, watchdog_s=300) as running:
    for sampling in (SamplingParams(), SamplingParams(0.5, top_p=0.9, seed=2)):
        for accepted in (0.0, 1.0):
            made = running.generate(
                TOKENS, max_tokens=24, sampling=sampling, drafting=Drafting(accepted=accepted)
            )
            assert len(made.tokens) == 24 and len(made.round_ns)
print("clean")
"""


def test_drafting_goes_on_after_many_rounds_that_kept_nothing() -> None:
    """Each pair of the prompt has two successors, so what was found is wrong about every time."""
    spec = replace(REPEATING, name="long", context=4096)
    plan = drafted(spec, max_context=2048, attention_splits=1)
    pairs = [int(t) for t in np.random.default_rng(5).integers(0, 4, 400)]
    with engine(plan) as running:
        made = running.generate(pairs, max_tokens=600)
    assert made.tokens == referenced(plan, pairs, 60) + made.tokens[60:]
    assert made.tokens_per_round > 2
