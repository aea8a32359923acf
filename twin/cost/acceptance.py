"""How many drafted tokens count, from hwmodels/acceptance.yaml or as a number says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated

from msgspec import Meta

from twin import reading
from twin.data import data_dir, did_you_mean, read_yaml
from twin.errors import ConfigError
from twin.frozen import frozen
from twin.reading import FieldError
from twin.text import shown

FILE = "acceptance.yaml"
MOST_DRAFTED = 64
HALVINGS = 60  # of an interval of probabilities

Drafted = Annotated[int, Meta(ge=1, le=MOST_DRAFTED)]


@frozen
class Curve:
    """Tokens that a round yields, the model's own among them, by how many are drafted."""

    drafter: str  # lookup, mtp, eagle3
    of: str  # the model, the text
    source: str
    tokens: Mapping[Drafted, float]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise FieldError("tokens", "at least one number of drafts")
        for drafted, tokens in self.tokens.items():
            if not 1 <= tokens <= drafted + 1:
                raise FieldError("tokens", f"{tokens} of {drafted} drafts: from 1 to {drafted + 1}")

    def of_drafts(self, drafted: int) -> float:
        """Tokens of a round with so many drafts."""
        if drafted in self.tokens:
            return self.tokens[drafted]
        nearest = min(self.tokens, key=lambda known: (abs(known - drafted), known))
        return expected_tokens(acceptance_for(self.tokens[nearest], nearest), drafted)


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Of a round whose drafts are accepted so often each, if those before were (Leviathan et al.
    2023, eq. 1).
    """
    return sum(acceptance**accepted for accepted in range(drafted + 1))


def acceptance_for(tokens: float, drafted: int) -> float:
    """How often each draft must be accepted for so many tokens a round: 0 to 1."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, drafted) < tokens else (low, middle)
    return (low + high) / 2


@frozen
class Acceptance:
    """What a user says: a curve's name, or how often a draft is accepted."""

    rate: float | None = None
    name: str = ""

    def tokens(self, drafted: int) -> float:
        if self.rate is not None:
            return expected_tokens(self.rate, drafted)
        return curves()[self.name].of_drafts(drafted) if drafted else 1.0

    def __str__(self) -> str:
        if self.rate is not None:
            return f"each draft accepted with {self.rate:g}"
        curve = curves()[self.name]
        return f"{self.name}: {curve.of} ({curve.source})"


def read_acceptance(text: str) -> Acceptance:
    """`text` as a curve's name or a probability. Raises ConfigError."""
    try:
        rate = float(text)
    except ValueError:
        check_curve(text)
        return Acceptance(name=text)
    if not 0 <= rate <= 1:
        raise ConfigError(f"acceptance={shown(text)}: a probability lies between 0 and 1")
    return Acceptance(rate)


def check_curve(name: str) -> None:
    """Raises ConfigError for a name that no curve has."""
    if name not in curves():
        raise ConfigError(
            f"acceptance={shown(name)}: a number from 0 to 1 or a curve of "
            f"hwmodels/{FILE}; {did_you_mean(name, list(curves()))}"
        )


@frozen
class _File:
    curves: Mapping[str, Curve]


@lru_cache(maxsize=1)
def curves() -> Mapping[str, Curve]:
    """All on file, by name."""
    path = data_dir("hwmodels") / FILE
    return reading.read(read_yaml(path), _File, path).curves
