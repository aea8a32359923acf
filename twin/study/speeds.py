"""Engines whose speed a study compares: an ordinary stack, our resident kernel, or a published
figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twin.batching.costs import Load
from twin.batching.step import IDEAL, predict
from twin.batching.tables import stack_names
from twin.errors import TwinError
from twin.hardware.load import load_node
from twin.hardware.types import Kind
from twin.models.load import load_model
from twin.study.fields import Fields
from twin.study.point import Point
from twin.study.runner import Runner
from twin.text import shown

RESIDENT = "resident"
PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class Engine:
    """One row of a comparison. Either `tokens_per_s` is published, or the speed of `model` on
    `node` is predicted.
    """

    name: str
    model: str = ""
    node: str = ""
    stack: str = ""  # an ordinary engine's, "ideal", or "resident"
    context: int = 1024
    tokens_per_s: float = 0.0
    kind: str = PREDICTED
    source: str = ""

    def point(self) -> Point:
        return Point(self.model, self.node, (("context", self.context),))


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of one sequence and where the number comes from; `problem` says why there
    is none.
    """

    engine: Engine
    tokens_per_s: float | None
    kind: str
    source: str
    problem: str = ""


def read_engines(fields: Fields, key: str, *, context: int) -> tuple[Engine, ...]:
    """Entries with `name` and either `model`, `node`, `stack`, or `tokens_per_s`, `kind`, `source`.
    Raises ConfigError.
    """
    return tuple(_engine(entry, context) for entry in fields.mappings(key))


def speeds(engines: Sequence[Engine], runner: Runner) -> list[Speed]:
    """In order; what can be simulated goes through the runner."""
    resident = [engine for engine in engines if engine.stack == RESIDENT]
    rows = dict(
        zip(
            resident,
            runner.rows([e.point() for e in resident], "resident kernels") if resident else [],
            strict=True,
        )
    )
    found = []
    for engine in engines:
        if engine.tokens_per_s:
            found.append(Speed(engine, engine.tokens_per_s, engine.kind, engine.source))
        elif engine in rows:
            row = rows[engine]
            source = f"simulated: {engine.model} on {engine.node}"
            found.append(
                Speed(
                    engine,
                    None if row.problem else row.tokens_per_s,
                    PREDICTED,
                    source,
                    row.problem,
                )
            )
        else:
            found.append(_ordinary(engine))
    return found


def _ordinary(engine: Engine) -> Speed:
    try:
        step = predict(
            load_model(engine.model),
            load_node(engine.node),
            engine.stack,
            Load(context=engine.context),
        )
    except TwinError as error:
        return Speed(engine, None, PREDICTED, "", str(error))
    return Speed(
        engine, step.tokens_per_s(), PREDICTED, f"{engine.model} on {engine.node}: {step.rests_on}"
    )


def _engine(entry: Fields, context: int) -> Engine:
    name = entry.text("name")
    if "tokens_per_s" in entry:
        kinds = [kind.value for kind in Kind]
        engine = Engine(
            name,
            tokens_per_s=entry.number("tokens_per_s", low=1e-3),
            kind=entry.choice("kind", kinds),
            source=entry.text("source"),
        )
        entry.done()
        return engine
    allowed = [*stack_names(), IDEAL, RESIDENT]
    engine = Engine(
        name, entry.text("model"), entry.text("node"), entry.choice("stack", allowed), context
    )
    entry.done()
    try:
        spec = load_model(engine.model)
        engine.point().on_node()
    except TwinError as error:
        raise entry.error("", str(error)) from error
    if context > spec.context:
        raise entry.error(
            "model",
            f"{shown(engine.model)} reaches {spec.context} positions, the study asks for "
            f"{context}; choose another or fewer",
        )
    return engine
