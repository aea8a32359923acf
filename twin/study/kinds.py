"""The kinds of studies, and how a study's file is read.

A kind is a module with `read(fields: Fields) -> Question`. It takes what it needs from the fields
(the head below is already taken; unknown keys are refused afterwards) and returns something that
can be run. It refuses whatever is wrong before anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from twin.data import read_yaml
from twin.errors import ConfigError
from twin.study.fields import Fields
from twin.study.outcome import Outcome
from twin.study.runner import Runner

FILE = "study.yaml"
KINDS = {  # kind: its module
    "projection": "twin.study.projection",
    "graph-engines": "twin.study.graph_engines",
    "launch-tax": "twin.study.launch_tax",
    "agent": "twin.study.agent",
    "mixed-load": "twin.study.mixed_load",
}


class Question(Protocol):
    """What a kind's `read` returns."""

    def run(self, runner: Runner) -> Outcome:
        """The answer. Simulations go through `runner`, which computes none twice and shows
        progress.
        """
        ...


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
    fields = Fields(read_yaml(file), file)
    kind = fields.choice("kind", list(KINDS))
    head = fields.text("title"), fields.text("question"), fields.text("prediction", "")
    came = fields.text("outcome", "")
    body: Question = import_module(KINDS[kind]).read(fields)
    fields.done()
    return Study(
        file.resolve().parent.name if file.name == FILE else file.stem, kind, *head, body, came
    )
