"""Text from tokens: what is shown when, and what ends it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.engine.generate import Piece, Request, Stop, Text, complete
from twin.engine.generation import Generation
from twin.engine.sampling import SamplingParams
from twin.engine.tokenizer import Tokenizer, make_byte_tokenizer, open_tokenizer
from twin.errors import EngineError


class Script:
    """A session that says what it was given, a few tokens ahead of who cancels it."""

    def __init__(self, tokens: list[int], *, stop_reason: str = "length", ahead: int = 2) -> None:
        self.tokens, self.stop_reason, self.ahead = tokens, stop_reason, ahead
        self.left: int | None = None

    def cancel(self) -> None:
        self.left = self.ahead

    def generate(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        sampling: SamplingParams,
        stop: frozenset[int],
        on_token: Callable[[int], None],
        on_logits: object = None,
        bias: object = None,
        reuse: bool = False,
    ) -> Generation:
        said = []
        for token in self.tokens[:max_tokens]:
            if self.left is not None:
                if not self.left:
                    break
                self.left -= 1
            said.append(token)
            on_token(token)
        reason = "cancelled" if self.left is not None else self.stop_reason
        return Generation(said, np.full(len(said), 1000), 500, reason)


@pytest.fixture(scope="module")
def byte(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    make_byte_tokenizer(folder)
    return open_tokenizer(folder)


def request(*stops: str, tokens: int = 100) -> Request:
    return Request([256], tokens, stop_texts=stops)


def test_a_character_is_shown_once_its_last_token_is_there(byte: Tokenizer) -> None:
    seen: list[Piece] = []
    ended = complete(Script([*"né🙂".encode()]), byte, request(), seen.append)  # type: ignore[arg-type]
    assert [piece.text for piece in seen] == ["n", "", "é", "", "", "", "🙂"]
    assert [piece.token for piece in seen] == [*"né🙂".encode()]
    assert (ended.text, ended.stop) == ("né🙂", Stop.LENGTH)


def test_half_a_character_at_the_end_is_shown_as_broken(byte: Tokenizer) -> None:
    seen: list[Piece] = []
    ended = complete(Script([*"aé".encode()][:2]), byte, request(), seen.append)  # type: ignore[arg-type]
    assert seen[-1] == Piece("\ufffd")
    assert ended.text == "a\ufffd"


def test_a_stop_text_ends_it_and_is_not_shown(byte: Tokenizer) -> None:
    seen: list[Piece] = []
    session = Script([*b"one END two"])
    ended = complete(session, byte, request("END"), seen.append)  # type: ignore[arg-type]
    assert (ended.text, ended.stop, ended.stop_text) == ("one ", Stop.TEXT, "END")
    assert "".join(piece.text for piece in seen) == "one "
    assert session.left == 0, "it was cancelled"


def test_what_only_looked_like_a_stop_text_is_shown(byte: Tokenizer) -> None:
    seen: list[Piece] = []
    ended = complete(Script([*b"an EN"]), byte, request("END"), seen.append)  # type: ignore[arg-type]
    assert [piece.text for piece in seen] == ["a", "n", " ", "", "", "EN"]
    assert ended.text == "an EN"


@pytest.mark.parametrize(
    ("reason", "stop"),
    [("stop", Stop.TOKEN), ("cancelled", Stop.CANCELLED), ("length", Stop.LENGTH)],
)
def test_a_stop_token_and_a_request_to_stop_have_words_of_their_own(
    reason: str, stop: Stop, byte: Tokenizer
) -> None:
    ended = complete(Script([*b"abc"], stop_reason=reason), byte, request())  # type: ignore[arg-type]
    assert (ended.stop, ended.made.tokens) == (stop, [*b"abc"])
    assert len({one.value for one in Stop}) == 4


def test_without_a_tokenizer_the_text_is_token_ids() -> None:
    ended = complete(Script([5, 6]), None, request())  # type: ignore[arg-type]
    assert ended.text == "5 6 "


def test_an_empty_stop_text_is_refused(byte: Tokenizer) -> None:
    with pytest.raises(EngineError, match="a stop text is empty"):
        complete(Script([]), byte, request(""))  # type: ignore[arg-type]


def test_no_tokens_have_no_speed() -> None:
    assert Generation([], np.zeros(0, np.int64), 0, "cancelled").tokens_per_s == 0
    assert Generation([1, 2, 3], np.array([9, 1000, 1000]), 0, "length").tokens_per_s == 1e6


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_what_is_shown_is_the_text_before_the_first_stop_text(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    grown, shown = Text(None, stops), ""
    left = text
    while left and grown.found is None:
        size = data.draw(st.integers(1, len(left)))
        shown += grown.add(left[:size])
        left = left[size:]
    shown += grown.finish()
    read = text[: len(text) - len(left)]
    firsts = [at for stop in stops if (at := read.find(stop)) >= 0]
    assert shown == grown.whole == (read[: min(firsts)] if firsts else read)


@pytest.mark.parametrize(
    ("tokens", "stop", "shown"),
    [
        ([*b"one", 257, *b"two"], "<eos>", "one"),
        ([*b"one<eos>two"], "<eos>", "one"),
        ([*b"one", 257, *b"\ntwo"], "<eos>\n", "one"),
        ([*b"one", 257, *b"two"], "<eos>\n", "onetwo"),
        ([*b"one", 257, 256, *b"two"], "e<eos><bos>t", "on"),
        ([*b"one", 256, *b"two"], "<eos>", "onetwo"),
    ],
)
def test_a_stop_text_may_name_special_tokens_which_have_no_text(
    tokens: list[int], stop: str, shown: str, byte: Tokenizer
) -> None:
    seen: list[Piece] = []
    ended = complete(Script(tokens), byte, request(stop), seen.append)  # type: ignore[arg-type]
    assert ended.text == shown == "".join(piece.text for piece in seen)
    assert ended.stop_text == ("" if shown == "onetwo" else stop)


def test_a_stop_token_is_not_shown(byte: Tokenizer) -> None:
    wanted = Request([256], 9, stop_tokens=frozenset({98}))
    ended = complete(Script([*b"ab"], stop_reason="stop"), byte, wanted)  # type: ignore[arg-type]
    assert (ended.text, ended.made.tokens) == ("a", [*b"ab"])
