"""How a run of the host engine ends: by a stop token, a cancel, an error, or the watchdog with a
report.
"""

from __future__ import annotations

import functools
import signal
from typing import Any

import numpy as np
import pytest

from tests.engine.small_engine import (
    LANED,
    LLAMA,
    SEED,
    TOKENS,
    after_the_first,
    engine,
    planned,
    sums_what_comes_later,
    waits_for_the_others,
)
from twin.engine.host import HostEngine
from twin.engine.weights import random_weights
from twin.errors import EngineError
from twin.models.spec import DType
from twin.plan.options import Execution, HandOffKind, LateParts, Sampling

# ---- ends ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("execution", [Execution.RESIDENT, Execution.GRAPH])
def test_cancel_returns_what_was_generated(execution: Execution) -> None:
    plan = planned(max_context=1_000_000, attention_splits=1, execution=execution)
    with engine(plan) as running:
        made = running.generate([1], max_tokens=900_000, on_token=after_the_first(running.cancel))
    assert made.stop_reason == "cancelled"
    assert 0 < len(made.tokens) == len(made.step_ns) < 900_000


def test_an_interrupt_returns_what_was_generated() -> None:
    # a background job inherits "ignore"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
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
        with (
            HostEngine(planned(sampling=sampling), Poisoned()) as running,
            pytest.raises(EngineError, match="not finite"),
        ):
            running.generate([1, 2], max_tokens=3)


# ---- hangs ---------------------------------------------------------------------------------------


def test_a_sum_of_parts_that_never_come_ends_by_watchdog() -> None:
    plan = sums_what_comes_later(planned(LANED, blocks=8, late_parts=LateParts.REDUCED))
    with (
        engine(plan, watchdog_s=0.2) as running,
        pytest.raises(EngineError, match=r"in reduce\[1\] at step 0 for .*, part [0-3], element"),
    ):
        running.generate([1, 2, 3], max_tokens=3)


@pytest.mark.parametrize("handoff", [HandOffKind.SENTINEL, HandOffKind.COUNTER])
def test_a_hang_ends_by_watchdog_with_the_stage_and_the_value(handoff: HandOffKind) -> None:
    plan = waits_for_the_others(planned(handoff=handoff))
    with engine(plan, watchdog_s=0.2) as running, pytest.raises(EngineError) as caught:
        running.generate([1, 2, 3], max_tokens=3)
    said = str(caught.value)
    assert "Rank[0].Block[" in said
    assert "down[0]" in said
    assert "candidates" in said
    assert ("element 0" in said) == (handoff is HandOffKind.SENTINEL)
    assert "step 0" in said
