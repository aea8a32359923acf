"""Figures that others published, kept as a run: what was measured, how, by whom and when.

A record says of all its figures whether they are inputs of a fit or held out of every fit. A
publication is one or the other: nothing that cites a held-out one may be fitted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from twin.data import read_yaml
from twin.errors import CalibrationError, ConfigError
from twin.hardware.number import Kind
from twin.hardware.override import SPREAD
from twin.reading import SOME, Check, FieldError, Parse, read
from twin.text import shown
from twin.units import parse_quantity

FIGURES = "figures"  # in the meta data of a record
TOKENS = "tokens/s"
TRUST = SPREAD[Kind.THIRD_PARTY]
BASES = ("B/s", "s")  # of the other units


class Role(Enum):
    INPUT = "input"
    HELD_OUT = "held-out"


@dataclass(frozen=True, slots=True)
class Figure:
    """One published quantity, or the ends of a published range; and what the twin predicts."""

    name: str
    node: str  # that it was measured on
    publication: str  # key of hwmodels/sources.yaml
    date: str  # of the publication, as exact as is known
    configuration: str
    values: tuple[float, ...]
    unit: str
    asks: Mapping[str, Any]  # what the twin predicts: twin.calibrate.published_plans
    group: str = ""  # of an input: the numbers that it settles
    note: str = ""  # what the twin's plan leaves out or takes otherwise
    predicted_s: float = field(default=math.nan, compare=False)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of a step, a hand-off, a launch or a collective, each value by itself."""
        if self.unit == TOKENS:
            return tuple(1 / value for value in self.values)
        base = _base(self.unit)
        found = tuple(parse_quantity(f"{value!r} {self.unit}", base) for value in self.values)
        if base == "s":
            return found
        return tuple(self.asks["stream"]["bytes"] / rate for rate in found)

    @property
    def middle_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def predicted(self) -> float:
        """In the figure's unit."""
        return self.in_unit(self.predicted_s)

    @property
    def error(self) -> float:
        """Of the speed against the middle of what was published, positive where the twin is too
        fast.
        """
        return self.middle_s / self.predicted_s - 1.0

    @property
    def inside(self) -> bool:
        """Does the prediction lie in the range that was published?"""
        return min(self.seconds) <= self.predicted_s <= max(self.seconds)

    def shown(self) -> str:
        """As it was published: "7.59 to 7.88 us"."""
        ends = [f"{value:,g}" for value in sorted({min(self.values), max(self.values)})]
        return f"{' to '.join(ends)} {self.unit}"

    def in_unit(self, seconds: float) -> float:
        """A time of the twin in the unit that was published."""
        if self.unit == TOKENS:
            return 1 / seconds
        base = _base(self.unit)
        value = seconds if base == "s" else self.asks["stream"]["bytes"] / seconds
        return value / parse_quantity(f"1 {self.unit}", base)


def is_published(meta: Mapping[str, Any]) -> bool:
    """Does a run of this meta data hold figures of others?"""
    return FIGURES in meta


def role_of(folder: Path, meta: Mapping[str, Any]) -> Role:
    """Raises CalibrationError for a record that does not say it."""
    try:
        return Role(meta.get("role"))
    except ValueError as error:
        words = " or ".join(role.value for role in Role)
        raise CalibrationError(
            f"{folder / 'meta.yaml'}: role: {shown(meta.get('role'))} must be {words}"
        ) from error


def figures(folder: Path, meta: Mapping[str, Any]) -> tuple[Figure, ...]:
    """All figures of a record. Raises CalibrationError with the figure that cannot be read."""
    role_of(folder, meta)
    kind: Any = Annotated[dict[str, _Entry], SOME]
    found: dict[str, _Entry] = read(
        meta[FIGURES],
        kind,
        folder / "meta.yaml",
        refusal=CalibrationError,
        at=FIGURES,
        advice="see calibration/runs/README.md",
    )
    return tuple(one.figure(name, str(meta["node"])) for name, one in found.items())


def check_inputs(folder: Path, meta: Mapping[str, Any]) -> None:
    """Raises CalibrationError for figures that no fit may use: of a held-out record, or of a
    publication that another record next to it holds out.
    """
    if not is_published(meta):
        return
    if role_of(folder, meta) is Role.HELD_OUT:
        raise CalibrationError(
            f"{folder}: its figures are held out: `twin validate {meta['node']} --from` it; only a "
            "record with role: input is fitted"
        )
    held_out: dict[str, Path] = {}
    for next_to in sorted(file.parent for file in folder.resolve().parent.glob("*/meta.yaml")):
        other = _meta(next_to)
        if is_published(other) and role_of(next_to, other) is Role.HELD_OUT:
            held_out |= {one.publication: next_to for one in figures(next_to, other)}
    for figure in figures(folder, meta):
        if figure.publication in held_out:
            raise CalibrationError(
                f"{folder}: {figure.name} is of {figure.publication}, which "
                f"{held_out[figure.publication].name} holds out: a publication is an input or held "
                "out, not both"
            )


def samples_of(folder: Path, meta: Mapping[str, Any]) -> dict[str, list[float]]:
    """Seconds by figure, as a measured run has them by probe. Nobody knows the repeats of a
    published figure, so it counts as known to TRUST.
    """
    return {
        figure.name: [*figure.seconds, figure.middle_s * (1 - TRUST), figure.middle_s * (1 + TRUST)]
        for figure in figures(folder, meta)
    }


def _meta(folder: Path) -> Mapping[str, Any]:
    """Of a run next to the one that is fitted."""
    try:
        return read_yaml(folder / "meta.yaml")
    except ConfigError as error:
        raise CalibrationError(
            f"{error}; what it holds out is unknown: repair or remove it"
        ) from error


def _listed(data: Any, at: str) -> Any:
    return data if isinstance(data, list) else [data]


def _check_unit(unit: str) -> None:
    if unit != TOKENS:
        _base(unit)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A figure as a record has it."""

    publication: str
    date: Annotated[str, Parse(lambda data, at: str(data))]  # a year is a number in YAML
    configuration: str
    value: Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Parse(_listed), SOME]
    unit: Annotated[str, Check(_check_unit)]
    asks: dict[str, Any]
    group: str = ""
    note: str = ""
    node: str = ""

    def figure(self, name: str, node: str) -> Figure:
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        known |= {"name": name, "node": self.node or node, "values": known.pop("value")}
        return Figure(**known)

    def __post_init__(self) -> None:
        try:
            seconds = self.figure("", "").seconds
        except (KeyError, TypeError) as error:
            raise FieldError("asks", "a rate asks for a stream of so many bytes") from error
        if not all(0 < one < float("inf") for one in seconds):
            raise FieldError("value", "one is zero or infinite")


def _base(unit: str) -> str:
    for base in BASES:
        try:
            parse_quantity(f"1 {unit}", base)
        except ConfigError:
            continue
        return base
    raise ConfigError(f"unit {shown(unit)}: give a time, a rate in B/s, or {TOKENS}")
