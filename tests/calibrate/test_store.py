"""Runs and fits on disk: whole, and named where they are not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.command_line import Twin
from twin.calibrate import store
from twin.errors import CalibrationError, OutputError
from twin.hardware.types import Kind, Number

NUMBERS = {"handoff.hop_s": Number(1e-6, Kind.FITTED, "x", 0.9e-6, 1.1e-6)}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.HOME_VARIABLE, str(tmp_path))
    return tmp_path


def test_a_fit_is_read_as_it_was_written() -> None:
    store.write_fit("h200-sxm", NUMBERS, {"run": "r"})
    assert store.read_fit("h200-sxm") == (NUMBERS, {"device": "h200-sxm", "run": "r"})


def test_a_fit_that_cannot_be_written_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    file = store.write_fit("h200-sxm", NUMBERS, {})
    before = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("twin.files.os.fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        store.write_fit("h200-sxm", {}, {})
    assert [path.read_bytes() for path in file.parent.iterdir()] == [before]


ENTRY = "numbers: {{a: {{value: {}, low: 1, high: 2, source: y}}}}"


def test_a_place_that_cannot_hold_runs_is_refused_before_measuring(home: Path, twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object, **__: object) -> None:
        raise AssertionError("measured first")

    monkeypatch.setattr("twin.commands.calibrate.measure_probes", measure)
    monkeypatch.setattr("twin.commands.validate.measure_held_out", measure)
    (home / "runs").write_text("a file")
    for words in (("calibrate", "host"), ("calibrate", "host", "--quick"), ("demo", "--out", str(home / "out"))):
        outcome = twin(*words)
        assert (outcome.code, outcome.out) == (2, ""), outcome
        assert "is no folder" in outcome.err


@pytest.mark.parametrize(
    "text",
    ["", "[]", "numbers: 3", "numbers: {a: 1}", "device: x", "{", ENTRY.format("x"), ENTRY.format(".nan"), "\x00", "[" * 5000],
)
def test_a_damaged_fit_is_named_with_the_next_step(text: str, twin: Twin) -> None:
    file = store.fit_file("h200-sxm")
    file.parent.mkdir(parents=True)
    file.write_text(text)
    outcome = twin("plan", "llama-3.2-1b", "1xh200")
    assert (outcome.code, outcome.out) == (2, "")
    assert str(file) in outcome.err
    assert "twin calibrate h200-sxm" in outcome.err


@pytest.mark.parametrize(
    ("name", "data"), [("meta.yaml", b""), ("meta.yaml", b"\xff\xfe"), ("meta.yaml", b"{"), ("samples.csv", b"\xff\xfe")]
)
def test_a_damaged_run_is_named(name: str, data: bytes, home: Path) -> None:
    run = store.save_run(home / "run", {"device": "x"}, {"probe": [1.0]})
    (run.folder / name).write_bytes(data)
    with pytest.raises(CalibrationError, match=f"{name}.*measure again"):
        store.read_run(run.folder)
