"""Blocks that agree on their numbers when they start, however they were dealt to dies: neighbours
share a die, and the machine code computes what the reference does. Planted faults do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.small_engine import LANED, TOKENS, expected
from tests.gfx942.code import Instruction, compiled, narrower, nothing, patched, read_code
from tests.gfx942.emulated import Emulated
from tests.gfx942.small import small
from twin.errors import EngineError
from twin.plan.options import CollectiveKind, HandOffKind, Placement
from twin.plan.types import Plan

PROMPT = TOKENS[:2]
CLOSE = 1e-3  # of the largest logit: cached keys and values are FP16
BY_DIE: dict[str, Any] = {"placement": Placement.BY_DIE}
PUSH: dict[str, Any] = {"collective": CollectiveKind.PUSH}
ONE = small(**BY_DIE)
PLANS: dict[str, Plan] = {
    "one rank": ONE,
    "counter": small(handoff=HandOffKind.COUNTER, **BY_DIE),
    "weights wanted near": small(placement=Placement.DIE_AWARE),
    "two GPUs": small(gpus=2, **PUSH, **BY_DIE),
    "lanes": small(LANED, blocks=8, **PUSH, **BY_DIE),
}
IN_GATE = ("one rank", "lanes")
SOME = [name if name in IN_GATE else pytest.param(name, marks=pytest.mark.slow) for name in PLANS]
SEEDS = [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4, 5))]


def off(running: Emulated) -> float:
    wanted = expected(running.plan, PROMPT)
    return float(np.abs(running.logits(PROMPT) - wanted).max() / np.abs(wanted).max())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("seed", SEEDS)
def test_however_blocks_are_dealt_neighbours_share_a_die(name: str, seed: int) -> None:
    plan, dies = PLANS[name], 2 + seed % 7
    running = Emulated(plan, seed=seed, dies=dies)
    assert plan.numbered_by_die
    assert off(running) < CLOSE
    drawn, gpus = np.random.default_rng(seed), plan.options.gpus
    for places in running.places.reshape(gpus, -1).tolist():
        assert places == sorted(int(drawn.integers(dies)) for _ in places)


def test_a_flat_plans_blocks_keep_the_numbers_that_the_hardware_gives_them() -> None:
    plan = small(handoff=HandOffKind.COUNTER)
    running = Emulated(plan, seed=4, dies=8)
    running.logits(PROMPT[:1])
    drawn = np.random.default_rng(4)
    assert not plan.numbered_by_die
    assert running.places.tolist() == [int(drawn.integers(8)) for _ in range(plan.blocks)]
    assert (running.reported == -1).all(), "nobody asks"


@pytest.mark.slow
def test_numbers_change_no_bit() -> None:
    flat = Emulated(small(), seed=2).logits(PROMPT)
    assert np.array_equal(Emulated(ONE, seed=5, dies=8).logits(PROMPT), flat)


def test_a_block_may_run_on_another_die_in_the_next_run() -> None:
    running = Emulated(ONE, seed=2, dies=8)
    first = running.generate(PROMPT, max_tokens=2).tokens
    before = running.places.tolist()
    running.seed = 5
    assert running.generate(PROMPT, max_tokens=2).tokens == first
    assert running.places.tolist() != before


# ---- planted faults ------------------------------------------------------------------------------


def exchanged(name: str) -> list[Instruction]:
    """Loads or stores of agent scope, in the order of the code: the start's come first."""
    code = read_code(compiled(ONE).code_object)
    return code.matching(rf"^global_{name}_dword .*(?<!sc0) sc1$")


def caught(one: Instruction, change: Any) -> str:
    code = read_code(patched(compiled(ONE).code_object, one, change))
    try:
        return "" if off(Emulated(ONE, code=code, seed=2, dies=8)) < CLOSE else "wrong logits"
    except EngineError as error:
        return str(error)


def test_a_block_that_says_nothing_is_named() -> None:
    said = caught(exchanged("store")[0], nothing)
    assert "block 0 of GPU 0 did not say within 0.003 s on which die it runs" in said


def test_a_look_that_does_not_pass_by_the_caches_is_caught() -> None:
    """The first look finds nothing yet, and a cache keeps that."""
    first, again = exchanged("load")[:2]
    assert "did not say" in caught(again, narrower)
    assert caught(first, narrower) == "", "what it keeps is looked for again"


def test_places_of_the_run_before_are_caught() -> None:
    """The host has not cleared them, blocks see different tables, and some number is nobody's."""
    running = Emulated(ONE, seed=2, dies=8)
    running.generate(PROMPT, max_tokens=2)
    running.clears, running.seed = False, 7
    with pytest.raises(EngineError, match="watchdog"):
        running.generate(PROMPT, max_tokens=2)
