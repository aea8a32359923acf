"""A whole benchmark of a small model, with the host's engine in the GPU's place."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from twin.bench import measure, plans
from twin.bench.measure import Bench, Measured, Settings
from twin.bench.plans import Plans, make_plans
from twin.bench.source import Source, hold_random
from twin.engine.host import HostEngine
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.models.spec import DType, ModelSpec

NODE = load_node("1xh200")  # its limits; nothing of it is needed to run
SEVERAL = load_node("2xh200")


class Quiet:
    """Clocks of no GPU."""

    rounds = 0

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def after_round(self) -> None:
        self.rounds += 1

    def to_json(self) -> dict[str, Any]:
        return {"rounds": self.rounds}


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds instead of minutes."""
    monkeypatch.setattr(measure, "WARM_UP_S", 0.01)
    monkeypatch.setattr(measure, "PROBE_STEPS", 3)
    monkeypatch.setattr(measure, "DETERMINISM_TOKENS", 20)
    monkeypatch.setattr(plans, "PROBE_BYTES", (1_000_000, 1_000_000))


def prepared(
    spec: ModelSpec, settings: Settings, node: Node = NODE, **chosen: Any
) -> tuple[Source, Plans]:
    options = {"blocks": 8 if spec.lanes else 2, "weight_dtype": DType.BF16, **chosen}
    made = make_plans(
        spec,
        node,
        options,
        context=settings.context,
        tokens=settings.tokens,
        positions=settings.positions,
    )
    return Source(spec, hold_random(spec, 1, DType.BF16), "random, seed 1", None), made


def measured(source: Source, made: Plans, settings: Settings, watch: Quiet) -> Measured:
    make_engine = partial(HostEngine)
    return Bench(
        source, made, settings, make_engine=make_engine, watch=watch, show=lambda text: None
    ).run()
