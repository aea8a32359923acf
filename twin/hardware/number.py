"""A number with its kind and its source."""

from __future__ import annotations

from enum import Enum

from twin.frozen import frozen


class Kind(Enum):
    """How much a number may be trusted, best first."""

    MEASURED = "measured"
    FITTED = "fitted"
    DATASHEET = "datasheet"
    THIRD_PARTY = "third-party"
    VENDOR = "vendor"
    UNBOUND = "unbound"  # stands in a fit, but its probes do not bind it (twin.calibrate.bound)
    ASSUMED = "assumed"


@frozen
class Like:
    """Where a number comes from that nobody measured on its part: the same number of another part,
    and a rule (twin.hardware.derive).
    """

    device: str
    rule: str
    # how much less, and more, it may cost than the rule says: factors on a time, or on one over a
    # rate
    low: float
    high: float
    fitted: bool = False  # the other number is fitted, and drawn together with the rest of its fit


@frozen
class Number:
    """One hardware quantity in SI base units (bytes, bytes/s, Hz, s) or a plain count."""

    value: float
    kind: Kind
    source: str
    # the range that the source or the kind allows; None: take it from the kind
    low: float | None = None
    high: float | None = None
    # then low and high are what the rule leaves open; what the other number leaves open comes on
    # top
    like: Like | None = None
