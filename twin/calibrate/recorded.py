"""Held-out runs as plain data: a record of engine runs holds what it ran, so that it can be
predicted and repeated from itself.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from twin.calibrate.heldout import HeldOut
from twin.errors import CalibrationError, ConfigError
from twin.models.load import load_model, model_names
from twin.models.spec import ModelSpec
from twin.plan.types import Options
from twin.text import said, shown

T = TypeVar("T")
RUNS = "runs"  # in the meta data of a record


def written(run: HeldOut) -> dict[str, Any]:
    """One run. A model on file is called by its name, any other shape is written out; options are
    written out whole: defaults change.
    """
    known = run.spec.name in model_names() and load_model(run.spec.name) == run.spec
    options = {name: _plain(getattr(run.options, name)) for name in Options.__slots__}
    return {
        "model": run.spec.name if known else _shape(run.spec),
        "options": options,
        "prompt": run.prompt,
        "tokens": run.tokens,
        "repeats": run.repeats,
        "traced": run.traced,
    }


def recorded(folder: Path, meta: Mapping[str, Any]) -> list[HeldOut] | None:
    """The runs that a record says it made; None for one of 2026-11, which names them only. Raises
    CalibrationError.
    """
    if RUNS not in meta:
        return None
    try:
        return [_read(name, one) for name, one in meta[RUNS].items()]
    except (AttributeError, ConfigError, KeyError, TypeError, ValueError) as error:
        raise CalibrationError(
            f"{folder / 'meta.yaml'}: {RUNS} hold no engine runs ({said(str(error))}); measure "
            "again"
        ) from error


def options_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Chosen options as a record spells them, by field. Raises ValueError."""
    hints = get_type_hints(Options)
    if unknown := sorted(set(data) - set(Options.__slots__)):
        raise ValueError(f"{shown(unknown[0])} is no option")
    return {name: _value(hints[name], value) for name, value in data.items()}


def shape_of(like: ModelSpec, data: Mapping[str, Any]) -> ModelSpec:
    """A dense model with some numbers of its own, full attention in every layer."""
    hints = get_type_hints(ModelSpec)
    if unknown := sorted(set(data) - set(hints)):
        raise ValueError(f"{shown(unknown[0])} is no field of a model")
    own = {name: _value(hints[name], value) for name, value in data.items()}
    return dataclasses.replace(like, **own, windows=(0,) * own.get("layers", like.layers))


def _read(name: str, one: Mapping[str, Any]) -> HeldOut:
    model = one["model"]
    spec = load_model(model) if isinstance(model, str) else _built(ModelSpec, model)
    return HeldOut(
        name,
        spec,
        _built(Options, one["options"]),
        one["prompt"],
        one["tokens"],
        one["repeats"],
        one["traced"],
    )


def _shape(spec: ModelSpec) -> dict[str, Any]:
    if spec.layout or spec.stored or spec.hyper:
        raise CalibrationError(
            f"{spec.name}: only a dense shape or a model on file can be written into a record; "
            "give it a file"
        )
    plain = _plain(spec)
    assert isinstance(plain, dict)
    return plain


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


def _built(cls: type[T], data: Mapping[str, Any]) -> T:
    """The reverse of _plain."""
    hints = get_type_hints(cls)
    if unknown := sorted(set(data) - set(hints)):
        raise ValueError(f"{shown(unknown[0])} is no field of {cls.__name__}")
    return cls(**{name: _value(hints[name], value) for name, value in data.items()})


def _value(hint: Any, data: Any) -> Any:
    if data is None:
        return None
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(one for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is tuple:
        return tuple(_value(get_args(hint)[0], one) for one in data)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(data)
    return _built(hint, data) if dataclasses.is_dataclass(hint) and isinstance(hint, type) else data
