"""LongRoPE's factors follow the tokens present, as in transformers, and not the positions that a
plan reserves.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine import test_cuda_engine as on_gpu
from tests.engine.hf_cases import FAMILIES, TOLERANCE, plan, weights
from tests.engine.small_engine import LLAMA, SEED
from tests.engine.test_huggingface import GOLDENS, hf_greedy, hf_logits
from twin.engine.host import HostEngine
from twin.engine.sampling import SamplingParams
from twin.engine.session import Session
from twin.engine.weights import random_weights
from twin.models.spec import DType, Rope, RopeScaling
from twin.plan.options import Options, Sampling
from twin.plan.shards import factors_change
from twin.plan.types import Plan
from twin.reference.step import Reference

CONFIG = FAMILIES["phi4"]
SHORT = 16  # tokens of the longest sequence with short factors
TABLE = weights(CONFIG)
TOKENS = [int(t) for t in np.load(GOLDENS / "phi4.npz")["tokens"]]


def made(gpus: int = 1, **options: Any) -> Plan:
    fp32 = {"weight_dtype": DType.FP32, "kv_dtype": DType.FP32}
    return plan(TABLE.spec, gpus, 3, 2, 4, Sampling.FULL, **fp32, **options)


def engine(gpus: int = 1, **options: Any) -> HostEngine:
    return HostEngine(made(gpus, **options), TABLE)


def each_from_the_whole(running: Session, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each from logits of the whole sequence before it."""
    whole = list(prompt)
    for _ in range(count):
        whole.append(int(running.logits(whole)[-1].argmax()))
    return whole[len(prompt) :]


def test_the_factors_change_behind_the_original_context() -> None:
    assert json.loads(str(np.load(GOLDENS / "phi4.npz")["config"])) == CONFIG
    assert factors_change(TABLE.spec) == SHORT < Options().max_context
    assert factors_change(weights(FAMILIES["phi3"]).spec) is None


def test_logits_do_not_depend_on_the_positions_reserved() -> None:
    short, long = (engine(max_context=reach) for reach in (SHORT, 64))
    with short, long:
        wanted = short.logits(TOKENS[:SHORT])
        assert np.abs(long.logits(TOKENS) - np.load(GOLDENS / "phi4.npz")["logits"]).max() < (
            TOLERANCE
        )
        assert (long.logits(TOKENS[:SHORT]) == wanted).all(), "behind a longer sequence"


@pytest.mark.hf
@pytest.mark.parametrize("length", [SHORT - 1, SHORT, SHORT + 1])
def test_transformers_changes_the_factors_at_the_same_length(length: int) -> None:
    reference = Reference(made(), TABLE, kv_dtype=None)
    reference.turn(length)
    found = np.array([reference.step(token) for token in TOKENS[:length]])
    assert np.abs(found - hf_logits(CONFIG, TABLE, TOKENS[:length])).max() < TOLERANCE


@pytest.mark.hf
def test_a_sequence_that_outgrows_the_short_factors_goes_on_as_in_transformers() -> None:
    wanted = hf_greedy(CONFIG, TABLE, TOKENS[:12], 10)
    assert Reference(made(), TABLE).generate(TOKENS[:12], 10) == wanted


@pytest.mark.few(1)
@pytest.mark.parametrize(("gpus", "chunk"), [(1, 1), (1, 4), (2, 4)])
def test_a_sequence_is_read_again_where_the_factors_change(gpus: int, chunk: int) -> None:
    given: list[int] = []
    rows: list[int] = []
    with engine(gpus, prompt_chunk=chunk) as running:
        for begin in (12, 15):
            wanted = each_from_the_whole(running, TOKENS[:begin], 10)
            given.clear()
            rows.clear()
            found = running.generate(
                TOKENS[:begin],
                max_tokens=10,
                on_token=given.append,
                on_logits=lambda row: rows.append(int(row.argmax())),
            )
            assert found.tokens == given == rows == wanted
            assert found.reread == SHORT + 1
            assert "17 tokens were read again" in found.remark
            assert len(found.step_ns) == 10
        reference = Reference(made(gpus, prompt_chunk=chunk), TABLE)
        assert reference.generate(TOKENS[:15], 10) == wanted
        # the last token is never read: nothing outgrows the short factors
        assert running.generate(TOKENS[:12], max_tokens=5).reread == 0
        # nor does what begins behind them
        assert running.generate(TOKENS, max_tokens=5).reread == 0


def test_keys_of_other_factors_are_not_kept() -> None:
    with engine(prompt_chunk=4) as running, engine(prompt_chunk=4) as fresh:
        for prompt, kept in (
            (TOKENS[:10], 0),
            (TOKENS[:14], 11),  # with the one token that was read behind the first prompt
            (TOKENS, 0),  # long factors
            ([*TOKENS, 5, 6], 20),
            (TOKENS[:14], 0),  # short ones
        ):
            found = running.generate(prompt, max_tokens=2, reuse=True)
            assert found.kept <= kept
            assert bool(found.kept) == bool(kept)
            assert found.tokens == fresh.generate(prompt, max_tokens=2).tokens


def test_a_stop_or_a_cancel_ends_either_part_and_a_seed_repeats() -> None:
    how = SamplingParams(1.0, seed=3)
    with engine(prompt_chunk=4) as running:
        whole = running.generate(TOKENS[:12], max_tokens=12, sampling=how).tokens
        assert running.generate(TOKENS[:12], max_tokens=12, sampling=how).tokens == whole
        for at in (2, 8):
            stop = {whole[at]}
            found = running.generate(TOKENS[:12], max_tokens=12, sampling=how, stop=stop)
            assert found.stop_reason == "stop"
            assert found.tokens == whole[: whole.index(whole[at]) + 1]
            seen: list[int] = []

            def cancelled(token: int, seen: list[int] = seen, at: int = at) -> None:
                seen.append(token)
                if len(seen) > at:
                    running.cancel()

            made = running.generate(TOKENS[:12], max_tokens=20, sampling=how, on_token=cancelled)
            assert made.stop_reason in ("cancelled", "length")
            assert made.tokens[:at] == whole[:at]


@pytest.mark.gpu
@pytest.mark.skipif(bool(on_gpu.REASON), reason=on_gpu.REASON or "a GPU")
@pytest.mark.parametrize("chunk", [1, 16])
def test_a_gpu_reads_a_sequence_again_where_the_factors_change(chunk: int) -> None:
    pairs = LLAMA.head_dim // 2
    short, long = (tuple(float(1 + n * i) for i in range(pairs)) for n in (1, 3))
    scaling = RopeScaling("longrope", 1.2, original_context=SHORT, short=short, long=long)
    spec = replace(LLAMA, rope=Rope(1e4, scaling=scaling))
    planned = on_gpu.planned(spec, prompt_chunk=chunk, sampling=Sampling.FULL)
    table = random_weights(spec, SEED, DType.FP16)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    with on_gpu.CudaEngine(planned, table) as running:
        for length in (12, SHORT + 4, 12):  # there and back
            whole = (prompt * 2)[:length]
            reference = Reference(planned, table)
            reference.turn(length)
            wanted = np.array([reference.step(token) for token in whole])
            found = running.logits(whole)
            assert np.abs(found - wanted).max() < 2e-3 * np.abs(wanted).max()
        made = running.generate(prompt, max_tokens=10)
        assert made.reread == SHORT + 1
        assert made.tokens == each_from_the_whole(running, prompt, 10)
