"""From a model that somebody names to a session that runs it: weights and words, a proven plan that
fits, the engine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twin.engine.choose import check_present, compile_all, open_engine, open_random
from twin.engine.gguf_tokenizer import gguf_tokenizer
from twin.engine.session import Session
from twin.engine.tokenizer import (
    TOKENIZER,
    Tokenizer,
    make_byte_tokenizer,
    make_word_tokenizer,
    open_tokenizer,
)
from twin.engine.weights import Checkpoint, open_checkpoint, random_weights
from twin.engine.words import CONFIG
from twin.errors import CheckpointError, ConfigError
from twin.hardware.types import Node
from twin.kernel.room import TO_RUN, check_room, free_bytes
from twin.models.files import is_there
from twin.models.gguf_file import is_gguf, read_gguf
from twin.models.load import load_model, model_names, tensors
from twin.models.spec import DType, ModelSpec
from twin.plan.options import Sampling
from twin.plan.shards import Array, Weights
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.options import plan_for
from twin.text import shown

MOST_SEED = 2**63 - 1
# tokens of a vocabulary with made-up words: more than 256 bytes and two marks, no more than a
# tokenizer's file may hold
FEWEST_WORDED, MOST_WORDED = 258, 2**19
USUAL_CONTEXT = 8192  # positions, where the model has as many and nobody says otherwise
Show = Callable[[str], None]


# ---- weights and words ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """Where weights and words come from."""

    spec: ModelSpec
    weights: Weights
    tokenizer: Tokenizer | None
    seed: int | None = None  # of random weights
    note: str = ""  # what a user should know of the weights, in a line

    @property
    def chat_template(self) -> str | None:
        """Of conversations: a program of whoever made the checkpoint."""
        return self.tokenizer.template if self.tokenizer else None

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt. Raises ConfigError where there are none, and for one that the
        model does not know.
        """
        if self.tokenizer is None:
            raise ConfigError(f"{self.spec.name} has no tokenizer: give token ids instead of text")
        tokens = self.tokenizer.encode(text)
        if not tokens:
            raise ConfigError("the prompt is empty: give at least one character")
        worst = max(tokens)
        if worst >= self.spec.vocab:
            raise ConfigError(
                f"the tokenizer gives token {worst}, but {self.spec.name} knows "
                f"{self.spec.vocab}: use --prompt-tokens"
            )
        return tokens


def open_source(
    model: str,
    seed: int | None = None,
    dtype: DType | None = None,
    *,
    text: bool = True,
    words: Path | None = None,
    blocks: bool = True,
) -> Source:
    """A checkpoint, or with a seed random weights of a model's shape. Raises ConfigError,
    CheckpointError.

    `dtype`: of random weights and of a GGUF file's. `text`: prompts will be text, so a checkpoint
    must have a tokenizer, and a shape without one gets made-up words. `words`: the folder of
    another tokenizer than the model's own. `blocks`: a GGUF file's weights may stay as they are
    stored, as CPUs multiply them.
    """
    folder = words or Path(model)
    if seed is None:
        checkpoint = named_checkpoint(model, dtype, blocks=blocks)
        tokenizer = _tokenizer(folder, checkpoint.spec, text)
        return Source(checkpoint.spec, checkpoint.weights, tokenizer, None, checkpoint.note)
    if not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"--random {shown(seed)}: a seed is at least 0 and at most {MOST_SEED}")
    spec = load_model(model, runs=True)
    tokenizer = _tokenizer(folder, spec, text=False)
    if tokenizer is None and text:
        tokenizer = _made_up_tokenizer(spec.vocab)
    return Source(spec, random_weights(spec, seed, dtype), tokenizer, seed)


def named_checkpoint(model: str, dtype: DType | None = None, *, blocks: bool = True) -> Checkpoint:
    """The checkpoint at a path; `dtype`: of a GGUF file's weights.

    Raises ConfigError for the name of a shape, CheckpointError for what is no checkpoint.
    """
    folder = Path(model)
    if model in model_names() and not folder.exists():
        raise ConfigError(
            f"{shown(model)} names a shape without weights: give a checkpoint's folder, or "
            "--random SEED to run its shape"
        )
    return open_checkpoint(folder, dtype, blocks=blocks)


def _tokenizer(place: Path, spec: ModelSpec, text: bool) -> Tokenizer | None:
    """The tokenizer of a folder, also by its config.json, or of a GGUF file; None where it has
    none, unless `text` needs one.
    """
    if place.name == CONFIG and is_there(place, Path.is_file):
        place = place.parent
    if is_gguf(place):
        try:
            return gguf_tokenizer(read_gguf(place), spec.vocab)
        except CheckpointError:
            if text:
                raise
            return None
    return open_tokenizer(place) if text or (place / TOKENIZER).is_file() else None


def _made_up_tokenizer(vocabulary: int) -> Tokenizer:
    """Words of no language; bytes alone where the vocabulary is too small to hold a word next to
    them, or too large for a tokenizer's file.
    """
    with tempfile.TemporaryDirectory() as folder:
        if FEWEST_WORDED < vocabulary <= MOST_WORDED:
            make_word_tokenizer(Path(folder), vocabulary)
        else:
            make_byte_tokenizer(Path(folder))
        return open_tokenizer(folder)


# ---- a plan --------------------------------------------------------------------------------------


def check_runs_here(node: Node) -> None:
    """Raises EngineError unless the engine can use the node here and now."""
    check_present(node.device, node.gpus)


def plan_run(
    spec: ModelSpec, node: Node, chosen: Mapping[str, Any], *, positions: int, greedy: bool
) -> Plan:
    """A proven plan that holds `positions` and fits the node's memory, on a CPU what is free of it.

    `chosen`: values of Options fields. Raises ConfigError, PlanError or InvalidPlan.
    """
    limit = chosen.get("max_context", spec.context)
    if positions - 1 > limit:
        what = "max_context" if "max_context" in chosen else f"{spec.name}'s context"
        raise ConfigError(
            f"prompt and --max-tokens need {positions - 1} positions, {what} is {limit}: shorten "
            "one of them"
        )
    options = {
        "max_context": min(limit, positions),
        **chosen,
        "sampling": Sampling.GREEDY if greedy else Sampling.FULL,
    }
    options["context"] = min(positions, options["max_context"])
    plan = plan_for(spec, node, **options)
    # before the proof, whose budget knows one GPU and no other programs
    check_fits(plan, node, options)
    prove(plan)
    return plan


def check_fits(plan: Plan, node: Node, chosen: Mapping[str, Any]) -> None:
    """Raises PlanError for a plan that the node's memory, or what is free of this computer's, does
    not hold.
    """
    check_room(
        plan,
        node,
        chosen,
        free_bytes=None if node.device.sharing is None else free_bytes(),
        advice=TO_RUN,
    )


# ---- a session -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Watched:
    """Weights that say how far they are: billions of random ones, or a large file on a slow disk,
    take minutes.
    """

    weights: Weights
    show: Show
    quiet_s: float = 2.0  # between two messages; what takes less than this says nothing
    _seen: set[str] = field(default_factory=set)
    _last_s: float = field(default_factory=time.monotonic)

    @property
    def spec(self) -> ModelSpec:
        return self.weights.spec

    @property
    def dtype(self) -> DType:
        return self.weights.dtype

    def __getitem__(self, name: str) -> Array:
        self._seen.add(name)
        if time.monotonic() - self._last_s >= self.quiet_s:
            self.show(f"weights: {len(self._seen)} of {len(tensors(self.spec))} tensors")
            self._last_s = time.monotonic()
        return self.weights[name]


def open_session(node: Node, plan: Plan, source: Source, show: Show) -> Session:
    """An engine of the node with the source's weights. `show` hears how far compiling and loading
    are.
    """
    if node.device.nvidia or node.device.amd:
        compile_all(node.device, [plan], show)
        if source.seed is not None:
            return open_random(node.device, plan, source.seed)
    return open_engine(node.device, plan, Watched(source.weights, show))


def plan_served(source: Source, node: Node, chosen: Mapping[str, Any], *, greedy: bool) -> Plan:
    """As plan_run, of as many positions as most requests need. Raises ConfigError, PlanError or
    InvalidPlan.
    """
    context = chosen.get("max_context", min(source.spec.context, USUAL_CONTEXT))
    options = {**chosen, "max_context": context}
    return plan_run(source.spec, node, options, positions=context, greedy=greedy)
