"""Logits leave the running kernel in rows that are used in turn: none is written again before the
host has taken it, and who is late makes the kernel wait.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.small_engine import FULL, TOKENS, engine, planned
from twin.engine import session
from twin.engine.generation import Generation
from twin.engine.host import HostEngine
from twin.engine.sampling import SamplingParams
from twin.errors import EngineError
from twin.plan.options import HandOffKind, Sampling

MADE = 20  # tokens, more than twice the rows


def heard(
    running: HostEngine, params: SamplingParams, late_s: float = 0.0, **more: Any
) -> tuple[list[NDArray[np.float32]], Generation]:
    """The logits of each token as they came, by who needs so long for each."""
    rows = list[NDArray[np.float32]]()

    def take(row: NDArray[np.float32]) -> None:
        time.sleep(late_s)
        rows.append(row)

    made = running.generate(TOKENS[:4], max_tokens=MADE, sampling=params, on_logits=take, **more)
    return rows, made


@pytest.mark.parametrize(
    ("chosen", "params"),
    [
        ({"sampling": Sampling.FULL}, FULL),
        ({"sampling": Sampling.FULL, "handoff": HandOffKind.COUNTER, "prompt_chunk": 3}, FULL),
        ({"sampling": Sampling.FULL, "gpus": 2}, FULL),
        ({}, SamplingParams()),
    ],
    ids=str,
)
def test_each_row_is_that_of_its_token_however_late_the_host(
    chosen: dict[str, Any], params: SamplingParams
) -> None:
    assert MADE > 2 * session.LOGIT_ROWS
    with engine(planned(**chosen)) as running:
        silent = running.generate(TOKENS[:4], max_tokens=MADE, sampling=params)
        for late_s in (0.0, 0.003):
            rows, made = heard(running, params, late_s)
            assert made.tokens == silent.tokens
            read = [TOKENS[3], *made.tokens[:-1]]  # by steps, as the generation did
            assert np.array_equal(rows, running.logits(read, after=TOKENS[:3]))
        again = running.generate(TOKENS[:4], max_tokens=MADE, sampling=params)
        assert again.tokens == silent.tokens


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("sampling", [Sampling.FULL, Sampling.GREEDY])
def test_no_request_is_too_short_for_logits(chunk: int, sampling: Sampling) -> None:
    """A kernel that waits for a row which only the next token could free would hang here."""
    params = FULL if sampling is Sampling.FULL else SamplingParams()
    with engine(planned(sampling=sampling, prompt_chunk=chunk), watchdog_s=10) as running:
        for prompt in range(1, 4):
            for most in (1, 2, 3, session.LOGIT_ROWS, session.LOGIT_ROWS + 1):
                rows = list[NDArray[np.float32]]()
                words = TOKENS[:prompt]
                made = running.generate(
                    words, max_tokens=most, sampling=params, on_logits=rows.append
                )
                assert made.stop_reason == "length"
                read = [words[-1], *made.tokens[:-1]]
                assert np.array_equal(rows, running.logits(read, after=words[:-1]))


@pytest.mark.parametrize("rows", [2, 3])
def test_as_few_rows_as_the_kernel_needs_will_do(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(planned(sampling=Sampling.FULL)) as running:
        wanted, _ = heard(running, FULL)
        monkeypatch.setattr(session, "LOGIT_ROWS", rows)
        found, _ = heard(running, FULL, 0.001)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("chosen", [{"sampling": Sampling.FULL}, {}], ids=["full", "greedy"])
def test_a_host_that_takes_nothing_gets_an_error(chosen: dict[str, Any]) -> None:
    params = FULL if chosen else SamplingParams()
    with engine(planned(**chosen), watchdog_s=0.6) as running:
        calls = 0

        def stay(_: int) -> None:
            nonlocal calls
            calls += 1
            time.sleep(1.5 if calls == 2 else 0)

        with pytest.raises(EngineError, match=r"waited 0\.3 s for the logits of 8 tokens to be"):
            heard(running, params, on_token=stay)
        rows, made = heard(running, params)
        assert len(rows) == len(made.tokens) == MADE


def test_a_cancel_ends_a_kernel_that_waits_for_the_host() -> None:
    with engine(planned(sampling=Sampling.FULL, max_context=500)) as running:

        def cancel(_: int) -> None:
            time.sleep(0.05)  # the kernel has filled all rows
            running.cancel()

        made = running.generate(
            TOKENS[:4], max_tokens=400, sampling=FULL, on_token=cancel, on_logits=lambda _: None
        )
    assert made.stop_reason == "cancelled"
    assert len(made.tokens) <= session.LOGIT_ROWS + 2
