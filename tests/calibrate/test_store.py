"""Runs and fits on disk: whole, and named where they are not."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.calibrate.pretended import stored_run
from tests.command_line import Twin
from twin.calibrate import store
from twin.calibrate.node import calibrated_node, fits_of
from twin.errors import CalibrationError, OutputError
from twin.hardware.number import Kind, Number
from twin.study.interval import Draws, settings

NUMBERS = {"handoff.hop_s": Number(1e-6, Kind.FITTED, "x", 0.9e-6, 1.1e-6)}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.HOME_VARIABLE, str(tmp_path))
    return tmp_path


def test_a_fit_is_read_as_it_was_written() -> None:
    store.write_fit("1xh200-sxm", NUMBERS, {"run": "r"})
    assert store.read_fit("1xh200-sxm") == (NUMBERS, {"node": "1xh200-sxm", "run": "r"})


def test_a_number_that_is_not_bound_is_read_as_such() -> None:
    unbound = {path: replace(number, kind=Kind.UNBOUND) for path, number in NUMBERS.items()}
    store.write_fit("1xh200-sxm", unbound, {})
    assert store.read_fit("1xh200-sxm") == (unbound, {"node": "1xh200-sxm"})


def test_a_node_of_one_is_called_by_its_device_on_disk(home: Path) -> None:
    assert (
        store.fit_file("1xh200-sxm")
        == store.fit_file("h200-sxm")
        == home / "fits" / "h200-sxm.yaml"
    )
    assert store.runs_folder("1xh200-sxm") == home / "runs" / "h200-sxm"
    assert store.runs_folder("8xh200-sxm") == home / "runs" / "8xh200-sxm"


@pytest.mark.parametrize("meta", [{"device": "h200-sxm"}, {"node": "1xh200-sxm"}])
def test_runs_that_name_a_device_or_a_node_of_one_are_adopted(
    meta: dict[str, str], home: Path
) -> None:
    store.save_run(home / "run", meta | {"date": "2026-11-21T10:00:00+00:00"}, {"a": [1.0]})
    assert store.adopt_run(home / "run", "1xh200-sxm", "probes").id == "2026-11-21T100000-probes"
    with pytest.raises(CalibrationError, match="measured on h200-sxm, not on 8xh200-sxm"):
        store.adopt_run(home / "run", "8xh200-sxm", "probes")


def test_runs_of_one_second_keep_their_samples_each(home: Path) -> None:
    made = [
        stored_run("h200-sxm", "probes", {"device": "h200-sxm"}, {"a": [n]})
        for n in (1.0, 2.0, 3.0)
    ]
    assert len({run.folder for run in made}) == 3
    assert all(run.folder.name.endswith("-probes") for run in made)
    assert [store.read_run(run.folder).samples["a"] for run in made] == [[1.0], [2.0], [3.0]]
    date = {"device": "h200-sxm", "date": "2026-11-21T10:00:00+00:00"}
    for name, value in (("one", 1.0), ("other", 2.0)):
        store.save_run(home / name, date, {"a": [value]})
    for _ in range(2):  # the second time both are there
        adopted = [
            store.adopt_run(home / name, "1xh200-sxm", "probes") for name in ("one", "other")
        ]
        assert [run.samples["a"] for run in adopted] == [[1.0], [2.0]]
    assert len({run.folder for run in adopted}) == 2


def fitted(value: float) -> Number:
    return Number(value, Kind.FITTED, "test", value / 2, value * 2)


def test_a_fit_of_one_device_serves_every_node_of_them_and_that_of_a_node_comes_on_top() -> None:
    store.write_fit(
        "1xh200-sxm", {"handoff.hop_s": fitted(7e-7), "memory.latency_s": fitted(6e-7)}, {}
    )
    store.write_fit(
        "8xh200-sxm", {"link.hop_s": fitted(9e-7), "memory.latency_s": fitted(8e-7)}, {}
    )
    one, four, eight = (calibrated_node(name) for name in ("1xh200", "4xh200", "8xh200"))
    assert one.device == four.device
    assert one.device.handoff.hop_s == eight.device.handoff.hop_s == fitted(7e-7)
    assert (four.device.memory.latency_s, eight.device.memory.latency_s) == (
        fitted(6e-7),
        fitted(8e-7),
    )
    assert eight.link is not None
    assert four.link is not None
    assert (eight.link.hop_s, four.link.hop_s.kind) == (fitted(9e-7), Kind.MEASURED)
    assert fits_of(four) == {"1xh200-sxm": {"device.handoff.hop_s", "device.memory.latency_s"}}
    assert fits_of(eight)["8xh200-sxm"] == {"link.hop_s", "device.memory.latency_s"}


def test_draws_of_a_node_take_those_of_its_fits_together() -> None:
    store.write_fit(
        "1xh200-sxm", {"handoff.hop_s": fitted(7e-7)}, {"together": {"handoff.hop_s": [0.5, 2.0]}}
    )
    store.write_fit(
        "8xh200-sxm", {"link.hop_s": fitted(9e-7)}, {"together": {"link.hop_s": [0.5, 2.0]}}
    )
    for drawn in map(dict, settings(calibrated_node("8xh200"), Draws(8, 1))):
        assert drawn["device.handoff.hop_s"] in (pytest.approx(3.5e-7), pytest.approx(1.4e-6))
        assert drawn["link.hop_s"] in (pytest.approx(4.5e-7), pytest.approx(1.8e-6))


def test_a_fit_that_cannot_be_written_leaves_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = store.write_fit("h200-sxm", NUMBERS, {})
    before = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("twin.files.os.fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        store.write_fit("h200-sxm", {}, {})
    assert [path.read_bytes() for path in file.parent.iterdir()] == [before]


ENTRY = "numbers: {{a: {{value: {}, low: 1, high: 2, source: y}}}}"


def test_a_place_that_cannot_hold_runs_is_refused_before_measuring(
    home: Path, twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object, **__: object) -> None:
        raise AssertionError("measured first")

    monkeypatch.setattr("twin.commands.calibrate.measure_probes", measure)
    monkeypatch.setattr("twin.commands.validate.measure_held_out", measure)
    (home / "runs").write_text("a file")
    for words in (
        ("calibrate", "host"),
        ("calibrate", "host", "--quick"),
        ("demo", "--out", str(home / "out")),
    ):
        outcome = twin(*words)
        assert (outcome.code, outcome.out) == (2, ""), outcome
        assert "is no folder" in outcome.err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "numbers: 3",
        "numbers: {a: 1}",
        "device: x",
        "{",
        ENTRY.format("x"),
        ENTRY.format(".nan"),
        "\x00",
        "[" * 5000,
    ],
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
    ("name", "data"),
    [
        ("meta.yaml", b""),
        ("meta.yaml", b"\xff\xfe"),
        ("meta.yaml", b"{"),
        ("samples.csv", b"\xff\xfe"),
    ],
)
def test_a_damaged_run_is_named(name: str, data: bytes, home: Path) -> None:
    run = store.save_run(home / "run", {"device": "x"}, {"probe": [1.0]})
    (run.folder / name).write_bytes(data)
    with pytest.raises(CalibrationError, match=f"{name}.*measure again"):
        store.read_run(run.folder)
