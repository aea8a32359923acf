"""The kernel's own machine code computes what the reference does, on hostile caches; planted faults
do not.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.small_engine import TOKENS, expected
from tests.gfx942.code import Instruction, code_of, compiled, narrower, nothing, patched, read_code
from tests.gfx942.emulated import Emulated
from tests.gfx942.interpreter import Fault, Refused, records
from tests.gfx942.small import NARROW, SPEC, small, strips
from tests.gfx942.waits import registers
from twin.errors import EngineError
from twin.models.spec import CacheScales, DType
from twin.plan.options import CollectiveKind, HandOffKind, Placement
from twin.plan.types import Plan

PROMPT = TOKENS[:4]
SHORT = TOKENS[:2]
CLOSE = 1e-3  # of the largest logit: cached keys and values are FP16
# the start of blocks that are numbered by their dies among it
SENTINEL = small(placement=Placement.BY_DIE)
COUNTER = small(handoff=HandOffKind.COUNTER)
TWO = small(gpus=2, collective=CollectiveKind.PUSH)
BEFORE_BARRIER = ("s_waitcnt", "s_barrier")
KEEP, LOSE = 2, 3  # seeds: caches keep what nobody drops; caches lose lines at random
PLANS: dict[str, Plan] = {
    "sentinel": SENTINEL,
    "counter": COUNTER,
    "grid": small(handoff=HandOffKind.GRID),
    "two GPUs": TWO,
    "two GPUs, counter": small(handoff=HandOffKind.COUNTER, gpus=2, collective=CollectiveKind.PUSH),
    "BF16": small(weight_dtype=DType.BF16, kv_dtype=DType.BF16),
    "FP32": small(weight_dtype=DType.FP32, kv_dtype=DType.FP32),
    "FP8 caches": small(
        replace(SPEC, cache_scales=(CacheScales((0.02,), (0.03,)),) * SPEC.layers),
        kv_dtype=DType.FP8,
    ),
    "biases": small(replace(SPEC, family="qwen2", qkv_bias=True)),
    "normed heads": small(replace(SPEC, family="qwen3", qk_norm=True)),
    "one strip": small(**strips(1)),
    "four strips": small(**strips(4)),
    "several batches": small(replace(SPEC, vocab=1001), **strips(4)),  # of a block's head rows
    "narrow input": small(NARROW, slot_bytes=16384),
    "flat": small(),
    "two GPUs by die": small(gpus=2, collective=CollectiveKind.PUSH, placement=Placement.BY_DIE),
}
IN_GATE = ("sentinel", "counter", "two GPUs")
SOME = [name if name in IN_GATE else pytest.param(name, marks=pytest.mark.slow) for name in PLANS]


def difference(plan: Plan, prompt: list[int] = PROMPT, **more: Any) -> float:
    """Largest difference from the reference, relative to the largest logit."""
    wanted = expected(plan, prompt)
    return float(
        np.abs(Emulated(plan, **more).logits(prompt) - wanted).max() / np.abs(wanted).max()
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("seed", [KEEP, pytest.param(LOSE, marks=pytest.mark.slow)])
def test_the_kernels_machine_code_computes_the_references_logits(name: str, seed: int) -> None:
    assert difference(PLANS[name], seed=seed) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 24))
def test_whatever_the_order_of_waves_and_of_memory(seed: int) -> None:
    assert difference(SENTINEL, seed=seed) < CLOSE


def test_every_order_gives_the_same_bits() -> None:
    assert difference(SENTINEL, SHORT, seed=KEEP) == difference(SENTINEL, SHORT, seed=LOSE)


@pytest.mark.slow
def test_tokens_come_out_as_the_reference_chooses_them() -> None:
    running = Emulated(SENTINEL)
    got = running.generate(PROMPT, max_tokens=2)
    assert got.tokens[0] == int(np.argmax(expected(SENTINEL, PROMPT)[-1]))
    again = Emulated(SENTINEL, seed=8).generate(PROMPT, max_tokens=2)
    assert got.tokens == again.tokens
    stopped = running.generate(PROMPT, max_tokens=2, stop=[got.tokens[0]])
    assert (stopped.tokens, stopped.stop_reason) == (got.tokens[:1], "stop")


def test_an_unknown_instruction_is_refused() -> None:
    code = code_of(SENTINEL)
    strange = Instruction(
        code.entry, "v_mfma_f32_16x16x16_f16", "a[0:3], v[0:1], v[2:3], a[0:3]", 8
    )
    with pytest.raises(Refused, match="does not know v_mfma_f32_16x16x16_f16"):
        records(replace(code, instructions=(strange, *code.instructions)))
    with pytest.raises(Refused, match="does not know clamp"):
        records(
            replace(code, instructions=(Instruction(0, "v_add_f32_e64", "v0, v1, v2 clamp", 8),))
        )


# ---- planted faults ------------------------------------------------------------------------------


def caught(plan: Plan, one: Instruction, change: Any, prompt: list[int] = PROMPT) -> str:
    """How the code object with a changed instruction fails; empty when nobody notices."""
    code = read_code(patched(compiled(plan).code_object, one, change))
    try:
        off = difference(plan, prompt, code=code, seed=KEEP)
    except (Fault, EngineError) as error:
        return str(error)
    return "" if off < CLOSE else "wrong logits"


def reached(plan: Plan, pattern: str, prompt: list[int] = PROMPT) -> list[Instruction]:
    running = Emulated(plan)
    running.logits(prompt)
    return [one for one in running.reached() if re.search(pattern, f"{one.name} {one.operands}")]


def awaited(pattern: str) -> Instruction:
    """The first wait whose next instruction uses what an instruction of a kind has loaded."""
    code = reached(SENTINEL, "", SHORT)
    for n, load in enumerate(code):
        if not re.search(pattern, f"{load.name} {load.operands}"):
            continue
        filled = set(registers(load.operands.split(", ")[0]))
        for wait, user in zip(code[n + 1 : n + 400], code[n + 2 : n + 401], strict=False):
            if wait.name == "s_waitcnt" and filled & set(
                registers(user.operands.partition(",")[2])
            ):
                return wait
    raise AssertionError(f"no wait for {pattern}")


LOADS = [
    "^global_load_dwordx4 .* nt$",
    "^ds_read",
    *(
        pytest.param(load, marks=pytest.mark.slow)
        for load in ("^global_load_dword .* sc1$", "^s_load_dword")
    ),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("load", LOADS)
def test_a_missing_wait_is_caught(load: str) -> None:
    assert "was loaded and not waited for" in caught(SENTINEL, awaited(load), nothing, SHORT)


@pytest.mark.slow
def test_a_wait_missing_before_a_barrier_is_caught_though_it_changes_no_number() -> None:
    """Old and new value are mostly the same there: votes of nobody."""
    code = code_of(SENTINEL).instructions
    waits = [
        wait
        for write, _, wait, barrier in zip(code, code[1:], code[2:], code[3:], strict=False)
        if write.name.startswith("ds_write") and (wait.name, barrier.name) == BEFORE_BARRIER
    ]
    said = [caught(SENTINEL, one, nothing) for one in waits]
    assert any("local memory that another wave has not waited for" in one for one in said), said


@pytest.mark.slow
def test_a_poll_that_does_not_pass_by_the_caches_is_caught() -> None:
    """It sees the sentinel that its cache has kept, for ever."""
    polls = reached(SENTINEL, r"^global_load_dword .*(?<!sc0) sc1$")
    assert any("watchdog" in caught(SENTINEL, one, narrower) for one in polls)


def test_a_publication_that_stays_in_its_dies_cache_is_caught() -> None:
    stores = reached(SENTINEL, r"^global_store_dword .*(?<!sc0) sc1$", SHORT)
    assert any("watchdog" in caught(SENTINEL, one, narrower, SHORT) for one in reversed(stores))


@pytest.mark.slow
def test_a_reset_that_stays_in_its_dies_cache_is_caught() -> None:
    """What the step before published is taken for this step's."""
    stores = reached(SENTINEL, r"^global_store_dword .*(?<!sc0) sc1$")
    assert any(caught(SENTINEL, one, narrower) == "wrong logits" for one in stores)


@pytest.mark.slow
def test_a_push_that_stays_in_its_gpus_caches_is_caught() -> None:
    pushes = reached(TWO, r"^global_store_dword v\[.* sc0 sc1$")
    assert any(caught(TWO, one, narrower) for one in reversed(pushes))


@pytest.mark.parametrize(
    "operation", ["buffer_inv", pytest.param("buffer_wbl2", marks=pytest.mark.slow)]
)
def test_a_missing_invalidation_or_write_back_is_caught(operation: str) -> None:
    waits = reached(COUNTER, f"^{operation} sc1$", SHORT)
    assert any(caught(COUNTER, one, nothing, SHORT) for one in waits)
