"""Engines whose speed a study compares: an ordinary stack, our resident kernel, or a published
figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from twin.batching.costs import Load
from twin.batching.step import IDEAL, predict
from twin.batching.tables import stack_names
from twin.errors import TwinError
from twin.hardware.load import load_node
from twin.hardware.number import Kind
from twin.models.load import load_model
from twin.reading import FieldError, Reader, one_of
from twin.study.fields import ModelName, NodeName, Rate, check_context
from twin.study.optimise import Found, Way, search, searched, together
from twin.study.point import Point
from twin.study.runner import Runner

RESIDENT = "resident"
PREDICTED = "predicted"
Stack = Annotated[str, one_of(lambda: [*stack_names(), IDEAL, RESIDENT])]


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


@dataclass(frozen=True, slots=True)
class Entry:
    """An engine as a study file has it: `model`, `node` and `stack`, or `tokens_per_s`, `kind` and
    `source`.
    """

    name: str
    model: ModelName = ""
    node: NodeName = ""
    stack: Stack = ""
    tokens_per_s: Rate | None = None
    kind: Kind | None = None
    source: str = ""

    def __post_init__(self) -> None:
        published = self.tokens_per_s is not None
        forms = (("model", "node", "stack"), ("tokens_per_s", "kind", "source"))
        needed, useless = reversed(forms) if published else forms
        for field in (*needed, *useless):
            if bool(getattr(self, field)) != (field in needed):
                has = "a published speed" if published else "an engine that is predicted"
                step = "missing" if field in needed else "leave it out"
                raise FieldError(field, f"{step}; {has} has {', '.join(needed)}")


def engines_of(entries: Sequence[Entry], context: int, reader: Reader) -> tuple[Engine, ...]:
    """The reader keeps refusals of contexts that a model does not reach."""
    found = []
    for index, one in enumerate(entries):
        if one.tokens_per_s and one.kind:
            found.append(
                Engine(
                    one.name,
                    tokens_per_s=one.tokens_per_s,
                    kind=one.kind.value,
                    source=one.source,
                )
            )
            continue
        with reader.at(f"engines[{index}].model"):
            check_context(one.model, context)
        found.append(Engine(one.name, one.model, one.node, one.stack, context))
    return tuple(found)


def speeds(engines: Sequence[Engine], runner: Runner) -> list[Speed]:
    """In order; what can be simulated goes through the runner, on several GPUs by the best plan."""
    plans = _plans([engine for engine in engines if engine.stack == RESIDENT], runner)
    points = [way.of(engine.point()) if way else engine.point() for engine, way in plans.items()]
    rows = dict(zip(plans, runner.rows(points, "resident kernels"), strict=True))
    found = []
    for engine in engines:
        if engine.tokens_per_s:
            found.append(Speed(engine, engine.tokens_per_s, engine.kind, engine.source))
        elif engine in rows:
            row = rows[engine]
            way = plans[engine]
            source = f"simulated: {engine.model} on {engine.node}{f', {way}' if way else ''}"
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


def _plans(engines: Sequence[Engine], runner: Runner) -> dict[Engine, Way | None]:
    """The best way to run each; None: by default options."""
    wanted = [engine for engine in engines if searched(engine.point())]
    answers = together([search(engine.point()) for engine in wanted], runner, "plans")
    found = {
        engine: answer.best.way
        for engine, answer in zip(wanted, answers, strict=True)
        if isinstance(answer, Found)
    }
    return {engine: found.get(engine) for engine in engines}


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
