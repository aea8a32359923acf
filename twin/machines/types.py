"""Machines that keep a model's weights next to the arithmetic, as far as a token's time needs
them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

from twin.hardware.types import Kind, Number


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
    # not comparable (speculation, a claim, early software): shown beside the prediction
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published speed of one request: tokens/s, and what is known about how it was made."""

    model: str
    tokens_per_s: float
    kind: Kind
    source: str
    use: Use
    context: int  # positions; where the source tells none, a short conversation is taken
    conditions: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A dataflow machine. Its time per token: weights and caches read, dependent steps waited for,
    units crossed.

    A step is one result that the next one needs (`twin.machines.steps`). `step_s` holds all that a
    step costs besides reading: exchange inside the machine, pipeline fill, norms, synchronisation;
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
    not_modelled: tuple[str, ...] = ()
    published: tuple[Published, ...] = ()

    def numbers(self) -> dict[str, Number]:
        """Every number by its field's name."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Number)}
