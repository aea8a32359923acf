"""Attacks on GGUF files: counts, lengths, types, shapes, values of any key, words, lost bytes.

Laws: a file is refused by one bounded line, or all of its weights have the shapes of its model and
only finite elements, and its tokenizer gives token ids and stop tokens that the model has; always
in bounded time and memory.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np

from tests.attack.defect import Defect
from tests.attack.hostile import check_refusal
from tests.engine.gguf_cases import CONFIGS, add_words, finish, named, start
from tests.engine.hf_cases import weights
from twin.engine.gguf_tokenizer import chat_template, gguf_tokenizer
from twin.engine.gguf_weights import open_gguf
from twin.errors import TwinError
from twin.models.decoder import canonical_shape
from twin.models.load import tensors

NAME = "GGUF files"
CASES = 30
TEXT = "the naïve 🙂 <|im_end|> 2024"
FAMILIES = ("llama", "qwen2", "gemma3", "phi4")
_INTEGERS = (0, 1, 2, 3, 7, 255, 2**16, 2**31, 2**32 - 1)
_LONG = (0, 1, 31, 33, 2**31, 2**32, 2**62, 2**63, 2**64 - 1)
_REALS = (0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan"))
_TEXTS = ("", "none", "linear", "yarn", "llama", "gpt2", "\x1b[2J", "x" * 100_000, "ß" * 99)


def attack(chance: random.Random, folder: Path) -> str:
    """One damaged file."""
    family, path = chance.choice(FAMILIES), folder / "model.gguf"
    about = chance.choice((_written, _spoiled))(chance, family, path)
    try:
        opened = open_gguf(path)
        for name in tensors(opened.spec):
            array = opened[name]
            if array.shape != canonical_shape(opened.spec, name) or not np.isfinite(array).all():
                raise Defect(f"{about}: {name} is {array.shape}, or has elements without a value")
        chat_template(opened.file)
        _check_words(opened.file, opened.spec.vocab, about)
    except TwinError as error:
        check_refusal(error, folder, about)
        return "refused"
    return "accepted"


def _check_words(file: Any, vocabulary: int, about: str) -> None:
    words = gguf_tokenizer(file, vocabulary)
    for token in (*words.encode(TEXT), *words.stop):
        if not 0 <= token < vocabulary:
            raise Defect(f"{about}: token {token} of a vocabulary of {vocabulary}")


def _written(chance: random.Random, family: str, path: Path) -> str:
    """A file whose writer says something else of it, in any key or a shape."""
    config = CONFIGS[family]
    writer = start(path, config)
    add_words(writer, chance.choice(("smollm", "qwen2", "llama-bpe", "tekken")))
    pairs = writer.kv_data[0]
    key = chance.choice(list(pairs))
    if chance.random() < 0.2:
        del pairs[key]
    else:
        _put(chance, writer, key)
    for name, array in named(config, weights(config)).items():
        if chance.random() < 0.01:
            array = array[: chance.randrange(len(array)) + 1]
        writer.add_tensor(name, array)
    finish(writer)
    return f"{family}: {key}"


def _put(chance: random.Random, writer: Any, key: str) -> None:
    pairs = writer.kv_data[0]
    kept = pairs.pop(key)
    match chance.choice(("integer", "long", "real", "text", "flag", "list", "texts", "entry")):
        case "integer":
            writer.add_uint32(key, chance.choice(_INTEGERS))
        case "long":
            writer.add_uint64(key, chance.choice(_LONG))
        case "real":
            writer.add_float32(key, chance.choice(_REALS))
        case "text":
            writer.add_key_value(key, chance.choice(_TEXTS), gguf.GGUFValueType.STRING)
        case "flag":
            writer.add_bool(key, chance.random() < 0.5)
        case "list":
            writer.add_array(key, [chance.choice(_INTEGERS[:6])] * chance.choice((1, 3, 262, 9999)))
        case "texts":
            writer.add_array(key, [chance.choice(_TEXTS[1:])] * chance.choice((1, 3, 262)))
        case "entry":
            if isinstance(kept.value, list):
                kept.value = list(kept.value)
                text = isinstance(kept.value[0], str)
                place = chance.randrange(len(kept.value))
                kept.value[place] = chance.choice(_TEXTS if text else _INTEGERS[:6])
            pairs[key] = kept


def _spoiled(chance: random.Random, family: str, path: Path) -> str:
    """A whole file with bytes of its header changed, or cut off, or more of it."""
    changed = bytearray(_whole(family))
    header = changed.index(b"output_norm.weight") + 2000
    match chance.choice(("byte", "bytes", "length", "cut", "more", "data")):
        case "byte" | "bytes":
            for _ in range(chance.choice((1, 4))):
                changed[chance.randrange(header)] = chance.choice((0, 1, 8, 9, 127, 128, 255))
        case "length":
            at = chance.randrange(4, header)
            changed[at : at + 8] = chance.choice(_LONG).to_bytes(8, "little")
        case "cut":
            del changed[chance.randrange(len(changed)) :]
        case "more":
            changed += bytes(chance.choice((1, 100)))
        case "data":
            changed[-chance.randrange(1, 1000)] = 0xFF
    path.write_bytes(changed)
    return f"{family}: bytes"


@lru_cache
def _whole(family: str) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = start(path, CONFIGS[family])
        add_words(writer)
        for name, array in named(CONFIGS[family], weights(CONFIGS[family])).items():
            writer.add_tensor(name, array)
        finish(writer)
        return path.read_bytes()
