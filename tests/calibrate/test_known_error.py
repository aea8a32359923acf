"""What a prediction says of its error: that of held-out runs, of the very fit that is in force."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from studies.common import held_out
from tests.calibrate.ran import ran, seen, shapes
from tests.command_line import Twin
from twin.calibrate import shape_record, store
from twin.calibrate.engine_runs import runs_of
from twin.calibrate.fitted import moved_by
from twin.calibrate.kernel_id import is_superseded, kernel_id
from twin.calibrate.known_error import FEWEST, KnownError, keep, keep_runs, known_error
from twin.calibrate.node import calibrated_node
from twin.calibrate.validate import Validation, compare
from twin.hardware.load import load_node
from twin.hardware.number import Kind, Number
from twin.hardware.types import Node
from twin.models.kind import ModelKind, kind_of
from twin.models.load import load_model
from twin.models.spec import ModelSpec
from twin.sim.run import simulate

HOP = Number(7e-7, Kind.FITTED, "test", 6e-7, 8e-7)
SPEEDS = (110.0, 95.0, 104.0)  # predicted of 100 measured
RECORD = store.Run(Path("record"), {}, {})


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.HOME_VARIABLE, str(tmp_path))
    store.write_fit("1xh200-sxm", {"handoff.hop_s": HOP}, {"run": "r"})


def kept() -> None:
    runs = tuple(ran(f"run{at}", speed) for at, speed in enumerate(SPEEDS))
    keep(load_node("1xh200"), Validation(runs, node="1xh200-sxm", fit="r"), RECORD)


def test_errors_are_read_as_they_were_kept_for_every_node_that_the_fit_serves(
    elsewhere: None,
) -> None:
    assert known_error(load_node("1xh200")) is None
    kept()
    for name in ("1xh200", "8xh200"):
        assert known_error(load_node(name)) == KnownError(
            "1xh200-sxm", "r", "record", {"run0": 0.1, "run1": -0.05, "run2": 0.04}, {}
        )
    assert known_error(load_node("1xh100")) is None


def test_errors_of_another_fit_are_not_stated(elsewhere: None) -> None:
    kept()
    store.write_fit(
        "1xh200-sxm", {"handoff.hop_s": Number(8e-7, Kind.FITTED, "test", 6e-7, 9e-7)}, {"run": "r"}
    )
    assert known_error(load_node("1xh200")) is None


def test_median_worst_and_interval_are_of_all_runs() -> None:
    known = KnownError(
        "1xh200-sxm",
        "r",
        "record",
        {str(at): speed / 100 - 1 for at, speed in enumerate(SPEEDS)},
        {},
    )
    assert (known.median, known.worst) == (pytest.approx(0.05), pytest.approx(0.1))
    low, high = known.interval(1000.0)
    assert 1000 / 1.1 < low < 1000 / 1.04 < 1000 < high < 1000 / 0.95


@pytest.mark.parametrize("name", ["1xh100", "1xh200"])
def test_every_fit_on_file_has_its_error_next_to_it(name: str) -> None:
    known = known_error(calibrated_node(name))
    assert known is not None
    assert len(known.errors) >= 16
    assert (store.runs_folder(calibrated_node(name).name) / known.record).is_dir()


def on_file(name: str) -> tuple[Node, KnownError, store.Run]:
    """A node, its error, and the record that it is of."""
    node = calibrated_node(name)
    known = known_error(node)
    assert known is not None
    return node, known, store.read_run(store.runs_folder(node.name) / known.record)


@pytest.mark.parametrize("name", ["1xh100", "1xh200"])
def test_the_error_on_file_is_what_the_twin_predicts(name: str) -> None:
    """Of one run, the quickest to simulate; all of them are in the studies."""
    node, known, record = on_file(name)
    one = store.Run(record.folder, record.meta, {"llama-1b": record.samples["llama-1b"]})
    (found,) = compare(node, one, lambda said: None).runs
    assert found.error == pytest.approx(known.errors["llama-1b"], abs=1e-5)


@pytest.mark.parametrize("name", ["1xh100", "1xh200"])
def test_runs_of_a_kernel_that_is_no_more_are_not_compared(name: str) -> None:
    """Narrow residuals that threads gathered by eights."""
    node, known, record = on_file(name)
    (narrow,) = (run for run in runs_of(record, node) if run.name == "qwen2-0.5b")
    assert is_superseded(narrow, node.device.name)
    assert "qwen2-0.5b" not in known.errors
    assert not is_superseded(replace(narrow, kernel=kernel_id(node.device)), node.device.name)


def test_drawn_shapes_stay_next_to_the_runs_of_the_same_fit_and_widen_the_interval(
    elsewhere: None,
) -> None:
    node = load_node("1xh200")
    keep_runs(node, [seen("run", 0.5)])
    assert known_error(node) is None  # no held-out runs to stand next to
    kept()
    before = known_error(node)
    keep_runs(node, [seen("run", 0.5), seen("other", -0.25)])
    kept()
    known = known_error(node)
    assert before is not None
    assert known is not None
    assert known.records == ("record", "shapes-1-seed-2")
    assert (len(known.errors), len(known.every), known.worst) == (3, 5, 0.5)
    (low, high), (lower, higher) = before.interval(1.0), known.interval(1.0)
    assert lower < low < high < higher
    store.write_fit("1xh200-sxm", {"handoff.hop_s": replace(HOP, value=2e-6)}, {"run": "r"})
    kept()
    known = known_error(node)
    assert known is not None
    assert not known.drawn  # of another fit


def test_enough_runs_of_a_kind_are_stated_and_no_other(elsewhere: None) -> None:
    node = load_node("1xh200")
    few_bits, experts = load_model("qwen3-8b@int4-g128"), load_model("gpt-oss-20b")
    kept()
    keep_runs(node, [seen("dense", 0.5)])
    dense = known_error(node)
    assert dense is not None

    def stated(model: ModelSpec) -> KnownError:
        known = known_error(node, model)
        assert known is not None
        return replace(known, evidence=None, about=None)

    some = {str(at): 0.2 for at in range(FEWEST - 1)}
    keep_runs(node, shapes(some, "shapes-4-seed-3-experts", ModelKind.EXPERTS))
    assert stated(experts) == dense  # too few
    keep_runs(node, shapes({"one": 0.3}, "shapes-1-seed-4-experts", ModelKind.EXPERTS))
    kept()  # a validation of the same fit leaves them
    own = stated(experts)
    assert own.kind is ModelKind.EXPERTS
    assert own.records == ("shapes-4-seed-3-experts", "shapes-1-seed-4-experts")
    assert (len(own.every), own.worst) == (FEWEST, 0.3)
    for model in (load_model("llama-3.2-1b"), few_bits):
        assert stated(model) == dense
    assert known_error(node) == dense


KINDS = ("llama-3.2-1b", "qwen3-8b@int4-g128", "gpt-oss-20b")


@pytest.mark.few(2)
@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("name", ["1xh100", "1xh200"])
def test_errors_of_drawn_shapes_on_file_are_what_the_twin_predicts(name: str, model: str) -> None:
    """Of one run, the quickest to simulate of all records that the fit does not rest on."""
    node = calibrated_node(name)
    known = known_error(node, load_model(model))
    assert known is not None
    own = known.kind is kind_of(load_model(model))
    seen = []
    for drawn in known.drawn.keys() - moved_by(node).keys() if own else ():
        record = shape_record.read(node, store.runs_folder(node.name) / drawn)
        ran_here = {run.name: run for run in record.measured.runs}
        assert set(known.drawn[drawn]) <= set(ran_here)
        assert record.kind is known.kind
        seen += [(ran_here[name], drawn) for name in known.drawn[drawn]]
    assert seen or not own
    if not seen:  # before the first of its kind has run
        return
    run, drawn = min(seen, key=lambda one: one[0].spec.layers * one[0].spec.hidden)
    error = simulate(run.plan(node.device.name), node).tokens_per_s * run.measured_s - 1
    assert error == pytest.approx(known.drawn[drawn][run.name], abs=1e-5), (
        f"keep them again: twin validate {name} with the shapes, seed and kind of {drawn}"
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("name", ["1xh100", "1xh200"])
def test_of_records_that_the_fit_rests_on_only_runs_of_kernels_in_force_count(
    name: str, model: str
) -> None:
    """By what the fit found without each."""
    node = calibrated_node(name)
    known = known_error(node, load_model(model))
    assert known is not None
    errors = moved_by(node)
    for drawn in sorted(known.drawn.keys() & errors.keys())[:1]:
        record = shape_record.read(node, store.runs_folder(node.name) / drawn)
        older = {run.name for run in record.runs if is_superseded(run, node.device.name)}
        assert known.drawn[drawn] == {n: e for n, e in errors[drawn].items() if n not in older}


def test_the_table_of_errors_is_that_of_the_errors_on_file() -> None:
    made = held_out.FILE.read_text(encoding="utf-8")
    assert made == held_out.page(), "python -m studies.common.held_out"


def test_simulate_tells_the_error_and_its_interval(twin: Twin) -> None:
    said = json.loads(twin("simulate", "llama-3.2-1b", "1xh200", "--json").out)
    known = known_error(calibrated_node("1xh200"))
    assert known is not None
    assert said["held_out"]["median_abs_error"] == statistics.median(map(abs, known.every))
    assert said["held_out"]["runs"] == len(known.every) > len(known.errors)
    assert said["held_out"]["drawn"] == list(known.drawn)
    low, high = said["held_out"]["tokens_per_s"]
    assert low < high
    assert (
        json.loads(twin("simulate", "llama-3.2-1b", "1xmi300x", "--json").out)["held_out"] is None
    )


def test_simulate_says_where_no_run_was_of_the_models_kind(twin: Twin) -> None:
    known = known_error(calibrated_node("1xh200"), load_model("gpt-oss-20b"))
    assert known is not None
    said = " ".join(twin("simulate", "gpt-oss-20b", "1xh200").out.split())
    other = known.kind is not kind_of(load_model("gpt-oss-20b"))
    assert ("none of them has experts" in said) is other
