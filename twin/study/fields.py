"""What fields of several kinds of study files have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from msgspec import Meta

from twin.errors import ConfigError
from twin.models.load import load_model
from twin.reading import Check, Reader
from twin.study.hardware import node_on_file
from twin.text import shown

if TYPE_CHECKING:
    from twin.study.outcome import Outcome
    from twin.study.runner import Runner

MOST_WHOLE = 10**12  # of any count; a field may allow less
MOST_NUMBER = 1e15  # of any plain number or quantity: what is made of it stays finite

Count = Annotated[int, Meta(ge=1, le=MOST_WHOLE)]
Rate = Annotated[float, Meta(ge=1e-3, le=MOST_NUMBER)]  # tokens per second
ModelName = Annotated[str, Check(load_model)]
NodeName = Annotated[str, Check(node_on_file)]


class Question(Protocol):
    """What a study asks, made of its file."""

    def run(self, runner: Runner) -> Outcome:
        """The answer. Simulations go through `runner`, which computes none twice and shows
        progress.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Head:
    """What every study file says; its kind's fields are those of a dataclass below this one."""

    kind: str
    title: str
    question: str
    prediction: str = ""  # written before it ran
    outcome: str = ""  # what came out, written after it ran

    def asks(self, reader: Reader, folder: Path) -> Question:
        """The question; what is wrong with several fields together is kept by the reader, or
        raised.
        """
        raise NotImplementedError


def check_context(model: str, context: int) -> None:
    """Raises ConfigError where a model does not reach so far."""
    spec = load_model(model)
    if context > spec.context:
        raise ConfigError(
            f"{context} exceeds the {spec.context} positions of {shown(model)}; take fewer, or "
            "another model"
        )


def percent(data: Any, at: str) -> Any:
    """A share: a number, or a percentage as text ("36%" is 0.36)."""
    if not isinstance(data, str) or not data.strip().endswith("%"):
        return data
    try:
        return float(data.strip()[:-1]) / 100
    except ValueError:
        raise ConfigError(f"{shown(data)} is no percentage; write it as '36%'") from None
