"""Text to token ids and back, from the words that a GGUF file holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from twin.engine.tokenizer import Tokenizer, refused, silent, tried
from twin.engine.words import MOST_STOPS, WORD, checked_template, ends_of
from twin.errors import CheckpointError
from twin.models.gguf_file import GgufFile
from twin.text import shown

ADVICE = (
    "give the folder of the model's tokenizer.json with --tokenizer, or ids with --prompt-tokens"
)
LONGEST_WORD = 512  # characters of a word with a score, each of whose cuts is looked at
_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # types of tokens
# Special tokens by what templates call them; "seperator" is the format's own spelling
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_NAMES |= {"sep_token": "seperator", "cls_token": "cls", "mask_token": "mask"}
# where a SentencePiece file has them that does not say so
_USUAL = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _split(letters: str, digits: str, signs: str = r"[\r\n]*") -> str:
    return rf"{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{signs}|{_REST}"


_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_LLAMA3 = _split(rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+", r"\p{N}{1,3}")
_QWEN2 = _split(rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+", r"\p{N}")
_TEKKEN = _split(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
    r"\p{N}",
    r"[\r\n/]*",
)
_WAYS: dict[str, tuple[str, ...]] = {  # tokenizer.ggml.pre -> texts are cut by each in turn
    **dict.fromkeys(("gpt-2", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe", "pixtral"), (_LLAMA3,)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
}
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken", "pixtral")  # before merges
_BEGIN = _WHOLE_WORDS  # whose texts begin with a token of their own unless the file says otherwise


def gguf_tokenizer(file: GgufFile, vocabulary: int) -> Tokenizer:
    """The tokenizer of a file. Raises CheckpointError where it has none that is understood."""
    words = _Words(file, vocabulary)
    with silent(), refused(f"{file.path}: its tokenizer cannot be used", ADVICE, CheckpointError):
        backend = words.backend()
        tried(backend)
    return Tokenizer(backend, words.begin(), words.stops(), words.names(), chat_template(file))


def chat_template(file: GgufFile) -> str | None:
    """The template of conversations, as the file holds it."""
    found = file.metadata.get("tokenizer.chat_template")
    return checked_template(f"{shown(file.path)}: tokenizer.chat_template", found)


class _Words:
    def __init__(self, file: GgufFile, vocabulary: int) -> None:
        self.file, self.vocabulary = file, vocabulary
        self.model, self.way = self._get("model"), self._get("pre")
        known = "gpt2 (byte-level BPE) or llama (SentencePiece BPE)"
        if self.model not in ("gpt2", "llama"):
            raise self._refusal("model", self.model, known)
        if self.model == "gpt2" and (not isinstance(self.way, str) or self.way not in _WAYS):
            raise self._refusal("pre", self.way, ", ".join(_WAYS))
        self.tokens = self._list("tokens", str)
        self.types = self._list("token_type", int) if self._get("token_type") else []
        if len(self.tokens) > vocabulary or len(self.types) not in (0, len(self.tokens)):
            count = f"{len(self.tokens)} tokens and {len(self.types)} types of them"
            raise self._refusal("tokens", count, f"up to {vocabulary}, the size of the vocabulary")
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise self._refusal("tokens", "a list with a token twice", "different tokens")
        special = {token for _, token in self._typed(_CONTROL, _UNKNOWN)}
        self.ends = ends_of(special | (self.ids.keys() - {WORD}))  # whatever their type
        self.special = special | self.ends

    def backend(self) -> Any:
        made = self._bpe() if self.model == "gpt2" else self._pieces()
        own = [token for token in self.tokens if token in self.special]
        made.add_special_tokens([self._added(token, special=True) for token in own])
        users = [token for _, token in self._typed(_USER) if token not in self.special]
        made.add_tokens([self._added(token, special=False) for token in users])
        return made

    def begin(self) -> int | None:
        """The token before every text, if there is to be one."""
        wanted = self._get("add_bos_token")
        if wanted is None:
            wanted = self.model == "llama" or self.way in _BEGIN
        return self._id("bos_token_id") if wanted else None

    def stops(self) -> frozenset[int]:
        named = (self._id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
        found = {n for n in named if n is not None} | {self.ids[end] for end in self.ends}
        return frozenset(sorted(found)[:MOST_STOPS])

    def names(self) -> dict[str, str]:
        """The texts of special tokens, by what templates call them."""
        found = {name: self._id(f"{key}_token_id") for name, key in _NAMES.items()}
        return {name: self.tokens[number] for name, number in found.items() if number is not None}

    def _bpe(self) -> Any:
        merges = [self._pair(text) for text in self._list("merges", str)]
        made = tokenizers.Tokenizer(
            tokenizers.models.BPE(self.ids, merges, ignore_merges=self.way in _WHOLE_WORDS)
        )
        cuts = [pre_tokenizers.Split(tokenizers.Regex(w), "isolated") for w in _WAYS[self.way]]
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, whole])
        made.decoder = decoders.ByteLevel()
        return made

    def _pair(self, text: str) -> tuple[str, str]:
        left, _, right = text.partition(" ")
        if (
            not left
            or left not in self.ids
            or right not in self.ids
            or left + right not in self.ids
        ):
            raise self._refusal(
                "merges", text, "two tokens that make a third, with a space between"
            )
        return left, right

    def _pieces(self) -> Any:
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise self._refusal("scores", f"a list of {len(scores)}", f"{len(self.tokens)} of them")
        unknown = self._id("unknown_token_id")
        made = tokenizers.Tokenizer(
            tokenizers.models.BPE(
                self.ids,
                _merges(self.ids, scores),
                fuse_unk=True,
                byte_fallback=True,
                unk_token=None if unknown is None else self.tokens[unknown],
            )
        )
        space, prefix = "▁", self._get("add_space_prefix") is not False
        begin = [normalizers.Prepend(space)] if prefix else []
        made.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", space)])
        end = [decoders.Strip(" ", 1, 0)] if prefix else []
        steps = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *end]
        made.decoder = decoders.Sequence(steps)
        return made

    def _typed(self, *types: int) -> Iterator[tuple[int, str]]:
        pairs = zip(enumerate(self.tokens), self.types, strict=False)
        return (token for token, kind in pairs if kind in types)

    def _added(self, token: str, *, special: bool) -> Any:
        return tokenizers.AddedToken(token, special=special, normalized=False)

    def _id(self, key: str) -> int | None:
        found = self._get(key)
        if found is None:
            usual = _USUAL.get(key) if self.model == "llama" else None
            named = usual is not None and usual < len(self.tokens)
            return usual if named and self.tokens[usual or 0] in self.special else None
        if type(found) is not int or not 0 <= found < len(self.tokens):
            raise self._refusal(key, found, f"a token's number below {len(self.tokens)}")
        return found

    def _list(self, key: str, kind: type) -> Sequence[Any]:
        found = self._get(key)
        if not isinstance(found, list) or not all(type(entry) is kind for entry in found):
            raise self._refusal(key, found, f"a list of {kind.__name__}")
        return found

    def _get(self, key: str) -> Any:
        return self.file.metadata.get(_PREFIX + key)

    def _refusal(self, key: str, value: object, allowed: str) -> CheckpointError:
        what = f"{_PREFIX}{key} is {shown(value)}"
        return CheckpointError(f"{shown(self.file.path)}: {what}; allowed: {allowed}; {ADVICE}")


def _merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a third, the most probable first, as SentencePiece joins them."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for word, number in ids.items():
        for cut in range(1, len(word) if len(word) <= LONGEST_WORD else 0):
            left, right = word[:cut], word[cut:]
            if left in ids and right in ids:
                found.append((-scores[number], ids[left], ids[right], (left, right)))
    return [pair for *_, pair in sorted(found)]
