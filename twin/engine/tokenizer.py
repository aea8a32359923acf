"""Text to token ids and back, from a checkpoint's tokenizer.json."""

from __future__ import annotations

import base64
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from twin.errors import CheckpointError, ConfigError, TwinError
from twin.files import write
from twin.models.bounds import LARGEST_VOCABULARY
from twin.models.files import find, read, read_json
from twin.text import shown

TOKENIZER, TOKENIZER_CONFIG, CONFIG = "tokenizer.json", "tokenizer_config.json", "config.json"
MOST_STOPS = 64  # tokens that end a generation; every block compares each of them in every step
# of tokenizer.json: twice to three times the largest published
MOST_BYTES, MOST_COLONS, MOST_COMMAS = 64 * 2**20, 2**20, 2**22
# of SentencePiece; it begins with the trie's bytes as 32 bits
CHARACTER_MAP, TRIE_LENGTH = "precompiled_charsmap", 4
# a letter written so that a search does not find it
ESCAPED = re.compile(rb"\\u00[2-7][0-9a-fA-F]")
BROKEN = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character
# of the prompt, decoded again before its continuation: more than one character or word needs
CONTEXT_TOKENS = 8
_QUIET = threading.RLock()  # descriptor 2 belongs to the whole process
BOS, EOS = "<bos>", "<eos>"  # of the byte tokenizer
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORD_LETTERS = 4  # of a made-up word, at least


@dataclass(slots=True)
class Detokenizer:
    """Text of a token sequence as it grows; a character appears once all of its bytes are there."""

    tokenizer: Tokenizer
    tokens: list[int] = field(default_factory=list)
    # first token decoded again: some decoders treat the start of a text differently
    context: int = 0
    shown: int = 0  # tokens whose text is out

    def push(self, token: int) -> str:
        """The text that this token completes, often empty inside a character."""
        self.tokens.append(token)
        text = self._pending()
        if not text or text.endswith(BROKEN):
            return ""
        self.context, self.shown = self.shown, len(self.tokens)
        return text

    def finish(self) -> str:
        """What is left, incomplete characters shown as U+FFFD."""
        text = self._pending()
        self.context = self.shown = len(self.tokens)
        return text

    def _pending(self) -> str:
        known = self.tokens[self.context : self.shown]  # most often one token
        before = self.tokenizer.word(known[0]) if len(known) == 1 else self.tokenizer.decode(known)
        return self.tokenizer.decode(self.tokens[self.context :])[len(before) :]


@dataclass(frozen=True, slots=True)
class Tokenizer:
    backend: Any
    # put before every prompt, None: the checkpoint asks for none beyond what tokenizer.json adds
    bos: int | None
    stop: frozenset[int]  # tokens that end a generation
    # of tokens that were asked for, because a text that grows asks for each of them once more
    _words: dict[int, str] = field(default_factory=dict, repr=False, compare=False)

    def encode(self, text: str) -> list[int]:
        with refused(
            "this text cannot be encoded", "give token ids with --prompt-tokens", ConfigError
        ):
            tokens: list[int] = self.backend.encode(text).ids
        return tokens if self.bos is None or tokens[:1] == [self.bos] else [self.bos, *tokens]

    def encode_plain(self, text: str) -> list[int]:
        """Without what the tokenizer puts around a text: a chat template has written it."""
        with refused("this text cannot be encoded", "send another text", ConfigError):
            tokens: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens; padding rows of the vocabulary have none."""
        with refused(
            "the generated tokens cannot be decoded",
            "use a checkpoint's own tokenizer",
            CheckpointError,
        ):
            text: str = self.backend.decode(list(tokens), skip_special_tokens=True)
        return text

    def word(self, token: int) -> str:
        """Of one token, as `decode`."""
        found = self._words.get(token)
        if found is None:
            found = self._words[token] = self.decode([token])
        return found

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """Text that follows a prompt: without it the first word would lose the space before it in
        some tokenizers.
        """
        tokens = list(prompt)[-CONTEXT_TOKENS:]
        return Detokenizer(self, tokens, shown=len(tokens))


def open_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory. Raises CheckpointError."""
    path = Path(path)
    file = find(path, TOKENIZER)
    if file is None:
        raise CheckpointError(
            f"{path}: has no {TOKENIZER}; give token ids with --prompt-tokens, or add the file "
            "from the model's page"
        )
    content = read(file, MOST_BYTES)
    # its library took 65 s and 1.3 GB for 4 million tokens
    if content.count(b":") > MOST_COLONS or content.count(b",") > MOST_COMMAS:
        limit = (
            f"{MOST_COLONS} colons and {MOST_COMMAS} commas, several times what the largest "
            "published vocabularies need"
        )
        raise CheckpointError(
            f"{file}: has too many parts; allowed: up to {limit}; download it again"
        )
    _check_tries(file, content)
    with refused(
        f"{file}: cannot be used",
        "download it again, or give token ids with --prompt-tokens",
        CheckpointError,
    ):
        backend = tokenizers.Tokenizer.from_buffer(content)
        # What was set when the file was saved would cut or fill up every prompt in silence.
        backend.no_truncation()
        backend.no_padding()
        if getattr(backend.model, "dropout", None):
            raise ValueError("its dropout would encode the same text in many ways")
    config, model = _optional_json(path, TOKENIZER_CONFIG), _optional_json(path, CONFIG)
    vocabulary = _vocabulary(model)
    bos = (
        _named(path, backend, config.get("bos_token"), vocabulary)
        if config.get("add_bos_token") is True
        else None
    )
    return Tokenizer(backend, bos, _stop_tokens(path, backend, config, vocabulary))


def _check_tries(file: Path, content: bytes) -> None:
    """The library takes memory for as many bytes as a character map says that its trie has, before
    it looks whether they are there: up to 8 GB, and where they cannot be had it ends the process.
    Raises CheckpointError.
    """
    if CHARACTER_MAP.encode() not in content and not ESCAPED.search(content):
        return
    for text in _values_of(CHARACTER_MAP, _parsed(content)):
        try:
            trie = base64.b64decode(text, validate=True)
        except (ValueError, TypeError):
            continue  # the library says so itself
        said = int.from_bytes(trie[:TRIE_LENGTH], "little")
        if said > len(trie) - TRIE_LENGTH:
            limit = f"it has {max(0, len(trie) - TRIE_LENGTH)}"
            raise CheckpointError(
                f"{file}: a character map says that its trie has {said} bytes; {limit}; download "
                "it again"
            )


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None  # the library says so itself


def _values_of(key: str, data: Any) -> Iterator[Any]:
    """Every value of a key, however deep it lies."""
    left = [data]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            if key in found:
                yield found[key]
            left += found.values()
        elif isinstance(found, list):
            left += found


def make_byte_tokenizer(path: Path) -> None:
    """Writes a tokenizer whose token i is byte i, then <bos> and <eos> (258 tokens): for tests and
    the demo.
    """
    _write_tokenizer(path, byte_characters())


def make_word_tokenizer(path: Path, vocabulary: int) -> None:
    """Writes a tokenizer of `vocabulary` tokens for weights that mean nothing: made-up words with a
    space before them, then the 256 bytes, <bos> and <eos>. Every text has tokens, every token but
    the last two has a text, and text of words gives the tokens that it was made of.

    Words come first because the first of equal logits wins, and those of random streams repeat.
    """
    space, rest = byte_characters()[ord(" ")], byte_characters()
    words = [space + _spelt(number) for number in range(vocabulary - len(rest) - len((BOS, EOS)))]
    _write_tokenizer(path, [*words, *rest], whole_words=True)


def _spelt(number: int) -> str:
    letters = ""
    while number or len(letters) < WORD_LETTERS:
        number, letter = divmod(number, len(LETTERS))
        letters = LETTERS[letter] + letters
    return letters


def _write_tokenizer(path: Path, tokens: Sequence[str], *, whole_words: bool = False) -> None:
    """Byte-level BPE without merges. `whole_words`: what stands between two spaces is looked up
    before it falls apart into bytes.
    """
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], ignore_merges=whole_words))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=whole_words
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
    }
    write(
        {
            path / TOKENIZER: backend.to_str(pretty=True),
            path / TOKENIZER_CONFIG: json.dumps(config, indent=2) + "\n",
        }
    )


def _stop_tokens(
    path: Path, backend: Any, config: dict[str, Any], vocabulary: int
) -> frozenset[int]:
    """The first that says: generation_config.json, config.json, then the tokenizer's own end
    token.
    """
    for name in ("generation_config.json", CONFIG):
        found = _optional_json(path, name).get("eos_token_id")
        tokens = found if isinstance(found, list) else [] if found is None else [found]
        if len(tokens) > MOST_STOPS or not all(
            type(t) is int and 0 <= t < vocabulary for t in tokens
        ):
            limit = (
                f"a token id below {vocabulary}, the size of the vocabulary, or a list of up to "
                f"{MOST_STOPS} of them"
            )
            raise CheckpointError(
                f"{path / name}: eos_token_id is {shown(found)}; expected {limit}; correct it"
            )
        if tokens:
            return frozenset(tokens)
    own = _named(path, backend, config.get("eos_token"), vocabulary)
    return frozenset() if own is None else frozenset([own])


def _named(path: Path, backend: Any, token: Any, vocabulary: int) -> int | None:
    """The id of a special token, which is written as its text or as a mapping with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return None
    file = path / TOKENIZER_CONFIG
    with refused(
        f"{file}: the special token {shown(text)} cannot be looked up",
        "download it again",
        CheckpointError,
    ):
        found: int | None = backend.token_to_id(text) if isinstance(text, str) else None
    if found is None:
        raise CheckpointError(
            f"{file}: names the special token {shown(text)}, which {TOKENIZER} does not have; "
            "download both again"
        )
    if found >= vocabulary:
        limit = f"below {vocabulary}, the size of the model's vocabulary"
        raise CheckpointError(
            f"{file}: the special token {shown(text)} is number {found}; allowed: {limit}; use "
            "the model's own tokenizer"
        )
    return found


def _vocabulary(config: dict[str, Any]) -> int:
    """Tokens of the model beside the tokenizer; without one, the most that any model has."""
    size = config.get("vocab_size")
    return size if type(size) is int and 0 < size <= LARGEST_VOCABULARY else LARGEST_VOCABULARY


def _optional_json(folder: Path, name: str) -> dict[str, Any]:
    file = find(folder, name)
    return read_json(file) if file else {}


@contextmanager
def refused(what: str, next_step: str, refusal: type[TwinError]) -> Iterator[None]:
    """Errors of the library as ours. It has no narrow types, and a panic of its Rust code is no
    Exception at all.
    """
    try:
        with _QUIET, _without_stderr():
            yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise refusal(f"{what} ({shown(str(error), 200)}); {next_step}") from error


@contextmanager
def _without_stderr() -> Iterator[None]:
    """A panic writes its own lines, file contents among them, straight to descriptor 2; what it
    says is in the exception, too.
    """
    try:
        kept = os.dup(2)
    except OSError:  # there is none
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)


def byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte: itself, or the next free
    one from 256 on.
    """
    plain = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    hidden = iter(range(256, 512))
    return [chr(byte if byte in plain else next(hidden)) for byte in range(256)]
