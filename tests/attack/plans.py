"""Edited plans on the CPU engine: what the proof accepts computes the reference's tokens, however
long a block may stop.

A plan of the builder's gets one to three mistakes, of those that a builder could make
(tests/proof/mutations.py) and of any field set to anything. `prove` may raise nothing but its own
error, what it accepts runs twice, once with blocks that nap at random, and both runs give the
reference's logits and greedy tokens.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.attack.bases import TOKENS, computed, some_plan, some_probe, tolerance, weights_of
from tests.attack.defect import Defect
from tests.proof.mutations import MUTATIONS
from twin.engine import host
from twin.errors import InvalidPlan, TwinError
from twin.models.spec import ModelSpec
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.toolchain import build_host

NAME = "plans"
CASES = 8  # most compile a kernel of their own
WATCHDOG_S = 60.0  # of a plan that hangs; a busy machine runs the others in a second
NAPS = ("-DTWIN_NAPS",)


def attack(chance: random.Random, folder: Path) -> str:
    """One edited plan."""
    base = some_plan(chance) if chance.random() < 0.85 else some_probe(chance)
    edits, plan = edited(base, chance)
    if plan == base:
        return "unchanged"
    if not accepted(plan, edits):
        return "refused"
    if plan.simulation_only():
        return "accepted for the twin"
    for naps in (False, True):
        run(plan, naps=naps, what=f"{edits} of {describe(base)}")
    return "accepted and right"


def accepted(plan: Plan, what: str) -> bool:
    try:
        prove(plan)
    except InvalidPlan:
        return False
    except Exception as error:
        raise Defect(f"the proof raises {type(error).__name__}: {error}; {what}") from error
    return True


def describe(plan: Plan) -> str:
    """What is not default about a plan's options."""
    default = type(plan.options)()
    changed = {f.name: getattr(plan.options, f.name) for f in dataclasses.fields(default)}
    words = ", ".join(
        f"{name}={_word(value)}"
        for name, value in changed.items()
        if value != getattr(default, name)
    )
    lanes = f" {plan.spec.lanes}" if plan.spec and plan.spec.lanes else ""
    return f"{plan.spec.name if plan.spec else plan.name}{lanes} ({words})"


def _word(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


# ---- running -------------------------------------------------------------------------------------


def run(plan: Plan, *, naps: bool, what: str) -> None:
    """The plan on the CPU engine. Raises Defect where it does not compute what the reference
    does.
    """
    if plan.spec is None:
        _run_probe(plan, naps=naps, what=what)
        return
    wanted, wanted_tokens = computed(plan)
    weights, room = weights_of(plan.spec, plan.options.weight_dtype), plan.options.max_context
    with engine_with(*(NAPS if naps else ())) as make:
        try:
            with make(plan, weights, watchdog_s=WATCHDOG_S) as engine:
                logits = engine.logits(TOKENS[:room])
                tokens = (
                    engine.generate(TOKENS, max_tokens=4).tokens
                    if room >= len(TOKENS) + 3
                    else wanted_tokens
                )
        except TwinError as error:
            raise Defect(f"accepted, and cannot run: {error}; {what}") from error
    worst = float(np.abs(logits - wanted[:room]).max() / np.abs(wanted).max())
    if not worst <= tolerance(plan):
        raise Defect(f"accepted, and its logits are off by {worst:.2g} of the largest; {what}")
    if tokens != wanted_tokens and tolerance(plan) < 1e-4:
        raise Defect(f"accepted, and its tokens are {tokens}, not {wanted_tokens}; {what}")


def _run_probe(plan: Plan, *, naps: bool, what: str) -> None:
    """A probe's steps end, and its numbers are finite."""
    with engine_with(*(NAPS if naps else ())) as make:
        try:
            with make(plan, None, watchdog_s=WATCHDOG_S) as engine:
                engine.run_steps(5)
        except TwinError as error:
            raise Defect(f"accepted, and cannot run: {error}; {what}") from error


class engine_with:  # read as a phrase: with engine_with(flags) as make
    """HostEngine, its library compiled with further flags."""

    def __init__(self, *flags: str) -> None:
        self.flags = flags

    def __enter__(self) -> Callable[..., host.HostEngine]:
        self.kept = host.build_host
        if self.flags:
            host.build_host = partial(build_host, extra=self.flags)
        return host.HostEngine

    def __exit__(self, *error: object) -> None:
        host.build_host = self.kept


# ---- edits ---------------------------------------------------------------------------------------


def edited(plan: Plan, chance: random.Random) -> tuple[str, Plan]:
    """(what was done, the plan with one to three edits)."""
    names = []
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3))):
        if chance.random() < 0.5:
            mutation = chance.choice(MUTATIONS)
            try:
                name, changed = mutation.__name__, mutation(plan, chance)
            except (ValueError, LookupError, ArithmeticError):
                # an edit before took what this one changes
                continue
        else:
            name, changed = any_field(plan, chance)
        if changed is not None:
            names.append(name)
            plan = changed
    return " + ".join(names), plan


def any_field(plan: Plan, chance: random.Random) -> tuple[str, Plan | None]:
    """Some field, anywhere in the plan but in the model, set to something of its type."""
    places = list(_places(plan, chance))
    path, owner, put = chance.choice(places)
    field = chance.choice(
        [f.name for f in dataclasses.fields(owner) if f.name not in ("spec", "name")]
    )
    value = other_value(getattr(owner, field), owner, field, plan, chance)
    if value is SAME:
        return "", None
    return f"{path}.{field}={_word(value)!s:.80}", put(replace(owner, **{field: value}))


Put = Callable[[Any], Plan]


def _places(plan: Plan, chance: random.Random) -> Iterator[tuple[str, Any, Put]]:
    """(name, data, how to put it back) of the plan's parts, of each kind one."""
    yield "plan", plan, lambda new: new
    for name in ("options", "limits", "shard"):
        if getattr(plan, name) is not None:
            yield name, getattr(plan, name), partial(_put, plan, name)
    for name in ("attentions", "buffers", "values", "stages", "stages", "stages"):
        items = getattr(plan, name)
        if not items:
            continue
        at = chance.randrange(len(items))
        yield f"{name}[{at}]", items[at], partial(_put_item, plan, name, at)
        if name != "stages":
            continue
        stage = items[at]
        if stage.matrix:
            yield (
                f"{stage.name}.matrix",
                stage.matrix,
                lambda new, at=at, stage=stage: _put_item(
                    plan, "stages", at, replace(stage, matrix=new)
                ),
            )
        for part in ("reads", "resets"):
            held = getattr(stage, part)
            if held:
                i = chance.randrange(len(held))
                yield f"{stage.name}.{part}[{i}]", held[i], partial(_put_nested, plan, at, part, i)


def _put(plan: Plan, name: str, new: Any) -> Plan:
    return replace(plan, **{name: new})


def _put_item(plan: Plan, name: str, at: int, new: Any) -> Plan:
    items = getattr(plan, name)
    return replace(plan, **{name: (*items[:at], new, *items[at + 1 :])})


def _put_nested(plan: Plan, at: int, part: str, i: int, new: Any) -> Plan:
    stage = plan.stages[at]
    held = getattr(stage, part)
    return _put_item(plan, "stages", at, replace(stage, **{part: (*held[:i], new, *held[i + 1 :])}))


SAME = object()
NUMBERS = (-1, 0, 1, 2, 3, 7, 16, 1000, 2**20, 2**31 - 1, 2**31, 2**40)


def other_value(value: Any, owner: Any, field: str, plan: Plan, chance: random.Random) -> Any:
    """Something else of the same kind: a neighbour, another member, another object's, or far
    off.
    """
    match value:
        case bool():
            return not value
        case Enum():
            return chance.choice(
                [member for member in type(value) if member is not value] or [value]
            )
        case int():
            return chance.choice(
                (value + 1, value - 1, 2 * value, value // 2, value + 8, chance.choice(NUMBERS))
            )
        case float():
            return chance.choice((0.0, -value, 2 * value, 1e30, float("inf"), float("nan")))
        case None:
            return _instead_of_nothing(owner, field, plan, chance)
        case ModelSpec() | str():
            return SAME
        case tuple():
            return _other_tuple(value, owner, field, plan, chance)
        case _:
            return (
                None
                if field
                in (
                    "matrix",
                    "scan",
                    "attention",
                    "routed",
                    "format",
                    "sequences",
                    "residual",
                    "common",
                )
                else SAME
            )


def _instead_of_nothing(owner: Any, field: str, plan: Plan, chance: random.Random) -> Any:
    others = [
        getattr(stage, field) for stage in plan.stages if getattr(stage, field, None) is not None
    ]
    if field == "sequences":
        return (1,) * plan.blocks
    if field == "routed":
        from twin.plan.matrix import Routed

        return Routed(4, 2, 4, 2)
    if field == "format":
        from twin.models.formats import Format

        return next((f for f in _formats() if isinstance(f, Format)), SAME)
    if field in ("gate", "publishes", "delay", "attention_splits"):
        return chance.choice((0, 1, 2, len(plan.stages) - 1))
    return chance.choice(others) if others else SAME


def _formats() -> list[Any]:
    from twin.models.load import load_model

    return [weight.format for weight in load_model("qwen3-30b-a3b").weights()] + [
        w.format for w in load_model("gpt-oss-20b").weights()
    ]


def _other_tuple(
    value: tuple[Any, ...], owner: Any, field: str, plan: Plan, chance: random.Random
) -> Any:
    """Items dropped, repeated, exchanged, shifted, or another object's tuple."""
    same = [
        o
        for o in (*plan.stages, *plan.values, *(s.matrix for s in plan.stages if s.matrix))
        if type(o) is type(owner)
    ]
    choice = chance.choice(("drop", "repeat", "exchange", "reverse", "other", "empty", "shift"))
    if choice == "empty":
        return ()
    if choice == "other" and same:
        return getattr(chance.choice(same), field)
    if not value:
        return SAME
    at, to = chance.randrange(len(value)), chance.randrange(len(value))
    items = list(value)
    if choice == "drop":
        del items[at]
    elif choice == "repeat":
        items.insert(to, items[at])
    elif choice == "exchange":
        items[at], items[to] = items[to], items[at]
    elif choice == "reverse":
        items.reverse()
    elif (
        isinstance(items[at], tuple)
        and items[at]
        and all(isinstance(edge, int) for edge in items[at])
    ):
        by = chance.choice((-8, -1, 1, 8))
        items[at] = tuple(edge + by for edge in items[at])
    elif isinstance(items[at], tuple) and items[at]:
        spans = list(items[at])
        j = chance.randrange(len(spans))
        lo, hi = spans[j]
        spans[j] = chance.choice(((lo, hi + 1), (lo - 1, hi), (lo + 1, hi), (lo, hi - 1), (0, hi)))
        items[at] = tuple(spans)
    return tuple(items)
