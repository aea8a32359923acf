"""`twin hardware MACHINE`: numbers, predicted next to published, and what is left out."""

from __future__ import annotations

import json

import pytest

from tests.command_line import Twin
from twin.machines.load import load_machine, machine_names
from twin.models.load import model_names
from twin.report.machines import cells_of


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["cerebras-cs3", "cerebras-cs4", "taalas-hc1"])
def test_a_machine_is_shown_with_what_it_rests_on(name: str, twin: Twin) -> None:
    machine, outcome = load_machine(name), twin("hardware", name)
    assert outcome.code == 0
    for text in (
        machine.title,
        *machine.numbers(),
        *machine.not_modelled,
        *(row.model for row in machine.published),
    ):
        assert text in " ".join(outcome.out.split())  # lines are as wide as the terminal
    data = json.loads(twin("hardware", name, "--json").out)
    assert len(data["published"]) == len(machine.published)
    for number in data["numbers"].values():
        assert number["low"] <= number["value"] <= number["high"]
        assert number["source"]
    for row in data["models"]:
        assert row["low"] <= row["tokens_per_s"] <= row["high"]


def test_machines_are_listed(twin: Twin) -> None:
    listed = json.loads(twin("hardware", "--json").out)["machines"]
    assert [machine["name"] for machine in listed] == machine_names()


def test_models_that_a_machine_cannot_hold_are_left_out() -> None:
    assert [c.model for c in cells_of(load_machine("taalas-hc1"))] == ["llama-3.1-8b"]
    assert len(cells_of(load_machine("cerebras-cs3"))) == len(model_names())
