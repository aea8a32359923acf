"""Text to token ids and back, from a checkpoint's tokenizer.json."""

from __future__ import annotations

import base64
import codecs
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from twin.engine.words import TOKENIZER_CONFIG, FolderWords
from twin.errors import CheckpointError, ConfigError, TwinError
from twin.files import write
from twin.models.files import find, read
from twin.text import shown

# A text is encoded by the thread that needs it: the library's own threads have no owner and no
# priority, and it warns on stderr once a process that used them forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TOKENIZER = "tokenizer.json"
# of tokenizer.json: twice to three times the largest published
MOST_BYTES, MOST_COLONS, MOST_COMMAS = 64 * 2**20, 2**20, 2**22
# of SentencePiece; it begins with the trie's bytes as 32 bits
CHARACTER_MAP, TRIE_LENGTH = "precompiled_charsmap", 4
# a letter written so that a search does not find it
ESCAPED = re.compile(rb"\\u00[2-7][0-9a-fA-F]")
BROKEN = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character
# of the prompt, decoded again before its continuation: more than one character or word needs
CONTEXT_TOKENS = 8
MOST_PENDING = 3  # tokens of an incomplete character: UTF-8 has at most four bytes
TRIAL = "ab <bos> 1\n é 🙂"
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a SentencePiece token for a byte
BYTE_LEVEL, BYTE_FALLBACK = "ByteLevel", "ByteFallback"  # decoders of the library
_QUIET = threading.RLock()  # descriptor 2 belongs to the whole process
BOS, EOS = "<bos>", "<eos>"  # of the byte tokenizer
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORD_LETTERS = 4  # of a made-up word, at least


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


_BYTES = {character: byte for byte, character in enumerate(byte_characters())}


class Detokenizer:
    """Text of a token sequence as it grows. A character appears once all of its bytes are there; a
    byte that belongs to none as U+FFFD, after three more bytes at most.

    A token costs the same however long the text is. The pieces, joined, are what `decode` says of
    all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """`prompt`: what the text follows. Without it the first word would lose the space before
        it in some tokenizers.
        """
        self.tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        # words whose text is out, decoded again: some decoders treat a text's start differently
        self._before: list[int] = []
        self._words: list[int] = []  # those whose text ends within a character
        for token in list(prompt)[-CONTEXT_TOKENS:]:
            self.push(token)

    def push(self, token: int) -> str:
        """The text that this token completes, often empty inside a character."""
        spelt = self.tokenizer.spelt(token)
        if spelt is None:
            return self._broken() + self._word(token)
        if not spelt:
            return ""
        left, first, self._before = self._left(), not self._before, [token]
        if first and not self.tokenizer.word(token):
            return ""  # a space that this decoder takes from a text's start
        return left + self._bytes.decode(spelt)

    def finish(self) -> str:
        """What is left, incomplete characters shown as U+FFFD."""
        return self._broken() + self._left()

    def _word(self, token: int) -> str:
        """Of a token that only the library can spell."""
        self._words.append(token)
        text = self._undecoded()
        if text.endswith(BROKEN) and len(self._words) <= MOST_PENDING:
            return ""
        self._before, self._words = self._words, []
        return text

    def _left(self) -> str:
        text, self._words = self._undecoded() if self._words else "", []
        return text

    def _undecoded(self) -> str:
        before, decode = self._before, self.tokenizer.decode_whole
        known = self.tokenizer.word(before[0]) if len(before) == 1 else decode(before)
        return decode([*before, *self._words])[len(known) :]

    def _broken(self) -> str:
        return self._bytes.decode(b"", final=True)


@dataclass(frozen=True)
class Tokenizer:
    backend: Any
    # put before every prompt, None: the checkpoint has none beyond what tokenizer.json adds
    bos: int | None
    stop: frozenset[int]  # tokens that end a generation
    names: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> its text, and others
    template: str | None = None  # of conversations: a program of whoever made the checkpoint
    # of tokens that were requested, because a text that grows requests each of them once more
    _words: dict[int, str] = field(default_factory=dict, repr=False, compare=False)
    _spelt: dict[int, bytes | None] = field(default_factory=dict, repr=False, compare=False)

    def encode(self, text: str) -> list[int]:
        with refused(
            "this text cannot be encoded", "give token ids with --prompt-tokens", ConfigError
        ):
            tokens = self._ids(text, special=True)
        return tokens if self.bos is None or tokens[:1] == [self.bos] else [self.bos, *tokens]

    def encode_plain(self, text: str) -> list[int]:
        """Without what the tokenizer puts around a text: a chat template has written it."""
        with refused("this text cannot be encoded", "send another text", ConfigError):
            return self._ids(text, special=False)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        """As a batch, because the library holds Python's lock while it encodes a single text: 5 s
        for a megabyte.
        """
        (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=special)
        tokens: list[int] = encoded.ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens; padding rows of the vocabulary have none."""
        text = self.decode_whole(tokens)
        if BROKEN in text and BYTE_FALLBACK in self._decoders:
            # The library shows a whole run of bytes as broken where one of them is.
            growing = Detokenizer(self)
            return "".join([*map(growing.push, tokens), growing.finish()])
        return text

    def decode_whole(self, tokens: Sequence[int]) -> str:
        """As the library does it."""
        with refused(
            "the generated tokens cannot be decoded",
            "use a checkpoint's own tokenizer",
            CheckpointError,
        ):
            text: str = self.backend.decode(list(tokens), skip_special_tokens=True)
        return text

    def spelling(self, tokens: Sequence[int]) -> str:
        """Text with special tokens. As a batch, because the library holds Python's lock while it
        decodes a single one.
        """
        with refused("the tokens cannot be decoded", "send others", CheckpointError):
            (text,) = self.backend.decode_batch([list(tokens)], skip_special_tokens=False)
        return str(text)

    def word(self, token: int) -> str:
        """Of one token, as the library does it."""
        found = self._words.get(token)
        if found is None:
            found = self._words[token] = self.decode_whole([token])
        return found

    def spelt(self, token: int) -> bytes | None:
        """The bytes that a token adds to a text: none for a special one or a padding row of the
        vocabulary. None where they depend on its neighbours.
        """
        if token not in self._spelt:
            self._spelt[token] = self._spell(token)
        return self._spelt[token]

    def _spell(self, token: int) -> bytes | None:
        piece, added = self.piece(token), self.added.get(token)
        if piece is None or (added is not None and added.special):
            return b""
        if self._decoders == {BYTE_LEVEL}:
            return bytes_of(piece)
        if BYTE_FALLBACK in self._decoders and BYTE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return None

    def piece(self, token: int) -> str | None:
        """As the vocabulary has it; None for a row without a token."""
        with refused("the token cannot be looked up", "check its number", CheckpointError):
            found: str | None = self.backend.id_to_token(token)
        return found

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """Text that follows a prompt."""
        return Detokenizer(self, prompt)

    @cached_property
    def added(self) -> dict[int, Any]:
        """Tokens in addition to the vocabulary's words."""
        found: dict[int, Any] = self.backend.get_added_tokens_decoder()
        return found

    @cached_property
    def special(self) -> dict[str, int]:
        """Tokens that stand for no text, by what they are called."""
        return {token.content: n for n, token in self.added.items() if token.special}

    @cached_property
    def byte_level(self) -> bool:
        return BYTE_LEVEL in self._decoders

    @cached_property
    def _decoders(self) -> set[str]:
        decoder = self.backend.decoder
        return _types(json.loads(decoder.__getstate__())) if decoder is not None else set()


def bytes_of(piece: str) -> bytes:
    """What a word of a byte-level vocabulary stands for; one that was put in as it is for its own
    text.
    """
    try:
        return bytes(_BYTES[character] for character in piece)
    except KeyError:
        return piece.encode()


def _types(state: Any) -> set[str]:
    """The kinds of decoders in one that may be a sequence of them."""
    if isinstance(state, list):
        return set().union(*map(_types, state)) if state else set()
    if not isinstance(state, dict):
        return set()
    inner = state.get("decoders")
    return {str(state.get("type"))} if inner is None else _types(inner)


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
    advice = "download it again, or give token ids with --prompt-tokens"
    with silent(), refused(f"{file}: cannot be used", advice, CheckpointError):
        backend = tokenizers.Tokenizer.from_buffer(content)
        # What was set when the file was saved would cut or fill up every prompt in silence.
        backend.no_truncation()
        backend.no_padding()
        if getattr(backend.model, "dropout", None):
            raise ValueError("its dropout would encode the same text in many ways")
        tried(backend)
    words = FolderWords(path, backend)
    return Tokenizer(backend, words.begin(), words.stops(), words.names(), words.template())


def tried(backend: Any) -> None:
    """What panics at every text does so while a file is opened, not for each request."""
    with suppress(Exception):
        (encoded,) = backend.encode_batch_fast([TRIAL])
        backend.decode(encoded.ids)


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
    before it is split into bytes.
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


@contextmanager
def refused(what: str, next_step: str, refusal: type[TwinError]) -> Iterator[None]:
    """Errors of the library as ours. It has no narrow types, and a panic of its Rust code is no
    Exception at all.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise refusal(f"{what} ({shown(str(error), 200)}); {next_step}") from error


@contextmanager
def silent() -> Iterator[None]:
    """A panic writes its own lines, file contents among them, straight to descriptor 2; what it
    says is in the exception, too. Only while a file is opened: no request waits for another's
    text, and no thread's messages get lost.
    """
    with _QUIET, _without_stderr():
        yield


@contextmanager
def _without_stderr() -> Iterator[None]:
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
