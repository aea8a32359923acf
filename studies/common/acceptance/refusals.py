"""What must not be run, and what ends when it is run all the same: broken plans, wrong requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from studies.common.acceptance.runs import Failed
from studies.common.shapes import Bench, prompt_of
from twin.engine.sampling import SamplingParams
from twin.engine.session import Session
from twin.errors import EngineError, TwinError
from twin.plan.catalogue import StageKind
from twin.plan.options import Execution
from twin.plan.types import Plan, Stage
from twin.proof.prove import violations

WATCHDOG_S = 1.0
SLACK_S = 8.0  # launches, and the host's look at the end
PROMPT, TOKENS = 3, 20


# ---- broken plans --------------------------------------------------------------------------------


def silent_block(plan: Plan, stage: Stage) -> tuple[Plan, str]:
    """The block that owns the first rows of `stage` does not compute and publish them. (plan, the
    stage that waits for them)
    """
    assert stage.matrix is not None
    assert stage.publishes is not None
    value = plan.values[stage.publishes]
    block = next(i for i, (lo, hi) in enumerate(value.owned) if lo < hi)
    rows, owned = list(stage.matrix.owned), list(value.owned)
    rows[block], owned[block] = (rows[block][0],) * 2, (owned[block][0],) * 2
    broken = replace(stage, matrix=replace(stage.matrix, owned=tuple(rows)))
    readers = [
        s.name
        for s in plan.stages[stage.index + 1 :]
        if any(read.value == value.id for read in s.reads)
    ]
    made = replace(
        plan,
        stages=tuple(broken if s.index == stage.index else s for s in plan.stages),
        values=tuple(
            replace(v, owned=tuple(owned)) if v.id == value.id else v for v in plan.values
        ),
    )
    return made, readers[0]


def premature_read(plan: Plan) -> tuple[Plan, str]:
    """DOWN of the first layer also asks for the candidates, which the LM head publishes later in
    the step.
    """
    at = next(s for s in plan.stages if s.kind is StageKind.DOWN)
    late = next(s.publishes for s in plan.stages if s.kind is StageKind.LM_HEAD)
    assert late is not None
    read = replace(
        at.reads[0], value=late, spans=(((0, plan.values[late].elements),),) * plan.blocks
    )
    stages = tuple(replace(s, reads=(*s.reads, read)) if s is at else s for s in plan.stages)
    return replace(plan, stages=stages), at.name


def broken_plans(bench: Bench) -> dict[str, tuple[Plan, str, str]]:
    """What is broken: (plan, the stage that must hang, what the proof must name)."""
    found: dict[str, tuple[Plan, str, str]] = {}
    for name in ("tiny", "tiny-lanes"):
        good = bench.plan(name, max_context=64)
        for kind in (StageKind.DOWN, StageKind.QKV):
            stage = next(s for s in good.stages if s.kind is kind and s.layer == 1)
            broken, waits = silent_block(good, stage)
            found[f"{name}: one block of {stage.name} does not publish"] = (
                broken,
                waits,
                stage.name,
            )
    broken, waits = premature_read(bench.plan("tiny", max_context=64))
    found[f"tiny: {waits} reads what nobody has published"] = (broken, waits, waits)
    return found


def refusal_plans(bench: Bench) -> list[Plan]:
    return [
        bench.plan("tiny", max_context=64),
        *(plan for plan, _, _ in broken_plans(bench).values()),
    ]


def broken(bench: Bench) -> dict[str, Any]:
    """The proof names each; unproven, each ends by the watchdog with its report; after each the
    device works as before.
    """
    good = bench.plan("tiny", max_context=64)
    before = _tokens(bench, good)
    facts = {}
    for what, (plan, waits, named) in broken_plans(bench).items():
        said = [str(violation) for violation in violations(plan)]
        if not any(named in line for line in said):
            raise Failed(f"{what}: the proof does not name {named}: {said[:3] or 'nothing'}")
        facts[what] = {"validator": said[0], **_hang(bench, plan, waits, what)}
        if _tokens(bench, good) != before:
            raise Failed(f"{what}: after the watchdog a sound plan gives other tokens")
    return facts


def _tokens(bench: Bench, plan: Plan) -> list[int]:
    with bench.engine(plan) as engine:
        return engine.generate(prompt_of(plan, PROMPT), max_tokens=TOKENS).tokens


def _hang(bench: Bench, plan: Plan, waits: str, what: str) -> dict[str, Any]:
    with bench.engine(plan, watchdog_s=WATCHDOG_S) as engine:
        begun = time.monotonic()
        try:
            engine.generate(prompt_of(plan, PROMPT), max_tokens=TOKENS)
        except EngineError as error:
            report, took = str(error), time.monotonic() - begun
        else:
            raise Failed(f"{what}: the run ended as if nothing were missing")
    if "watchdog" not in report or waits not in report:
        raise Failed(f"{what}: expected the watchdog to name {waits}, got: {report}")
    if took > WATCHDOG_S + SLACK_S:
        raise Failed(f"{what}: ended only after {took:.1f} s with a watchdog of {WATCHDOG_S:g} s")
    return {"watchdog": report, "seconds": took}


# ---- wrong requests ------------------------------------------------------------------------------


def wrong_requests(bench: Bench) -> dict[str, Any]:
    """Each is refused with one error that says what is wrong; the engine works as before."""
    plan = bench.plan("tiny", max_context=64)
    assert plan.spec is not None
    vocab = plan.spec.vocab
    with bench.engine(plan) as engine:
        before = engine.generate(prompt_of(plan, PROMPT), max_tokens=TOKENS).tokens
        requests: dict[str, tuple[str, Callable[[], object]]] = {
            "empty prompt": ("empty", lambda: engine.generate([], max_tokens=4)),
            "token past the vocabulary": (
                str(vocab),
                lambda: engine.generate([1, vocab], max_tokens=4),
            ),
            "negative token": ("-1", lambda: engine.generate([-1], max_tokens=4)),
            "no tokens wanted": ("max_tokens=0", lambda: engine.generate([1], max_tokens=0)),
            "negative tokens wanted": (
                "max_tokens=-3",
                lambda: engine.generate([1], max_tokens=-3),
            ),
            "beyond the context": ("max_context=64", lambda: engine.generate([1], max_tokens=65)),
            "prompt beyond the context": (
                "max_context=64",
                lambda: engine.generate([1] * 70, max_tokens=1),
            ),
            "logits of nothing": ("empty", lambda: engine.logits([])),
            "temperature with a greedy plan": (
                "temperature=0.7",
                lambda: engine.generate(
                    [1], max_tokens=4, sampling=SamplingParams(temperature=0.7)
                ),
            ),
        }
        facts = {what: _refused(what, part, request) for what, (part, request) in requests.items()}
        if engine.generate(prompt_of(plan, PROMPT), max_tokens=TOKENS).tokens != before:
            raise Failed("after the refused requests the engine gives other tokens")
    facts["after close"] = _refused(
        "after close", "closed", lambda: engine.generate([1], max_tokens=1)
    )
    return facts | _wrong_engines(bench, plan)


def _wrong_engines(bench: Bench, plan: Plan) -> dict[str, str]:
    """Plans that a GPU engine cannot run."""
    if bench.device == "host":
        return {}
    options = plan.options
    engines: dict[str, tuple[str, Callable[[], Session]]] = {
        "two GPUs": (
            "gpus=2",
            lambda: bench.engine(replace(plan, options=replace(options, gpus=2))),
        ),
        "launch by launch": (
            "execution=stream",
            lambda: bench.engine(
                replace(plan, options=replace(options, execution=Execution.LAUNCHES))
            ),
        ),
    }
    return {what: _refused(what, part, make) for what, (part, make) in engines.items()}


def _refused(what: str, part: str, request: Callable[[], object]) -> str:
    try:
        request()
    except TwinError as error:
        if part not in str(error):
            raise Failed(f"{what}: the message does not say {part!r}: {error}") from error
        return str(error)
    raise Failed(f"{what}: accepted")
