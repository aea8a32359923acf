"""The words of a GGUF file: text becomes the tokens that the model was trained with, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.gguf_cases import CONFIGS, add_words, finish, start, write_case
from tests.refusals import refused
from twin.engine.gguf_tokenizer import chat_template, gguf_tokenizer
from twin.engine.opening import open_source
from twin.engine.tokenizer import Tokenizer, make_byte_tokenizer
from twin.errors import CheckpointError
from twin.models.gguf_file import read_gguf

VOCABULARY = 320


def opened(path: Path, change: Any = None, way: str = "smollm") -> Tokenizer:
    writer = start(path, CONFIGS["qwen3"])
    add_words(writer, way)
    if change:
        change(writer.kv_data[0])
    finish(writer)
    return gguf_tokenizer(read_gguf(path), VOCABULARY)


def put(key: str, value: Any) -> Any:
    """Changes a value of a file; None leaves it out."""

    def change(pairs: dict[str, Any]) -> None:
        kept = pairs.pop(f"tokenizer.ggml.{key}", None)
        if value is not None:
            assert kept is not None
            kept.value = value
            pairs[f"tokenizer.ggml.{key}"] = kept

    return change


def pieces(path: Path, *, prefix: bool = True, named: bool = True) -> Tokenizer:
    """A tokenizer in the style of Llama 2."""
    writer = start(path, CONFIGS["qwen3"])
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
    ]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 262 + [-1.0, -2.0, -3.0])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 6)
    if named:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    finish(writer)
    return gguf_tokenizer(read_gguf(path), VOCABULARY)


def test_bytes_merge_as_the_file_says_and_come_back(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path / "model.gguf")
    text = "the\n naïve — 🙂 12 the"
    tokens = tokenizer.encode(text)
    assert tokens[0] == 257
    assert tokens[-1] == 258
    assert tokenizer.decode(tokens) == text
    assert tokenizer.encode("a<|im_end|>")[-1] == 260
    assert (tokenizer.bos, tokenizer.stop) == (None, {260})


@pytest.mark.parametrize(
    ("way", "begin", "digits"),
    [("qwen2", None, 4), ("llama-bpe", 259, 4), ("tekken", 259, 4), ("gpt-2", None, 4)],
)
def test_each_way_of_cutting_keeps_every_character(
    way: str, begin: int | None, digits: int, tmp_path: Path
) -> None:
    tokenizer = opened(tmp_path / "model.gguf", way=way)
    assert tokenizer.bos == begin
    for text in ("I'll GO 2024!\r\n\n  über  ", "naïve 🙂 don't", "   "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len([t for t in tokenizer.encode("2024") if t != begin]) == digits


def test_pieces_join_by_their_scores_and_other_characters_become_bytes(tmp_path: Path) -> None:
    tokenizer = pieces(tmp_path / "model.gguf")
    assert tokenizer.encode("ab b") == [1, 264, 259, 261]
    assert tokenizer.encode("é") == [1, 259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("ab é b")) == "ab é b"
    assert tokenizer.stop == {2}
    assert pieces(tmp_path / "bare.gguf", prefix=False).encode("ab") == [1, 263]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model", "bert", "'bert'"),
        ("model", None, "None"),
        ("pre", "poro-chat", "'poro-chat'"),
        ("merges", ["t x y"], "'t x y'"),
        ("eos_token_id", 10**6, "below 262"),
        ("tokens", ["a", "a"], "types of them"),
        ("token_type", [1] * 3, "3 types of them"),
    ],
)
def test_words_that_are_not_understood_are_refused_with_what_to_do(
    key: str, value: Any, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    refused(
        CheckpointError,
        lambda: opened(path, put(key, value)),
        says,
        "--tokenizer",
        "--prompt-tokens",
    )


def test_a_source_takes_other_words_where_they_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_case(path, CONFIGS["qwen3"])
    refused(CheckpointError, lambda: open_source(str(path)), "tokenizer.ggml.model", "--tokenizer")
    assert open_source(str(path), text=False).tokenizer is None
    make_byte_tokenizer(tmp_path / "words")
    assert open_source(str(path), words=tmp_path / "words").encode("ab") == [256, 97, 98]


def test_the_chat_template_is_kept_as_it_stands(tmp_path: Path) -> None:
    write_case(tmp_path / "model.gguf", CONFIGS["qwen3"], words=True)
    source = open_source(str(tmp_path / "model.gguf"))
    assert source.chat_template == "{{ messages }}"
    assert source.encode("the") == [257]
    assert chat_template(read_gguf(tmp_path / "model.gguf")) == "{{ messages }}"


def test_special_tokens_are_called_what_templates_call_them(tmp_path: Path) -> None:
    assert opened(tmp_path / "a.gguf").names == {"bos_token": "<begin>", "eos_token": "<|im_end|>"}
    usual = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert pieces(tmp_path / "b.gguf").names == usual
    silent = pieces(tmp_path / "c.gguf", named=False)
    assert (silent.names, silent.bos, silent.stop) == (usual, 1, {2})


@pytest.mark.parametrize("kind", [1, 3, 4, None])
@pytest.mark.parametrize("end", ["<|eot_id|>", "<end_of_turn>", "<|im_end|>", "<|eom_id|>"])
def test_what_looks_like_an_end_ends_a_text_whatever_its_type(
    end: str, kind: int | None, tmp_path: Path
) -> None:
    """As llama.cpp finds them: converters forget keys, and call control tokens words."""

    def change(pairs: dict[str, Any]) -> None:
        pairs["tokenizer.ggml.tokens"].value[-2:] = ["<x>", end]
        pairs.pop("tokenizer.ggml.eos_token_id")
        if kind is None:
            pairs.pop("tokenizer.ggml.token_type")
        else:
            pairs["tokenizer.ggml.token_type"].value[-1] = kind

    tokenizer = opened(tmp_path / "model.gguf", change)
    assert tokenizer.special[end] == 261
    assert tokenizer.stop >= {261}
    assert tokenizer.encode_plain(f"a{end}")[-1] == 261
    assert tokenizer.decode([97, 261]) == "a"


def test_a_word_that_looks_like_an_old_end_is_a_word(tmp_path: Path) -> None:
    def change(pairs: dict[str, Any]) -> None:
        pairs["tokenizer.ggml.tokens"].value[-1] = "</s>"
        pairs["tokenizer.ggml.token_type"].value[-1] = 1

    assert opened(tmp_path / "model.gguf", change).stop == {260}
