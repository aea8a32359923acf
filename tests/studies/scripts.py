"""Scripts of the studies, which are no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

STUDIES = Path(__file__).resolve().parents[2] / "studies"


def loaded(script: str) -> ModuleType:
    """The script at this path in `studies`, run as a module of its own, not of another's name."""
    name = script.removesuffix(".py").replace("/", "_").replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, STUDIES / script)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(made)
    return made
