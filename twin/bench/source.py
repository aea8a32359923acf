"""What is benchmarked: weights held in memory once for the engine and its peers, and the
prompts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twin.engine.opening import named_checkpoint
from twin.engine.safetensors import NUMPY
from twin.engine.tokenizer import TOKENIZER, open_tokenizer
from twin.engine.weights import random_weights
from twin.errors import ConfigError
from twin.models.load import load_model, tensors
from twin.models.spec import DType, ModelSpec
from twin.plan.shards import Array, Weights

PROMPT_SEED = 20261121
TEXTS = (
    "The watchman of the lighthouse wrote down the weather every evening, and on the last page of "
    "the book he noticed",
    "To find the shortest path between two nodes of a weighted graph, Dijkstra's algorithm keeps "
    "a queue of",
    "Dear colleagues, thank you for the detailed review of our proposal. We have changed three "
    "things:",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n",
    "In the spring of 1848, crowds filled the streets of Vienna, Berlin and Paris because",
    "Q: A train leaves at 9:40 and arrives at 13:05. How long does the journey take?\n"
    "A: Let us think step by step.",
    "Photosynthesis turns light into chemical energy. In its first stage, the chlorophyll of the "
    "leaf",
    "She opened the letter twice before she believed it. The first line said only:",
)


@dataclass(slots=True)
class Held:
    """Tensors by canonical name, all in memory and in the plan's type."""

    spec: ModelSpec
    dtype: DType
    table: dict[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.table[name]


@dataclass(frozen=True, slots=True)
class Source:
    """A model's weights; `about` says where they come from, `folder` holds its config.json, if
    there is one, and `stored` says that it holds these weights, too.
    """

    spec: ModelSpec
    weights: Weights
    about: str
    folder: Path | None
    stored: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """What a user named, checked and not yet loaded."""

    spec: ModelSpec
    about: str
    folder: Path | None
    load_as: Callable[[DType], Held]
    stored: bool = False

    def load(self, dtype: DType) -> Source:
        return Source(self.spec, self.load_as(dtype), self.about, self.folder, self.stored)


def find_source(model: str, seed: int | None) -> Found:
    """A checkpoint, or with a seed random weights of a model's shape. Raises CheckpointError or
    ConfigError.
    """
    folder = Path(model)
    if seed is None:
        checkpoint = named_checkpoint(model, blocks=False)
        about, own = (
            checkpoint.note or f"checkpoint {folder.resolve().name}",
            folder if folder.is_dir() else None,
        )
        return Found(
            checkpoint.spec,
            about,
            own,
            lambda dtype: hold(checkpoint.weights, dtype),
            stored=own is not None,
        )
    if seed < 0:
        raise ConfigError(f"--random {seed}: a seed is at least 0")
    spec = load_model(model, runs=True)
    own = folder if folder.is_dir() else None
    return Found(spec, f"random, seed {seed}", own, lambda dtype: hold_random(spec, seed, dtype))


def hold(weights: Weights, dtype: DType) -> Held:
    """All tensors as the engine streams them; a tensor of the right type stays the mapped
    file's.
    """
    table = {name: weights[name].astype(NUMPY[dtype], copy=False) for name in tensors(weights.spec)}
    return Held(weights.spec, dtype, table)


def hold_random(spec: ModelSpec, seed: int, dtype: DType) -> Held:
    """The tensors of `random_weights`, made by all cores: each depends on the seed and its name
    alone.
    """
    names = list(tensors(spec))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = list(pool.map(lambda name: random_weights(spec, seed, dtype)[name], names))
    return Held(spec, dtype, dict(zip(names, made, strict=True)))


def make_prompts(source: Source, count: int, length: int) -> list[list[int]]:
    """`count` different prompts of `length` tokens: English texts, repeated to that length, where
    there is a tokenizer; else random.
    """
    if source.folder is not None and (source.folder / TOKENIZER).is_file():
        return _text_prompts(source.folder, count, length)
    return [
        # the same whatever the count
        np.random.default_rng((PROMPT_SEED, number)).integers(0, source.spec.vocab, length).tolist()
        for number in range(count)
    ]


def _text_prompts(folder: Path, count: int, length: int) -> list[list[int]]:
    """Prompt i begins with text i and goes on with the others; when the texts are used up, a word
    later.
    """
    encode = open_tokenizer(folder).encode
    prompts = []
    for number in range(count):
        again, first = divmod(number, len(TEXTS))
        words = " ".join(TEXTS[first:] + TEXTS[:first]).split(" ")
        text = " ".join(words[again:] + words[:again])
        copies = 2 + length // max(1, len(encode(text)))
        prompts.append(encode(" ".join([text] * copies))[:length])
    return prompts
