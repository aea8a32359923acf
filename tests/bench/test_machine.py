"""What nvidia-smi says, and which commit measured."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from twin.bench import machine
from twin.bench.machine import Clocks, commit, parse_states
from twin.errors import ConfigError, EngineError

LINE = "NVIDIA H200, 580.159.04, 1980, 3201, 1980, 3201, 587.31, 51\n"


def test_a_state_is_read_by_name() -> None:
    state = parse_states(LINE)[0]
    assert (state["gpu"], state["driver"]) == ("NVIDIA H200", "580.159.04")
    assert (state["sm_mhz"], state["memory_mhz"], state["power_w"], state["temperature_c"]) == (
        1980,
        3201,
        587.31,
        51,
    )


def test_what_the_driver_does_not_tell_is_none_and_other_lines_are_left_out() -> None:
    states = parse_states(LINE + LINE.replace("587.31", "[N/A]") + "WARNING: something")
    assert [state["power_w"] for state in states] == [587.31, None]


def test_clocks_are_summed_up() -> None:
    clocks = Clocks(
        under_load=parse_states(LINE + LINE.replace("1980, 3201, 1980", "1500, 3201, 1980"))
    )
    made = clocks.to_json()
    assert made["under_load"]["sm_mhz"] == {"low": 1500, "median": 1740, "high": 1980}
    assert made["after_rounds"]["sm_mhz"] is None
    assert made["max_sm_mhz"] == 1980


def test_clocks_are_read_while_the_block_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    monkeypatch.setattr(machine, "gpu_states", lambda gpus: looked.set() or parse_states(LINE))
    clocks = Clocks()
    with clocks:
        assert looked.wait(PATIENCE_S)
    seen = len(clocks.under_load)
    assert seen > 0
    clocks.after_round()
    assert (len(clocks.under_load), len(clocks.after_rounds)) == (seen, 1)


def test_without_a_driver_the_next_step_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    with pytest.raises(EngineError, match="run on a computer with an NVIDIA GPU"):
        machine.gpu_states()


def test_commit_says_when_files_differ(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    assert commit(tmp_path, None) == head
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path, None) == f"{head}-dirty"
    assert commit(tmp_path, "given") == "given"


def test_no_checkout_asks_for_the_commit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --commit ID"):
        commit(tmp_path, None)


def test_all_gpus_of_a_node_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        wanted.append(command)
        return subprocess.CompletedProcess(command, 0, LINE * 2, "")

    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine.subprocess, "run", run)
    clocks = Clocks(2)
    clocks.after_round()
    assert wanted[0][1] == "--id=0,1"
    assert len(clocks.after_rounds) == 2
    with pytest.raises(EngineError, match="expected 4 lines"):
        machine.gpu_states(4)
