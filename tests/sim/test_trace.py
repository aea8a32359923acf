"""Results and traces as they leave the twin."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command_line import TINY, Twin
from tests.sim.machines import node_of, plan_for, usual
from tests.sim.test_executors import shallow
from twin.engine.generation import Generation
from twin.errors import CalibrationError
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.plan.options import CollectiveKind, HandOffKind, Options
from twin.plan.types import Parts, Plan
from twin.report.recording import Recording, load, record
from twin.report.side_by_side import side_by_side, text
from twin.schedule.options import plan_for as default_plan
from twin.sim.machine import Machine
from twin.sim.run import Result, simulate
from twin.sim.trace import CRITICAL, marks


def result_of(**options: object) -> Result:
    node = node_of(usual(dies=2, per_die=2, io_dies=2), 2)
    plan = plan_for(
        node,
        Options(
            gpus=2,
            blocks=4,
            slot_bytes=512,
            tile_rows=2,
            max_context=256,
            collective=CollectiveKind.PUSH,
        ),
    )
    return simulate(plan, node, trace=True, **options)  # type: ignore[arg-type]


def events_of(result: Result) -> list[dict[str, object]]:
    assert result.trace is not None
    data = json.loads(result.trace.to_json())
    assert set(data) == {"displayTimeUnit", "traceEvents"}
    return list(data["traceEvents"])


def test_spans_nest_and_never_overlap() -> None:
    """Steps hold stages, stages hold what their time went to."""
    tracks: dict[tuple[object, object, str], list[tuple[float, float]]] = defaultdict(list)
    for event in events_of(result_of()):
        if event["ph"] == "X":
            level = str(event["cat"]) if event["cat"] in ("step", "stage") else "cause"
            start = float(str(event["ts"]))
            tracks[event["pid"], event["tid"], level].append(
                (start, start + float(str(event["dur"])))
            )
    for (pid, tid, level), spans in tracks.items():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans)), (pid, tid, level)
    for gpu in range(2):
        step, stage, cause = (
            sum(e - s for s, e in tracks[gpu, 0, level]) for level in ("step", "stage", "cause")
        )
        assert abs(step - stage) < 1e-6
        assert abs(step - cause) < 1e-6


def test_tracks_carry_the_names_of_the_machine() -> None:
    names = {event["args"]["name"] for event in events_of(result_of()) if event["ph"] == "M"}  # type: ignore[index]
    assert {"Gpu[0]", "Gpu[1]", "Gpu[1].Die[1].Block[3].consumer", "critical path"} <= names


def test_a_track_is_named_once_however_many_stages_a_scheduler_makes() -> None:
    model = shallow("laneformer-2b")
    plan = default_plan(model, load_node("1xh200"), blocks=16)
    named = [
        event
        for event in events_of(simulate(plan, load_node("1xh200"), trace=True))
        if event["ph"] == "M"
    ]
    tracks = [(event["name"], event["pid"], event.get("tid")) for event in named]
    assert len(tracks) == len(set(tracks))
    assert sum("helper" in str(event["args"]) for event in named) == 16


def test_a_loader_never_has_more_in_flight_than_its_window() -> None:
    levels = [event["args"]["slots"] for event in events_of(result_of()) if event["ph"] == "C"]  # type: ignore[index]
    assert min(levels) == 0
    assert 0 < max(levels) <= Options().window_slots


def test_the_critical_path_covers_the_step_without_gap() -> None:
    result = result_of()
    spans = sorted(
        (e["ts"], e["dur"]) for e in events_of(result) if e["ph"] == "X" and e["pid"] == CRITICAL
    )
    assert abs(sum(float(str(d)) for _, d in spans) - result.step_ps / 1e6) < 1e-6
    assert all(
        abs(float(str(a)) + float(str(d)) - float(str(b))) < 1e-6
        for (a, d), (b, _) in pairwise(spans)
    )


def test_a_trace_of_some_blocks_has_only_those() -> None:
    few, all_blocks = events_of(result_of(blocks=(1,))), events_of(result_of())
    assert len(few) < len(all_blocks) / 2
    assert {e["tid"] for e in few if e.get("cat") == "stage"} == {1}


def test_a_trace_does_not_change_the_result() -> None:
    node = node_of(usual(dies=2, per_die=2, io_dies=2), 2)
    plan = plan_for(
        node,
        Options(
            gpus=2,
            blocks=4,
            slot_bytes=512,
            tile_rows=2,
            max_context=256,
            collective=CollectiveKind.PUSH,
        ),
    )
    assert simulate(plan, node).to_json() == simulate(plan, node, trace=True).to_json()


def test_the_json_holds_nothing_that_depends_on_this_computer() -> None:
    data = json.loads(result_of().to_json())
    assert "wall_s" not in data
    assert "trace" not in data
    assert data["tokens_per_s"] == 1e12 / data["step_ps"]
    assert sum(data["attribution_ps"].values()) == data["step_ps"]


def test_only_assumed_numbers_that_matter_are_listed() -> None:
    paths = result_of().assumed
    assert "device.handoff.hop_s" in paths
    assert "link.hop_s" in paths
    assert not [
        path
        for path in paths
        if "launch" in path or "library" in path or "atomic" in path or "sample" in path
    ]


# ---- marks, and recorded steps next to simulated ones --------------------------------------------


def machine_of(**options: Any) -> Machine:
    node = node_of(usual(dies=2, per_die=2, io_dies=2), 2)
    settled = {
        "gpus": 2,
        "blocks": 4,
        "slot_bytes": 512,
        "tile_rows": 2,
        "max_context": 256,
        "collective": CollectiveKind.PUSH,
        **options,
    }
    machine = Machine(plan_for(node, Options(**settled)), node, steps=3, keep_all=True)
    machine.run()
    return machine


@pytest.mark.parametrize("handoff", list(HandOffKind))
def test_marks_lie_in_the_order_of_the_stages(handoff: HandOffKind) -> None:
    machine = machine_of(handoff=handoff)
    times = marks(machine)
    steps, ranks, blocks, stages, two = times.shape
    in_order = times.transpose(1, 2, 0, 3, 4).reshape(ranks, blocks, steps * stages * two)
    assert (np.diff(in_order) >= 0).all()
    for block in machine.blocks:
        assert times[:, block.place.rank, block.place.index, -1, 1].tolist() == block.ended


def test_inputs_are_ready_only_after_their_producers_have_finished() -> None:
    machine = machine_of()
    times = marks(machine)[-1]
    for stage in machine.plan.stages:
        for read in stage.reads:
            value = machine.plan.values[read.value]
            if read.previous_step or read.parts is not Parts.OWN:
                continue
            done = [
                times[:, block, value.stage, 1]
                for block, (lo, hi) in enumerate(value.owned)
                if lo < hi
            ]
            needing = [
                block for block, spans in enumerate(read.spans) if spans == ((0, value.elements),)
            ]
            for block in needing:
                assert (times[:, block, stage.index, 0] > np.max(done, axis=0)).all()


def recorded(plan: Plan, node: Node, *, slower: int = 1, start: int = 0) -> Recording:
    """What an engine that behaves as the twin, or `slower` times slower, would have recorded."""
    machine = Machine(plan, node, steps=5, keep_all=True)
    machine.run()
    return Recording(
        plan, start + slower * marks(machine)[1:] // 1000, np.arange(100, 104), {"device": "a twin"}
    )


@pytest.fixture(scope="module")
def h200() -> tuple[Plan, Node]:
    node = load_node("1xh200")
    return default_plan(TINY, node, blocks=8), node


def test_a_recording_of_the_twin_itself_differs_by_nothing(h200: tuple[Plan, Node]) -> None:
    result = side_by_side(recorded(*h200, start=7_000_000), h200[1], shown=(0, 5))
    assert abs(result.difference) < 1e-3
    for row in result.stages:
        assert row.measured_wait_us == pytest.approx(row.simulated_wait_us, abs=2e-3)
        assert row.measured_work_us == pytest.approx(row.simulated_work_us, abs=2e-3)
    assert sum(row.stages for row in result.stages) == len(h200[0].stages)
    assert sum(row.stages * row.simulated_span_us for row in result.stages) == pytest.approx(
        result.simulated_step_us, rel=1e-3
    )


def test_a_slower_engine_shows_in_every_stage(h200: tuple[Plan, Node]) -> None:
    result = side_by_side(recorded(*h200, slower=2), h200[1], shown=(0,))
    assert result.difference == pytest.approx(-0.5, abs=1e-3)
    assert all(row.difference == pytest.approx(-0.5, abs=1e-2) for row in result.stages)
    assert "-50.0%" in text(result)


def test_both_sides_have_the_same_tracks_and_stages_from_the_same_start(
    h200: tuple[Plan, Node],
) -> None:
    plan, node = h200
    events = list(
        side_by_side(recorded(plan, node, start=7_000_000), node, shown=(0, 5)).trace.events
    )
    assert min(float(str(e["ts"])) for e in events if e["ph"] != "M") >= 0
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}  # type: ignore[index]
    assert set(names.values()) == {"measured Gpu[0]", "simulated Gpu[0]", "simulated critical path"}
    sides: dict[str, dict[Any, list[Any]]] = {
        "measured": defaultdict(list),
        "simulated": defaultdict(list),
    }
    for event in events:
        if event["ph"] == "X" and event["cat"] in ("step", "stage"):
            sides[names[event["pid"]].split()[0]][event["tid"], event["cat"]].append(event)
    assert sides["measured"].keys() == sides["simulated"].keys()
    for track, ours in sides["measured"].items():
        theirs = sides["simulated"][track]
        assert [e["name"] for e in ours] == [e["name"] for e in theirs]
        assert all(
            a["ts"] == pytest.approx(b["ts"], abs=5e-3) for a, b in zip(ours, theirs, strict=True)
        )


def test_a_recording_survives_the_disk(h200: tuple[Plan, Node], tmp_path: Path) -> None:
    before = recorded(*h200)
    before.save(tmp_path / "a.npz")
    after = load(tmp_path / "a.npz")
    assert after.plan == before.plan
    assert np.array_equal(after.marks, before.marks)
    assert after.positions.tolist() == before.positions.tolist()
    assert after.conditions == before.conditions


def test_broken_recordings_are_refused_with_the_file(
    h200: tuple[Plan, Node], tmp_path: Path
) -> None:
    good = recorded(*h200)
    file = tmp_path / "a.npz"
    with pytest.raises(CalibrationError, match=r"a\.npz: cannot be read"):
        load(file)
    file.write_text("no archive")
    with pytest.raises(CalibrationError, match=r"a\.npz: is no recording"):
        load(file)
    np.savez_compressed(file, marks=good.marks)
    with pytest.raises(CalibrationError, match=r"positions"):
        load(file)
    replace(good, marks=good.marks[:, :, :, 1:]).save(file)
    with pytest.raises(CalibrationError, match=r"its plan now has \[1, 8, 13, 2\] a step"):
        load(file)


def test_only_whole_runs_of_built_plans_are_recorded(h200: tuple[Plan, Node]) -> None:
    plan = h200[0]
    marked = np.zeros((139, 1, 8, len(plan.stages), 2), np.int64)
    marked[:] = np.arange(139)[:, None, None, None, None]
    made = Generation([0] * 120, np.zeros(120, np.int64), 0, "length", marked)
    kept = record(plan, made, prompt=20, conditions={}, steps=8)
    assert kept.positions.tolist() == list(range(123, 132))
    assert (kept.marks[:, 0, 0, 0, 0] == kept.positions - 1).all()
    with pytest.raises(CalibrationError, match="trace=True"):
        record(plan, replace(made, trace=None), prompt=20, conditions={})
    with pytest.raises(CalibrationError, match="generate at least 121"):
        record(plan, made, prompt=20, conditions={}, steps=120)
    with pytest.raises(CalibrationError, match="not what its model and options build"):
        record(replace(plan, stages=plan.stages[:-1]), made, prompt=20, conditions={})


def test_the_command_prints_the_table_and_writes_the_trace(
    h200: tuple[Plan, Node], tmp_path: Path, twin: Twin
) -> None:
    recorded(*h200).save(tmp_path / "a.npz")
    outcome = twin("trace", tmp_path / "a.npz", "1xh200", "--out", tmp_path / "deep" / "a.json")
    assert outcome.code == 0, outcome.err
    assert "gate_up" in outcome.out
    assert json.loads((tmp_path / "deep" / "a.json").read_text())["traceEvents"]
    assert {
        row["kind"]
        for row in json.loads(twin("trace", tmp_path / "a.npz", "1xh200", "--json").out)["stages"]
    } >= {"qkv", "sample"}
    refused = twin("trace", tmp_path / "a.npz", "1xh200", "--steps", 9)
    assert refused.code == 2
    assert "holds 3 complete steps" in refused.err
