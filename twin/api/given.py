"""What callers give, checked before anything is done with it."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from os import PathLike, fspath
from typing import Any

from twin.errors import ConfigError
from twin.text import shown

MOST = 2**31 - 1
MOST_SEED = 2**63 - 1


def whole(name: str, value: Any, least: int, most: int) -> int:
    """A whole number in its range, also one of NumPy. Raises ConfigError."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise ConfigError(
            f"{name}={shown(value)}: must be a whole number, at least {least} and at most {most}"
        )
    return number


def text(name: str, value: Any) -> str:
    """A text or a path. Raises ConfigError."""
    found = fspath(value) if isinstance(value, PathLike) else value
    if not isinstance(found, str):
        raise ConfigError(f"{name}={shown(value)}: must be a text")
    return found


def named(name: str, value: Any) -> Mapping[str, Any]:
    """Values by their names. Raises ConfigError."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{name}={shown(value)}: must be a dictionary with names as its keys")
    return value
