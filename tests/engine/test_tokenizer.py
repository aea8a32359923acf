"""Text to tokens and back; streamed text is the whole text, never a broken character."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.draws import CHARACTERS, scaled
from tests.refusals import refused
from twin.engine.tokenizer import Tokenizer, make_byte_tokenizer, open_tokenizer
from twin.errors import CheckpointError, TwinError


@pytest.fixture(scope="module")
def byte(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("byte")
    make_byte_tokenizer(path)
    return open_tokenizer(path)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer in the style of Llama 2: spaces belong to words, unknown characters fall back to
    bytes.
    """
    path = tmp_path_factory.mktemp("words")
    pieces = ["<unk>", "<s>", "▁", "▁a", "▁to", "ken", "b"] + [f"<0x{i:02X}>" for i in range(256)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
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
    detokenizer = tokenizer.detokenizer()
    return [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]


@given(text=st.text(CHARACTERS | st.sampled_from("ab <>")))
def test_bytes_survive_the_round_trip(byte: Tokenizer, text: str) -> None:
    tokens = byte.encode(text)
    assert tokens == [256, *text.encode()] or not set(text).isdisjoint("<>")
    assert byte.decode(tokens) == text


@given(tokens=st.lists(st.integers(0, 257), max_size=40))
def test_streamed_text_is_the_whole_text(byte: Tokenizer, tokens: list[int]) -> None:
    assert "".join(streamed(byte, tokens)) == byte.decode(tokens)


@given(tokens=st.lists(st.integers(0, 262), max_size=40))
def test_streamed_words_and_stray_bytes_are_the_whole_text(
    words: Tokenizer, tokens: list[int]
) -> None:
    assert "".join(streamed(words, tokens)) == words.decode(tokens)


@given(text=st.text(st.sampled_from("ab token é🙂")))
def test_streamed_text_keeps_the_spaces_between_words(words: Tokenizer, text: str) -> None:
    tokens = words.encode(text)
    assert "".join(streamed(words, tokens)) == words.decode(tokens)
    assert words.decode(tokens) == words.backend.decode(tokens)
    assert words.decode(words.encode("a b")) == "a b"


@given(data=st.binary(max_size=40))
def test_bytes_are_shown_as_a_decoder_of_utf8_shows_them(
    byte: Tokenizer, words: Tokenizer, data: bytes
) -> None:
    whole = data.decode(errors="replace")
    assert byte.decode([*data]) == whole == byte.backend.decode([*data])
    # not a whole run of them as broken; a space at the start is not part of a word
    assert words.decode([7 + one for one in data]) == whole.removeprefix(" ")
    for tokenizer, first, start in ((byte, 0, ""), (words, 7, " ")):
        shown = ""
        detokenizer = tokenizer.detokenizer()
        for count, one in enumerate(data, 1):
            shown += detokenizer.push(first + one)
            due = data[:count].decode(errors="replace").removeprefix(start)
            assert due.startswith(shown)
            assert len(due) - len(shown) <= 2, "the beginning of a character, and what looks so"


def test_a_token_costs_the_same_however_many_bytes_are_stray(
    words: Tokenizer, byte: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    whole = Tokenizer.decode_whole

    def counted(tokenizer: Tokenizer, tokens: list[int]) -> str:
        lengths.append(len(tokens))
        return whole(tokenizer, tokens)

    monkeypatch.setattr(Tokenizer, "decode_whole", counted)
    for tokenizer, stray in ((byte, [0x80]), (words, [7 + 0x80]), (words, [7 + 0x80, 3])):
        lengths.clear()
        detokenizer = tokenizer.detokenizer()
        shown = "".join(detokenizer.push(token) for token in stray * 500)
        assert shown.count("\ufffd") == 500
        assert sum(lengths) <= 4 * 500 * len(stray)


def test_a_character_that_a_prompt_begins_is_shown_once_it_is_whole(byte: Tokenizer) -> None:
    first, *rest = "é".encode()
    assert byte.detokenizer([97, first]).push(*rest) == "é"


def test_text_after_a_prompt_keeps_its_first_space(words: Tokenizer) -> None:
    prompt, more = words.encode("token a"), words.encode("b")
    detokenizer = words.detokenizer(prompt)
    assert detokenizer.push(more[0]) + detokenizer.push(more[1]) == " b"
    assert words.detokenizer().push(words.encode("a")[0]) == ""


def test_a_character_appears_when_its_last_byte_does(byte: Tokenizer) -> None:
    assert streamed(byte, [*"aé🙂".encode()]) == ["a", "", "é", "", "", "", "🙂", ""]
    assert streamed(byte, [*"🙂".encode()][:2])[-1] == "\ufffd"


def test_special_tokens_have_no_text(byte: Tokenizer) -> None:
    assert byte.decode([256, 65, 257, 300]) == "A"


PLACES = ["generation_config.json", "config.json", "text_config", "tokenizer_config.json"]
PLACES += ["special_tokens_map.json", "chat_template.jinja"]


@settings(max_examples=scaled(40))
@given(
    named=st.dictionaries(
        st.sampled_from(PLACES), st.sampled_from(["<eos>", "<|im_end|>", "<|eot_id|>"])
    )
)
def test_every_token_that_a_file_of_the_folder_ends_a_text_with_ends_it(
    named: dict[str, str],
) -> None:
    with TemporaryDirectory() as place:
        folder = with_ends(Path(place))
        opened = open_tokenizer(folder)
        for where, text in named.items():
            names(folder, where, text, opened.special[text])
        found = open_tokenizer(folder)
    assert found.stop == {opened.special[text] for text in named.values()}


def with_ends(folder: Path) -> Path:
    """The byte tokenizer with ends of turns, of which no file says what they are."""
    make_byte_tokenizer(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<|im_end|>", "<|eot_id|>", "<|end|>", "<|return|>", "<|call|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def names(folder: Path, where: str, text: str, token: int) -> None:
    """Writes an end where a file of the folder has it."""
    if where == "chat_template.jinja":
        (folder / where).write_text("{{ messages[0].content }}" + text)
        return
    file = folder / ("config.json" if where == "text_config" else where)
    said = json.loads(file.read_text()) if file.exists() else {}
    by_id = {"eos_token_id": token}
    if where in ("tokenizer_config.json", "special_tokens_map.json"):
        said |= {"eos_token": text}
    else:
        said |= {"text_config": by_id} if where == "text_config" else by_id
    file.write_text(json.dumps(said))


def test_a_chat_ends_with_the_tokenizers_own_end_and_with_the_models(tmp_path: Path) -> None:
    """A published pair: the model names <|endoftext|>, its tokenizer what ends each turn."""
    with_ends(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 257}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 257}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert open_tokenizer(tmp_path).stop == {257, 258}


def test_what_only_ends_a_thought_ends_no_answer(tmp_path: Path) -> None:
    """GPT-OSS writes <|end|> between what it thinks and what it says."""
    template = with_ends(tmp_path) / "chat_template.jinja"
    template.write_text("<|end|>")
    assert open_tokenizer(tmp_path).stop == {260}
    template.write_text("<|end|><|return|><|call|>")
    assert open_tokenizer(tmp_path).stop == {261, 262}


def test_a_named_end_that_the_vocabulary_lacks_matters_where_there_is_no_other(
    tmp_path: Path,
) -> None:
    make_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    refused(TwinError, lambda: open_tokenizer(tmp_path), "'<gone>'", "download both again")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 257}')
    assert open_tokenizer(tmp_path).stop == {257}


def test_ends_beyond_what_a_block_compares_are_refused(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [*range(60)]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(60, 90)]}))
    refused(TwinError, lambda: open_tokenizer(tmp_path), "91 tokens", "up to 64")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(CheckpointError, match="eos_token_id is 'end'"):
        open_tokenizer(tmp_path)


def test_special_tokens_are_called_what_their_files_call_them(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<bos>"}}')
    assert open_tokenizer(tmp_path).names == {"bos_token": "<bos>"}
    config = {"eos_token": "<eos>", "pad_token": None, "extra_special_tokens": {"x_token": "<x>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    said = {"bos_token": "<bos>", "eos_token": "<eos>", "x_token": "<x>"}
    assert open_tokenizer(tmp_path).names == said


def test_a_template_is_found_where_checkpoints_keep_it(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    assert open_tokenizer(tmp_path).template is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "zero"}')
    assert open_tokenizer(tmp_path).template == "zero"
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert open_tokenizer(tmp_path).template == "one"
    both = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]
    config.write_text(json.dumps({"chat_template": both}))
    assert open_tokenizer(tmp_path).template == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert open_tokenizer(tmp_path).template == "three"
    config.write_text(json.dumps({"chat_template": 5}))
    (tmp_path / "chat_template.jinja").unlink()
    refused(CheckpointError, lambda: open_tokenizer(tmp_path), "chat_template")


def test_bos_is_added_only_where_requested_and_once(tmp_path: Path) -> None:
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
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": "<start>", "add_bos_token": true}'
    )
    with pytest.raises(CheckpointError, match="'<start>'"):
        open_tokenizer(tmp_path)


# ---- hostile files -------------------------------------------------------------------------------


def changed(path: Path, **parts: object) -> Path:
    """The byte tokenizer with other parts."""
    make_byte_tokenizer(path)
    content = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(content | parts))
    return path


@pytest.mark.parametrize(
    "stop",
    [
        2**31,
        2**24,
        10**30,
        -1,
        True,
        1.0,
        "\x1b[2J",
        [1, 2**31],
        [[1]],
        {"a": 1},
        [1] * 999,
        "x" * 300_000,
    ],
)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_stop_token_that_no_model_has_is_refused(tmp_path: Path, file: str, stop: object) -> None:
    make_byte_tokenizer(tmp_path)
    (tmp_path / file).write_text(json.dumps({"eos_token_id": stop}))
    refused(TwinError, lambda: open_tokenizer(tmp_path), file, "eos_token_id is", "below 16777216")


def test_a_stop_token_beyond_the_vocabulary_of_the_model_is_refused(tmp_path: Path) -> None:
    """It would never be generated: the text would go on for ever without a word."""
    make_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 258, "eos_token_id": 258}')
    refused(TwinError, lambda: open_tokenizer(tmp_path), "eos_token_id is 258", "below 258")
    (tmp_path / "config.json").write_text('{"vocab_size": 257}')
    refused(TwinError, lambda: open_tokenizer(tmp_path), "'<eos>' is number 257", "below 257")


def test_a_prompt_is_neither_cut_nor_filled_up(tmp_path: Path) -> None:
    """Settings that a training script left in the file."""
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 99},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 7,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    tokenizer = open_tokenizer(changed(tmp_path, truncation=cut, padding=fill))
    assert tokenizer.encode("a longer text") == [256, *b"a longer text"]


PANICS: list[tuple[str, object]] = [
    ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "xy"}),
    ("normalizer", {"type": "Prepend", "prepend": ""}),
    (
        "post_processor",
        {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "B", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        },
    ),
]


@pytest.mark.parametrize("key", ["precompiled_charsmap", "precompiled_ch\\u0061rsmap"])
def test_a_character_map_that_lies_about_its_length_does_not_end_the_process(
    key: str, tmp_path: Path
) -> None:
    """The library would take 8 GB first, and abort where they cannot be had."""
    make_byte_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Precompiled", "KEY": "/////wA="}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content).replace("KEY", key))
    with pytest.raises(CheckpointError, match="its trie has 4294967295 bytes; it has 1"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(("part", "value"), PANICS)
def test_a_panic_of_the_library_is_a_refusal_when_the_file_is_opened_and_writes_nothing(
    tmp_path: Path, part: str, value: object, capfd: pytest.CaptureFixture[str]
) -> None:
    changed(tmp_path, **{part: value})
    refused(TwinError, lambda: open_tokenizer(tmp_path), "cannot be used", "--prompt-tokens")
    os.write(2, b"heard")
    assert capfd.readouterr().err == "heard"


def test_a_panic_at_one_text_is_a_refusal_of_that_text(tmp_path: Path) -> None:
    """The library may say more on stderr: silencing it would lose what other threads say."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    tokenizer = open_tokenizer(changed(tmp_path, pre_tokenizer=split | {"invert": False}))
    hard = "a" * 40 + "!"
    refused(TwinError, lambda: tokenizer.encode(hard), "cannot be encoded", "--prompt-tokens")
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_an_interrupt_is_not_taken_for_a_panic(byte: Tokenizer) -> None:
    class Interrupted:
        def encode_batch_fast(self, texts: list[str], **_: bool) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tokenizer(Interrupted(), None, frozenset()).encode("a")


def test_a_text_with_half_a_character_is_refused(byte: Tokenizer) -> None:
    refused(TwinError, lambda: byte.encode("a\udcff"), "cannot be encoded")


def test_a_tokenizer_that_encodes_at_random_is_refused(tmp_path: Path) -> None:
    model = {
        "type": "BPE",
        "dropout": 0.5,
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
    }
    refused(
        TwinError,
        lambda: open_tokenizer(changed(tmp_path, model=model)),
        "tokenizer.json",
        "dropout",
    )


@pytest.mark.parametrize(
    "text",
    ['{"a":1,' * 1_100_000, "1," * 4_300_000, " " * (2**26 + 1)],
    ids=["mappings", "numbers", "spaces"],
)
def test_a_vocabulary_without_end_is_refused_before_its_library_reads_it(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    refused(TwinError, lambda: open_tokenizer(tmp_path), "tokenizer.json", "download it again")


def test_special_tokens_that_are_unknown_are_shown_harmlessly(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    for token in (
        "\x1b[2J",
        "x" * 300_000,
        {"content": "\x1b[2J"},
        {"content": ["\x1b"]},
        5,
        "\ud800",
    ):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": token, "add_bos_token": True})
        )
        refused(
            TwinError, lambda: open_tokenizer(tmp_path), "tokenizer_config.json", "special token"
        )


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_files_of_words_obey_the_rules_of_weights(tmp_path: Path, file: str) -> None:
    """Neither links out of the folder nor pipes; JSON with an end."""
    make_byte_tokenizer(tmp_path / "m")
    path = tmp_path / "m" / file
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/passwd")
    refused(TwinError, lambda: open_tokenizer(tmp_path / "m"), file, "outside of this folder")
    path.unlink()
    os.mkfifo(path)
    refused(TwinError, lambda: open_tokenizer(tmp_path / "m"), file, "not a regular file")
    path.unlink()
    path.write_text("[" * 100_000)
    refused(TwinError, lambda: open_tokenizer(tmp_path / "m"), file)


@pytest.mark.hf
def test_transformers_reads_the_byte_tokenizer_alike(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra 'hf')"
    )
    make_byte_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = open_tokenizer(tmp_path)
    text = "naïve\n  ça — 🙂"
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)[1:]
