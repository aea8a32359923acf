"""Repeats have to give the same bits, and the same with few slots of the ring in flight as with
all: with engines that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from studies.common.acceptance import runs
from studies.common.shapes import Bench
from twin.plan.types import Plan

TOKENS = 20
Bits = Callable[[Plan, int], int]  # of the plan's n-th answer


@dataclass(frozen=True)
class Pretended(Bench):
    """Engines whose bits are those of functions."""

    tokens: Bits
    logits: Bits

    @contextmanager
    def engine(self, plan: Plan, **_: Any) -> Iterator[Any]:  # type: ignore[override]
        wanted = {"generate": 0, "logits": 0}

        def generate(prompt: list[int], *, max_tokens: int) -> Any:
            wanted["generate"] += 1
            return SimpleNamespace(
                tokens=[self.tokens(plan, wanted["generate"])] * max_tokens,
                step_ns=np.ones(max_tokens),
            )

        def logits(read: list[int]) -> Any:
            wanted["logits"] += 1
            return np.full(len(read), self.logits(plan, wanted["logits"]), np.float32)

        yield SimpleNamespace(generate=generate, logits=logits)


def steady(plan: Plan, number: int) -> int:
    return 1


def unsteady(plan: Plan, number: int) -> int:
    """Differs from run to run, with the whole ring in flight."""
    return number if plan.options.window_slots == plan.options.ring_slots else 1


def by_window(plan: Plan, number: int) -> int:
    return plan.options.window_slots


def test_equal_bits_pass_with_both_windows() -> None:
    facts = runs.repeats(Pretended("host", steady, steady), TOKENS)
    assert {name: list(windows) for name, windows in facts.items()} == {
        name: ["2 of 4 slots in flight", "4 of 4 slots in flight"] for name in runs.MODELS
    }


@pytest.mark.parametrize(
    ("tokens", "logits", "why"),
    [
        (unsteady, steady, "4 of 4 slots in flight: run 1 differs from run 0 at token 0 of 20"),
        (
            steady,
            unsteady,
            "4 of 4 slots in flight: 5 passes over the same 128 tokens gave 5 different sets",
        ),
        (
            by_window,
            steady,
            "llama-3.2-1b: other tokens with 4 of 4 slots in flight than with 2 of 4",
        ),
        (
            steady,
            by_window,
            "llama-3.2-1b: other logits with 4 of 4 slots in flight than with 2 of 4",
        ),
    ],
)
def test_other_bits_fail(tokens: Bits, logits: Bits, why: str) -> None:
    with pytest.raises(runs.Failed, match=why):
        runs.repeats(Pretended("host", tokens, logits), TOKENS)


def test_one_window_shows_nothing() -> None:
    class Whole(Pretended):
        def plan(self, name: str, **chosen: Any) -> Plan:
            return super().plan(name, **{**chosen, "ring_slots": 4, "window_slots": 4})

    with pytest.raises(runs.Failed, match="nothing shows whether the bits depend on it"):
        runs.repeats(Whole("host", steady, steady), TOKENS)
