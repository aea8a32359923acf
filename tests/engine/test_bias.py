"""What the host adds to logits: the kernel draws from the sum, and waits for who is late."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.small_engine import FULL, LLAMA, TOKENS, engine, planned
from twin.engine.sampling import SamplingParams, sample
from twin.errors import EngineError
from twin.plan.options import HandOffKind, Sampling

MADE = 20
PLANS: list[dict[str, Any]] = [
    {},
    {"handoff": HandOffKind.COUNTER, "prompt_chunk": 3},
    {"gpus": 2},
]
DRAWS = [FULL, SamplingParams(), SamplingParams(temperature=1.5, seed=3)]


@dataclass
class Drawn:
    """Another bias for each token, or the first one for all; some tokens cannot come."""

    steady: bool = False
    late_s: float = 0.0
    vocab: int = LLAMA.vocab
    repetition: float = 1.0

    def of(self, position: int) -> NDArray[np.float32]:
        rng = np.random.default_rng(0 if self.steady else position)
        row = rng.normal(0, 4, self.vocab).astype(np.float32)
        row[rng.random(self.vocab) < 0.5] = -np.inf
        return row

    def write(self, row: NDArray[np.float32], made: Sequence[int]) -> None:
        time.sleep(self.late_s)
        row[:] = self.of(len(made))


@pytest.mark.few(4)
@pytest.mark.parametrize("params", DRAWS, ids=["cut", "greedy", "whole"])
@pytest.mark.parametrize("chosen", PLANS, ids=["plain", "counters", "two ranks"])
def test_each_token_is_drawn_from_its_logits_and_its_bias(
    chosen: dict[str, Any], params: SamplingParams
) -> None:
    with engine(planned(sampling=Sampling.FULL, **chosen)) as running:
        silent = running.generate(TOKENS[:4], max_tokens=MADE, sampling=params)
        for bias in (Drawn(), Drawn(late_s=0.003), Drawn(steady=True)):
            rows = list[NDArray[np.float32]]()
            made = running.generate(
                TOKENS[:4], max_tokens=MADE, sampling=params, bias=bias, on_logits=rows.append
            )
            read = [TOKENS[3], *made.tokens[:-1]]
            assert np.array_equal(rows, running.logits(read, after=TOKENS[:3])), "without it"
            wanted = [sample(row + bias.of(at), params, at) for at, row in enumerate(rows)]
            assert made.tokens == wanted
        again = running.generate(TOKENS[:4], max_tokens=MADE, sampling=params)
    assert again.tokens == silent.tokens != made.tokens


@pytest.mark.parametrize("steady", [False, True], ids=["drawn", "steady"])
def test_a_repetition_penalty_lowers_what_was_there_before(steady: bool) -> None:
    with engine(planned(sampling=Sampling.FULL)) as running:
        bias, rows = Drawn(steady, repetition=1.5), list[NDArray[np.float32]]()
        made = running.generate(
            TOKENS[:4], max_tokens=MADE, sampling=FULL, bias=bias, on_logits=rows.append
        )
    for at, logits in enumerate(rows):
        there = [*TOKENS[:4], *made.tokens[:at]]
        row, found = bias.of(at), logits.copy()
        found[there] = np.where(found > 0, found / np.float32(1.5), found * np.float32(1.5))[there]
        words = row.view(np.uint32)
        words &= np.uint32(0xFFFFFFFE)  # the mark's place
        assert made.tokens[at] == sample(found + row, FULL, at)


class Dictated:
    """One token may come at each place."""

    steady = False
    repetition = 1.0

    def write(self, row: NDArray[np.float32], made: Sequence[int]) -> None:
        row[:] = -np.inf
        row[TOKENS[len(made) % len(TOKENS)]] = 0


@pytest.mark.parametrize("params", DRAWS, ids=["cut", "greedy", "whole"])
def test_a_token_that_alone_may_come_comes(params: SamplingParams) -> None:
    with engine(planned(sampling=Sampling.FULL)) as running:
        made = running.generate([1], max_tokens=len(TOKENS), sampling=params, bias=Dictated())
    assert made.tokens == TOKENS


def test_a_host_that_gives_no_bias_gets_an_error() -> None:
    with engine(planned(sampling=Sampling.FULL), watchdog_s=0.6) as running:
        calls = 0

        def stay(_: int) -> None:
            nonlocal calls
            calls += 1
            time.sleep(1.5 if calls == 2 else 0)

        with pytest.raises(EngineError, match=r"waited 0\.3 s for the bias of the next token"):
            running.generate([1], max_tokens=9, sampling=FULL, bias=Dictated(), on_token=stay)
        made = running.generate([1], max_tokens=9, sampling=FULL, bias=Dictated())
    assert made.tokens == TOKENS[:9]


def test_a_cancel_ends_a_kernel_that_waits_for_a_bias() -> None:
    with engine(planned(sampling=Sampling.FULL)) as running:

        def cancel(_: int) -> None:
            running.cancel()
            time.sleep(0.02)

        made = running.generate([1], max_tokens=40, sampling=FULL, bias=Dictated(), on_token=cancel)
    assert made.stop_reason == "cancelled"
    assert len(made.tokens) <= 2


def test_a_greedy_plan_takes_no_bias() -> None:
    with engine(planned()) as running, pytest.raises(EngineError, match="sampling=full"):
        running.generate([1], max_tokens=4, bias=Dictated())
