"""What a study may choose about a run: the engine's options and the conditions of the simulation,
as plain values by name.
"""

from __future__ import annotations

import types
from enum import Enum
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from twin.data import did_you_mean
from twin.errors import ConfigError
from twin.models.spec import WEIGHT_TYPES
from twin.plan.options import Options
from twin.plan.ranges import RANGES as PLANNED
from twin.schedule.options import FIELDS
from twin.text import shown
from twin.units import parse_quantity, unit_of

ALIASES = {"dtype": "weight_dtype", "draft_step": "draft_step_s"}
# The least and the most of each number: of the plan's options, and of the conditions below.
RANGES: dict[str, tuple[float, float]] = {
    **PLANNED,
    "seed": (0, 2**63 - 1),
    "acceptance": (0, 1),
    "draft_step_s": (0, 1000),
    "layers": (1, 65_536),
}
Plain = str | int | float | bool | None
# Conditions of a simulation that are no part of the plan.
CONDITIONS: dict[str, type] = {
    "routing": str,  # which experts tokens choose: uniform, zipf:EXPONENT, or a JSON file of counts
    "seed": int,  # of the routing
    "acceptance": float,  # of a drafted token, with `draft`
    "draft_step_s": float,  # one step of the draft model
    # how often drafts are accepted, instead of `acceptance`: a name of hwmodels/acceptance.yaml
    "curve": str,
    # lookup, mtp or eagle3: `draft` is how many tokens a round of the engine verifies
    "drafter": str,
    # that the weights are stored in, instead of the model's own: fp8-128x128, mxfp4, int4-g32 ...
    "format": str,
    "layers": int,  # only the model's first layers: what depth costs
}


def option_name(name: str) -> str | None:
    """The Options field or condition that `name` means ("ring-slots", "dtype"), or None."""
    field = name.replace("-", "_")
    field = ALIASES.get(field, field)
    return field if field in FIELDS or field in CONDITIONS else None


def plain_option(name: str, value: object) -> Plain:
    """`value` checked and in its plain form: an enum by its value, sizes in bytes. Raises
    ConfigError.
    """
    typed = option_value(name, value)
    found: Plain = typed.value if isinstance(typed, Enum) else typed
    return found


def check_range(name: str, value: object) -> None:
    """Raises ConfigError for a number that is less or more than any plan could have."""
    if isinstance(value, int | float):
        least, most = RANGES[name]
        if not least <= value <= most:
            raise ConfigError(f"{name}={shown(value)}: at least {least}, at most {most}")


def option_value(name: str, value: object) -> Any:
    """`value` as the type of the Options field or condition `name`, and in its range. Raises
    ConfigError.
    """
    typed = _typed(name, value)
    check_range(name, typed)
    return typed


def _typed(name: str, value: object) -> Any:
    kinds = _kinds(name)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if issubclass(kind, Enum) and isinstance(value, str):
            return _member(name, kind, value)
        if kind is bool and isinstance(value, bool):
            return value
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            check_range(name, value)  # a double has no room for every integer
            return float(value)
        if kind is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if kind is int and isinstance(value, str) and unit_of(name):
            return _bytes(name, value)
        if kind is float and isinstance(value, str) and unit_of(name):
            return _quantity(name, value)
        if kind is str and isinstance(value, str):
            return value
    raise ConfigError(
        f"{name}: {shown(value)} is not {' or '.join(_spoken(kind) for kind in kinds)}"
    )


@lru_cache(maxsize=1)
def _hints() -> dict[str, Any]:
    return get_type_hints(Options)


def _kinds(name: str) -> tuple[type, ...]:
    if name in CONDITIONS:
        return (CONDITIONS[name],)
    hint = _hints()[name]
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def members(name: str, kind: type[Enum]) -> tuple[Enum, ...]:
    """What the Options field `name` may be, which has this type: weights are not of a type of
    caches.
    """
    return WEIGHT_TYPES if name == "weight_dtype" else tuple(kind)


def _member(name: str, kind: type[Enum], value: str) -> Enum:
    values = [member.value for member in members(name, kind)]
    if value not in values:
        raise ConfigError(f"{name}: {shown(value)} is unknown; {did_you_mean(value, values)}")
    return kind(value)


def text_value(name: str, text: str) -> Plain:
    """A condition as the command line gives it."""
    if CONDITIONS[name] is str or unit_of(name):
        return plain_option(name, text)
    try:
        return plain_option(name, CONDITIONS[name](text))
    except ValueError:
        raise ConfigError(f"{name}: {shown(text)} is not {_spoken(CONDITIONS[name])}") from None


def _quantity(name: str, text: str) -> float:
    try:
        return parse_quantity(text, unit_of(name))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _bytes(name: str, text: str) -> int:
    size = _quantity(name, text)
    if size != int(size):
        raise ConfigError(f"{name}: {shown(text)} is not a whole number of bytes")
    return int(size)


def _spoken(kind: type) -> str:
    if issubclass(kind, Enum):
        return f"one of {', '.join(member.value for member in kind)}"
    return {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }.get(kind, kind.__name__)
