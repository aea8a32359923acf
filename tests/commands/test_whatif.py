"""`twin whatif` compares under the conditions that it is given, and says what it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import Twin
from tests.refusals import refused_command

EXPERTS = ("gpt-oss-20b", "2xh200", "--expert-ranks", 2, "--blocks", 4)
DENSE = ("llama-3.2-1b", "1xh200", "--blocks", 8)


def answer(twin: Twin, *words: object) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(twin(*words, "--json").out)
    return found


def test_a_changed_routing_is_that_of_simulate(twin: Twin) -> None:
    routing = "zipf:1.5"
    found = answer(twin, "whatif", *EXPERTS, "--set", f"routing={routing}")
    before, after = (
        json.loads(twin("simulate", *EXPERTS, *more, "--json").out)
        for more in ((), ("--routing", routing))
    )
    assert found["baseline"]["tokens_per_s"] == before["tokens_per_s"]
    assert found["changed"]["tokens_per_s"] == after["tokens_per_s"]
    assert after["tokens_per_s"] < before["tokens_per_s"]


def test_accepted_drafts_are_counted(twin: Twin) -> None:
    base = (*DENSE, "--draft", 3)
    few, more = (
        answer(twin, "whatif", *base, "--set", f"acceptance={rate}", "--sweep", "context=64,128")
        for rate in (0.1, 0.9)
    )
    speeds = [json.dumps(one) for one in (few, more)]
    assert speeds[0] != speeds[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--set", "routing=nothing"), "uniform, zipf:EXPONENT"),
        (("--set", "context=64", "--set", "context=128"), "context is set twice"),
        (("--sweep", "clock=x1,x2", "--sweep", "clock=x3"), "clock is swept twice"),
    ],
)
def test_what_says_nothing_or_two_things_is_refused(
    twin: Twin, words: tuple[str, ...], says: str
) -> None:
    refused_command(twin, "whatif", *DENSE, *words, says=(says,))


@pytest.mark.parametrize("command", ["simulate", "whatif", "hardware"])
def test_links_in_a_circle_are_a_file_that_cannot_be_read(
    twin: Twin, tmp_path: Path, command: str
) -> None:
    circle = tmp_path / "circle.yaml"
    circle.symlink_to(circle)
    words = {"hardware": [], "simulate": ["llama-3.2-1b"], "whatif": ["llama-3.2-1b"]}[command]
    more = ["--set", "clock=x1"] if command == "whatif" else []
    refused_command(twin, command, *words, circle, *more, says=("circle.yaml", "cannot be read"))
