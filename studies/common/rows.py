"""Rows of a study on this computer's GPU: a small model of each is compared with the reference,
then the whole one is timed. Random weights of the true shapes. Needs no simulator.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from twin import files
from twin.bench.choices import Agreement
from twin.bench.measure import check_logits, reference_logits
from twin.engine.choose import compile_all, open_engine, open_random
from twin.engine.generation import Generation
from twin.engine.session import Session
from twin.engine.weights import KEPT_TENSORS, random_weights
from twin.hardware.types import Device
from twin.models.feeds import ExpertFeed, Feed
from twin.models.spec import ModelSpec
from twin.plan.shards import Weights
from twin.plan.types import Plan

Item = TypeVar("Item")
Made = TypeVar("Made")
CHECK = "check"  # what a row's small plan is for; its other plans are timed
REPEATS, SEED = 3, 1
EQUAL_RUNS, EQUAL_TOKENS = 5, 16  # compared bit by bit
FEW_LAYERS, FEW_WORDS, FEW_EXPERTS = 2, 8192, 8  # of a small model
KEPT = 10**6  # tensors of a small model: all of them


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the host makes of a small plan: its weights, the first tokens, the reference's logits
    of them.
    """

    plan: Plan
    weights: Weights
    tokens: list[int]
    logits: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Ready:
    """A row whose turn it is."""

    name: str
    plans: Mapping[str, Plan]  # by what they are for
    refused: Mapping[str, str]  # those that do not compile, with the reason
    small: Future[Prepared]


def first_tokens(vocab: int, count: int) -> list[int]:
    """A prompt without repetition, as far as the vocabulary goes."""
    return [(7 + 13 * at) % vocab for at in range(count)]


def cut(spec: ModelSpec, layers: int = FEW_LAYERS) -> ModelSpec:
    """A small model with the same kinds of layers, at least `layers` where it has them, whose
    logits a NumPy reference computes soon.
    """
    kinds = [(type(layer.mixer), type(layer.feed)) for layer in spec.layout]
    layers = min(max([layers, *(kinds.index(kind) + 1 for kind in set(kinds))]), spec.layers)
    layout = tuple(replace(layer, feed=_fewer(layer.feed)) for layer in spec.layout[:layers])
    return replace(
        spec,
        layers=layers,
        windows=spec.windows[:layers],
        layout=layout,
        vocab=min(FEW_WORDS, spec.vocab),
    )


def _fewer(feed: Feed) -> Feed:
    if not isinstance(feed, ExpertFeed):
        return feed
    return replace(feed, experts=min(feed.experts, max(FEW_EXPERTS, feed.top_k)))


def prepared(plan: Plan, tokens: Sequence[int], *, keep: int = KEPT_TENSORS) -> Prepared:
    """`keep`: tensors that stay in memory."""
    assert plan.spec is not None
    weights = random_weights(plan.spec, SEED, plan.options.weight_dtype, keep=keep)
    return Prepared(plan, weights, list(tokens), reference_logits(plan, weights, tokens))


def rows_in_turn(
    device: Device,
    rows: Mapping[str, Mapping[str, Plan]],
    *,
    checked: int,
    ahead: int,
    show: Callable[[str], None],
) -> Iterator[Ready]:
    """Rows in their order, all kernels compiled first. The host prepares the small plans of the
    next `ahead` rows meanwhile, for a check of `checked` tokens.
    """
    each = [(name, what, plan) for name, plans in rows.items() for what, plan in plans.items()]
    refused = compile_all(device, [plan for *_, plan in each], show)
    small = _made_ahead(
        partial(_prepared, checked), [plans[CHECK] for plans in rows.values()], ahead
    )
    for (name, plans), (_, ready) in zip(rows.items(), small, strict=True):
        failed = {each[at][1]: why for at, why in refused.items() if each[at][0] == name}
        yield Ready(name, plans, failed, ready)


def _made_ahead(
    make: Callable[[Item], Made], items: Iterable[Item], ahead: int
) -> Iterator[tuple[Item, Future[Made]]]:
    """Each item with what is made of it, in order; threads make those of the next `ahead` items
    meanwhile, and no more: memory holds so many. A failure is raised where the result is requested.
    """
    with ThreadPoolExecutor(ahead) as pool:
        waiting: deque[tuple[Item, Future[Made]]] = deque()
        for item in items:
            waiting.append((item, pool.submit(make, item)))
            if len(waiting) > ahead:
                yield waiting.popleft()
        yield from waiting


def _prepared(checked: int, plan: Plan) -> Prepared:
    assert plan.spec is not None
    return prepared(plan, first_tokens(plan.spec.vocab, checked), keep=KEPT)


def logit_difference(device: Device, small: Prepared) -> float:
    """The largest from the reference, relative. Raises EngineError beyond the tolerance."""
    with open_engine(device, small.plan, small.weights) as engine:
        return _agreement(engine, small).difference


def checked(device: Device, small: Prepared) -> dict[str, Any]:
    """The largest difference from the reference, relative; whether EQUAL_RUNS runs are equal bit by
    bit; the choices of experts that rounding decided, if any.
    """
    with open_engine(device, small.plan, small.weights) as engine:
        found = _agreement(engine, small)
        row = {"logit_difference": found.difference, "bitwise_equal": _equal(engine, small.tokens)}
    if found.followed:
        row |= {"unfollowed": found.unfollowed, "choices": [asdict(one) for one in found.followed]}
    return row


def _agreement(engine: Session, small: Prepared) -> Agreement:
    return check_logits(engine, small.plan, small.weights, small.tokens, small.logits)


def _equal(engine: Session, prompt: Sequence[int]) -> bool:
    """Of tokens and logits."""
    seen = set()
    for _ in range(EQUAL_RUNS):
        made = engine.generate(prompt, max_tokens=EQUAL_TOKENS).tokens
        logits = engine.logits(prompt)
        seen.add((tuple(made), hashlib.sha256(logits.tobytes()).hexdigest()))
    return len(seen) == 1


def repeated(
    device: Device, plan: Plan, prompt: Sequence[int], tokens: int, *, reuse: bool = False
) -> list[Generation]:
    """A first run, which is not timed, and REPEATS more. With `reuse` the prompt is read once:
    repeats find its keys and values.
    """
    with open_random(device, plan, SEED) as engine:
        first = engine.generate(prompt, max_tokens=tokens)
        return [
            first,
            *(engine.generate(prompt, max_tokens=tokens, reuse=reuse) for _ in range(REPEATS)),
        ]


def alike(runs: Sequence[Generation]) -> bool:
    """Did all runs give the same tokens?"""
    return all(run.tokens == runs[0].tokens for run in runs)


def step_ns(run: Generation, warm_up: int) -> float:
    """The median step, without the first ones."""
    return float(statistics.median(run.step_ns[warm_up:]))


def keep(file: Path, made: Mapping[str, Any]) -> None:
    """Written after each row: a run that is cut off leaves the file of the row before."""
    files.write({file: json.dumps(made, indent=1) + "\n"})
