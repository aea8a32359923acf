"""Points: keyed by content, kept on disk, never computed twice, whatever is interrupted or dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.command_line import Twin
from tests.conftest import POINTS
from tests.patience import PATIENCE_S
from twin.errors import ConfigError, EngineError
from twin.study import point as point_module
from twin.study.local import Batch, in_process, pool_of
from twin.study.point import Point, Row, key_of
from twin.study.runner import Runner
from twin.study.store import VARIABLE, Store

ROOT = Path(__file__).resolve().parents[2]


def points(checkpoint: Path, count: int) -> list[Point]:
    return [
        Point(str(checkpoint), "1xh200").with_options(blocks=4, context=16 + i)
        for i in range(count)
    ]


# ---- content -------------------------------------------------------------------------------------


def test_tests_keep_their_points_where_the_store_looks() -> None:
    assert POINTS == VARIABLE


def test_key_sees_content_and_not_names(checkpoint: Path) -> None:
    base = points(checkpoint, 1)[0]
    assert key_of(base) == key_of(replace(base, node="1xh200-sxm"))
    stream = base.on_node().device.memory.stream_bytes_per_s.value
    assert key_of(base.with_settings(("memory.stream", stream * 2))) == key_of(
        base.with_settings(("device.memory.stream_bytes_per_s", stream * 2))
    )
    different = [
        base.with_options(context=17),
        base.with_settings(("memory.stream", "x1.5")),
        base.with_settings(("clock", "x0.5")),
        replace(base, node="2xh200"),
        replace(base, steps=3),
    ]
    assert len({key_of(one) for one in [base, *different]}) == 6


def test_conditions_are_content_and_reach_the_simulation() -> None:
    base = Point("qwen3-30b-a3b", "1xh200").with_options(blocks=8, layers=2)
    dense = Point("qwen2.5-coder-1.5b", "1xh200").with_options(blocks=8, layers=2)
    different = [
        base.with_options(routing="zipf:1.0"),
        base.with_options(seed=1),
        base.with_options(layers=3),
        replace(base, steps=5),
    ]
    assert len({key_of(one) for one in [base, *different]}) == 5
    rows = Runner.inline().rows(
        [
            replace(base, steps=5),
            dense,
            dense.with_options(format="fp8-128x128"),
            dense.with_options(batch=4),
        ]
    )
    assert len(rows[0].step_times_s) == 4
    assert rows[2].bytes_per_step < rows[1].bytes_per_step
    assert rows[3].sequences == 4
    assert rows[3].total_tokens_per_s == pytest.approx(4 * rows[3].tokens_per_s)
    draft = dense.with_options(draft=2, acceptance=0.5, draft_step_s="20 us")
    drafted = Runner.inline().rows([draft])[0]
    assert drafted.tokens_per_step == pytest.approx(1 + 0.5 + 0.25)
    assert drafted.tokens_per_s == pytest.approx(1.75 / (drafted.step_s + 2 * 20e-6))


def test_key_changes_with_the_simulators_code(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = points(checkpoint, 1)[0]
    before = key_of(base)
    monkeypatch.setattr(point_module, "code_version", lambda: "another")
    assert key_of(base) != before


def test_clock_changes_the_blocks_and_not_the_memory(checkpoint: Path) -> None:
    base = points(checkpoint, 1)[0].on_node().device
    slow = points(checkpoint, 1)[0].with_settings(("clock", "x0.5")).on_node().device
    assert slow.kernel.stage_s.value == pytest.approx(2 * base.kernel.stage_s.value)
    assert slow.kernel.fp16_bytes_per_s.value == pytest.approx(
        0.5 * base.kernel.fp16_bytes_per_s.value
    )
    # but for the spread of its answers, which is counted in a block's cycles
    assert replace(slow.memory, jitter_s=base.memory.jitter_s) == base.memory
    assert slow.block.on_chip_bytes == base.block.on_chip_bytes
    assert slow.handoff == base.handoff


# ---- on disk -------------------------------------------------------------------------------------


class Counting:
    """Work in this process that counts what it was given, and may stop in the middle."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.wanted: list[Point] = []
        self.stop_after = stop_after

    def __call__(self, batches: Sequence[Batch]) -> Iterator[tuple[int, list[Row]]]:
        for done, (index, rows) in enumerate(in_process(batches)):
            if done == self.stop_after:
                raise KeyboardInterrupt
            self.wanted += batches[index]
            yield index, rows


def runner(work: Counting, folder: Path) -> Runner:
    return Runner(work, workers=4, store=Store(folder), progress=lambda message: None)


def test_nothing_is_computed_twice(checkpoint: Path, tmp_path: Path) -> None:
    first, second = Counting(), Counting()
    wanted = points(checkpoint, 3)
    rows = runner(first, tmp_path).rows([*wanted, *wanted])
    assert rows[:3] == rows[3:]
    assert len(first.wanted) == 3
    again = runner(second, tmp_path).rows([*reversed(wanted), *points(checkpoint, 4)[3:]])
    assert again[:3] == rows[2::-1]
    assert len(second.wanted) == 1
    assert Store(tmp_path).count() == 4


def test_why_the_work_is_slow_is_said_once(checkpoint: Path) -> None:
    said: list[str] = []

    def slowly(batches: Sequence[Batch]) -> Iterator[tuple[int, list[Row]]]:
        return (
            (index, [replace(row, why_simpy="no compiler") for row in rows])
            for index, rows in in_process(batches)
        )

    runner = Runner(slowly, workers=4, store=None, progress=said.append)
    runner.rows(points(checkpoint, 3), "cells")
    runner.rows(points(checkpoint, 5), "details")
    assert len([message for message in said if "no compiler" in message]) == 1
    assert len([message for message in said if "left" in message]) == 5


def test_a_part_says_how_long_it_takes_before_its_first_point_is_done(
    checkpoint: Path, tmp_path: Path
) -> None:
    """By the points that this run has computed, or by those on file."""
    said: list[str] = []
    for count in (3, 5):
        run = Runner(in_process, workers=1, store=Store(tmp_path), progress=said.append)
        run.rows(points(checkpoint, count), "cells")
        run.rows(points(checkpoint, count + 1), "details")
    begun = [message for message in said if ": 0/" in message]
    assert re.fullmatch(r"cells: 0/3", begun[0])
    assert len(begun) == 4
    assert all(re.search(r": 0/1, about \d+ (s|min)$", message) for message in begun[1:])


def test_row_survives_the_disk_to_the_last_bit(checkpoint: Path, tmp_path: Path) -> None:
    rows = runner(Counting(), tmp_path).rows(points(checkpoint, 1))
    found = Store(tmp_path).find([rows[0].key])
    assert found == {rows[0].key: rows[0]}
    assert found[rows[0].key].kinds
    assert found[rows[0].key].wall_s == rows[0].wall_s


def test_impossible_point_is_a_result_too(checkpoint: Path, tmp_path: Path) -> None:
    broken = Point("qwen2.5-coder-1.5b", "8xh200")
    row = runner(Counting(), tmp_path).rows([broken])[0]
    assert "heads" in row.problem
    work = Counting()
    assert runner(work, tmp_path).rows([broken]) == [row]
    assert not work.wanted


def test_interrupted_work_is_kept_and_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    wanted = points(checkpoint, 5)
    with pytest.raises(KeyboardInterrupt):
        runner(Counting(stop_after=2), tmp_path).rows(wanted)
    assert Store(tmp_path).count() == 2
    rest = Counting()
    rows = runner(rest, tmp_path).rows(wanted)
    assert len(rest.wanted) == 3
    assert all(row.step_s > 0 for row in rows)


def test_half_a_file_is_never_seen(checkpoint: Path, tmp_path: Path) -> None:
    runner(Counting(), tmp_path).rows(points(checkpoint, 1))
    (tmp_path / ".20260101T000000-torn.parquet").write_bytes(b"PAR1 and then the power went")
    assert len(Store(tmp_path).find([key_of(points(checkpoint, 1)[0])])) == 1


def test_changed_code_during_a_run_is_noticed(checkpoint: Path, tmp_path: Path) -> None:
    def stale(batches: Sequence[Batch]) -> Iterator[tuple[int, list[Row]]]:
        for index, rows in in_process(batches):
            yield index, [replace(row, key="made by other code") for row in rows]

    with pytest.raises(EngineError, match="code has changed"):
        Runner(stale, workers=1, store=Store(tmp_path), progress=lambda message: None).rows(
            points(checkpoint, 1)
        )


def test_a_table_without_keys_is_nobodys_result_and_one_without_values_is_named(
    checkpoint: Path, tmp_path: Path
) -> None:
    rows = runner(Counting(), tmp_path).rows(points(checkpoint, 1))
    parquet.write_table(pa.table({"of": ["somebody", "else"]}), tmp_path / "other.parquet")
    assert Store(tmp_path).find([rows[0].key]) == {rows[0].key: rows[0]}
    parquet.write_table(pa.table({"key": [rows[0].key]}), tmp_path / "torn.parquet")
    with pytest.raises(ConfigError, match=r"torn\.parquet"):
        Store(tmp_path).find([rows[0].key])


# ---- processes -----------------------------------------------------------------------------------


def test_workers_have_the_environment_of_whoever_starts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("MONOTWIN_A_TEST", value)
        with pool_of(1) as pool:
            assert pool.submit(os.getenv, "MONOTWIN_A_TEST").result() == value


def test_a_killed_worker_costs_nothing_but_time(checkpoint: Path, tmp_path: Path) -> None:
    """A real pool; the first worker that shows progress is killed while others of its batches are
    open.
    """
    script = (
        "import multiprocessing, os, signal, sys\nfrom pathlib import Path\n"
        "from twin.study.point import Point\nfrom twin.study.runner import Runner\n"
        "from twin.study.store import Store\nif __name__ == '__main__':\n    killed = []\n"
        "    def show(message):\n        if not killed and not message.startswith('points: 0'):\n"
        "            killed.append(multiprocessing.active_children()[0].pid)\n"
        "            os.kill(killed[0], signal.SIGKILL)\n"
        "    points = [Point(sys.argv[1], '1xh200').with_options(blocks=4, context=16 + i) for i "
        "in range(8)]\n    runner = Runner.local(Store(Path(sys.argv[2])), show, 2)\n"
        "    rows = runner.rows(points)\n"
        "    print(len(killed), len(rows), all(row.step_s > 0 for row in rows), "
        "Store(Path(sys.argv[2])).count())\n"
    )
    file = tmp_path / "kill.py"
    file.write_text(script)
    done = subprocess.run(
        [sys.executable, file, checkpoint, tmp_path / "points"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["1", "8", "True", "8"], done.stderr


CELLS = 8
HALTING = f"""
import sys, time
from twin.study import point
simulate, begun = point.simulate, []
def halting(*args, **more):
    begun.append(0)
    if len(begun) == 3:
        time.sleep({PATIENCE_S})
    return simulate(*args, **more)
point.simulate = halting
from twin.__main__ import main
sys.exit(main())
"""


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    checkpoint: Path, tmp_path: Path, twin: Twin
) -> None:
    """The interrupted one stands still at its third cell."""
    store = tmp_path / "points"
    words = [
        str(w)
        for w in (
            "whatif",
            checkpoint,
            "1xh200",
            "--blocks",
            4,
            "--sweep",
            f"context={','.join(map(str, range(1, CELLS + 1)))}",
            "--store",
            store,
        )
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", HALTING, *words, "--workers", "1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a background job inherits "ignore"
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr
    for line in process.stderr:
        if re.search("cells: [1-9]", line):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "goes on from there" in err
    kept = Store(store).count()
    assert CELLS < kept < 2 * CELLS  # all plans, some cells
    outcome = twin(*words, "--workers", 1, "--json")
    assert outcome.code == 0
    assert "plans: " not in outcome.err
    assert Store(store).count() == 2 * CELLS
