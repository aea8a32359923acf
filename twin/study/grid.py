"""The cells of a study: every combination of models, nodes and axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, Any

from msgspec import Meta

from twin.cost.routing import MOST_STEPS
from twin.errors import ConfigError, TwinError
from twin.reading import SOME, FieldError, Reader
from twin.study.fields import ModelName, NodeName
from twin.study.hardware import GPUS, Setting, node_on_file, with_setting
from twin.study.options import Plain, option_name, plain_option
from twin.study.point import Point
from twin.text import shown

MODEL, NODE = "model", "node"
MOST_CELLS = 100_000  # of a study: more would be days of simulation, and gigabytes of questions


@dataclass(frozen=True, slots=True)
class Axis:
    """An engine option or a hardware number, and the values it takes."""

    name: str
    values: tuple[Plain, ...]
    option: bool


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the study; its own options win over those of the study."""

    name: str
    label: str
    options: tuple[tuple[str, Plain], ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination. `at` holds its place on every axis, in the axes' order, after the model's
    and the node's names.
    """

    model: str
    node: str
    at: tuple[tuple[str, Plain], ...]
    point: Point
    plan: str = ""  # that was found for it; empty: default options and the study's
    default: Point | None = None  # by default options, where a plan was found

    def value(self, axis: str) -> Plain:
        """Its place on an axis; `model` and `node` are axes too."""
        return {MODEL: self.model, NODE: self.node, **dict(self.at)}[axis]

    def __str__(self) -> str:
        places = ", ".join(f"{name} {value}" for name, value in self.at)
        return f"{self.model} on {self.node}{f', {places}' if places else ''}"


@dataclass(frozen=True, slots=True)
class Grid:
    models: tuple[Model, ...]
    nodes: tuple[str, ...]
    axes: tuple[Axis, ...]
    options: tuple[tuple[str, Plain], ...]
    settings: tuple[Setting, ...]
    steps: int = 2  # simulated for each cell; more where steps differ by their routing

    def __post_init__(self) -> None:
        if self.size > MOST_CELLS:
            raise ConfigError(
                f"{shown(self.size)} combinations of models, nodes and axes: at most "
                f"{MOST_CELLS:,}; leave values out"
            )

    @property
    def size(self) -> int:
        """How many cells it has."""
        return (
            len(self.models) * len(self.nodes) * math.prod(len(axis.values) for axis in self.axes)
        )

    def cells(self) -> Iterator[Cell]:
        """Models slowest, the last axis fastest."""
        for model, node in product(self.models, self.nodes):
            for values in product(*(axis.values for axis in self.axes)):
                at = tuple(
                    (axis.name, value) for axis, value in zip(self.axes, values, strict=True)
                )
                yield Cell(model.label, node, at, self._point(model, node, values))

    def _point(self, model: Model, node: str, values: Sequence[Plain]) -> Point:
        options = dict(self.options) | dict(model.options)
        settings: list[Setting] = list(self.settings)
        for axis, value in zip(self.axes, values, strict=True):
            if axis.option:
                options[axis.name] = value
            else:
                assert isinstance(value, str | int | float)
                settings.append((axis.name, value))
        # another number of GPUs is another node: before its numbers change
        settings.sort(key=lambda setting: setting[0] != GPUS)
        return Point(model.name, node, tuple(sorted(options.items())), tuple(settings), self.steps)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model with options of its own, as a study file has it."""

    model: ModelName
    label: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GridFields:
    """What a study file says of its grid."""

    models: Annotated[tuple[ModelName | ModelEntry, ...], SOME]
    nodes: Annotated[tuple[NodeName, ...], SOME]
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Annotated[tuple[Any, ...], SOME]] = field(default_factory=dict)
    steps: Annotated[int, Meta(ge=2, le=MOST_STEPS)] = 2

    def grid(self, reader: Reader) -> Grid:
        """Every value tried on every node; the reader keeps those that cannot be. Raises FieldError
        before that for more cells than there is time for, which a short file can ask for.
        """
        counts = [len(one) for one in (self.models, self.nodes, *self.axes.values())]
        if math.prod(counts) > MOST_CELLS:
            product = " x ".join(map(str, counts[:12])) + (" x ..." if len(counts) > 12 else "")
            raise FieldError(
                "axes",
                f"{product} combinations of models, nodes and axes: at most {MOST_CELLS:,}; leave "
                "values out",
            )
        models = [_model(one, reader, f"models[{i}].") for i, one in enumerate(self.models)]
        for key, values in {
            "models": [model.label for model in models],
            "nodes": self.nodes,
            **{f"axes.{name}": values for name, values in self.axes.items()},
        }.items():
            with reader.at(key):
                _check_distinct(values)
        options = _options(self.options, reader, "options.")
        for name, value in self.settings.items():
            with reader.at(f"settings.{name}"):
                _check_setting(name, value, self.nodes)
        axes = tuple(_axis(name, values, self.nodes, reader) for name, values in self.axes.items())
        for axis in axes:
            if axis.name in dict(options) or axis.name in self.settings:
                raise FieldError(
                    f"axes.{axis.name}", "is set for all cells as well; remove one of the two"
                )
        return Grid(
            tuple(models), self.nodes, axes, options, tuple(self.settings.items()), self.steps
        )


def _model(one: str | ModelEntry, reader: Reader, at: str) -> Model:
    if isinstance(one, str):
        return Model(one, one)
    return Model(one.model, one.label or one.model, _options(one.options, reader, f"{at}options."))


def _options(given: Mapping[str, Any], reader: Reader, at: str) -> tuple[tuple[str, Plain], ...]:
    found: dict[str, Plain] = {}
    for key, value in given.items():
        with reader.at(f"{at}{key}"):
            name = option_name(key)
            if name is None:
                raise ConfigError("not an engine option; `twin simulate --help` lists them")
            if name == GPUS:
                raise ConfigError("nodes say how many GPUs there are")
            found[name] = plain_option(name, value)
    return tuple(sorted(found.items()))


def _axis(key: str, values: Sequence[Any], nodes: Sequence[str], reader: Reader) -> Axis:
    name = option_name(key)
    option = name is not None and name != GPUS
    found = []
    for index, value in enumerate(values):
        with reader.at(f"axes.{key}[{index}]"):
            if name is not None and option:
                value = plain_option(name, value)
            else:
                _check_setting(key, value, nodes)
            found.append(value)
    return Axis(name if name and option else key, tuple(found), option)


def _check_setting(name: str, value: Any, nodes: Sequence[str]) -> None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(
            f"{shown(value)} must be a quantity ('5 TB/s'), a change ('x0.5', '+10%') or a number "
            "in base units"
        )
    for node in nodes:
        try:
            with_setting(node_on_file(node), name, value)
        except TwinError as error:
            raise ConfigError(f"on {node}: {error}") from error


def _check_distinct(values: Sequence[object]) -> None:
    seen: set[Plain] = set()
    for value in values:
        if isinstance(value, str | int | float):  # anything else is refused as what it is
            if value in seen:
                raise ConfigError(f"{shown(value)} is given twice; remove one")
            seen.add(value)
