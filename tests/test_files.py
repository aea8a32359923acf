"""Outputs: refused before the work, whole or not at all, and only where the user
wants them.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests.command_line import Twin
from twin.errors import ConfigError, OutputError
from twin.files import check_file, check_folder, check_stems, read_text, write

SIMULATE = ("1xh200", "--blocks", "8")
LONG = "n" * 300


@pytest.fixture
def never_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(*_: object, **__: object) -> None:
        raise AssertionError("simulated before the output was refused")

    monkeypatch.setattr("twin.commands.simulate.simulate", simulate)


@pytest.mark.usefixtures("never_simulated")
@pytest.mark.parametrize("flag", ["--trace", "--report"])
@pytest.mark.parametrize(
    ("place", "says"),
    [
        (".", "is a folder"),
        ("", "empty name"),
        ("/dev/full", "no ordinary file"),
        ("/dev/null", "no ordinary file"),
        ("/proc/page.html", "cannot be written"),
        ("file/page.html", "is no folder"),
        (LONG, "File name too long"),
        ("new/" + LONG, "at most 255"),
        ("a/" * 3000 + "b", "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(
    flag: str,
    place: str,
    says: str,
    twin: Twin,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    outcome = twin("simulate", checkpoint, *SIMULATE, f"{flag}={place}")
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert says in outcome.err
    assert len(outcome.err) < 3000
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_looking_ahead_leaves_nothing(tmp_path: Path) -> None:
    check_file(tmp_path / "a" / "b" / "page.html")
    check_folder(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    old.write_text("before")
    written: list[int] = []

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("twin.files.os.fsync", full)
    with pytest.raises(OutputError, match=r"No space left on device.*make room"):
        write({old: "after", new: "after"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old.csv": "before"}


def test_a_file_keeps_its_permissions_and_its_link(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("before")
    kept.chmod(0o640)
    (tmp_path / "link").symlink_to(kept)
    write({tmp_path / "link": "after"})
    assert kept.read_text() == "after"
    assert kept.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "link").is_symlink()


def test_undecodable_bytes_of_a_name_do_not_end_a_report(tmp_path: Path) -> None:
    write({tmp_path / "page": os.fsdecode(b"model \xff")})
    assert (tmp_path / "page").read_text() == "model \\udcff"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "a\\b",
        ".hidden",
        "a b",
        "größe",
        "a\n",
        "Cost",
        "a" * 201,
        "-x",
        "a..b",
    ],
)
def test_a_name_that_is_no_plain_file_name_is_refused(name: str) -> None:
    with pytest.raises(OutputError):
        check_stems([name])


def test_names_that_meet_in_one_file_are_refused() -> None:
    check_stems(["cost", "long", "held-out", "ladder-qwen2.5-1xh200"])
    with pytest.raises(OutputError, match="two files"):
        check_stems(["cost", "long", "cost"])


def test_a_device_without_end_is_refused_soon() -> None:
    with pytest.raises(ConfigError, match="more than 1,000 bytes"):
        read_text(Path("/dev/zero"), 1000)


def test_a_prompt_without_end_is_refused(twin: Twin, checkpoint: Path) -> None:
    outcome = twin("run", checkpoint, "--prompt-file", "/dev/zero")
    assert (outcome.code, outcome.out) == (2, "")
    assert "more than" in outcome.err


def test_a_report_that_fails_at_the_end_leaves_no_output(
    twin: Twin, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("twin.files.os.fsync", full)
    outcome = twin("simulate", checkpoint, *SIMULATE, "--json", "--trace", tmp_path / "trace.json")
    assert (outcome.code, outcome.out) == (2, "")
    assert "No space left" in outcome.err
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert json.loads(
        twin("simulate", checkpoint, *SIMULATE, "--json", "--trace", tmp_path / "trace.json").out
    )
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
