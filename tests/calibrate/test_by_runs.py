"""A fit that engine runs move: how far, what stays held out, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.calibrate.ran import shapes
from tests.command_line import Twin
from twin.calibrate import by_runs, store
from twin.calibrate.experiment import Experiment
from twin.calibrate.fitted import MOVES, moved_by
from twin.calibrate.held_out import SMALL, TINY
from twin.calibrate.known_error import keep_runs, kept_records
from twin.calibrate.node import calibrated_node, uncalibrated_node
from twin.calibrate.recorded import RUNS, written
from twin.data import data_dir
from twin.errors import CalibrationError
from twin.hardware.load import load_node
from twin.hardware.override import apply_fit
from twin.schedule.options import default_options
from twin.sim.run import simulate

H200 = load_node("1xh200")
PATH = "kernel.tile_s"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.HOME_VARIABLE, str(tmp_path))
    for folder in ("fits", "kernels", "held-out"):
        shutil.copytree(data_dir("calibration") / folder, tmp_path / folder)
    kept = store.read_fit(H200.name)
    assert kept is not None
    meta = {key: kept[1][key] for key in kept[1] if key not in (MOVES, "node", "device")}
    store.write_fit(H200.name, kept[0], meta)
    return tmp_path


def record(home: Path, seed: int, slower: float) -> store.Run:
    """Runs that took `slower` times what the fit in force says."""
    node = calibrated_node(H200.name)
    runs = [
        Experiment(
            f"s{seed}-{at:02d}-short", spec, default_options(spec, H200, max_context=256), 48, 8, 1
        )
        for at, spec in enumerate((TINY, SMALL), start=1)
    ]
    samples = {
        run.name: [slower * simulate(run.plan(H200.device.name), node).step_s] for run in runs
    }
    meta = {"node": H200.name, "failed": {}, RUNS: {run.name: written(run) for run in runs}}
    folder = home / "runs" / "h200-sxm" / f"shapes-2-seed-{seed}"
    return store.save_run(folder, meta, samples)


def moved(*records: store.Run) -> by_runs.Moved:
    kept = store.read_fit(H200.name)
    assert kept is not None
    fit = (kept[0], kept[1]["together"])
    return by_runs.move(uncalibrated_node(H200.name), fit, records, lambda _: None)


@pytest.fixture
def few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them take minutes."""
    monkeypatch.setattr(by_runs, "movable", lambda node: [PATH, "kernel.stage_s"])


def test_the_numbers_move_towards_the_runs_and_no_further(home: Path, few_numbers: None) -> None:
    found = moved(record(home, 1, 1.04), record(home, 2, 1.04))
    for name in found.before:
        for run, before in found.before[name].items():
            assert before == pytest.approx(0.04, abs=1e-6)
            assert 0 <= found.after[name][run] < before
            # by the other seed's runs, which say the same
            assert 0 <= found.left_out[name][run] < before
    kept = store.read_fit(H200.name)
    assert kept is not None
    for path, number in found.numbers.items():
        assert number.low is not None
        assert number.high is not None
        assert number.low <= number.value <= number.high
        same = number.value == kept[0][path].value
        assert same is (path not in (PATH, "kernel.stage_s"))
    assert "moved by shapes-2-seed-1, shapes-2-seed-2" in found.numbers[PATH].source
    assert len(found.together[PATH]) == len(kept[1]["together"][PATH])


def test_runs_that_agree_move_nothing(home: Path, few_numbers: None) -> None:
    found = moved(record(home, 1, 1.0))
    fit = store.read_fit(H200.name)
    assert fit is not None
    for path in (PATH, "kernel.stage_s"):
        assert found.numbers[path].value == pytest.approx(fit[0][path].value, rel=1e-6)


def test_one_wild_run_pulls_little() -> None:
    slopes, inverse = np.full((20, 1), 0.5), np.array([[1 / 0.3**2]])
    errors = np.full(20, 0.01)
    calm = float(by_runs.least(slopes, errors, inverse).sum())
    errors[0] = 1.0
    wild = float(by_runs.least(slopes, errors, inverse).sum())
    assert calm == pytest.approx(0.02, rel=0.05)
    assert calm < wild < 1.3 * calm


def test_what_cards_differ_by_moves_no_other_number() -> None:
    """Four seeds on cards whose memory is 3 % slower and faster than the fit's, in turn. A number
    that costs wide models as much stays, the rate of a card between them too.
    """
    seeds = np.repeat(np.arange(4), 60)
    bytes_part = np.tile(np.linspace(0.2, 0.9, 60), 4)  # of a step, by run
    slopes = np.column_stack([-bytes_part, bytes_part**2])
    errors = -bytes_part * np.where(seeds % 2, 0.03, -0.03)
    inverse = np.diag([1 / 0.02**2, 1 / 0.01**2])
    cards = np.column_stack([-bytes_part * (seeds == one) for one in range(4)])
    both = by_runs._Both(slopes, cards, inverse)
    assert both.least(errors) == pytest.approx([0, 0], abs=1e-3)
    # cards that are slow alike may all be of the slow ones: the fit's rate follows part of the way
    blind = by_runs._Both(slopes, np.empty((240, 0)), inverse)
    slow = bytes_part * 0.03
    assert blind.least(slow)[0] < 1.1 * both.least(slow)[0] < 0


def test_seeds_are_left_out_whole_and_of_one_seed_some_shapes() -> None:
    def runs(*names: str) -> list[Any]:
        plan: Any = None
        return [
            by_runs.Timed("r", Experiment(name, TINY, plan, 1), plan, (), None) for name in names
        ]

    two = list(by_runs._folds(runs("s1-01-short", "s1-02-short", "s2-01-short", "s2-01-long")))
    assert [fold.tolist() for fold in two] == [
        [True, True, False, False],
        [False, False, True, True],
    ]
    one = list(by_runs._folds(runs("s1-01-short", "s1-01-long", "s1-02-short")))
    assert [fold.tolist() for fold in one] == [[True, True, False], [False, False, True]]


def test_a_moved_fit_keeps_errors_by_other_runs_and_is_not_moved_twice(
    home: Path, few_numbers: None, twin: Twin
) -> None:
    folders = [str(record(home, seed, 1.04).folder) for seed in (1, 2)]
    command = ["calibrate", "1xh200", "--runs", folders[0], "--runs", folders[1]]
    first = twin(*command)
    assert first.code == 0, first.err
    assert "by the other runs alone" in first.out
    kept = moved_by(H200)
    assert set(kept) == {"shapes-2-seed-1", "shapes-2-seed-2"}
    again = twin(*command)
    assert again.code != 0
    assert "count twice" in again.err
    # what was held out is of another fit until it is validated again
    assert not kept_records(H200)
    run = store.read_run(Path(folders[0]))
    keep_runs(H200, shapes(kept[run.id], run.id))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--groups", "chain"], "leave out --groups"),
        (["--judge"], "--judge is gone: every fit says which numbers its probes bind"),
        (["--quick"], "leave out --quick"),
    ],
)
def test_moving_a_fit_goes_with_nothing_that_measures(
    more: list[str], said: str, tmp_path: Path, twin: Twin
) -> None:
    found = twin("calibrate", "1xh200", "--runs", tmp_path, *more)
    assert found.code != 0
    assert said in found.err


def test_a_folder_without_engine_runs_is_refused(home: Path) -> None:
    folder = home / "runs" / "h200-sxm" / "2026-probes"
    run = store.save_run(folder, {"node": H200.name}, {"stream-b1": [1e-3]})
    with pytest.raises(CalibrationError, match="holds no engine run"):
        by_runs.timed_runs(H200, [run])


def test_deep_models_have_the_slopes_of_two_short_ones(home: Path) -> None:
    run = record(home, 1, 1.0)
    kept = store.read_fit(H200.name)
    assert kept is not None
    path = "kernel.stage_s"
    more = replace(kept[0][path], value=1.1 * kept[0][path].value, high=None)
    nodes = [
        apply_fit(uncalibrated_node(H200.name), fit) for fit in (kept[0], {**kept[0], path: more})
    ]
    for one in by_runs.timed_runs(H200, [run]):
        whole = [simulate(one.plan, node, steps=by_runs.STEPS).step_s for node in nodes]
        short = [
            one.line([simulate(plan, node, steps=by_runs.STEPS).step_s for plan in one.short])
            for node in nodes
        ]
        assert short[1] / short[0] == pytest.approx(whole[1] / whole[0], abs=0.01)


def test_runs_of_another_node_and_several_gpus_are_refused(home: Path, twin: Twin) -> None:
    run = record(home, 1, 1.0)
    with pytest.raises(CalibrationError, match="was measured on h200-sxm, not on h100-sxm"):
        by_runs.timed_runs(load_node("1xh100"), [run])
    several = twin("calibrate", "2xh200", "--runs", run.folder)
    assert several.code != 0
    assert "name 1xh200-sxm" in several.err


def test_runs_of_kernels_that_are_no_more_move_nothing() -> None:
    """A model whose output projections waited for each slice, and one without."""
    node = calibrated_node("1xh200")
    record = store.read_run(store.runs_folder(node.name) / "shapes-24-seed-112707")
    gone, still = "s112707-01-short", "s112707-02-short"
    few = replace(record, samples={name: record.samples[name] for name in (gone, still)})
    assert [one.run.name for one in by_runs.timed_runs(node, [few])] == [still]
    with pytest.raises(CalibrationError, match="holds no engine run"):
        by_runs.timed_runs(node, [replace(few, samples={gone: record.samples[gone]})])
