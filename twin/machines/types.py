"""Machines that keep a model's weights next to the arithmetic, as far as a token's time needs
them.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Annotated

from msgspec import Meta

from twin.frozen import frozen
from twin.hardware.number import Kind, Number
from twin.models.load import model_names
from twin.reading import FieldError, one_of

DEFAULT_CONTEXT = 1024  # of a published speed whose source tells none


class Spread(Enum):
    """Which part of the machine works on a token at a time."""

    # each layer lies on units of its own (at least one): those work while the token is there
    LAYERS = "layers"
    REGIONS = "regions"  # each layer has an equal region of all units together
    TOGETHER = "together"  # all units work on each layer


class Use(Enum):
    """What a published figure is for."""

    FIT = "fit"  # step_s comes from it
    CHECK = "check"  # compared with the prediction, never used for it
    # not comparable (speculation, a claim, early software): shown next to the prediction
    REFERENCE = "reference"


@frozen(kw_only=True)
class Published:
    """A published speed of one request: tokens/s, and what is known about how it was made."""

    model: Annotated[str, one_of(model_names)]
    tokens_per_s: Annotated[float, Meta(gt=0)]
    kind: Kind
    source: str
    use: Use
    # positions; where the source tells none, a short conversation is taken
    context: Annotated[int, Meta(ge=1)] = DEFAULT_CONTEXT
    conditions: str = ""


@frozen(kw_only=True)
class Machine:
    """A dataflow machine. Its time per token: weights and caches read, dependent steps waited for,
    units crossed.

    A step is one result that the next one needs (`twin.machines.steps`). `step_s` holds all that a
    step costs but for reading: exchange inside the machine, pipeline fill, norms, synchronisation;
    nobody publishes it, so it is fitted to one published speed.
    """

    name: str
    title: str
    unit: str  # what is counted: chip, wafer, socket
    spread: Spread
    step_s: Number
    units: Number | None = None  # installed; None: as many as the weights need
    most_units: Number | None = None  # where units is None
    # weights and caches that one unit takes; None: the model is hard-wired
    usable_bytes: Number | None = None
    bytes_per_s: Number | None = None  # of one unit; None: nothing is read
    crossing_s: Number | None = None  # a token passes from unit to unit; None: inside step_s
    stored: str = ""  # a format of twin.models.formats; empty: as the model is published
    only: str = ""  # the one model that a hard-wired machine runs
    not_modelled: tuple[str, ...]
    published: tuple[Published, ...]

    def __post_init__(self) -> None:
        """Every figure that step_s was fitted to must exist, and the other way round."""
        if (self.usable_bytes is None) != bool(self.only):
            raise FieldError(
                "usable_bytes",
                "a hard-wired machine names its model in `only`, every other one its memory",
            )
        if (self.units is None) == (self.most_units is None):
            raise FieldError(
                "units",
                "give units (installed) or most_units (as many as the weights need), one of the "
                "two",
            )
        fits = [row.model for row in self.published if row.use is Use.FIT]
        if len(fits) != (self.step_s.kind is Kind.FITTED):
            raise FieldError(
                "step_s",
                f"kind {self.step_s.kind.value!r} with {len(fits)} figures of use fit; a fitted "
                "one has exactly one",
            )

    def numbers(self) -> dict[str, Number]:
        """Every number by its field's name."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Number)}
