"""The kinds of studies, and how a study's file is read.

A kind is a module, twin.study.projection or kind.py of the study that asks it, with a dataclass
`File` below `Head` (twin/study/fields.py). Its fields are the file's; `asks` makes of them
something that can be run, and refuses whatever is wrong before anything is computed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from twin.data import data_dir, did_you_mean, read_yaml
from twin.errors import ConfigError
from twin.hardware.schema import OWN
from twin.reading import Reader
from twin.study.fields import Head, Question
from twin.text import shown

FILE = "study.yaml"
PROJECTION = "projection"
KINDS = (PROJECTION, "graph-engines", "launch-tax", "agent", "mixed-load")
MODULE = "kind.py"


@dataclass(frozen=True, slots=True)
class Study:
    """One study file: its head, and its kind's own question."""

    name: str  # of its folder, or of the file
    kind: str
    title: str
    question: str
    prediction: str  # written before it ran; may be empty
    body: Question
    outcome: str = ""  # what came out, written after it ran


def read_study(place: Path) -> Study:
    """The study in a folder or a YAML file. Raises ConfigError with the field and the reason."""
    file = place / FILE if place.is_dir() else place
    if not file.is_file():
        raise ConfigError(
            f"{place}: no study there; give a folder with a {FILE}, or the file itself"
        )
    data = read_yaml(file)
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{file}: kind: {shown(kind)} is unknown; {did_you_mean(kind, KINDS)}")
    reader = Reader(OWN)
    found: Head = reader.value(data, module_of(kind).File, "")
    reader.refuse(file)
    with reader.at(""):
        body = found.asks(reader, file.parent)
    reader.refuse(file)
    name = file.resolve().parent.name if file.name == FILE else file.stem
    return Study(name, kind, found.title, found.question, found.prediction, body, found.outcome)


@cache
def module_of(kind: str) -> ModuleType:
    """The module of a kind; one next to a study may import others from the same folder."""
    if kind == PROJECTION:
        return import_module("twin.study.projection")
    folder = data_dir("studies") / kind
    name = f"twin.study.of_{kind.replace('-', '_')}"
    spec = spec_from_file_location(name, folder / MODULE, submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[name] = module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(made)
    return made
