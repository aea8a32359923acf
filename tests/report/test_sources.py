"""Tables of numbers: each source once, no line wider than the terminal, one family of units."""

from __future__ import annotations

import re

import pytest

from tests.command_line import Twin
from twin.hardware.load import device_names, load_device, load_node
from twin.hardware.override import numbers
from twin.machines.load import load_machine, machine_names
from twin.report.machines import shown
from twin.report.sources import Sources, number_rows, numbers_text

WIDTHS = (80, 100)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_of_a_device_a_node_or_a_machine_is_wider_than_the_terminal(width: int) -> None:
    texts = [
        *(numbers_text(numbers(load_device(name)), width) for name in device_names()),
        numbers_text(numbers(load_node("8xmi300x")), width),
        *(shown(load_machine(name), width) for name in machine_names()[::3]),
    ]
    for text in texts:
        assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("name", device_names())
def test_each_source_stands_once_and_every_number_cites_one(name: str) -> None:
    known, sources = numbers(load_device(name)), Sources()
    rows = number_rows(known, sources)
    listed = dict(sources.listed())
    assert len(set(listed.values())) == len(listed)
    for number, row in zip(known.values(), rows, strict=True):
        said = listed[row[-1]]
        for mark in re.findall(r"(?<= )\[\d+\]", said):
            said = said.replace(mark, f"({listed[mark]})")
        assert said == number.source


@pytest.mark.parametrize("name", device_names())
def test_bytes_of_a_device_are_in_one_family_of_units(name: str) -> None:
    rows = number_rows(numbers(load_device(name)), Sources())
    families = {
        unit[1:] == "iB"
        for row in rows
        if row[0].endswith(".capacity_bytes") or row[0].endswith("_bytes")
        if (unit := row[1].split()[-1]) != "B"
    }
    assert len(families) == 1


def test_the_command_is_as_wide_as_columns_say(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, twin("hardware", "mi300x").out.splitlines())) == 80
