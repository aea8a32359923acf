"""Four changes of a plan (studies/h200-changes), each of one option of a base plan: what is
predicted is what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from twin.bench.shapes import Bench, fitting_slots
from twin.plan.build import build
from twin.plan.types import Execution, HandOffKind, Options, Plan
from twin.proof.prove import prove

MODELS = ("llama-3.2-1b", "laneformer-2b")
PROMPT, TOKENS = 32, 320
CONTEXT = PROMPT + TOKENS // 2
BASE = "resident, sentinel"
CHECKED_LAYERS = 4  # twice Laneformer's delay, at least
FEWER_BLOCKS = 96


@dataclass(frozen=True)
class Case:
    model: str
    change: str
    plan: Plan
    checked: Plan  # the same change on few layers, whose weights are quick to pack

    @property
    def name(self) -> str:
        return f"{self.model} | {self.change}"


def cases(bench: Bench) -> list[Case]:
    """Base and changes of each model, in order."""
    found = []
    for model in MODELS:
        whole = _fitting(bench.plan(model, context=CONTEXT, max_context=PROMPT + TOKENS))
        few = bench.plan(model, layers=CHECKED_LAYERS, context=CONTEXT, max_context=PROMPT + TOKENS)
        few = _changed(
            few,
            {
                name: getattr(whole.options, name)
                for name in ("slot_bytes", "ring_slots", "window_slots")
            },
        )
        for change, options in changes(whole.options).items():
            found.append(Case(model, change, _changed(whole, options), _changed(few, options)))
    return found


def _fitting(base: Plan) -> Plan:
    """With a ring that leaves room for what every change needs of a block's shared memory."""
    alike = [
        _changed(base, options)
        for options in changes(base.options).values()
        if "ring_slots" not in options
    ]
    slots = min(fitting_slots(plan) for plan in alike)
    return _changed(
        base, {"ring_slots": slots, "window_slots": min(slots, base.options.window_slots)}
    )


def changes(base: Options) -> dict[str, dict[str, Any]]:
    """What each change sets; everything else stays as it is in the base plan."""
    half = max(1, base.ring_slots // 2)
    fewer = FEWER_BLOCKS if base.blocks > FEWER_BLOCKS else max(1, base.blocks // 2)
    return {
        BASE: {},
        "sentinel -> grid": {"handoff": HandOffKind.GRID},
        f"ring {base.ring_slots} -> {half} slots": {
            "ring_slots": half,
            "window_slots": min(half, base.window_slots),
        },
        f"{base.blocks} -> {fewer} blocks": {"blocks": fewer},
        "resident -> graph": {"execution": Execution.GRAPH},
    }


def _changed(plan: Plan, options: dict[str, Any]) -> Plan:
    assert plan.spec is not None
    made = build(plan.spec, replace(plan.options, **options), plan.limits)
    prove(made)
    return made
