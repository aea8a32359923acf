"""What no command line may do: end in a traceback, hurt the terminal, or take numbers that no plan
could have.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.command_line import Twin
from twin.cli import build_parser
from twin.commands.output import LONGEST_MESSAGE, harmless, one_line
from twin.commands.reference import subparsers
from twin.plan.options import Options
from twin.study.options import CONDITIONS, RANGES, option_value
from twin.study.store import Store

SMALL = ("1xh200", "--blocks", "4")


@pytest.mark.parametrize("columns", [60, 80, 132])
def test_help_is_as_wide_as_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name, parser in subparsers(build_parser()).items():
        said = parser.format_help()
        assert "\\" not in said, name
        lines = said.partition("\nexamples:")[0].splitlines()
        # a usage, a path or a list of choices is one word
        wide = [one for one in lines if len(one) > columns and len(one.split()) > 4]
        assert [one for one in wide if not one.startswith("usage:")] == [], name


def test_every_number_of_a_plan_has_a_range() -> None:
    numbers = {
        field.name for field in fields(Options) if field.type in ("int", "int | None", "float")
    }
    assert numbers | {name for name, kind in CONDITIONS.items() if kind is not str} == RANGES.keys()
    for field in fields(Options):
        if field.name in RANGES and field.default is not None:
            assert option_value(field.name, field.default) == field.default


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--slot-bytes", "0"), ("slot_bytes=0", "at least 16")),
        (("--batch", "1000000"), ("batch=1000000", "at most 1024")),
        (("--draft", "1000"), ("draft=1000", "at most 64")),
        (
            ("--max-context", "99999999999999999999"),
            ("max_context=99999999999999999999", "at most 2147483647"),
        ),
        (("--context", "9" * 5000), ("--context", "out of range")),
        (("--slot-bytes", "9" * 5000), ("--slot-bytes", "out of range")),
        (("--attention-splits", "0"), ("attention_splits=0", "at least 1")),
        (("--blocks=--",), ("--blocks", "'--' is not a whole number")),
        (("--dtype=--",), ("'--' is unknown",)),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(
    words: tuple[str, ...], says: tuple[str, ...], twin: Twin, checkpoint: Path
) -> None:
    outcome = twin("plan", checkpoint, "1xh200", *words)
    assert (outcome.code, outcome.out) == (2, "")
    for part in says:
        assert part in outcome.err


def test_two_dashes_are_a_value_where_they_are_given_as_one(twin: Twin, checkpoint: Path) -> None:
    assert (
        twin("run", checkpoint, "--prompt=--", "--max-tokens", "2", "--blocks", "2", "--json").code
        == 0
    )


@pytest.mark.parametrize("stop", ["²", "٣", "½"])
def test_a_stop_that_is_no_plain_number_is_text(stop: str, twin: Twin, checkpoint: Path) -> None:
    assert (
        twin(
            "run", checkpoint, "--prompt", "a", "--max-tokens", "2", "--blocks", "2", "--stop", stop
        ).code
        == 0
    )


@pytest.mark.parametrize("stop", ["", "9" * 5000, "99999999999999999999"])
def test_a_stop_that_cannot_be_is_refused(stop: str, twin: Twin, checkpoint: Path) -> None:
    outcome = twin("run", checkpoint, "--prompt", "a", "--max-tokens", "2", f"--stop={stop}")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--stop" in outcome.err


def test_a_model_of_few_positions_is_planned_without_choosing_a_context(
    twin: Twin, checkpoint: Path, tmp_path: Path
) -> None:
    config = (checkpoint / "config.json").read_text()
    assert '"max_position_embeddings": 256' in config
    (tmp_path / "config.json").write_text(
        config.replace('"max_position_embeddings": 256', '"max_position_embeddings": 64')
    )
    for command in ("plan", "simulate"):
        assert twin(command, tmp_path, *SMALL).code == 0
    assert twin("plan", tmp_path, *SMALL, "--context", "65").code == 2
    assert twin("plan", checkpoint, *SMALL, "--max-context", "32").code == 0


def test_a_sweep_beyond_all_time_is_refused_before_it_is_expanded(
    twin: Twin, checkpoint: Path, tmp_path: Path
) -> None:
    values = ",".join(map(str, range(1, 201)))
    sweeps = [
        word
        for name in ("context", "seed", "lane-stagger-ns", "copies")
        for word in ("--sweep", f"{name}={values}")
    ]
    outcome = twin("whatif", checkpoint, *SMALL, *sweeps, "--store", tmp_path)
    assert (outcome.code, outcome.out) == (2, "")
    assert "1600000000 combinations" in outcome.err
    assert "at most 100,000" in outcome.err


# ---- the terminal --------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("plan",), ("hardware",), ("models",), ("trace",), ("project",)])
def test_names_cannot_move_the_cursor_or_fill_the_screen(
    words: tuple[str, ...], twin: Twin
) -> None:
    evil = "\x1b[2J\r\x9b31m\u202e" + "x" * 300_000
    outcome = twin(
        *words,
        *(("1xh200",) if words[0] in ("plan", "trace") else ()),
        evil,
        *(("1xh200",) if words[0] == "plan" else ()),
    )
    assert (outcome.code, outcome.out) == (2, "")
    assert all(letter.isprintable() or letter == "\n" for letter in outcome.err)
    assert len(outcome.err) <= LONGEST_MESSAGE + 200


def test_a_message_is_one_bounded_line() -> None:
    assert one_line("a\n  b\tc\x07") == "a b\\tc\\x07"
    assert len(one_line("x\n" * 10**6)) == LONGEST_MESSAGE
    assert harmless("µs · 5 → 6\n") == "µs · 5 → 6\n"


# ---- what is not a TwinError ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            OSError(errno.EIO, os.strerror(errno.EIO), "/some/\x1bfile"),
            2,
            "'/some/\\x1bfile': Input/output error",
        ),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), 2, "Permission denied"),
        (MemoryError(), 2, "not enough memory"),
        (RecursionError(), 2, "nested too deeply"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_error_of_the_system_is_a_traceback(
    error: BaseException, code: int, says: str, twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr("twin.commands.models.load_model", fail)
    outcome = twin("models", "laneformer-2b")
    assert (outcome.code, outcome.out) == (code, "")
    assert says in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_full_disk_under_the_result_is_said_once() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "twin.cli", "models"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_sign_that_the_terminal_lacks_is_escaped() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "twin.cli", "hardware", "host"],
        capture_output=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ---- studies that are killed ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_study_goes_on_where_it_stopped(
    checkpoint: Path, tmp_path: Path, twin: Twin
) -> None:
    contexts = ",".join(map(str, range(1, 61)))
    words = [
        "whatif",
        str(checkpoint),
        *SMALL,
        "--sweep",
        f"context={contexts}",
        "--store",
        str(tmp_path / "store"),
        "--workers",
        "1",
    ]
    script = (
        "import twin.study.runner as r; r.KEEP_S = 0.05; from twin.cli import main; import sys; "
        "main(sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    for line in process.stderr:
        if line.startswith("twin: cells: 1") and any((tmp_path / "store").glob("*.parquet")):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    store = tmp_path / "store"
    kept = Store(store).count()
    assert kept
    outcome = twin(*words)
    assert outcome.code == 0, outcome.err
    keys = [
        key
        for file in Store(store).files()
        for key in pq.read_table(file, columns=["key"])["key"].to_pylist()
    ]
    assert len(keys) > kept
    assert len(set(keys)) == len(keys)  # what was there was not computed again


def test_what_a_killed_study_was_writing_is_no_result_and_goes_away(tmp_path: Path) -> None:
    old, young = tmp_path / ".old.parquet", tmp_path / ".young.parquet"
    for hidden in (old, young):
        hidden.write_bytes(b"PAR1half")
    os.utime(old, (0, 0))
    store = Store(tmp_path)
    assert store.find(["key"]) == {}
    assert store.count() == 0
    assert (old.exists(), young.exists()) == (False, True)
