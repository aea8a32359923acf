"""The cells of a study: every combination of models, nodes and axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from twin.errors import ConfigError, TwinError
from twin.models.load import load_model
from twin.study.fields import Fields
from twin.study.hardware import GPUS, Setting, node_on_file, with_setting
from twin.study.options import Plain, option_name, plain_option
from twin.study.point import Point
from twin.text import shown

MODEL, NODE = "model", "node"
MOST_STEPS = 1000  # of a simulation: they show how steps differ, not more
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


def read_grid(fields: Fields) -> Grid:
    """`models`, `nodes`, `options`, `settings`, `axes`, `steps`. Names and values are tried on
    every node; refusals name the field.
    """
    _check_size(fields)
    models = tuple(_model(fields, index, item) for index, item in enumerate(fields.items("models")))
    nodes = tuple(_node(fields, index, item) for index, item in enumerate(fields.items("nodes")))
    _distinct(fields, "models", [model.label for model in models])
    _distinct(fields, "nodes", nodes)
    options = _options(fields.mapping("options"))
    settings = tuple(_settings(fields.mapping("settings"), nodes))
    axes = tuple(_axes(fields.mapping("axes"), nodes))
    for axis in axes:
        if axis.name in dict(options) or axis.name in dict(settings):
            raise fields.error(
                f"axes.{axis.name}", "is set for all cells as well; remove one of the two"
            )
    return Grid(
        models, nodes, axes, options, settings, fields.whole("steps", 2, low=2, high=MOST_STEPS)
    )


def _check_size(fields: Fields) -> None:
    """Before names and values are tried one by one: a short file can ask for more cells than there
    is time for.
    """
    axes = fields.mapping("axes")
    counts = [
        len(fields.items("models")),
        len(fields.items("nodes")),
        *(len(axes.items(key)) for key in axes.names()),
    ]
    if math.prod(counts) > MOST_CELLS:
        product = " x ".join(map(str, counts[:12])) + (" x ..." if len(counts) > 12 else "")
        raise fields.error(
            "axes",
            f"{product} combinations of models, nodes and axes: at most {MOST_CELLS:,}; leave "
            "values out",
        )


def _model(fields: Fields, index: int, item: object) -> Model:
    where = f"models[{index}]"
    options: tuple[tuple[str, Plain], ...] = ()
    if isinstance(item, str):
        name = label = item
    else:
        one = Fields(item, fields.file, where)
        name = one.text(MODEL)
        label = one.text("label", name)
        options = _options(one.mapping("options"))
        one.done()
    try:
        load_model(name)
    except TwinError as error:
        raise fields.error(where, str(error)) from error
    return Model(name, label, options)


def _node(fields: Fields, index: int, item: object) -> str:
    if not isinstance(item, str):
        raise fields.error(
            f"nodes[{index}]", f"{shown(item)} must be a node's name, such as 8xh200"
        )
    try:
        node_on_file(item)
    except TwinError as error:
        raise fields.error(f"nodes[{index}]", str(error)) from error
    return item


def _options(fields: Fields) -> tuple[tuple[str, Plain], ...]:
    found: dict[str, Plain] = {}
    for key in fields.names():
        name = option_name(key)
        if name is None or name == GPUS:
            reason = (
                "nodes say how many GPUs there are"
                if name
                else "not an engine option; `twin simulate --help` lists them"
            )
            raise fields.error(key, reason)
        found[name] = _option(fields, key, name, fields.take(key))
    return tuple(sorted(found.items()))


def _option(fields: Fields, key: str, name: str, value: object) -> Plain:
    try:
        return plain_option(name, value)
    except TwinError as error:
        raise fields.error(key, str(error)) from error


def _settings(fields: Fields, nodes: Sequence[str]) -> Iterator[Setting]:
    for key in fields.names():
        value = fields.take(key)
        _try_setting(fields, key, key, value, nodes)
        yield key, value


def _axes(fields: Fields, nodes: Sequence[str]) -> Iterator[Axis]:
    for key in fields.names():
        values = fields.items(key)
        _distinct(fields, key, values)
        name = option_name(key)
        if name is not None and name != GPUS:
            yield Axis(
                name,
                tuple(
                    _option(fields, f"{key}[{i}]", name, value) for i, value in enumerate(values)
                ),
                True,
            )
            continue
        for index, value in enumerate(values):
            _try_setting(fields, f"{key}[{index}]", key, value, nodes)
        yield Axis(key, tuple(values), False)


def _try_setting(fields: Fields, where: str, name: str, value: Any, nodes: Sequence[str]) -> None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise fields.error(
            where,
            f"{shown(value)} must be a quantity ('5 TB/s'), a change ('x0.5', '+10%') or a number "
            "in base units",
        )
    for node in nodes:
        try:
            with_setting(node_on_file(node), name, value)
        except TwinError as error:
            raise fields.error(where, f"on {node}: {error}") from error


def _distinct(fields: Fields, key: str, values: Sequence[object]) -> None:
    seen: set[Plain] = set()
    for value in values:
        if isinstance(value, str | int | float):  # anything else is refused as what it is
            if value in seen:
                raise fields.error(key, f"{shown(value)} is given twice; remove one")
            seen.add(value)
