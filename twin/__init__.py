"""MonoTwin: an engine that decodes for one user in one resident kernel, and its digital twin.

`import twin` gives the Python API; docs/python.md says how it is used. Nothing is loaded before a
name is used: importing takes milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twin.api.engine import Engine, Generated, Stream, open_engine
    from twin.api.predict import (
        Prediction,
        WhatIf,
        load_model,
        load_node,
        make_plan,
        simulate,
        what_if,
    )
    from twin.api.sweep import sweep
    from twin.errors import TwinError
    from twin.hardware.types import Node
    from twin.models.spec import ModelSpec
    from twin.plan.types import Plan

_HOME = {
    "Engine": "twin.api.engine",
    "Generated": "twin.api.engine",
    "ModelSpec": "twin.models.spec",
    "Node": "twin.hardware.types",
    "Plan": "twin.plan.types",
    "Prediction": "twin.api.predict",
    "Stream": "twin.api.engine",
    "TwinError": "twin.errors",
    "WhatIf": "twin.api.predict",
    "load_model": "twin.api.predict",
    "load_node": "twin.api.predict",
    "make_plan": "twin.api.predict",
    "open_engine": "twin.api.engine",
    "simulate": "twin.api.predict",
    "sweep": "twin.api.sweep",
    "what_if": "twin.api.predict",
}
__all__ = [  # noqa: RUF022  # in the order of docs/python.md
    "load_model",
    "load_node",
    "make_plan",
    "simulate",
    "what_if",
    "sweep",
    "open_engine",
    "Prediction",
    "WhatIf",
    "Engine",
    "Generated",
    "Stream",
    "ModelSpec",
    "Node",
    "Plan",
    "TwinError",
]

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'twin' has no attribute {name!r}")
        found = getattr(import_module(_HOME[name]), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
