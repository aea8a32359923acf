"""What studies/server asks, and the plans that answer it: those of `twin serve` and `twin run`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from twin.engine.opening import Source, plan_run, plan_served
from twin.hardware.types import HOST, Node
from twin.plan.types import Plan

SEED = 1  # of the random weights
MODELS = ("llama-3.2-1b", "llama-3.1-8b")
SERVED, RUN, SAMPLER = "served", "run", "sampler"
RATE_GOAL, SHARE_GOAL, SHARE_RATE = 0.98, 0.2, 2000  # of `twin run`; of a core at so many tokens/s


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens, and how often each thing is measured."""

    prompt: int  # of the streamed answer
    tokens: int  # of that answer
    first: tuple[int, ...]  # prompts whose first token is awaited
    opening: int  # the user's first turn of a chat
    answer: int
    follow: int  # words of the second turn
    warm_up: int = 32  # of a stream that is not timed
    streams: int = 3  # at least, and for as long as
    streams_s: float = 2.5
    firsts: int = 5
    chats: int = 3
    drawn: int = 2  # streams of a server that draws, at each temperature


SIZES = Sizes(32, 400, (32, 1024, 8192), 2048, 128, 32)
SMALL = Sizes(24, 32, (24, 96), 64, 12, 8, 8, streams=2, streams_s=0.05, firsts=2, chats=2, drawn=1)
TINY = {  # for a CPU
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 96,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}


Made = TypeVar("Made")


def repeated(make: Callable[[], Made], sizes: Sizes) -> list[Made]:
    """Enough of them for a median."""
    began, made = time.perf_counter(), list[Made]()
    while len(made) < sizes.streams or time.perf_counter() - began < sizes.streams_s:
        made.append(make())
    return made


def small(node: Node) -> bool:
    """A CPU tries the script's way, not its question."""
    return node.device.isa == HOST


def sizes_of(node: Node) -> Sizes:
    return SMALL if small(node) else SIZES


def models_of(node: Node, folder: Path) -> dict[str, str]:
    """What is passed to `twin serve`, by the models' names."""
    if not small(node):
        return {name: name for name in MODELS}
    (folder / "tiny").mkdir(parents=True, exist_ok=True)
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return {"tiny": str(folder / "tiny")}


def plans_of(source: Source, node: Node) -> dict[str, Plan]:
    """`twin serve --greedy`, `twin run` with the stream's prompt, and `twin serve` by default."""
    sizes = sizes_of(node)
    positions = sizes.prompt + sizes.tokens
    return {
        SERVED: plan_served(source, node, {}, greedy=True),
        RUN: plan_run(source.spec, node, {}, positions=positions, greedy=True),
        SAMPLER: plan_served(source, node, {}, greedy=False),
    }
