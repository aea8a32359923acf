"""Text to token ids and back, from a checkpoint's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from twin.engine.safetensors import read_json
from twin.errors import CheckpointError

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BROKEN = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character
CONTEXT_TOKENS = 8  # of the prompt, decoded again before its continuation: more than one character or word needs
BOS, EOS = "<bos>", "<eos>"  # of the byte tokenizer


@dataclass(slots=True)
class Stream:
    """Text of a token sequence as it grows; a character appears once all of its bytes are there."""

    tokenizer: Tokenizer
    tokens: list[int] = field(default_factory=list)
    context: int = 0  # first token decoded again: some decoders treat the start of a text differently
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
        before = self.tokenizer.decode(self.tokens[self.context : self.shown])
        return self.tokenizer.decode(self.tokens[self.context :])[len(before) :]


@dataclass(frozen=True, slots=True)
class Tokenizer:
    backend: Any
    bos: int | None  # put before every prompt, None: the checkpoint asks for none beyond what tokenizer.json adds
    stop: frozenset[int]  # tokens that end a generation

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self.backend.encode(text).ids
        return tokens if self.bos is None or tokens[:1] == [self.bos] else [self.bos, *tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens; padding rows of the vocabulary have none."""
        text: str = self.backend.decode(list(tokens), skip_special_tokens=True)
        return text

    def stream(self, prompt: Sequence[int] = ()) -> Stream:
        """Text that follows a prompt: without it the first word would lose the space before it in some tokenizers."""
        tokens = list(prompt)[-CONTEXT_TOKENS:]
        return Stream(self, tokens, shown=len(tokens))


def open_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory. Raises CheckpointError."""
    path = Path(path)
    file = path / TOKENIZER
    if not file.is_file():
        raise CheckpointError(f"{path}: has no {TOKENIZER}; give token ids with --prompt-tokens, or add the file from the model's page")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        raise CheckpointError(f"{file}: cannot be used ({error}); download it again, or give token ids with --prompt-tokens") from error
    config = _optional_json(path / TOKENIZER_CONFIG)
    bos = _named(backend, config.get("bos_token")) if config.get("add_bos_token") is True else None
    return Tokenizer(backend, bos, _stop_tokens(path, backend, config))


def make_byte_tokenizer(path: Path) -> None:
    """Writes a tokenizer whose token i is byte i, then <bos> and <eos> (258 tokens): for tests and the demo."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS])
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / TOKENIZER))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "add_bos_token": True}
    (path / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _stop_tokens(path: Path, backend: Any, config: dict[str, Any]) -> frozenset[int]:
    """The first that says: generation_config.json, config.json, then the tokenizer's own end token."""
    for name in ("generation_config.json", "config.json"):
        found = _optional_json(path / name).get("eos_token_id")
        tokens = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(t) is int and t >= 0 for t in tokens):
            raise CheckpointError(f"{path / name}: eos_token_id is {found!r}; expected a token id or a list of them")
        if tokens:
            return frozenset(tokens)
    own = _named(backend, config.get("eos_token"))
    return frozenset() if own is None else frozenset([own])


def _named(backend: Any, token: Any) -> int | None:
    """The id of a special token, which is written as its text or as a mapping with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return None
    found: int | None = backend.token_to_id(text) if isinstance(text, str) else None
    if found is None:
        raise CheckpointError(f"{TOKENIZER_CONFIG}: names the special token {text!r}, which {TOKENIZER} does not have; download both again")
    return found


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file, file.read_bytes()) if file.is_file() else {}


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte: itself, or the next free one from 256 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in plain else next(hidden)) for byte in range(256)]
