"""The engine by its Python API: what `twin run` makes, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import twin
from tests.command_line import Twin


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[twin.Engine]:
    with twin.open_engine(checkpoint, blocks=1) as found:
        yield found


def test_it_makes_what_twin_run_makes(
    engine: twin.Engine, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--prompt", "hi", "--max-tokens", 12, "--ignore-eos", "--blocks", 1, "--json")
    said = json.loads(Twin(capsys)("run", checkpoint, *words).out)
    made = engine.generate("hi", max_tokens=12, ignore_eos=True)
    assert list(made.tokens) == said["tokens"]
    assert made.text == said["text"]
    assert made.prompt_tokens == len(said["prompt_tokens"]) == len(engine.encode("hi"))


def test_pieces_are_the_text_and_end_with_its_figures(engine: twin.Engine) -> None:
    how = {"max_tokens": 20, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    whole = engine.generate("hi", **how)
    with engine.stream("hi", **how) as pieces:
        assert "".join(pieces) == whole.text
    assert pieces.result is not None
    assert pieces.result.tokens == whole.tokens
    assert whole.step_s.shape == (20,)
    assert whole.tokens_per_s > 0
    assert next(pieces, None) is None


def test_a_stop_text_ends_it_and_is_left_out(engine: twin.Engine) -> None:
    whole = engine.generate("hi", max_tokens=20, ignore_eos=True)
    stop = whole.text[5:7]
    made = engine.generate("hi", max_tokens=20, ignore_eos=True, stop=stop)
    assert made.finish_reason == "stop"
    assert made.text == whole.text[: whole.text.find(stop)]


def test_a_closed_stream_leaves_the_engine_free(engine: twin.Engine) -> None:
    for _ in range(5):
        pieces = engine.stream("hi", max_tokens=200, ignore_eos=True)
        pieces.close()
        assert next(pieces, None) is None
        assert engine.generate("hi", max_tokens=1).prompt_tokens == 3


def test_one_text_at_a_time(engine: twin.Engine) -> None:
    with engine._session._alone("a text that does not end meanwhile"):
        with pytest.raises(twin.TwinError, match="runs a request already"):
            engine.generate("hi")
        with pytest.raises(twin.TwinError, match="runs a request already"):
            next(engine.stream("hi"))


@pytest.mark.parametrize(
    ("prompt", "how", "needle"),
    [
        ([], {}, "prompt is empty"),
        (None, {}, "a text, or a list of token ids"),
        (b"hi", {}, "a text, or a list of token ids"),
        ("hi", {"max_tokens": 0}, "max_tokens=0"),
        ("hi", {"max_tokens": "5"}, "max_tokens='5'"),
        ("hi", {"max_tokens": True}, "max_tokens=True"),
        ("hi", {"max_tokens": 10_000}, "max_tokens=10000"),
        ("hi", {"temperature": -1}, "temperature=-1"),
        ("hi", {"stop": ["x", ""]}, "stop=''"),
    ],
)
def test_an_impossible_request_is_refused_before_it_runs(
    engine: twin.Engine, prompt: str | list[int], how: dict[str, object], needle: str
) -> None:
    with pytest.raises(twin.TwinError, match=needle):
        engine.stream(prompt, **how)  # type: ignore[arg-type]


def test_what_fails_later_comes_out_of_the_stream(engine: twin.Engine) -> None:
    with pytest.raises(twin.TwinError, match="prompt token 0"):
        next(engine.stream([10**6], max_tokens=1))


def test_it_predicts_the_plan_that_it_runs(engine: twin.Engine) -> None:
    found = engine.predict(context=9)
    assert found.context == 9
    assert found.node == "1xhost"
    assert found.tokens_per_s > 0


def test_random_weights_of_a_seed_make_the_same_text(checkpoint: Path) -> None:
    made = []
    for seed in (1, 1, 2):
        with twin.open_engine(checkpoint, random=seed, blocks=1, max_context=32) as engine:
            made.append(engine.generate([1, 2, 3], max_tokens=16, ignore_eos=True).tokens)
    assert made[0] == made[1] != made[2]


def test_a_node_that_is_not_here_is_refused(checkpoint: Path) -> None:
    with pytest.raises(twin.TwinError, match="it instead"):
        twin.open_engine(checkpoint, "1xb200")
