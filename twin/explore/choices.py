"""What a page of the explorer offers to choose from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from typing import Any, get_args, get_type_hints

from twin.errors import TwinError
from twin.hardware.load import load_node, node_names
from twin.hardware.override import numbers
from twin.models.formats import STORED
from twin.models.load import load_model, model_names
from twin.plan.options import Options
from twin.schedule.options import DEFAULT, SETTLED
from twin.study.hardware import CLOCK, node_on_file
from twin.study.options import CONDITIONS, members
from twin.units import format_quantity, unit_of

HIDDEN = ("gpus",)  # the node says it


def choices(own: Mapping[str, str]) -> dict[str, Any]:
    """Models, nodes by device, options with their values. `own`: nodes of the user's files."""
    return {
        "models": _models(),
        "devices": _devices() | {name: _own(name, place) for name, place in own.items()},
        "formats": list(STORED),
        "options": [_option(name) for name in Options.__dataclass_fields__ if name not in HIDDEN],
        "conditions": [name for name in CONDITIONS if name not in ("format", "seed")],
    }


@lru_cache(maxsize=1)
def _models() -> list[dict[str, Any]]:
    return [
        {
            "name": spec.name,
            "gb": round(spec.streamed_bytes / 1e9, 2),
            "context": spec.context,
        }
        for spec in map(load_model, model_names())
    ]


@lru_cache(maxsize=1)
def _devices() -> dict[str, dict[str, Any]]:
    """By name, with the GPUs that a node may have."""
    found: dict[str, dict[str, Any]] = {}
    for name in node_names():
        gpus, _, device = name.partition("x")
        node = load_node(name)
        if node.device.sharing is None:
            entry = found.setdefault(device, {"title": node.device.title, "nodes": {}})
            entry["nodes"][gpus] = name
    return found


def _own(name: str, place: str) -> dict[str, Any]:
    node = load_node(place)
    return {"title": f"{node.device.title} (your file)", "nodes": {str(node.gpus): name}}


def _option(name: str) -> dict[str, Any]:
    hint = get_type_hints(Options)[name]
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    kind = kinds[0]
    default = getattr(DEFAULT, name)
    return {
        "name": name,
        "values": [member.value for member in members(name, kind)]
        if issubclass(kind, Enum)
        else None,
        "default": None if name in SETTLED else getattr(default, "value", default),
    }


def hardware(name: str) -> dict[str, Any]:
    """The numbers of a node that a case may set. Raises TwinError."""
    node = node_on_file(name)
    found = []
    for path, number in numbers(node).items():
        with suppress(TwinError):
            value = format_quantity(number.value, unit_of(path.rsplit(".", 1)[-1]))
            found.append([path.removeprefix("device."), value, number.kind.value])
    return {"node": node.name, "numbers": [[CLOCK, "x1", "all of a block's clock"], *found]}
