"""What a checkpoint says of its words but the vocabulary: which tokens end a text, how special
ones are called, and its chat template. `FolderWords` reads a Hugging Face folder;
`twin/engine/gguf_tokenizer.py` has the same of a GGUF file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from twin.errors import CheckpointError
from twin.models.bounds import LARGEST_VOCABULARY
from twin.models.files import find, read, read_json
from twin.text import shown

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
JINJA, TEMPLATE = "chat_template.jinja", "chat_template.json"
MOST_STOPS = 64  # tokens that end a generation; every block compares each of them in every step
MOST_TEMPLATE = 2**18  # bytes of a chat template: ten times the largest published
# Tokens that end a text or a turn whatever a file says of them: `special_eog_ids` of llama.cpp
# (src/llama-vocab.cpp).
ENDS = re.compile(
    r"<\|(eot_id|eom_id|im_end|end|return|calls?|flush|endoftext|end_of_text|fim_pad|fim_repo"
    r"|repo_name|file_sep)\|>|<(end_of_turn|end_of_utterance|eos|EOT|fim[-_]pad|PAD|fim-repo|REPO"
    r"|reponame)>|\[(EOS|EOT|PAD)\]|</s>|_<EOT>|<｜end▁of▁sentence｜>|<turn\|>|<\|tool_response>"
    r"|\[e~\["
)
# Where a model has the first two kinds of end, the third only separates what it thinks from what
# it answers; and Gemma 4 writes </s> as a word.
CALLS, WITHIN = {"<|call|>", "<|calls|>"}, "<|end|>"
TOOLS, WORD = "<|tool_response>", "</s>"


def ends_of(tokens: Iterable[str]) -> set[str]:
    """Those of a vocabulary's special tokens that end a text or a turn, by how they look."""
    found = {token for token in tokens if ENDS.fullmatch(token)}
    if found & CALLS and found & {"<|return|>", "<|flush|>"}:
        found -= {WITHIN}
    return found - {WORD} if TOOLS in found else found


def checked_template(where: str, found: object) -> str | None:
    """A chat template, which is a program of somebody else's. Raises CheckpointError."""
    if found is None:
        return None
    if not isinstance(found, str) or len(found) > MOST_TEMPLATE:
        raise CheckpointError(
            f"{where} is {shown(found)}; allowed: a text of up to {MOST_TEMPLATE} characters; "
            "download it again"
        )
    return found


def read_template(file: Path) -> str:
    """A file with a chat template. Raises CheckpointError."""
    try:
        return read(file, MOST_TEMPLATE).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: is not UTF-8; give a jinja template") from error


class FolderWords:
    """Of a Hugging Face folder with a tokenizer. Its methods raise CheckpointError."""

    def __init__(self, path: Path, backend: Any) -> None:
        self.path, self.backend = path, backend
        self.model, self.tokenizer = self._json(CONFIG), self._json(TOKENIZER_CONFIG)
        text = self.model.get("text_config")  # of a model that reads pictures, too
        self.text = text if isinstance(text, dict) else {}
        size: Any = self.model.get("vocab_size", self.text.get("vocab_size"))
        known = type(size) is int and 0 < size <= LARGEST_VOCABULARY
        self.vocabulary: int = size if known else LARGEST_VOCABULARY
        # As transformers has them: older checkpoints keep special tokens in a file of their own.
        newer = "added_tokens_decoder" in self.tokenizer
        self.older = {} if newer else self._json(SPECIAL_TOKENS)
        extra = self.tokenizer.get("extra_special_tokens")
        said = {**self.tokenizer, **self.older, **(extra if isinstance(extra, dict) else {})}
        self.special = {n: _content(v) for n, v in said.items() if n.endswith("_token")}

    def begin(self) -> int | None:
        """The token before every text, if there is to be one."""
        wanted = self.tokenizer.get("add_bos_token") is True
        return self._id(self.special.get("bos_token")) if wanted else None

    def stops(self) -> frozenset[int]:
        """All that end a text: what either configuration names, the tokenizer's own end token, and
        ends that the chat template writes.
        """
        found = {
            *self._ids(GENERATION_CONFIG, self._json(GENERATION_CONFIG)),
            *self._ids(CONFIG, self.model),
            *self._ids(CONFIG, self.text),
        }
        template, added = self.template() or "", self.backend.get_added_tokens_decoder()
        written = {t.content: number for number, t in added.items() if t.content in template}
        found |= {written[end] for end in ends_of(written) if written[end] < self.vocabulary}
        for said in (self.tokenizer, self.older):
            # the model cannot end with a token that is not there: no matter, where it has others
            own = self._id(_content(said.get("eos_token")), needed=not found)
            found |= set() if own is None else {own}
        if len(found) > MOST_STOPS:
            raise CheckpointError(
                f"{self.path}: names {len(found)} tokens that end a text; allowed: up to "
                f"{MOST_STOPS}; correct eos_token_id in {GENERATION_CONFIG}"
            )
        return frozenset(found)

    def names(self) -> dict[str, str]:
        """The texts of special tokens, by what templates call them."""
        return {name: text for name, text in self.special.items() if isinstance(text, str)}

    def template(self) -> str | None:
        if file := find(self.path, JINJA):
            return read_template(file)
        found = self.tokenizer.get("chat_template")
        if isinstance(found, list):  # several by name
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        if found is not None:
            return checked_template(f"{self.path / TOKENIZER_CONFIG}: chat_template", found)
        found = self._json(TEMPLATE).get("chat_template")  # of a processor for pictures
        return checked_template(f"{self.path / TEMPLATE}: chat_template", found)

    def _json(self, name: str) -> dict[str, Any]:
        file = find(self.path, name)
        return read_json(file) if file else {}

    def _ids(self, name: str, said: Mapping[str, Any]) -> list[int]:
        found = said.get("eos_token_id")
        tokens = found if isinstance(found, list) else [] if found is None else [found]
        if len(tokens) > MOST_STOPS or not all(
            type(t) is int and 0 <= t < self.vocabulary for t in tokens
        ):
            limit = (
                f"a token id below {self.vocabulary}, the size of the vocabulary, or a list of up "
                f"to {MOST_STOPS} of them"
            )
            raise CheckpointError(
                f"{self.path / name}: eos_token_id is {shown(found)}; expected {limit}; correct it"
            )
        return tokens

    def _id(self, text: Any, *, needed: bool = True) -> int | None:
        """The id of a special token; None without a text, or where the model has none of that text
        and it is not needed.
        """
        if text is None:
            return None
        file = self.path / TOKENIZER_CONFIG
        try:
            found = self.backend.token_to_id(text)
        except Exception as error:  # no text at all, or half a character: the library's own error
            raise CheckpointError(
                f"{file}: the special token {shown(text)} cannot be looked up "
                f"({type(error).__name__}); download it again"
            ) from error
        if found is not None and found < self.vocabulary:
            return int(found)
        if not needed:
            return None
        if found is None:
            raise CheckpointError(
                f"{file}: names the special token {shown(text)}, which tokenizer.json does not "
                "have; download both again"
            )
        limit = f"below {self.vocabulary}, the size of the model's vocabulary"
        raise CheckpointError(
            f"{file}: the special token {shown(text)} is number {found}; allowed: {limit}; use "
            "the model's own tokenizer"
        )


def _content(token: Any) -> Any:
    """Of a special token, which is written as its text or as a mapping with its content."""
    return token.get("content") if isinstance(token, dict) else token
