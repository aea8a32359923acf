"""Engine runs as plain data: a record holds what ran, so that it can be predicted and repeated from
itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from msgspec import convert

from twin.calibrate.experiment import Experiment
from twin.calibrate.kernel_id import kernel_of
from twin.calibrate.store import Run
from twin.errors import CalibrationError, ConfigError
from twin.models.feeds import ExpertFeed
from twin.models.formats import Formats, Role, format_named
from twin.models.layers import Layer
from twin.models.load import load_model, model_names
from twin.models.mixers import GroupedAttention
from twin.models.spec import ModelSpec
from twin.plan.options import Limits, Options
from twin.reading import read
from twin.text import said

T = TypeVar("T")
RUNS = "runs"  # in the meta data of a record
ATTENTION, EXPERTS, STORED = "attention", "experts", "stored"  # of a shape that is not dense


def written(run: Experiment) -> dict[str, Any]:
    """One run; options are written out whole: defaults change."""
    return {
        "model": model_written(run.spec),
        "options": whole(run.options),
        "prompt": run.prompt,
        "tokens": run.tokens,
        "repeats": run.repeats,
        "traced": run.traced,
    }


def model_written(spec: ModelSpec) -> str | dict[str, Any]:
    """The name of a model on file, NAME@FORMAT too; any other shape's fields. Raises
    CalibrationError.
    """
    if spec.name.split("@")[0] in model_names():
        with contextlib.suppress(ConfigError):  # of a format that none is called by
            if load_model(spec.name) == spec:
                return spec.name
    return shape(spec)


def model_read(model: str | Mapping[str, Any]) -> ModelSpec:
    """The reverse of `model_written`. Raises ConfigError."""
    return load_model(model) if isinstance(model, str) else shaped(model)


def recorded(folder: Path, meta: Mapping[str, Any]) -> list[Experiment] | None:
    """The runs that a record says it made; None for one of 2026-11, which names them only. Raises
    CalibrationError.
    """
    if RUNS not in meta:
        return None
    before: dict[str, Any] = {}
    try:
        return [_read(name, one, before) for name, one in meta[RUNS].items()]
    except (AttributeError, ConfigError, KeyError, TypeError, ValueError) as error:
        raise CalibrationError(
            f"{folder / 'meta.yaml'}: {RUNS} hold no engine runs ({said(str(error))}); measure "
            "again"
        ) from error


def measured(runs: Iterable[Experiment], record: Run) -> list[Experiment]:
    """Those of `runs` that the record has samples of, with these and the kernel."""
    kernel = kernel_of(record)
    return [
        dataclasses.replace(run, kernel=kernel, samples=tuple(record.samples[run.name]))
        for run in runs
        if run.name in record.samples
    ]


def options_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Chosen options as a record spells them, by field. Raises ConfigError."""
    whole = built(Options, data)
    return {name: getattr(whole, name) for name in data}


def shape_of(like: ModelSpec, data: Mapping[str, Any]) -> ModelSpec:
    """A dense model with some numbers of its own, full attention in every layer."""
    return shaped({**shape(like), **data, "windows": [0] * data.get("layers", like.layers)})


def _read(name: str, one: Mapping[str, Any], before: dict[str, Any]) -> Experiment:
    """`before`: the run in front, mostly of the same model."""
    if before.get("said") != one["model"]:
        before.update(said=one["model"], model=model_read(one["model"]))
    return Experiment(
        name,
        before["model"],
        built(Options, one["options"]),
        one["prompt"],
        one["tokens"],
        one["repeats"],
        one["traced"],
    )


def shape(spec: ModelSpec) -> dict[str, Any]:
    """A dense shape's fields; of experts, besides, what all layers have but for their windows; the
    formats by their names.
    """
    if spec.hyper or (spec.layout and spec.layout != _layout(spec, *_parts(spec))):
        raise CalibrationError(
            f"{spec.name}: only a dense shape, one whose layers all have the same experts behind "
            "grouped attention, or a model on file can be written into a record; give it a file"
        )
    plain = _plain(dataclasses.replace(spec, layout=(), stored=None))
    assert isinstance(plain, dict)
    if spec.layout:
        attention, experts = _parts(spec)
        plain |= {ATTENTION: _plain(attention), EXPERTS: _plain(experts)}
    if spec.stored:
        chosen = [[role.value, form.name] for role, form in spec.stored.chosen]
        plain[STORED] = {"rest": spec.stored.rest.name, "chosen": chosen}
    return plain


def _parts(spec: ModelSpec) -> tuple[Any, Any]:
    """Of the first layer: its mixer without a window, its feed-forward layer."""
    first = spec.layout[0]
    return dataclasses.replace(first.mixer, window=0), first.feed


def _layout(spec: ModelSpec, attention: Any, experts: Any) -> tuple[Layer, ...]:
    """No layers of parts that a record cannot hold."""
    if not (isinstance(attention, GroupedAttention) and isinstance(experts, ExpertFeed)):
        return ()
    return tuple(
        Layer(dataclasses.replace(attention, window=window), experts) for window in spec.windows
    )


def shaped(model: Mapping[str, Any]) -> ModelSpec:
    """The reverse of `shape`. Raises ConfigError."""
    plain = {name: value for name, value in model.items() if name not in (ATTENTION, EXPERTS)}
    stored = plain.pop(STORED, None)
    spec: ModelSpec = built(ModelSpec, plain)
    if ATTENTION in model:
        attention: GroupedAttention = built(GroupedAttention, model[ATTENTION])
        experts: ExpertFeed = built(ExpertFeed, model[EXPERTS])
        spec = dataclasses.replace(spec, layout=_layout(spec, attention, experts))
    if stored is None:
        return spec
    chosen = tuple((Role(role), format_named(name)) for role, name in stored["chosen"])
    return dataclasses.replace(spec, stored=Formats(format_named(stored["rest"]), chosen))


def whole(value: Options | Limits) -> dict[str, Any]:
    """All fields: defaults change."""
    return {name: _plain(getattr(value, name)) for name in type(value).__dataclass_fields__}


def _plain(value: object) -> object:
    """Enumerations as their values, tuples as lists, and of a dataclass what is not its default."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {field.name: _plain(one) for field, one in fields if one != field.default}
    return value


def built(cls: type[T], data: Any) -> T:
    """The reverse of _plain. Raises ConfigError."""
    return read(data, cls, cls.__name__, own={str: lambda _, text, at: convert(text, str)})
