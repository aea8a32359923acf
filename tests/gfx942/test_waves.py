"""AMD's platform, its source as it is, on this CPU in waves of 64 lanes: the numbers of the
reference, also of what the interpreter refuses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.small_engine import (
    FULL,
    LANED,
    LLAMA,
    TOKENS,
    expected,
    run_script,
    waits_for_the_others,
)
from tests.engine.test_experts import routed
from tests.gfx942.emulated import Emulated, Waved
from tests.gfx942.small import NARROW, SPEC, small, strips
from twin.engine.sampling import sample
from twin.errors import EngineError
from twin.models.formats import format_named
from twin.models.quantized import requantized
from twin.models.spec import DType
from twin.plan.options import CollectiveKind, HandOffKind, Placement, Sampling
from twin.plan.types import Plan

PROMPT = TOKENS[:4]
CLOSE = 1e-3  # of the largest logit: cached keys and values are FP16
ROUNDED = 1e-6  # what the CPU's and the interpreter's functions round differently
PUSH: dict[str, Any] = {"collective": CollectiveKind.PUSH}
TWO: dict[str, Any] = {"gpus": 2, **PUSH}
FP32: dict[str, Any] = {"weight_dtype": DType.FP32, "kv_dtype": DType.FP32}
WIDE = replace(LLAMA, layers=2, windows=(0, 5), heads=32, kv_heads=16, ffn=512, hidden=256)
PLANS: dict[str, Plan] = {
    "sentinel": small(),
    "counter": small(handoff=HandOffKind.COUNTER),
    "grid": small(handoff=HandOffKind.GRID),
    "two GPUs": small(**TWO),
    "two GPUs, counter": small(handoff=HandOffKind.COUNTER, **TWO),
    "BF16": small(weight_dtype=DType.BF16, kv_dtype=DType.BF16),
    "biases": small(replace(SPEC, family="qwen2", qkv_bias=True)),
    "normed heads": small(replace(SPEC, family="qwen3", qk_norm=True)),
    "four strips": small(**strips(4)),
    "several batches": small(replace(SPEC, vocab=1001), **strips(4)),
    "narrow input": small(NARROW, slot_bytes=16384),
    "lanes": small(LANED, blocks=8, **PUSH),
    "lanes by die": small(LANED, blocks=8, placement=Placement.BY_DIE, **PUSH),
    "experts": small(routed()),
    **{
        name: small(requantized(WIDE, format_named(name)), slot_bytes=4096)
        for name in ("int8", "fp8", "fp8-128x128")
    },
}
SOME = [
    name if name == "two GPUs" else pytest.param(name, marks=pytest.mark.slow) for name in PLANS
]


def difference(got: Any, wanted: Any) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("name", SOME)
def test_waves_of_64_compute_the_references_logits(name: str) -> None:
    prompt = PROMPT[:2] if name == "two GPUs" else PROMPT
    assert difference(Waved(PLANS[name]).logits(prompt), expected(PLANS[name], prompt)) < CLOSE


@pytest.mark.slow
def test_nothing_but_rounding_is_lost_in_full_precision() -> None:
    plan = small(**FP32)
    assert difference(Waved(plan).logits(PROMPT), expected(plan, PROMPT)) < ROUNDED


@pytest.mark.slow
def test_the_source_and_the_machine_code_compute_the_same() -> None:
    plan = PLANS["sentinel"]
    assert difference(Waved(plan).logits(PROMPT), Emulated(plan).logits(PROMPT)) < ROUNDED


@pytest.mark.slow
def test_the_full_sampler_draws_as_the_reference_does() -> None:
    """Its FP64 sums the interpreter refuses."""
    running = Waved(small(sampling=Sampling.FULL))
    made = running.generate(PROMPT[:3], max_tokens=3, sampling=FULL).tokens
    logits = running.logits([*PROMPT[:3], *made[:-1]])
    assert made == [sample(row, FULL, step) for step, row in enumerate(logits[2:])]


@pytest.mark.slow
def test_whatever_the_order_of_turns() -> None:
    first = Waved(PLANS["sentinel"], seed=1).logits(PROMPT)
    for seed in range(2, 6):
        assert np.array_equal(Waved(PLANS["sentinel"], seed=seed).logits(PROMPT), first)


SANITIZED = """
from tests.gfx942.emulated import Waved
from tests.gfx942.test_waves import CLOSE, PLANS, PROMPT, difference, expected
plan = PLANS["NAME"]
assert difference(Waved(plan, sanitize=True).logits(PROMPT), expected(plan, PROMPT)) < CLOSE
print("clean")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["sentinel", "counter", "two GPUs", "int8", "experts", "narrow input", "four strips"]
)
def test_nothing_undefined_happens(name: str) -> None:
    """Under UBSan, which ends the process: an index beyond an array, a shift too far, an address
    that is not aligned.
    """
    Waved(small())  # skips without a compiler
    done = run_script(SANITIZED.replace("NAME", name))
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-3000:]


@pytest.mark.slow
def test_who_waits_in_vain_is_named() -> None:
    hung = Waved(waits_for_the_others(PLANS["sentinel"]), watchdog_s=0.2)
    with pytest.raises(EngineError, match=r"watchdog: Rank\[0\]"):
        hung.generate(PROMPT, max_tokens=2)
