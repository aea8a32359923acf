"""A GPU's probes, from measuring over the fit to predictions of engine runs, on a GPU whose numbers
only the test knows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.calibrate.pretended import HIDDEN, NAME, hidden_node, pretend, probes_of
from twin.calibrate import engine_runs, experiment, store
from twin.calibrate import fit as fit_module
from twin.calibrate import gpu_probes as gpu_probes_module
from twin.calibrate import recipe as recipe_module
from twin.calibrate.cross import Cross
from twin.calibrate.experiment import Experiment
from twin.calibrate.fit import stage_targets
from twin.calibrate.gpu_probes import MOST_STEPS
from twin.calibrate.held_out import held_out
from twin.calibrate.node import calibrated_node
from twin.calibrate.reading import steady
from twin.calibrate.recipe import GPU_RECIPE, recipe_of
from twin.calibrate.simulated import Simulated
from twin.calibrate.stages import stage_times
from twin.calibrate.validate import stages_compared
from twin.cli import main
from twin.data import data_dir
from twin.engine import choose
from twin.engine.choose import Found
from twin.errors import CalibrationError, EngineError
from twin.hardware.load import load_node
from twin.hardware.number import Kind, Number
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.plan.options import Options
from twin.proof.prove import violations
from twin.schedule.choose import schedule_of
from twin.schedule.options import default_options
from twin.schedule.probe import stream_probe
from twin.schedule.ring import limits_of
from twin.sim.run import step_s

# by the quick probes, alone or as what a stage takes in sum: no quick probe has a stage of neither
# a tile nor a hop
SETTLED = (
    ("memory.stream_bytes_per_s",),
    ("kernel.copy_s",),
    ("block.pair_bytes_per_s",),
    ("kernel.slice_s", "kernel.reduction_s"),
    ("kernel.element_s",),
    ("l2.latency_s",),
    ("kernel.round_s",),
    ("kernel.unit_s",),
    ("kernel.compare_s",),
    ("kernel.sample_element_s",),
    ("kernel.tile_s", "kernel.stage_s"),
    ("handoff.hop_s", "kernel.stage_s"),
    ("handoff.hop_s", "handoff.fence_s", "kernel.stage_s"),
    ("kernel.item_s", "kernel.stage_s"),
    ("launch.graph_edge_s", "kernel.stage_s"),
)
SLOW = ("hop-0-1", "graph-matrices", "exchange-grid-16-b132")  # to simulate
SHARED_BYTES = 232448  # of an H200's block
HUGE = 150 * 10**9


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.HOME_VARIABLE, str(tmp_path / "calibration"))


def h200() -> Node:
    return load_node("1xh200")


def small_runs() -> list[Experiment]:
    """Two engine runs of a shallow model."""
    spec = load_model("llama-3.2-1b")
    spec = replace(spec, name="shallow", layers=2, windows=(0, 0), vocab=8192)
    options = default_options(spec, h200(), context=40, max_context=64)
    shallow = Experiment("shallow", spec, options, 16, 48, 2, traced=True)
    return [
        shallow,
        replace(shallow, name="shallow-b96", options=replace(options, blocks=96), traced=False),
    ]


def test_all_probes_lie_in_memory_and_each_fits_a_block() -> None:
    probes = probes_of("1xh200", quick=False)
    # all of them lie in memory together, an H100's too
    room = load_node("1xh100").device.memory.usable_bytes
    assert sum(probe.plan.memory_bytes() for probe in probes) < 0.9 * room
    for probe in probes:
        assert schedule_of(probe.plan).block_bytes <= SHARED_BYTES, probe.name
        assert probe.plan.memory_bytes() < 2.5 * 10**9, probe.name
        assert 1 < probe.steps <= MOST_STEPS
    assert len({probe.name for probe in probes}) == len(probes)


@pytest.mark.few(1)
@pytest.mark.parametrize("first", range(8))
def test_every_probe_is_a_valid_plan(first: int) -> None:
    """An eighth of them each."""
    for probe in probes_of("1xh200", quick=False)[first::8]:
        assert violations(probe.plan) == [], probe.name


def test_every_group_of_numbers_has_probes_even_in_a_hurry() -> None:
    wanted = {probe.group for probe in probes_of("1xh200", quick=True)}
    assert set(recipe_of(h200().device).groups) <= wanted


def test_no_probe_takes_half_a_second() -> None:
    node = hidden_node()
    for probe in probes_of("1xh200", quick=True):
        assert step_s(probe.plan, node) * probe.steps < 0.5, probe.name


def test_held_out_runs_are_models_and_fit_one_gpu_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "prove", lambda plan: None)  # who runs them proves them
    runs = held_out(h200())
    assert len({run.name for run in runs}) == len(runs) >= 12
    assert {run.options.handoff.value for run in runs} == {"sentinel", "counter", "grid"}
    assert {run.options.execution.value for run in runs} == {"resident", "graph"}
    total = 0
    for run in runs:
        assert run.prompt + run.tokens <= run.options.max_context + 1, run.name
        total += run.plan(NAME).memory_bytes()
    assert total < limits_of(h200()).memory_bytes


def probe_only(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...] = ()
) -> None:
    """A recipe of these groups, `without` some probes."""
    groups = {name: GPU_RECIPE.groups[name] for name in names}
    some = [
        probe
        for probe in probes_of("1xh200", quick=True)
        if probe.group in groups and probe.name not in without
    ]
    monkeypatch.setattr(
        recipe_module,
        "GPU_RECIPE",
        replace(GPU_RECIPE, groups=groups, probes=lambda limits, quick: some),
    )


@pytest.mark.slow
def test_numbers_of_some_groups_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the slow test below does with all groups."""
    pretend(monkeypatch)
    probe_only(("exchange", "sample"), monkeypatch, without=SLOW)
    assert (
        main(
            ["calibrate", "1xh200", "--quick", "--measure-only", "--out", str(tmp_path / "probes")]
        )
        == 0
    )
    assert main(["calibrate", "1xh200", "--from", str(tmp_path / "probes"), "--json"]) == 0
    node = calibrated_node("1xh200")
    for path in ("kernel.element_s", "l2.latency_s", "kernel.sample_element_s"):
        assert getattr_path(node, path) == pytest.approx(HIDDEN[path], rel=0.1), path
    found = store.read_fit("1xh200-sxm")
    assert found is not None
    numbers, about = found
    assert numbers.keys() <= about["binding"].keys()
    for path, number in numbers.items():
        assert (number.kind is Kind.FITTED) == (about["binding"][path] >= 1), path


def test_some_groups_are_probed_and_fitted_next_to_the_others_on_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    probe_only(("exchange", "sample"), monkeypatch, without=SLOW)
    first, second = tmp_path / "first", tmp_path / "second"
    wanted = ["calibrate", "1xh200", "--quick", "--groups"]
    assert main([*wanted, "sample", "--measure-only", "--out", str(first)]) == 0
    assert main(["calibrate", "1xh200", "--from", str(first)]) != 0
    assert "no fit of 1xh200-sxm is on file" in capsys.readouterr().err
    assert main([*wanted, "exchange", "--measure-only", "--out", str(second)]) == 0
    assert main([*wanted, "nobody", "--measure-only", "--out", str(tmp_path / "none")]) != 0
    assert "there are exchange, sample" in capsys.readouterr().err
    kept = {
        "handoff.hop_s": Number(9e-7, Kind.FITTED, "test", 8e-7, 1e-6),
        "kernel.sample_element_s": Number(1e-10, Kind.FITTED, "test", 1e-10, 2e-10),
    }
    meta = {"run": "old", "binding": dict.fromkeys(kept, 3.0), "residuals": {"another": 0.5}}
    store.write_fit("1xh200-sxm", kept, meta)
    assert main(["calibrate", "1xh200", "--from", str(first)]) == 0
    found = store.read_fit("1xh200-sxm")
    assert found is not None
    numbers, about = found
    assert numbers["handoff.hop_s"] == kept["handoff.hop_s"]
    # found next to a hop that is not the device's
    assert numbers["kernel.sample_element_s"].value > 2 * kept["kernel.sample_element_s"].value
    assert about["run"] == "old"
    assert set(about["added"]) == {"sample"}
    assert main(["calibrate", "1xh200", "--from", str(first), "--groups", "exchange"]) != 0
    assert "has no probes of exchange, only of sample" in capsys.readouterr().err
    assert about["binding"]["handoff.hop_s"] == 3.0
    assert about["residuals"]["another"] == 0.5


def test_some_groups_of_a_run_that_has_more_are_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    probe_only(("exchange", "sample"), monkeypatch, without=SLOW)
    both = str(tmp_path / "both")
    assert main(["calibrate", "1xh200", "--quick", "--measure-only", "--out", both]) == 0
    kept = {"handoff.hop_s": Number(9e-7, Kind.FITTED, "test", 8e-7, 1e-6)}
    store.write_fit("1xh200-sxm", kept, {"run": "old"})
    assert main(["calibrate", "1xh200", "--groups", "sample", "--from", both]) == 0
    found = store.read_fit("1xh200-sxm")
    assert found is not None
    assert found[0].keys() == {"handoff.hop_s", "kernel.sample_element_s"}
    assert found[0]["handoff.hop_s"] == kept["handoff.hop_s"]
    assert found[1]["run"] == "old"
    held = store.read_run(store.runs_folder("1xh200-sxm") / found[1]["added"]["sample"])
    assert any(name.startswith("exchange") for name in held.samples)  # nothing of it is lost
    assert "cross" not in found[1]


def test_errors_over_shapes_are_those_of_the_chains_fitted_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    probe_only(("sample",), monkeypatch, without=SLOW)
    folder = str(tmp_path / "sample")
    assert main(["calibrate", "1xh200", "--quick", "--measure-only", "--out", folder]) == 0
    crossed = Cross({"shape-01": 0.1}, (0.2,))
    fitted = fit_module.fit_node
    monkeypatch.setattr(
        fit_module, "fit_node", lambda *wanted: replace(fitted(*wanted), cross=crossed)
    )
    kept = {"handoff.hop_s": Number(9e-7, Kind.FITTED, "test", 8e-7, 1e-6)}
    before = {"errors": {"shape-01": 0.3}, "along": [0.4]}
    store.write_fit("1xh200-sxm", kept, {"run": "old", "cross": before})
    assert main(["calibrate", "1xh200", "--groups", "sample", "--from", folder]) == 0
    found = store.read_fit("1xh200-sxm")
    assert found is not None
    assert found[1]["cross"] == {"errors": {"shape-01": 0.1}, "along": [0.2]}


@pytest.mark.slow
def test_the_numbers_of_a_gpu_are_found_and_predict_its_engine_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    # still more than the L2 holds, and quicker to simulate
    monkeypatch.setattr(gpu_probes_module, "FROM_MEMORY", 80 * 10**6)
    monkeypatch.setattr(
        gpu_probes_module, "QUICK", [name for name in gpu_probes_module.QUICK if name not in SLOW]
    )
    assert (
        main(
            ["calibrate", "1xh200", "--quick", "--measure-only", "--out", str(tmp_path / "probes")]
        )
        == 0
    )
    assert main(["calibrate", "1xh200", "--from", str(tmp_path / "probes"), "--json"]) == 0
    node = calibrated_node("1xh200")
    for paths in SETTLED:
        found = sum(getattr_path(node, path) for path in paths)
        assert found == pytest.approx(sum(HIDDEN[path] for path in paths), rel=0.1), paths
    capsys.readouterr()

    monkeypatch.setattr(engine_runs, "held_out", lambda node: small_runs())
    assert main(["validate", "h200-sxm", "--measure-only", "--out", str(tmp_path / "runs")]) == 0
    capsys.readouterr()
    assert main(["validate", "1xh200-sxm", "--from", str(tmp_path / "runs"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["worst_abs_error"] < 0.03
    assert {row["run"] for row in said["stages"]} == {"shallow"}
    # two chains in a hurry settle the numbers of five in sum: a step is right where its stages are
    # not yet
    for row in said["stages"]:
        assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=0.3, abs=2e-7), row[
            "stage"
        ]


def getattr_path(node: Node, path: str) -> float:
    found: object = node.device
    for name in path.split("."):
        found = getattr(found, name)
    return float(found.value)  # type: ignore[attr-defined]


def test_chains_of_layers_are_traced_after_the_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    some = [
        probe
        for probe in probes_of("1xh200", quick=True)
        if probe.name in ("chain-small", "sample-32000")
    ]
    monkeypatch.setattr(
        recipe_module, "GPU_RECIPE", replace(GPU_RECIPE, probes=lambda limits, quick: some)
    )
    assert (
        main(
            ["calibrate", "1xh200", "--quick", "--measure-only", "--out", str(tmp_path / "probes")]
        )
        == 0
    )
    stages = store.read_run(tmp_path / "probes").stages
    assert {one.run for one in stages} == {"chain-small"}
    assert {"qkv", "attention", "o_proj", "gate_up", "down"} <= {one.stage for one in stages}


def test_stages_of_layers_are_wanted_as_shares_of_the_step_without_marks() -> None:
    (chain,) = [probe for probe in probes_of("1xh200", quick=True) if probe.name == "chain-small"]
    # the embedding comes once in a step, and a clock ticks coarsely
    spans = (("embed", 1e-4), ("qkv", 4e-4), ("down", 3e-4))
    traced = tuple(store.StageTimes("chain-small", kind, span, 0.0, 0.0) for kind, span in spans)
    run = store.Run(Path("run"), {}, {"chain-small": [1e-3]}, traced)
    wanted = {(name, kind): span for name, kind, span in stage_targets([chain], run)}
    assert wanted == {
        ("chain-small", "qkv"): pytest.approx(5e-4),
        ("chain-small", "down"): pytest.approx(3.75e-4),
    }
    assert stage_targets([chain], replace(run, stages=())) == []


def test_a_probe_that_does_not_run_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, broken="hop 0-1")
    probe_only(("exchange",), monkeypatch)
    assert (
        main(
            ["calibrate", "1xh200", "--quick", "--measure-only", "--out", str(tmp_path / "probes")]
        )
        == 0
    )
    run = store.read_run(tmp_path / "probes")
    assert run.meta["failed"] == {"hop-0-1": "no room on this multiprocessor"}
    assert "hop-0-1" not in run.samples
    assert "hop-0-1 failed: no room" in capsys.readouterr().out


def test_measuring_needs_no_simulator() -> None:
    code = (
        "import sys\nfor name in ('simpy', 'scipy', 'pandas', 'plotly', 'tokenizers'): "
        "sys.modules[name] = None\nfrom twin.cli import build_parser\n"
        "build_parser(['calibrate', 'validate'])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=data_dir("hwmodels").parent)


def test_a_run_of_another_device_is_refused(tmp_path: Path) -> None:
    store.save_run(
        tmp_path / "run", {"device": "host", "date": "2026-11-21T10:00:00+00:00"}, {"a": [1.0]}
    )
    with pytest.raises(CalibrationError, match="measured on host, not on h200-sxm"):
        store.adopt_run(tmp_path / "run", NAME, "probes")


def test_a_run_is_adopted_once_under_its_own_date(tmp_path: Path) -> None:
    store.save_run(
        tmp_path / "run",
        {"device": NAME, "date": "2026-11-21T10:00:00+00:00"},
        {"a": [1.0]},
        [store.StageTimes("a", "qkv", 1, 2, 3)],
    )
    first = store.adopt_run(tmp_path / "run", NAME, "probes")
    again = store.adopt_run(tmp_path / "run", NAME, "probes")
    assert first.id == again.id == "2026-11-21T100000-probes"
    assert store.adopt_run(first.folder, NAME, "probes").stages == (
        store.StageTimes("a", "qkv", 1, 2, 3),
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--measure-only",),
        ("--out", "somewhere"),
        ("--measure-only", "--out", "."),
        ("--from", "nowhere"),
    ],
)
def test_folders_that_make_no_sense_are_refused(words: tuple[str, ...]) -> None:
    assert main(["calibrate", "h200", *words]) == 2


def test_another_gpu_is_not_taken_for_the_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        choose, "nvidia_gpus", lambda: [Found("NVIDIA H100 80GB HBM3", "sm_90a", 132, 85 * 10**9)]
    )
    with pytest.raises(EngineError, match=r"h200-sxm has 132 .* Here GPU 0 is NVIDIA H100"):
        choose.check_present(h200().device)


def test_the_gpu_that_is_named_is_found_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Found("NVIDIA T1000", "compute capability 7.5", 14, 4 * 10**9)
    large = Found("NVIDIA H200", "sm_90a", 132, HUGE)
    for here, gpus, first in (
        ([large], 1, 0),
        ([small, large], 1, 1),
        ([large, small, large, large], 1, 0),
        ([large, small, large, large], 2, 2),
    ):
        monkeypatch.setattr(choose, "nvidia_gpus", lambda here=here: here)
        assert choose.place(h200().device, gpus) == first
    monkeypatch.setattr(choose, "nvidia_gpus", lambda: [small])
    with pytest.raises(EngineError, match=r"GPU 0 is NVIDIA T1000 .* CUDA_VISIBLE_DEVICES"):
        choose.place(h200().device)


def test_stretches_undo_a_clock_that_ticks_coarsely() -> None:
    tick, step = 256e-9, 10.1e-6
    ends = np.floor(np.arange(1, 2001) * step / tick) * tick
    assert steady(np.diff(ends)) == pytest.approx(step, rel=1e-3)


def test_spans_of_stages_add_up_to_the_step() -> None:
    plan = stream_probe(Options(blocks=2), limits_of(h200()), rows=16, cols=512, stages=3)
    random = np.random.default_rng(3)
    finished = (
        np.cumsum(random.uniform(1, 2, (2, 5 * 3)), axis=1)
        .reshape(2, 5, 3)
        .transpose(1, 0, 2)[:, None]
    )
    trace = np.stack([finished - 0.5, finished], axis=-1)
    (times,) = stage_times("x", plan, trace)
    steps = np.diff(finished[:, 0, :, -1].max(axis=1))
    assert times.span_s == pytest.approx(float(np.median(steps)))
    assert times.work_s == pytest.approx(3 * 0.5)


def test_what_the_scheduler_warp_makes_is_not_compared() -> None:
    """Its end is never the last of the block's, so it has no span of its own."""
    measured = [
        store.StageTimes("lanes", "down", 2.0, 0.5, 1.5),
        store.StageTimes("lanes", "reduce", 0.0, 0.0, 0.1),
    ]
    found = list(stages_compared(measured, {"lanes": Simulated(4.0, {"down": 3.0, "reduce": 0.0})}))
    assert [(one.stage, one.error) for one in found] == [("down", 0.5)]
