"""How a model is divided over an NVIDIA GPU: the standard division, or one that the twin predicts
to be faster.

A few other numbers of attention splits are simulated with two layers and a small vocabulary, once
for each shape, and the answer is kept on disk. A division must win by more than the twin has been
wrong about such a change. Slots of other sizes are not among them: of twelve that it predicted to
be faster, or at most 2 % slower, eleven took 2 to 19 % longer (studies/h200-history/tried.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from twin.data import data_dir
from twin.errors import TwinError
from twin.files import MOST_RECORD_BYTES, read_json
from twin.frozen import frozen
from twin.hardware.override import numbers
from twin.hardware.types import Node
from twin.models.spec import ModelSpec
from twin.plan.options import Execution, HandOffKind, Options
from twin.plan.ranges import pages_of
from twin.plan.settle import on_kernel
from twin.plan.types import Plan
from twin.schedule.choose import chooser_of, schedule_of
from twin.schedule.options import plan_for
from twin.schedule.ring import limits_of
from twin.sim.executor import Executor
from twin.sim.run import simulate
from twin.toolchain import cache_dir

# of the model that is simulated: the second one's weights arrive while the first one works
LAYERS = 2
ROWS = 8  # of its LM head, of each block
# By how much a division must be predicted faster. Four, three and six splits were predicted alike
# and measured within 2.4 % of each other (studies/h200-history).
MARGIN = 0.015
STANDARD = "the standard division"


@frozen
class Division:
    """Options that make it, and why it may be better."""

    name: str
    options: tuple[tuple[str, int], ...] = ()


@frozen
class Choice:
    """What was chosen, and why."""

    options: tuple[tuple[str, int], ...]
    reason: str


def choice(spec: ModelSpec, node: Node, chosen: Mapping[str, Any]) -> Choice:
    """The division, and the reason in words. What cannot be planned keeps the standard one: who
    plans it then says why.
    """
    why = _unsearched(spec, node, chosen)
    if why:
        return Choice((), f"{STANDARD}: {why}")
    vocab = min(spec.vocab, ROWS * limits_of(node).blocks)
    small = dataclasses.replace(
        spec, layers=min(LAYERS, spec.layers), vocab=vocab, windows=spec.windows[:LAYERS]
    )
    return _searched(small, node, tuple(sorted(chosen.items())))


def _unsearched(spec: ModelSpec, node: Node, chosen: Mapping[str, Any]) -> str:
    limits = limits_of(node)
    if not limits.teams:
        return "others are searched for NVIDIA's GPUs only"
    if node.gpus > 1 or chosen.get("gpus", 1) != 1 or spec.lanes:
        return "others are searched for one GPU without lanes only"
    resident = chosen.get("execution", Execution.RESIDENT) is Execution.RESIDENT
    if not resident or chosen.get("handoff", HandOffKind.SENTINEL) is not HandOffKind.SENTINEL:
        return "others are searched for resident kernels with sentinels only"
    try:
        options = dataclasses.replace(Options(), **chosen)
        if (
            not on_kernel(spec, options, limits)
            or spec.layout
            or spec.coded
            or "blocks" in chosen
            or "delay" in chosen
        ):
            return "others are searched for dense models on all blocks only"
    except TwinError as error:
        return str(error)
    return "splits were chosen" if "attention_splits" in chosen else ""


@lru_cache(maxsize=1024)
def _searched(small: ModelSpec, node: Node, chosen: tuple[tuple[str, Any], ...]) -> Choice:
    path = cache_dir() / f"division-{_key(small, node, chosen)}.json"
    try:
        kept = read_json(path, MOST_RECORD_BYTES)
        return Choice(
            tuple((str(name), int(value)) for name, value in kept["options"]), str(kept["reason"])
        )
    except (TwinError, ValueError, KeyError, TypeError):
        found = _search(small, node, dict(chosen))
    if found is None:  # nothing that another day would say otherwise is kept
        return Choice((), f"{STANDARD}: without a compiler others are not searched")
    _keep(path, found)
    return found


def _keep(path: Path, found: Choice) -> None:
    """Whole or not at all. A disk that takes nothing costs time only."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(
            json.dumps({"options": found.options, "reason": found.reason}), encoding="utf-8"
        )
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)


def _search(small: ModelSpec, node: Node, chosen: dict[str, Any]) -> Choice | None:
    """None where the compiled simulator cannot run."""
    try:
        standard = plan_for(small, node, **chosen)
        base = simulate(standard, node)
    except TwinError as error:
        return Choice((), f"{STANDARD}: {error}")
    if base.executor != Executor.COMPILED.value:
        return None
    best, least, tried = Division(STANDARD), base.step_s, 0
    for other in _others(standard):
        took = _took(small, node, {**chosen, **dict(other.options)})
        tried += took is not None
        # Whoever wins by less than the twin errs is not better, but of those that do the fastest is
        # taken.
        if took is not None and took < min(least, base.step_s * (1 - MARGIN)):
            best, least = other, took
    if not best.options:
        return Choice(
            (), f"{STANDARD}: none of {tried} others is predicted faster by more than the twin errs"
        )
    gain = 1 - least / base.step_s
    return Choice(
        best.options,
        f"{best.name}: {100 * gain:.1f} % less time for a layer than {STANDARD}, the best of "
        f"{tried} others",
    )


def _took(small: ModelSpec, node: Node, chosen: Mapping[str, Any]) -> float | None:
    try:
        return simulate(plan_for(small, node, **chosen), node).step_s
    except TwinError:
        return None


def _others(standard: Plan) -> Iterator[Division]:
    own = standard.kernel_attention()
    first = standard.options.split_positions
    if first is None:
        chooser = chooser_of(standard.limits)
        first = chooser.first_positions(standard.options, group=own.group, head_dim=own.head_dim)
    for splits in _splits(standard):
        yield Division(
            f"{splits} attention splits instead of {own.splits}",
            (("attention_splits", splits), ("split_positions", first)),
        )


def _splits(standard: Plan) -> tuple[int, ...]:
    """Other numbers of splits."""
    own = standard.kernel_attention()
    most = min(standard.blocks // own.kv_heads, pages_of(standard.options))
    tried = (
        (own.splits // 2, 2 * own.splits)
        if schedule_of(standard).scan.tensor
        else (own.splits // 2, 3 * own.splits // 2, 2 * own.splits, 3 * own.splits)
    )
    return tuple(splits for splits in tried if 1 <= splits <= most)


def _key(small: ModelSpec, node: Node, chosen: tuple[tuple[str, Any], ...]) -> str:
    shape = dataclasses.replace(small, name="")
    device = [(path, number.value) for path, number in numbers(node).items()]
    return hashlib.sha256(repr((shape, device, chosen, _sources())).encode()).hexdigest()[:24]


@lru_cache(maxsize=1)
def _sources() -> str:
    """Of what decides an answer."""
    package, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    files = [
        path
        for name in ("models", "plan", "schedule", "kernel", "cost", "sim", "hardware")
        for path in sorted((package / name).rglob("*.py"))
    ]
    for path in (*files, *sorted((data_dir("native") / "simulator").iterdir())):
        digest.update(path.read_bytes())
    return digest.hexdigest()
