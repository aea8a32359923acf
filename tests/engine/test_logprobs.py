"""Log probabilities are those of the logits that the kernel chose from; tokens spell the text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tests.command_line import TINY
from twin.calibrate.node import calibrated_node
from twin.engine.generate import Piece, Request, complete
from twin.engine.logprobs import Spelling, scored
from twin.engine.opening import open_session, open_source, plan_run
from twin.engine.sampling import SamplingParams
from twin.engine.tokenizer import Tokenizer
from twin.errors import EngineError


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_each_token_has_the_probability_that_the_model_gave_it(
    temperature: float, checkpoint: Path
) -> None:
    node, source = calibrated_node("1xhost"), open_source(str(checkpoint))
    plan = plan_run(TINY, node, {"blocks": 1}, positions=64, greedy=temperature == 0)
    prompt, pieces = [256, 104, 105], list[Piece]()
    request = Request(prompt, 20, SamplingParams(temperature, seed=4), logprobs=3)
    with open_session(node, plan, source, lambda _: None) as session:
        made = complete(session, source.tokenizer, request, pieces.append).made
        plain = complete(
            session, source.tokenizer, Request(prompt, 20, SamplingParams(temperature, seed=4))
        )
        assert plain.made.tokens == made.tokens
        read = [prompt[-1], *made.tokens[:-1]]  # by steps, as the generation did
        logits = session.logits(read, after=prompt[:-1]).astype(np.float64)
        session.gives_logits = False
        with pytest.raises(EngineError, match="gives no logits while this plan runs"):
            complete(session, source.tokenizer, request)
    wanted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found = [piece.scored for piece in pieces if piece.token is not None]
    assert len(found) == 20
    for one, row, token in zip(found, wanted, made.tokens, strict=True):
        assert one is not None
        assert one.token == token
        assert one.logprob == pytest.approx(row[token], abs=1e-6)
        assert [logprob for _, logprob in one.top] == pytest.approx(sorted(row)[:-4:-1], abs=1e-6)
        assert temperature or one.top[0] == (token, one.logprob)


def test_of_equal_logits_the_lower_number_stands_first_and_impossible_ones_are_infinite() -> None:
    logits = np.array([1, 3, 3, -np.inf, 3, 2], np.float32)
    found = scored(logits, 3, 2)
    assert [token for token, _ in found.top] == [1, 2]
    assert found.logprob == -np.inf
    everything = scored(logits, 1, 99).top
    assert [token for token, _ in everything] == [1, 2, 4, 5, 0, 3]
    assert sum(np.exp(one) for _, one in everything) == pytest.approx(1)
    assert scored(logits, 1, 0).top == ()


def test_bytes_of_tokens_join_to_the_text(checkpoint: Path) -> None:
    tokenizer = open_source(str(checkpoint)).tokenizer
    assert tokenizer is not None
    spelling, text = Spelling(tokenizer), "é€ 🙂\n"
    tokens = tokenizer.encode_plain(text)
    assert b"".join(map(spelling.bytes_of, tokens)) == text.encode()
    assert len(tokens) == len(text.encode())
    assert spelling.bytes_of(256) == b"<bos>"
    assert spelling.special(256)
    assert not spelling.special(65)
    assert spelling.bytes_of(319) == b""


def test_bytes_of_a_sentencepiece_vocabulary() -> None:
    words = {"<unk>": 0, "▁hi": 1, "<0xF0>": 2, "é": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()]
    )
    spelling = Spelling(Tokenizer(backend, None, frozenset()))
    assert [spelling.bytes_of(token) for token in (1, 2, 3)] == [b" hi", b"\xf0", "é".encode()]
