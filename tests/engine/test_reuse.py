"""Keys and values that a request left are not computed again where the next one begins alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.small_engine import LANED, LLAMA, QWEN3, TOKENS, engine, planned
from twin.engine.session import _agreeing
from twin.errors import EngineError
from twin.models.spec import ModelSpec

CASES: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "passes": (LLAMA, {"prompt_chunk": 4}),
    "steps": (LLAMA, {"prompt_chunk": 1}),
    "normed heads": (QWEN3, {"prompt_chunk": 4}),
    "two GPUs": (LLAMA, {"prompt_chunk": 4, "gpus": 2}),
    "lanes": (LANED, {"prompt_chunk": 4, "blocks": 4}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_a_turn_that_keeps_what_was_read_says_what_a_fresh_one_says(case: str) -> None:
    spec, options = CASES[case]
    plan = planned(spec, **options)
    with engine(plan) as fresh, engine(plan) as running:
        first = running.generate(TOKENS, max_tokens=6, reuse=True)
        assert first.kept == 0
        second = [*TOKENS, *first.tokens, 7, 8, 9]
        again = running.generate(second, max_tokens=6, reuse=True)
        assert again.kept == len(TOKENS) + len(first.tokens) - 1, "all but the last token was read"
        assert again.tokens == fresh.generate(second, max_tokens=6).tokens
        assert len(again.step_ns) == 6
        branch = [*TOKENS[:5], 1, 2, 3]
        other = running.generate(branch, max_tokens=6, reuse=True)
        assert other.kept == 5
        assert other.tokens == fresh.generate(branch, max_tokens=6).tokens


def test_the_same_prompt_again_reads_its_last_token_only() -> None:
    with engine(planned(prompt_chunk=4)) as running:
        first = running.generate(TOKENS, max_tokens=3, reuse=True)
        again = running.generate(TOKENS, max_tokens=3, reuse=True)
        assert again.kept == len(TOKENS) - 1
        assert again.tokens == first.tokens
        assert not len(again.pass_ns)


def test_nothing_is_kept_unless_requested_and_after_something_else_ran() -> None:
    with engine(planned(prompt_chunk=4)) as running:
        wanted = running.generate(TOKENS, max_tokens=3)
        assert running.generate(TOKENS, max_tokens=3).kept == 0
        running.logits([9, 9, 9])
        after = running.generate(TOKENS, max_tokens=3, reuse=True)
        assert (after.kept, after.tokens) == (0, wanted.tokens)


def test_what_a_cancelled_request_read_is_kept_and_right() -> None:
    with engine(planned(prompt_chunk=4)) as running:
        wanted = running.generate(TOKENS, max_tokens=6).tokens
        cut = running.generate(
            TOKENS, max_tokens=40, reuse=True, on_token=lambda _: running.cancel()
        )
        assert cut.stop_reason in ("cancelled", "length")  # a fast computer had made all of them
        longer = [*TOKENS, *cut.tokens]
        again = running.generate(longer, max_tokens=2, reuse=True)
        assert again.kept == len(longer) - 1
        assert [*cut.tokens, *again.tokens][:6] == wanted[: len(cut.tokens) + 2]


def test_a_refused_request_leaves_what_is_held() -> None:
    with engine(planned(prompt_chunk=4)) as running:
        running.generate(TOKENS, max_tokens=3, reuse=True)
        with pytest.raises(EngineError):
            running.generate([10**6], max_tokens=3, reuse=True)
        assert running.generate(TOKENS, max_tokens=3, reuse=True).kept == len(TOKENS) - 1


def test_agreeing_counts_the_common_beginning() -> None:
    assert _agreeing([], [1]) == 0
    assert _agreeing([1, 2, 3], [1, 2]) == 2
    assert _agreeing([1, 2, 3], [1, 4, 3]) == 1
    assert _agreeing(np.array([5, 6]).tolist(), [5, 6, 7]) == 2
