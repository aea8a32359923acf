"""Figures of others are runs: fitted where they are inputs, compared where they are held out, and
never both.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import Twin
from twin.calibrate import store
from twin.calibrate.fit import fit_node
from twin.calibrate.node import calibrated_node, uncalibrated_node
from twin.calibrate.published import TRUST, Figure, Role, check_inputs, figures, role_of
from twin.calibrate.published_plans import predicted_s, probe, question
from twin.calibrate.reading import Reading
from twin.data import data_dir, read_yaml
from twin.errors import CalibrationError
from twin.hardware.load import load_node
from twin.hardware.override import numbers
from twin.plan.catalogue import StageKind

RUNS = data_dir("calibration") / "runs"
FILES = sorted(
    file
    for file in RUNS.glob("*/*/meta.yaml")
    if (file.parent.name.endswith(("-published", "-published-inputs", "-published-all-reduces")))
)
INPUTS = RUNS / "mi300x" / "2026-11-23T145500-published-inputs"
HELD_OUT = RUNS / "mi300x" / "2026-11-23T145500-published"
SAMPLE: dict[str, Any] = {
    "publication": "ETX",
    "date": "2026-09-22",
    "configuration": "an empty kernel",
    "value": 1.6,
    "unit": "us",
    "group": "launch",
    "asks": {"launches": {"blocks": 304}},
}


def record(folder: Path, role: str, node: str = "1xmi300x", **changes: Any) -> Path:
    folder.mkdir(parents=True)
    meta = {"node": node, "role": role, "figures": {"launch": SAMPLE | changes}}
    (folder / "meta.yaml").write_text(yaml.safe_dump(meta))
    return folder


def of(folder: Path) -> tuple[Figure, ...]:
    return figures(folder, store.read_run(folder).meta)


def figure(node: str, **asks: Any) -> Figure:
    return Figure("x", node, "ETX", "2026", "", (1.0,), "us", asks)


# ---- what is on file -----------------------------------------------------------------------------


def test_records_of_both_roles_are_on_file() -> None:
    roles = {role_of(file.parent, store.read_run(file.parent).meta) for file in FILES}
    assert roles == set(Role)
    assert len(FILES) == 3


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_every_figure_says_who_measured_what_and_when(file: Path) -> None:
    sources = read_yaml(data_dir("hwmodels") / "sources.yaml")
    for one in of(file.parent):
        assert one.publication in sources, one.name
        assert one.configuration, one.name
        assert re.match(r"20\d\d(-\d\d){0,2}$", one.date), one.name
        if not {"step", "border"} & set(one.asks):  # plans of models take longer
            question(one)


def test_no_number_of_the_hardware_cites_what_is_held_out() -> None:
    """Of the nodes that the figures were measured on, and so of what predicts them."""
    cited = {}
    for file in FILES:
        held_out = role_of(file.parent, store.read_run(file.parent).meta) is Role.HELD_OUT
        for one in of(file.parent) if held_out else ():
            for path, number in numbers(load_node(one.node)).items():
                if re.search(rf"\b{re.escape(one.publication)}(?![\w-])", number.source):
                    cited[one.node, path] = one.publication
    assert cited == {}


def test_pushes_between_gpus_use_no_librarys_all_reduce() -> None:
    """Those of hwmodels/nodes are of the same tables as the held-out figures (AIC)."""
    ((file,),) = [[f for f in FILES if "all-reduces" in f.parent.name]]
    for one in of(file.parent):
        assert all(stage.kind is not StageKind.COLLECTIVE for stage in question(one).plan.stages)


# ---- inputs and held-out figures -----------------------------------------------------------------


def test_a_fit_of_held_out_figures_is_refused(
    twin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CalibrationError, match=r"held out: .*role: input is fitted"):
        fit_node(uncalibrated_node("1xmi300x"), [], store.read_run(HELD_OUT), lambda said: None)
    monkeypatch.setenv(store.HOME_VARIABLE, str(tmp_path))
    folder = record(tmp_path / "runs" / "mi300x" / "x", "held-out")
    outcome = twin("calibrate", "1xmi300x", "--from", folder)
    assert outcome.code == 2
    assert "held out" in outcome.err
    assert not store.fit_file("1xmi300x").exists()


def test_a_publication_is_an_input_or_held_out_but_not_both(tmp_path: Path) -> None:
    folder = record(tmp_path / "inputs", "input")
    check_inputs(folder, store.read_run(folder).meta)
    record(tmp_path / "engines", "held-out", unit="ms")
    with pytest.raises(CalibrationError, match="launch is of ETX, which engines holds out"):
        check_inputs(folder, store.read_run(folder).meta)


def test_the_inputs_on_file_make_the_fit_on_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})  # sooner than workers start
    run = store.read_run(INPUTS)
    launches = [one for one in of(INPUTS) if one.group == "launch"]
    found = fit_node(
        uncalibrated_node("1xmi300x"),
        [probe(one) for one in launches],
        store.Run(run.folder, run.meta, run.samples),
        lambda said: None,
    ).numbers["launch.stream_s"]
    kept = store.read_fit("1xmi300x")
    assert kept is not None
    assert kept[1]["run"] == run.id
    assert found.value == pytest.approx(kept[0]["launch.stream_s"].value, rel=1e-3)
    assert found.low == pytest.approx(1.6e-6 * (1 - TRUST), rel=0.02)


# ---- what the twin predicts ----------------------------------------------------------------------


def test_a_published_launch_is_the_twins_launch() -> None:
    node = load_node("1xmi300x")
    wanted = figure("1xmi300x", launches={"blocks": 304})
    assert predicted_s(wanted, node) == pytest.approx(node.device.launch.stream_s.value)


def test_a_word_between_dies_takes_a_hop_half_a_poll_and_the_crossing() -> None:
    node = load_node("1xmi300x")
    idle = node.device.handoff
    same, other = (
        predicted_s(figure("1xmi300x", hop={"dies": dies}), node) for dies in ([0, 0], [0, 1])
    )
    assert same == pytest.approx(idle.hop_s.value + idle.poll_s.value / 2, rel=0.01)
    assert other - same == pytest.approx(idle.cross_die_s.value, rel=0.01)


def test_arrivals_at_one_counter_queue_and_flags_in_the_data_do_not() -> None:
    def taken(blocks: int, handoff: str) -> float:
        wanted = {"blocks": blocks, "bytes": 1216, "handoff": handoff}
        return predicted_s(figure("1xmi300x", exchange=wanted), node)

    node = load_node("1xmi300x")
    more = taken(304, "counter") - taken(152, "counter")
    assert more == pytest.approx(152 * node.device.handoff.atomic_s.value, rel=0.02)
    assert taken(304, "sentinel") == pytest.approx(taken(152, "sentinel"), rel=0.05)


def test_an_all_reduce_takes_a_remote_store_at_least_and_a_graph_adds_its_edge() -> None:
    node = calibrated_node("2xh200")
    wanted = {"gpus": 2, "bytes": 8192, "blocks": 8}
    alone = figure("2xh200", **{"all-reduce": wanted})
    in_graph = figure("2xh200", **{"all-reduce": wanted | {"graph_edge": True}})
    assert node.link
    assert predicted_s(alone, node) > node.link.hop_s.value + node.device.l2.latency_s.value
    edge = load_node("1xh200").device.launch.graph_edge_s.value
    assert predicted_s(in_graph, node) - predicted_s(alone, node) == pytest.approx(edge)


def test_a_model_like_another_has_its_own_numbers() -> None:
    wanted = question(figure("1xmi300x", border={"model": {"like": "llama-3.2-1b", "layers": 2}}))
    assert wanted.plan.spec
    assert (wanted.plan.spec.layers, wanted.plan.spec.hidden) == (2, 2048)
    assert wanted.reading is Reading.BORDER


# ---- units and errors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "values", "seconds"),
    [
        ("us", (7.5, 8.0), (7.5e-6, 8.0e-6)),
        ("tokens/s", (200.0,), (5e-3,)),
        ("GB/s", (2.0,), (0.5,)),
    ],
)
def test_a_figure_is_read_in_seconds_and_stated_in_its_unit(
    unit: str, values: tuple[float, ...], seconds: tuple[float, ...]
) -> None:
    one = Figure("x", "n", "K", "2026", "", values, unit, {"stream": {"bytes": 1e9}})
    assert one.seconds == pytest.approx(seconds)
    assert [one.in_unit(taken) for taken in one.seconds] == pytest.approx(values)


def test_an_error_is_of_the_speed_and_a_range_has_an_inside() -> None:
    one = Figure("x", "n", "K", "2026", "", (3000.0, 3300.0), "tokens/s", {})
    slow, right = (replace(one, predicted_s=1 / speed) for speed in (2000, 3100))
    assert slow.error == pytest.approx(2000 / 3150 - 1, rel=0.01)
    assert (slow.inside, right.inside) == (False, True)
    assert one.shown() == "3,000 to 3,300 tokens/s"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unit": "furlongs"}, "furlongs"),
        ({"value": []}, "at least one entry"),
        ({"value": 0}, "a number, above 0"),
        ({"surplus": 1}, "surplus"),
    ],
)
def test_what_is_no_figure_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = record(tmp_path / "r", "input", **changes)
    with pytest.raises(CalibrationError, match=f"launch.*{said}"):
        store.read_run(folder)


def test_a_record_without_figures_and_a_damaged_one_next_to_an_input_are_refused(
    tmp_path: Path,
) -> None:
    folder = record(tmp_path / "inputs", "input")
    other = record(tmp_path / "damaged", "held-out")
    (other / "meta.yaml").write_text("node: 1xmi300x\nrole: held-out\nfigures: [1]\n")
    with pytest.raises(CalibrationError, match=r"figures: .*must be a mapping"):
        store.read_run(other)
    (other / "meta.yaml").write_text("{")
    with pytest.raises(CalibrationError, match="what it holds out is unknown"):
        check_inputs(folder, store.read_run(folder).meta)


def test_a_record_without_a_role_is_refused(tmp_path: Path) -> None:
    folder = record(tmp_path / "r", "both")
    with pytest.raises(CalibrationError, match="role: 'both' must be input or held-out"):
        store.read_run(folder)


def test_words_that_ask_nothing_are_refused() -> None:
    for asks in ({"weather": {}}, {"hop": {"miles": 3}}, {}):
        with pytest.raises(CalibrationError, match="none of stream, hop"):
            question(figure("1xmi300x", **asks))


# ---- the command ---------------------------------------------------------------------------------


def test_validate_sets_figures_next_to_predictions(twin: Twin, tmp_path: Path) -> None:
    folder = record(tmp_path / "r", "held-out")
    said = json.loads(twin("validate", "1xmi300x", "--from", folder, "--json").out)
    (row,) = said["figures"]
    assert (said["role"], row["published"], row["unit"]) == ("held-out", [1.6], "us")
    assert row["predicted"] == pytest.approx(1.6, rel=0.02)
    shown = twin("validate", "mi300x", "--from", folder).out
    assert "held out of every fit" in shown
    assert "1.6 us" in shown


def test_validate_refuses_another_nodes_figures(twin: Twin, tmp_path: Path) -> None:
    folder = record(tmp_path / "r", "held-out")
    outcome = twin("validate", "1xh200", "--from", folder)
    assert outcome.code == 2
    assert "holds figures of mi300x, not of h200-sxm" in outcome.err
