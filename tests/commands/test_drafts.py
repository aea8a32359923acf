"""What drafts are worth, by `twin simulate`, `twin whatif` and `twin bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import Twin
from tests.refusals import refused_command

DENSE = ("llama-3.2-1b", "1xh200")


def test_simulate_says_what_drafts_are_worth(twin: Twin) -> None:
    words = ("simulate", *DENSE, "--draft", "eagle3:3", "--acceptance", "minimax-m3-eagle3")
    found = json.loads(twin(*words, "--json").out)["drafts"]
    widths = found["widths"]
    assert [one["drafts"] for one in widths] == [0, 1, 2, 3]
    assert widths[3]["tokens_per_round"] == 2.83
    speeds = [one["tokens_per_s"] for one in widths]
    assert found["best"] == speeds.index(max(speeds))
    assert all(one["verify_cost"] > 1 for one in widths[1:])
    said = twin(*words).out
    assert "break-even" in said
    assert "MiniMax-M3" in said


def test_a_sweep_of_drafts_is_what_simulate_says(twin: Twin) -> None:
    chosen = ("--set", "drafter=lookup", "--set", "acceptance=0.8", "--sweep", "draft=0..2")
    rows = twin("whatif", *DENSE, *chosen, "--draws", 0, "--json").out
    words = ("simulate", *DENSE, "--draft", "lookup:2", "--acceptance", "0.8", "--json")
    widths = json.loads(twin(*words).out)["drafts"]["widths"]
    for one in widths[1:]:
        assert f"{one['tokens_per_s']:.6g}"[:6] in rows


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--draft", "eagle3:5"), "needs --acceptance"),
        (("--draft", "eagle3:9", "--acceptance", "0.5"), "a colon and how many"),
        (("--draft", "lookup:2", "--acceptance", "nobody"), "a curve of"),
        (("--draft", "lookup:2", "--acceptance", "1.5"), "between 0 and 1"),
        (("--draft", "lookup:2", "--acceptance", "1", "--draft-time", "1us"), "--draft-time"),
        (("--draft", "lookup:2", "--acceptance", "1", "--batch", "2"), "batch=1"),
    ],
)
def test_wrong_drafts_are_refused(twin: Twin, words: tuple[str, ...], says: str) -> None:
    refused_command(twin, "simulate", *DENSE, *words, says=(says,))


@pytest.mark.parametrize("text", ["draft=7..0", "draft=0..999", "draft=0..9999999999"])
def test_a_range_is_short_and_rises(twin: Twin, text: str) -> None:
    refused_command(twin, "whatif", *DENSE, "--sweep", text, says=("a larger one",))


def test_bench_times_rounds_of_a_forced_length(twin: Twin, checkpoint: Path) -> None:
    words = ("--repeats", 2, "--tokens", 30, "--draft", "lookup:3", "--force-acceptance", "2.5")
    data = json.loads(twin("bench", checkpoint, *words, "--json").out)
    assert data["tokens_per_round"] == pytest.approx(2.5, rel=0.1)
    assert data["drafts"] == 3
    assert data["round_s"] > 0 < data["verify_cost"]
    assert data["logit_difference"] < 1e-3
    refused_command(twin, "bench", checkpoint, *words[:-1], "4.5", says=("from 1 to 4",))
