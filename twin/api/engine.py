"""Run the engine: text whole, or piece by piece as it is made."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from twin.api import given
from twin.api.predict import Prediction, Where, chosen_options, load_node, simulate
from twin.engine import choose
from twin.engine.generate import Completion, OnPiece, Piece, Request, Stop, complete
from twin.engine.hub import local
from twin.engine.opening import MOST_SEED, Source, check_runs_here, open_source, plan_served
from twin.engine.sampling import SamplingParams
from twin.engine.session import Session
from twin.errors import ConfigError
from twin.hardware.types import Node
from twin.plan.options import Sampling
from twin.plan.types import Plan
from twin.schedule.options import multiplies_blocks
from twin.text import shown

REASONS = {Stop.LENGTH: "length", Stop.TOKEN: "stop", Stop.TEXT: "stop", Stop.CANCELLED: "abort"}


@dataclass(frozen=True, slots=True)
class Generated:
    """A text that the engine made. Its times are measured, by the kernel's own clock."""

    text: str  # up to the stop text, which is left out
    tokens: tuple[int, ...]  # a stop token included
    finish_reason: str  # "length", "stop" or "abort"
    prompt_tokens: int
    prompt_s: float  # to read the prompt, the step of its last token included
    step_s: NDArray[np.float64]  # [tokens] of each token's step

    @property
    def tokens_per_s(self) -> float:
        """Of the steps after the first token; 0 where there are none."""
        total = float(self.step_s[1:].sum())
        return (len(self.step_s) - 1) / total if total else 0.0


class How(TypedDict, total=False):
    """How a text may be requested; `Engine.stream` says what each means."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: str | int | Sequence[str | int]
    ignore_eos: bool


class Engine:
    """A model in memory, ready to generate: `open_engine` makes one. A context manager.

    One text is made at a time: a second one, from another thread, raises EngineError.
    """

    def __init__(self, session: Session, source: Source, node: Node) -> None:
        self._session, self._source = session, source
        self.node = node

    @property
    def plan(self) -> Plan:
        """What the kernel runs."""
        return self._session.plan

    def generate(self, prompt: str | Sequence[int], **how: Unpack[How]) -> Generated:
        """A whole text. Arguments and refusals as of `stream`; Ctrl-C returns what there is."""
        tokens = self._tokens(prompt)
        return generated(tokens, self._complete(self._request(tokens, **how)))

    def stream(self, prompt: str | Sequence[int], **how: Unpack[How]) -> Stream:
        """The text piece by piece, while the kernel goes on.

        `prompt`: text, or token ids. Further arguments, by name:

        - `max_tokens` (64): the most that are made; prompt and these fit the context;
        - `temperature` (0: the most probable token), `top_k` (0: all), `top_p` (1), `min_p` (0),
          `seed` (0);
        - `stop`: texts or token ids that end it; `ignore_eos`: go on after the model's end token.

        Raises ConfigError for a prompt or an argument that cannot be. What fails later, and Ctrl-C,
        comes out of the iterator.
        """
        tokens = self._tokens(prompt)
        return Stream(self, tokens, self._request(tokens, **how))

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the tokenizer puts before it. Raises ConfigError."""
        return self._source.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids. Raises ConfigError where the model has no tokenizer."""
        if self._source.tokenizer is None:
            raise ConfigError(f"{self._source.spec.name} has no tokenizer: give token ids instead")
        return self._source.tokenizer.decode(list(tokens))

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """[tokens, vocabulary] after each of the given tokens. Raises EngineError."""
        return self._session.logits(_listed(tokens))

    def predict(self, context: int = 1) -> Prediction:
        """What the twin says of this very plan, with `context` positions in the KV cache."""
        options = self.plan.options
        chosen = {one.name: getattr(options, one.name) for one in fields(options)}
        del chosen["gpus"]
        assert self.plan.spec is not None
        return simulate(self.plan.spec, self.node, **{**chosen, "context": context})

    def cancel(self) -> None:
        """Ends the present text at once, from any thread: its finish reason is "abort"."""
        self._session.cancel()

    def close(self) -> None:
        """Frees the memory. Raises EngineError while a text is made."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one text ------------------------------------------------------------------------------

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        tokens = self._source.encode(prompt) if isinstance(prompt, str) else _listed(prompt)
        if not tokens:
            raise ConfigError("the prompt is empty: give a text, or at least one token id")
        return tokens

    def _request(
        self,
        tokens: list[int],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | int | Sequence[str | int] = (),
        ignore_eos: bool = False,
    ) -> Request:
        stops = [stop] if isinstance(stop, str | int) else list(stop)
        texts = tuple(one for one in stops if isinstance(one, str))
        if "" in texts:
            raise ConfigError("stop='': an empty text would end every generation at once; leave it")
        if texts and self._source.tokenizer is None:
            raise ConfigError(f"stop={shown(texts[0])}: a text needs a tokenizer; give a token id")
        ids = {one for one in stops if isinstance(one, int)}
        if self._source.tokenizer is not None and not ignore_eos:
            ids |= self._source.tokenizer.stop
        sampling = SamplingParams(temperature, top_k, top_p, seed, min_p)
        if not sampling.greedy and self.plan.options.sampling is Sampling.GREEDY:
            raise ConfigError(
                f"temperature={temperature}: this engine was opened with greedy=True; open one "
                "without, or use 0"
            )
        room = self.plan.options.max_context + 1  # the last token is never read
        max_tokens = given.whole("max_tokens", max_tokens, 1, given.MOST)
        if max_tokens > room - len(tokens):
            raise ConfigError(
                f"max_tokens={shown(max_tokens)} after a prompt of {len(tokens)} tokens: at least "
                f"1, together at most {room}; shorten one of them, or open the engine with a "
                "larger max_context"
            )
        return Request(tokens, max_tokens, sampling, frozenset(ids), texts)

    def _complete(self, request: Request, on_piece: OnPiece | None = None) -> Completion:
        return complete(self._session, self._source.tokenizer, request, on_piece)


class Stream(Iterator[str]):
    """Pieces of a text; joined, they are `result.text`.

    Whoever stops reading early calls `close`, or uses it as a context manager: else the kernel goes
    on until its last token.
    """

    def __init__(self, engine: Engine, tokens: list[int], request: Request) -> None:
        self.result: Generated | None = None  # once all pieces have been read
        self._engine, self._tokens, self._request = engine, tokens, request
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: no more
        self._failed: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="twin stream", daemon=True)
        self._thread.start()

    def __next__(self) -> str:
        piece = None if self._closed else self._next()
        if piece is not None:
            return piece
        self._closed = True
        self._thread.join()
        if self._failed is not None:
            raise self._failed
        raise StopIteration

    def close(self) -> None:
        """Ends the text, if it has not ended; returns when the engine is free."""
        self._closed = True
        while self._thread.is_alive():
            self._engine.cancel()  # again: the first may come before the kernel's start
            self._thread.join(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> str | None:
        try:
            return self._pieces.get()
        except BaseException:  # Ctrl-C, which only the main thread hears
            self.close()
            raise

    def _run(self) -> None:
        try:
            made = self._engine._complete(self._request, self._take)
            self.result = generated(self._tokens, made)
        except BaseException as error:
            self._failed = error
        finally:
            self._pieces.put(None)

    def _take(self, piece: Piece) -> None:
        if piece.text:
            self._pieces.put(piece.text)


def _listed(tokens: Any) -> list[int]:
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence | np.ndarray):
        raise ConfigError(f"{shown(tokens)}: must be a text, or a list of token ids")
    return list(tokens)


def generated(prompt: Sequence[int], ended: Completion) -> Generated:
    made = ended.made
    return Generated(
        text=ended.text,
        tokens=tuple(made.tokens),
        finish_reason=REASONS[ended.stop],
        prompt_tokens=len(prompt),
        prompt_s=made.prompt_ns / 1e9,
        step_s=made.step_ns / 1e9,
    )


def open_engine(
    model: str | Path,
    node: Where = "1xhost",
    *,
    random: int | None = None,
    greedy: bool = False,
    **options: Any,
) -> Engine:
    """A checkpoint (a Hugging Face folder or a GGUF file) in memory, its kernel compiled.

    `node`: "1xhost", this computer's CPU, or "1xh200" and the like for its NVIDIA GPU. `random`: a
    seed, for random weights of a model's shape: text without sense, true speed. `greedy`: a little
    faster, temperature 0 alone. `options` as in `make_plan`; `max_context`: positions of prompt and
    text together (8,192 where the model has as many).

    Raises ConfigError, CheckpointError, PlanError, ToolchainError without a compiler, and
    EngineError where the node is not in this computer.
    """
    where = node if isinstance(node, Node) else load_node(node)
    check_runs_here(where)
    chosen = chosen_options(options)
    if random is not None:
        random = given.whole("random", random, 0, MOST_SEED)
    name = local(given.text("model", model), weights=random is None)
    dtype, blocks = chosen.get("weight_dtype"), multiplies_blocks(where.device)
    source = open_source(name, random, dtype, text=random is None, blocks=blocks)
    plan = plan_served(source, where, chosen, greedy=greedy)
    return Engine(_session(where, plan, source), source, where)


def _session(node: Node, plan: Plan, source: Source) -> Session:
    """Compiled in this process: workers would run a user's script again, whose lines are not below
    `if __name__ == "__main__"`.
    """
    if source.seed is not None:
        return choose.open_random(node.device, plan, source.seed)
    return choose.open_engine(node.device, plan, source.weights)
