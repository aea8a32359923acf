"""The same bits every time, for long, and an end when requested: repeats, soak, cancel."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

import numpy as np

from studies.common.shapes import SEED, Bench, prompt_of
from twin.engine.session import Session
from twin.plan.types import Plan

MODELS = ("llama-3.2-1b", "laneformer-2b")
PROMPT, RUNS = 32, 5
# of random tokens: greedy runs of random weights repeat themselves, and equal tokens hide small
# differences
LOGIT_POSITIONS = 128
SOAK_TOKENS, SOAK_PROMPTS = 900, 4  # a run; distinct prompts, each with the tokens of its first run
CANCEL_AFTER_S = 0.2
CANCEL_TOKENS = 90_000


class Failed(Exception):
    """What was shown is not what has to be shown."""


# ---- five runs, the same bits --------------------------------------------------------------------


def repeat_plans(bench: Bench, tokens: int) -> list[Plan]:
    return [plan for name in MODELS for plan in _windows(bench, name, tokens)]


def repeats(bench: Bench, tokens: int) -> dict[str, Any]:
    """Five runs of `tokens` tokens, and five times the logits of the same random tokens: the same
    bits, whatever is in flight.
    """
    made = {
        name: {
            _window(plan): _repeat(bench, plan, tokens) for plan in _windows(bench, name, tokens)
        }
        for name in MODELS
    }
    for name, windows in made.items():
        _check_same(name, windows)
    return made


def _windows(bench: Bench, name: str, tokens: int) -> list[Plan]:
    """The default plan, and the same with its whole ring in flight: a slot is then filled again as
    soon as it has been left.
    """
    plan = bench.plan(name, max_context=PROMPT + tokens)
    slots = plan.options.ring_slots
    return [
        plan,
        bench.plan(name, max_context=PROMPT + tokens, ring_slots=slots, window_slots=slots),
    ]


def _window(plan: Plan) -> str:
    return f"{plan.options.window_slots} of {plan.options.ring_slots} slots in flight"


def _check_same(name: str, windows: dict[str, dict[str, Any]]) -> None:
    """Raises Failed where the windows' bits differ, or where there is one window only."""
    (first, few), *others = windows.items()
    if not others:
        raise Failed(
            f"{name}: {first} by default, so that nothing shows whether the bits depend on it; "
            "give the default plan fewer"
        )
    for window, many in others:
        for what in ("tokens", "logits"):
            if few[f"{what}_sha256"] != many[f"{what}_sha256"]:
                raise Failed(f"{name}: other {what} with {window} than with {first}")


def _repeat(bench: Bench, plan: Plan, tokens: int) -> dict[str, Any]:
    with bench.engine(plan) as engine:
        return repeated_bits(engine, plan, tokens)


def repeated_bits(
    engine: Session, plan: Plan, tokens: int, positions: int = LOGIT_POSITIONS
) -> dict[str, Any]:
    """Raises Failed where a run of RUNS gives other tokens or logits than the first."""
    prompt = prompt_of(plan, PROMPT)
    runs = [engine.generate(prompt, max_tokens=tokens) for _ in range(RUNS)]
    read = prompt_of(plan, positions, SEED + 1)
    prints = {_print(engine.logits(read)) for _ in range(RUNS)}
    where = f"{plan.name}, {_window(plan)}"
    for number, run in enumerate(runs):
        if len(run.tokens) != tokens or run.tokens != runs[0].tokens:
            at = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(run.tokens, runs[0].tokens, strict=False))
                    if a != b
                ),
                len(run.tokens),
            )
            raise Failed(f"{where}: run {number} differs from run 0 at token {at} of {tokens}")
    if len(prints) > 1:
        raise Failed(
            f"{where}: {RUNS} passes over the same {len(read)} tokens gave {len(prints)} "
            "different sets of logits"
        )
    return {
        "tokens": tokens,
        "runs": RUNS,
        "distinct_tokens": len(set(runs[0].tokens)),
        "logits_sha256": prints.pop(),
        "tokens_sha256": _print(np.array(runs[0].tokens)),
        "us_per_token": [float(np.median(run.step_ns)) / 1e3 for run in runs],
    }


def _print(numbers: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(numbers.tobytes()).hexdigest()


# ---- soak ----------------------------------------------------------------------------------------


def soak_plans(bench: Bench) -> list[Plan]:
    return [bench.plan(name, max_context=PROMPT + SOAK_TOKENS) for name in ("small", MODELS[0])]


def soak(bench: Bench, tokens: int, seconds: float) -> dict[str, Any]:
    """`tokens` tokens of a small model, then as many of the first model as fit into `seconds`. A
    hang ends by the watchdog.
    """
    small, large = soak_plans(bench)
    with bench.engine(small) as engine:
        first = soaked(engine, small, tokens)
    with bench.engine(large) as engine:
        return {"small": first, MODELS[0]: soaked(engine, large, 10**12, seconds)}


def soaked(
    engine: Session, plan: Plan, tokens: int, seconds: float = float("inf")
) -> dict[str, Any]:
    """Raises Failed where a prompt no longer gives the tokens that it gave first."""
    prompts = [prompt_of(plan, PROMPT, seed) for seed in range(SOAK_PROMPTS)]
    expected: dict[int, list[int]] = {}
    made, runs, begun, shown = 0, 0, time.monotonic(), time.monotonic()
    while made < tokens and (time.monotonic() - begun < seconds or not runs):
        number = runs % SOAK_PROMPTS
        got = engine.generate(prompts[number], max_tokens=min(SOAK_TOKENS, tokens - made)).tokens
        if got != expected.setdefault(number, got)[: len(got)]:
            raise Failed(
                f"{plan.name}: after {made} tokens prompt {number} no longer gives the tokens "
                "that it gave first"
            )
        made, runs = made + len(got), runs + 1
        if time.monotonic() - shown > 5:
            shown = time.monotonic()
            print(f"  soak {plan.name}: {made} tokens in {shown - begun:.0f} s", flush=True)
    return {"tokens": made, "runs": runs, "seconds": time.monotonic() - begun}


# ---- cancel --------------------------------------------------------------------------------------


def cancel_plans(bench: Bench) -> list[Plan]:
    return [bench.plan("small", max_context=CANCEL_TOKENS + 10, attention_splits=1)]


def cancel(bench: Bench) -> dict[str, Any]:
    """Another thread ends a run; what it made is the beginning of the whole run, and the engine
    goes on.
    """
    (plan,) = cancel_plans(bench)
    prompt = prompt_of(plan, 4)
    with bench.engine(plan) as engine:
        threading.Timer(CANCEL_AFTER_S, engine.cancel).start()
        begun = time.monotonic()
        made = engine.generate(prompt, max_tokens=CANCEL_TOKENS)
        took = time.monotonic() - begun
        checked = min(len(made.tokens), 500)
        again = engine.generate(prompt, max_tokens=max(1, checked)).tokens
    if made.stop_reason != "cancelled" or not 0 < len(made.tokens) < CANCEL_TOKENS:
        raise Failed(
            f"cancelled after {CANCEL_AFTER_S} s: {len(made.tokens)} tokens, stop reason "
            f"{made.stop_reason!r}"
        )
    if took > 5:
        raise Failed(f"cancelled after {CANCEL_AFTER_S} s, ended after {took:.1f} s")
    if made.tokens[:checked] != again:
        raise Failed(
            f"the {checked} first of {len(made.tokens)} tokens are not those of a run that nobody "
            "cancelled"
        )
    return {"tokens": len(made.tokens), "compared": checked, "seconds": took}
