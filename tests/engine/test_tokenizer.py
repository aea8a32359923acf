"""Text to tokens and back; streamed text is the whole text, never a broken character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from twin.engine.tokenizer import Tokenizer, make_byte_tokenizer, open_tokenizer
from twin.errors import CheckpointError


@pytest.fixture(scope="module")
def byte(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("byte")
    make_byte_tokenizer(path)
    return open_tokenizer(path)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer in the style of Llama 2: spaces belong to words, unknown characters fall back to bytes."""
    path = tmp_path_factory.mktemp("words")
    pieces = ["<unk>", "<s>", "▁", "▁a", "▁to", "ken", "b"] + [f"<0x{i:02X}>" for i in range(256)]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.save(str(path / "tokenizer.json"))
    return open_tokenizer(path)


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [stream.push(token) for token in tokens] + [stream.finish()]


@given(text=st.text())
def test_bytes_survive_the_round_trip(byte: Tokenizer, text: str) -> None:
    tokens = byte.encode(text)
    assert tokens == [256, *text.encode()] or not set(text).isdisjoint("<>")
    assert byte.decode(tokens) == text


@given(tokens=st.lists(st.integers(0, 257), max_size=40))
def test_streamed_text_is_the_whole_text(byte: Tokenizer, tokens: list[int]) -> None:
    assert "".join(streamed(byte, tokens)) == byte.decode(tokens)


@given(text=st.text(st.sampled_from("ab token é🙂")))
def test_streamed_text_keeps_the_spaces_between_words(words: Tokenizer, text: str) -> None:
    # Only for text: this decoder shows a whole run of bytes as broken once one of them is, also those already streamed.
    tokens = words.encode(text)
    assert "".join(streamed(words, tokens)) == words.decode(tokens)
    assert words.decode(words.encode("a b")) == "a b"


def test_text_after_a_prompt_keeps_its_first_space(words: Tokenizer) -> None:
    prompt, more = words.encode("token a"), words.encode("b")
    stream = words.stream(prompt)
    assert stream.push(more[0]) + stream.push(more[1]) == " b"
    assert words.stream().push(words.encode("a")[0]) == ""


def test_a_character_appears_when_its_last_byte_does(byte: Tokenizer) -> None:
    assert streamed(byte, [*"aé🙂".encode()]) == ["a", "", "é", "", "", "", "🙂", ""]
    assert streamed(byte, [*"🙂".encode()][:2])[-1] == "\ufffd"


def test_special_tokens_have_no_text(byte: Tokenizer) -> None:
    assert byte.decode([256, 65, 257, 300]) == "A"


def test_stop_tokens_come_from_the_first_file_that_names_them(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    assert open_tokenizer(tmp_path).stop == {257}
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert open_tokenizer(tmp_path).stop == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_tokenizer(tmp_path).stop == {1, 2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(CheckpointError, match="eos_token_id is 'end'"):
        open_tokenizer(tmp_path)


def test_bos_is_added_only_where_asked_for_and_once(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    assert open_tokenizer(tmp_path).encode("<bos>a") == [256, 97]
    config = {"bos_token": {"content": "<bos>"}, "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    opened = open_tokenizer(tmp_path)
    assert opened.encode("a") == [97]
    assert opened.stop == frozenset()


def test_a_missing_or_corrupt_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*--prompt-tokens"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot be used.*--prompt-tokens"):
        open_tokenizer(tmp_path)
    make_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<start>", "add_bos_token": true}')
    with pytest.raises(CheckpointError, match="'<start>'"):
        open_tokenizer(tmp_path)


@pytest.mark.hf
def test_transformers_reads_the_byte_tokenizer_alike(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
    make_byte_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = open_tokenizer(tmp_path)
    text = "naïve\n  ça — 🙂"
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)[1:]
