"""Held-out runs of several devices: shapes that divide over them, fixed runs of GPUs, whose errors
make a node's interval, and all errors together.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.calibrate.ran import ran, shapes
from tests.command_line import Twin
from twin.calibrate import drawn, experiment, shape_record, store
from twin.calibrate.all_held_out import all_held_out, together
from twin.calibrate.drawn import drawn_runs
from twin.calibrate.experiment import Experiment
from twin.calibrate.fitted import numbers_of
from twin.calibrate.held_out import TINY, held_out
from twin.calibrate.known_error import FEWEST, keep, keep_runs, known_error
from twin.calibrate.node import calibrated_node
from twin.calibrate.recorded import RUNS, recorded, written
from twin.calibrate.validate import Validation, compare
from twin.cli import main
from twin.errors import CalibrationError
from twin.hardware.load import load_node
from twin.hardware.number import Kind, Number
from twin.hardware.types import Node
from twin.models.kind import ModelKind, kind_of
from twin.models.load import load_model
from twin.plan.options import HandOffKind
from twin.schedule.options import default_options

NODES = [f"{gpus}x{device}" for gpus, device in ((2, "h100"), (4, "h200"), (8, "h100"))]
HOP = Number(7e-7, Kind.FITTED, "test", 6e-7, 8e-7)
LINK = Number(9e-7, Kind.FITTED, "test", 8e-7, 1e-6)
DENSE = load_model("llama-3.2-1b")


# ---- what is drawn -------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", list(ModelKind), ids=lambda kind: kind.value)
@pytest.mark.parametrize("name", NODES)
def test_drawn_shapes_divide_over_the_gpus(name: str, kind: ModelKind) -> None:
    """Heads, KV heads or copies of them, rows; `Experiment.plan` proves."""
    node = calibrated_node(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "prove", lambda plan: None)  # once, below
        runs = drawn_runs(node, 2, 31, kind=kind)
        assert runs[: len(runs) // 2] == drawn_runs(node, 1, 31, kind=kind)
    for run in runs:
        spec, ranks = run.spec, run.spec.lanes.count if run.spec.lanes else node.gpus
        assert spec.heads % ranks == spec.ffn % ranks == spec.vocab % ranks == 0
        assert spec.kv_heads % ranks == 0 or ranks % spec.kv_heads == 0
        assert kind_of(spec) is kind
        assert run.options.gpus == node.gpus
        assert run.plan(node.device.name).ranks == ranks


def test_by_construction_no_draw_of_several_gpus_fails_by_its_heads() -> None:
    generator = drawn.np.random.default_rng(3)
    for ranks in (2, 4, 8):
        specs = drawn._specs(drawn.GPU, generator, ranks)
        found = [spec for spec in (next(specs) for _ in range(300)) if spec is not None]
        assert all(spec.heads % ranks == 0 for spec in found)
        assert {spec.kv_heads for spec in found} >= {1, 2, 4, 8}
        assert len({spec.heads // spec.kv_heads for spec in found}) > 3


def test_every_fourth_dense_model_of_several_gpus_has_lanes_and_none_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # others plan and prove what is drawn
    monkeypatch.setattr(Experiment, "plan", lambda run, device: None)
    monkeypatch.setattr(drawn, "check_room", lambda plan, node: None)
    runs = drawn_runs(calibrated_node("2xh100"), 4, 7)
    laned = {run.spec.name: run.spec for run in runs if run.spec.lanes}
    assert len(laned) == 1
    for spec in laned.values():
        assert spec.lanes is not None
        assert spec.lanes.count == drawn.GPU.lanes
        assert spec.lanes.delay in drawn.DELAYS
        assert spec.kv_heads % spec.lanes.count == 0
        assert spec.family == "laneformer"
    assert {run.options.handoff for run in runs if run.spec.lanes} == {
        HandOffKind.SENTINEL,
        HandOffKind.COUNTER,
        HandOffKind.GRID,
    }
    assert {run.spec.dtype for run in runs} == set(drawn.DTYPES)
    assert {run.prompt for run in runs} == set(drawn.GPU.prompts)
    assert not any(run.spec.lanes for run in drawn_runs(calibrated_node("1xh100"), 4, 7))


@pytest.mark.slow
def test_drawn_shapes_of_one_gpu_are_those_on_file() -> None:
    """The first record of each kind: a draw for several GPUs moves none of them."""
    for name in ("1xh200", "1xh100"):
        node, kinds = calibrated_node(name), set[ModelKind]()
        for folder in sorted(store.runs_folder(node.name).glob("shapes-*")):
            said = json.loads((folder / shape_record.PREDICTIONS).read_text())
            kind = ModelKind(said.get("kind", ModelKind.DENSE.value))
            if kind in kinds:
                continue
            kinds.add(kind)
            runs = drawn_runs(node, 1, said["seed"], kind=kind)
            on_file = shape_record.read(node, folder).runs[: len(runs)]
            assert [run.spec for run in runs] == [run.spec for run in on_file], folder.name
        assert kinds == set(ModelKind)


def test_lanes_come_back_as_they_were_written() -> None:
    runs = drawn_runs(calibrated_node("2xhost"), 4, 5)
    assert any(run.spec.lanes for run in runs)
    kept = {RUNS: {run.name: written(run) for run in runs}}
    assert recorded(Path("record"), json.loads(json.dumps(kept))) == runs


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_emulated_gpus_are_predicted_run_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever stops goes on where it stopped; the second call adds nothing."""
    monkeypatch.setenv(store.HOME_VARIABLE, str(tmp_path))
    command = ["validate", "2xhost", "--shapes", "4", "--seed", "5"]
    folder = tmp_path / "runs" / "2xhost" / "shapes-4-seed-5"
    really, ran = shape_record.timed, list[str]()

    def seconds(node: Any, run: Experiment, plan: Any) -> list[float]:
        ran.append(run.name)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return really(node, run, plan)

    monkeypatch.setattr(shape_record, "timed", seconds)
    assert main(command) != 0
    assert len(store.read_run(folder).samples) == 2
    before = (folder / "predictions.json").read_bytes()
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "4 lanes, delay" in out
    assert "grid, lanes" in out
    assert "16 of 16 runs" in out
    assert len(ran) == 17
    assert main([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (folder / "predictions.json").read_bytes() == before
    assert len(ran) == 17
    assert not said["failed"]
    assert sum(group["runs"] for group in said["groups"].values()) == 16
    assert {"sentinel", "counter", "grid"} <= set(said["groups"])


def test_without_enough_gpus_it_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(store.HOME_VARIABLE, str(tmp_path))
    wanted = list[int]()

    def absent(device: Any, gpus: int = 1) -> None:
        wanted.append(gpus)
        raise CalibrationError("gpus=2 from GPU 0 on: this computer has 1")

    monkeypatch.setattr("twin.commands.validate_shapes.require", absent)
    node = calibrated_node("2xh100")
    run = Experiment("s3-01-short", TINY, default_options(TINY, node, max_context=256), 48, 8, 1)
    monkeypatch.setattr(shape_record, "drawn_runs", lambda *_, kind: [run])
    assert main(["validate", "2xh100", "--shapes", "1", "--seed", "3"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert wanted == [2]
    assert f"On a computer with 2 x {node.device.title}" in said
    assert "twin validate 2xh100-sxm --shapes 1 --seed 3" in said


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NODES)
def test_fixed_runs_of_several_gpus_are_planned_recorded_and_enough_for_an_interval(
    name: str,
) -> None:
    node = calibrated_node(name)
    runs = held_out(node)
    assert len(runs) == len({run.name for run in runs}) >= FEWEST
    assert {run.prompt for run in runs} == {48, 1500}
    assert sum(run.spec.lanes is not None for run in runs) == 2
    laned, alike = (
        next(run for run in runs if run.name == f"{model}-g{node.gpus}")
        for model in ("laneformer-2b", "laneformer-2b-llama")
    )
    assert laned.spec.lanes is not None
    assert laned.spec.lanes.delay == 2
    assert laned.spec.streamed_bytes == alike.spec.streamed_bytes
    for run in runs:
        assert run.plan(node.device.name).options.gpus == node.gpus
    kept = {RUNS: {run.name: written(run) for run in runs}}
    assert recorded(Path("record"), json.loads(json.dumps(kept))) == runs


def test_a_record_of_several_gpus_is_compared_by_the_fits_that_hold_for_it() -> None:
    node = calibrated_node("2xh100")
    (run,) = [run for run in held_out(node) if run.name == "llama-1b-g2"]
    meta = {"node": node.name, RUNS: {run.name: written(run)}}
    found = compare(
        node, store.Run(Path("record"), meta, {run.name: [5e-4, 5e-4]}), lambda said: None
    )
    assert found.node == "2xh100-sxm"
    assert 1000 < found.runs[0].predicted_tokens_per_s < 4000


@pytest.mark.parametrize("name", ["2xhost", "8xmi300x"])
def test_devices_without_fixed_runs_of_several_say_so(name: str, twin: Twin) -> None:
    said = twin("validate", name).err
    assert "--shapes N --seed S" in said


# ---- what is known -------------------------------------------------------------------------------


@pytest.fixture
def fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Node]:
    """Two H200 with a fit of one of them, whose held-out runs are on file."""
    monkeypatch.setenv(store.HOME_VARIABLE, str(tmp_path))
    store.write_fit("1xh200-sxm", {"handoff.hop_s": HOP}, {"run": "one"})
    kept("1xh200", {f"run{at}": 110.0 for at in range(FEWEST)}, "record-1")
    return lambda: load_node("2xh200")


def kept(name: str, speeds: dict[str, float], record: str) -> None:
    """Predicted speeds of 100 measured."""
    runs = tuple(ran(run, speed) for run, speed in speeds.items())
    node = load_node(name)
    keep(node, Validation(runs, node=node.name, fit="fit"), store.Run(Path(record), {}, {}))


def test_a_node_has_the_interval_of_its_own_runs_once_there_are_enough(
    fitted: Callable[[], Node],
) -> None:
    one = known_error(fitted())
    assert one is not None
    assert one.node == "1xh200-sxm"
    kept("2xh200", {f"two{at}": 101.0 for at in range(FEWEST - 1)}, "record-2")
    assert known_error(fitted()) == one
    kept("2xh200", {f"two{at}": 101.0 for at in range(FEWEST)}, "record-2")
    own = known_error(fitted())
    assert own is not None
    assert (own.node, own.record, len(own.errors)) == ("2xh200-sxm", "record-2", FEWEST)
    assert own.worst == pytest.approx(0.01)
    assert known_error(load_node("1xh200")) == one
    assert known_error(load_node("4xh200")) == one  # another link


def test_drawn_shapes_of_several_gpus_need_no_fixed_runs_next_to_them(
    fitted: Callable[[], Node],
) -> None:
    some = {f"run{at}": 0.02 for at in range(FEWEST)}
    keep_runs(fitted(), shapes(some, "shapes-2-seed-3", gpus=2))
    known = known_error(fitted())
    assert known is not None
    assert known.records == ("shapes-2-seed-3",)
    kept("2xh200", {"two": 101.0}, "record-2")
    known = known_error(fitted())
    assert known is not None
    assert known.records == ("record-2", "shapes-2-seed-3")


def test_runs_of_a_kind_go_before_those_of_the_node(fitted: Callable[[], Node]) -> None:
    experts = load_model("gpt-oss-20b")
    some = {f"run{at}": 0.02 for at in range(FEWEST)}
    keep_runs(fitted(), shapes(some, "shapes-2-seed-3", gpus=2))
    some = {f"run{at}": 0.2 for at in range(FEWEST)}
    keep_runs(load_node("1xh200"), shapes(some, "shapes-4-seed-3-experts", ModelKind.EXPERTS))
    known = known_error(fitted(), experts)
    assert known is not None
    assert (known.node, known.kind) == ("1xh200-sxm", ModelKind.EXPERTS)
    keep_runs(fitted(), shapes(some, "shapes-4-seed-5-experts", ModelKind.EXPERTS, 2))
    known = known_error(fitted(), experts)
    assert known is not None
    assert known.node == "2xh200-sxm"
    dense = known_error(fitted(), DENSE)
    assert dense is not None
    assert dense.records == ("shapes-2-seed-3",)


def test_a_new_fit_of_the_link_or_of_the_device_makes_old_errors_unknown(
    fitted: Callable[[], Node],
) -> None:
    def own() -> bool:
        known = known_error(fitted())
        return known is not None and known.node == "2xh200-sxm"

    before = numbers_of(fitted())
    kept("2xh200", {f"two{at}": 101.0 for at in range(FEWEST)}, "record-2")
    assert own()
    store.write_fit("2xh200-sxm", {"link.hop_s": LINK}, {"run": "two"})
    assert numbers_of(fitted()) != before
    assert not own()
    kept("2xh200", {f"two{at}": 101.0 for at in range(FEWEST)}, "record-2")
    assert own()
    known = known_error(fitted())
    assert known is not None
    assert known.fit == "two"
    assert known_error(load_node("1xh200")) is not None  # its own fit is the same
    store.write_fit("1xh200-sxm", {"handoff.hop_s": LINK}, {"run": "one"})
    assert known_error(fitted()) is None


def test_larger_nodes_have_the_interval_of_those_whose_links_they_are_like(
    fitted: Callable[[], Node],
) -> None:
    """Of another device's links nothing but the device's own runs."""
    store.write_fit("1xh100-sxm", {"handoff.hop_s": HOP}, {"run": "h100"})
    kept("1xh100", {f"run{at}": 103.0 for at in range(FEWEST)}, "record-h100")
    store.write_fit("2xh200-sxm", {"link.loaded_hop_s": LINK}, {"run": "two"})
    kept("2xh200", {f"two{at}": 101.0 for at in range(FEWEST)}, "record-2")
    for name in ("2xh200", "8xh200"):
        known = known_error(load_node(name))
        assert known is not None
        assert known.node == "2xh200-sxm"
    for name in ("1xh100", "2xh100"):
        known = known_error(load_node(name))
        assert known is not None
        assert known.node == "1xh100-sxm"


def test_simulate_says_on_which_node_the_runs_of_its_interval_were(
    fitted: Callable[[], Node], twin: Twin
) -> None:
    # by one plan: workers that search would read the fits that are really on file
    words = ("simulate", "llama-3.2-1b", "2xh200", "--plan", "fixed")
    said = " ".join(twin(*words).out.split())
    assert f"they ran on 1xh200-sxm, and fewer than {FEWEST} on 2xh200-sxm" in said
    kept("2xh200", {f"two{at}": 101.0 for at in range(FEWEST)}, "record-2")
    said = " ".join(twin(*words).out.split())
    assert "the fit of 2xh200-sxm" in said
    assert "they ran on" not in said
    stated = json.loads(twin(*words, "--json").out)["held_out"]
    assert (stated["node"], stated["record"]) == ("2xh200-sxm", "record-2")


# ---- all of them ---------------------------------------------------------------------------------


@pytest.mark.slow  # the table of them is compared in test_known_error.py
def test_all_errors_on_file_are_stated_together(twin: Twin) -> None:
    said = json.loads(twin("validate", "--all", "--json").out)
    rows, last = said["records"], said["together"][-1]
    assert {row["node"] for row in rows} >= {"1xh100-sxm", "1xh200-sxm"}
    assert last["runs"] == sum(row["runs"] for row in rows)
    assert abs(last["worst_error"]) == max(abs(row["worst_error"]) for row in rows)
    for name in ("1xh100", "1xh200"):
        known = known_error(calibrated_node(name))
        assert known is not None
        own = [row for row in rows if row["node"] == known.node and row["kind"] == "dense"]
        assert sum(row["runs"] for row in own) == len(known.every)
    for row in rows:
        drawn_here = row["record"].startswith("shapes-")
        if drawn_here:  # what was predicted before any interval was known has none
            folder = store.runs_folder(row["node"]) / row["record"]
            stated = json.loads((folder / "predictions.json").read_text(encoding="utf-8"))
            known = not stated["interval"].startswith("none")
            assert row["judged_by_p10_p90"] == known * row["runs"]


def test_chosen_runs_are_judged_by_the_interval_of_the_others(
    fitted: Callable[[], Node], twin: Twin
) -> None:
    kept("2xh200", {"near": 110.0, "far": 150.0}, "record-2")
    parts, left = all_held_out()
    (one, two) = parts
    assert not left
    assert (one.node, one.held) == ("1xh200-sxm", ())  # nothing next to its own runs
    assert (two.node, two.held) == ("2xh200-sxm", (True, False))  # by those of one device
    both = together(parts, "all")
    assert (len(both.errors), both.worst, both.share_held) == (FEWEST + 2, 0.5, 0.5)
    assert "inside p10 to p90" in twin("validate", "--all").out


def test_errors_of_other_fits_are_left_out_and_said(fitted: Callable[[], Node]) -> None:
    kept("2xh200", {"near": 110.0}, "record-2")
    store.write_fit("2xh200-sxm", {"link.hop_s": LINK}, {"run": "two"})
    parts, left = all_held_out()
    assert [part.node for part in parts] == ["1xh200-sxm"]
    assert "repeat `twin validate 2xh200-sxm`" in left[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no node: name one"),
        (("1xh200", "--all"), "NODE does not go with --all"),
        (("--all", "--seed", "0"), "--seed does not go with --all"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], said: str, twin: Twin) -> None:
    assert said in twin("validate", *words).err
