"""One request at a time, each within the plan's limits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.small_engine import LLAMA, SEED, TOKENS, engine, planned, run_script
from tests.patience import PATIENCE_S
from twin.engine.host import HostEngine
from twin.engine.weights import random_weights
from twin.errors import EngineError
from twin.models.spec import DType
from twin.plan.options import Execution
from twin.reference.step import Reference

# ---- requests ------------------------------------------------------------------------------------


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
def test_wrong_requests_are_refused_with_the_limit(
    prompt: list[int], count: int, said: str
) -> None:
    with engine(planned()) as running, pytest.raises(EngineError, match=said):
        running.generate(prompt, max_tokens=count)


def test_the_context_can_be_filled_to_its_end() -> None:
    plan = planned(attention_splits=2)
    with engine(plan) as running:
        made = running.generate(TOKENS[:4], max_tokens=61)
    assert made.tokens == Reference(plan, random_weights(LLAMA, SEED, DType.FP32)).generate(
        TOKENS[:4], 61
    )


# ---- one request at a time -----------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="limits a process's memory as Linux counts it"
)
@pytest.mark.parametrize("execution", [Execution.RESIDENT, Execution.GRAPH])
def test_an_engine_whose_threads_could_not_start_runs_the_next_request(
    execution: Execution,
) -> None:
    """Stacks of 32 threads do not fit the memory that the process may take; then they do."""
    script = f"""
import resource
from tests.engine.small_engine import *
from twin.errors import EngineError
from twin.plan.options import Execution
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
    done = run_script(script)
    assert "right" in done.stdout, done.stdout + done.stderr


def test_a_cancel_before_the_kernel_starts_is_not_lost() -> None:
    """The start clears the control words, the cancel among them."""
    with engine(planned(replace(LLAMA, context=2**20), max_context=2**20, kv_page=1024)) as running:
        start = running._start

        def cancelled_first(request: Any) -> None:
            running.cancel()
            start(request)

        running._start = cancelled_first  # type: ignore[method-assign]
        made = running.generate([1], max_tokens=900_000)
        assert made.stop_reason == "cancelled"
        running._start = start  # type: ignore[method-assign]
        assert running.generate([1], max_tokens=3).stop_reason == "length", (
            "a cancel ends one request"
        )


def test_a_cancel_between_requests_ends_none() -> None:
    with engine(planned()) as running:
        running.cancel()
        assert running.generate([1], max_tokens=3).stop_reason == "length"


def test_a_second_thread_is_refused_while_the_engine_is_in_use() -> None:
    with engine(planned(replace(LLAMA, context=2**20), max_context=2**20, kv_page=1024)) as running:
        began, made = threading.Event(), []
        first = threading.Thread(
            target=lambda: made.append(
                running.generate([1], max_tokens=900_000, on_token=lambda _: began.set())
            )
        )
        first.start()
        assert began.wait(PATIENCE_S)
        for call in (
            lambda: running.generate([1], max_tokens=1),
            lambda: running.logits([1]),
            running.close,
        ):
            with pytest.raises(EngineError, match="the engine runs a request already"):
                call()
        running.cancel()
        first.join(PATIENCE_S)
        assert made[0].stop_reason == "cancelled"
        assert made[0].tokens
        first_tokens = made[0].tokens[:3]  # a busy computer may have made fewer
        assert running.generate([1], max_tokens=len(first_tokens)).tokens == first_tokens


def test_a_request_within_on_token_is_refused_and_ends_the_first() -> None:
    with engine(planned()) as running:
        with pytest.raises(EngineError, match="the engine runs a request already"):
            running.generate(
                [1], max_tokens=40, on_token=lambda _: running.generate([1], max_tokens=1) and None
            )
        assert len(running.generate([1], max_tokens=4).tokens) == 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda e: e.generate([1.5], max_tokens=1),
            "prompt token 0 is 1.5: must be a whole number",
        ),
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
