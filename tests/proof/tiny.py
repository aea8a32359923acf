"""Tiny models and the ordinary options, small enough to run word by word."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from twin.errors import PlanError
from twin.models.spec import LaneHead, Lanes, ModelSpec, Rope
from twin.plan.options import (
    CollectiveKind,
    Execution,
    HandOffKind,
    LateParts,
    Limits,
    Options,
    Sampling,
)
from twin.plan.types import Plan
from twin.schedule.plans import build
from twin.schedule.probe import exchange_probe

LIMITS = Limits(
    blocks=304, dies=2, on_chip_bytes=160 << 10, memory_bytes=192 << 30, oversubscribe=False
)
LANEFORMER = ModelSpec(
    "laneformer-2b",
    "laneformer",
    15,
    3072,
    32,
    16,
    96,
    12288,
    32000,
    4096,
    1e-5,
    Rope(1e4),
    (0,) * 15,
    lanes=Lanes(8, 2),
)


def tiny(
    layers: int = 2, lanes: Lanes | None = None, heads: int = 4, kv_heads: int = 2
) -> ModelSpec:
    windows = tuple(8 * (layer % 2) for layer in range(layers))
    return ModelSpec(
        "tiny",
        "llama",
        layers,
        8,
        heads,
        kv_heads,
        8,
        32,
        13,
        4096,
        1e-5,
        Rope(1e4),
        windows,
        lanes=lanes,
    )


def plan_of(spec: ModelSpec, *, limits: Limits = LIMITS, **options: Any) -> Plan:
    settled: dict[str, Any] = {"slot_bytes": 1024, "collective": CollectiveKind.PUSH, **options}
    return build(spec, Options(**settled), limits)


def some_plan(seed: int, *, most: int = 6, protocol: HandOffKind | None = None) -> Plan:
    """A buildable plan of at most `most` blocks, all ranks together."""
    chance = random.Random(seed)
    while True:
        options = Options(
            gpus=chance.choice((1, 1, 2, 4)),
            blocks=chance.choice((1, 2, 3, 4)),
            handoff=protocol or chance.choice((HandOffKind.SENTINEL, *HandOffKind)),
            sampling=chance.choice(list(Sampling)),
            execution=chance.choice((Execution.RESIDENT, Execution.RESIDENT, Execution.GRAPH)),
            collective=chance.choice(
                (CollectiveKind.PUSH, CollectiveKind.PUSH, CollectiveKind.LIBRARY)
            ),
            copies=chance.choice((1, 2, 3, 3)),
            max_context=chance.choice((128, 1024)),
            slot_bytes=1024,
        )
        try:
            if chance.random() < 0.15:
                rings = options.copies * chance.choice((1, 2, 3))
                plan = exchange_probe(
                    replace(options, gpus=1), LIMITS, elements=chance.choice((4, 9)), stages=rings
                )
            else:
                model = _some_model(chance)
                late = model.lanes is not None and model.lanes.delay > 0 and chance.random() < 0.6
                plan = build(
                    model, replace(options, late_parts=LateParts.REDUCED if late else None), LIMITS
                )
        except PlanError:
            continue
        if plan.ranks * plan.blocks <= most:
            return plan


def _some_model(chance: random.Random) -> ModelSpec:
    head, early = chance.choice(list(LaneHead)), chance.random() < 0.3
    match chance.choice(("plain", "plain", "two", "four", "late")):
        case "plain":
            return tiny(chance.choice((2, 3)))
        case "two":
            return tiny(chance.choice((2, 3)), Lanes(2, chance.choice((0, 1)), head, early))
        case "four":
            return tiny(2, Lanes(4, chance.choice((0, 1)), head, early))
        case _:
            return tiny(4, Lanes(2, 2, head, early))
