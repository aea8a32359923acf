"""Results and traces as they leave the twin."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

from tests.sim.machines import node_of, plan_for, usual
from twin.plan.types import CollectiveKind, Options
from twin.sim.run import Result, simulate
from twin.sim.trace import CRITICAL


def result_of(**options: object) -> Result:
    node = node_of(usual(dies=2, per_die=2, io_dies=2), 2)
    plan = plan_for(node, Options(gpus=2, blocks=4, slot_bytes=512, tile_rows=2, max_context=256, collective=CollectiveKind.PUSH))
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
            tracks[event["pid"], event["tid"], level].append((start, start + float(str(event["dur"]))))
    for (pid, tid, level), spans in tracks.items():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans)), (pid, tid, level)
    for gpu in range(2):
        step, stage, cause = (sum(e - s for s, e in tracks[gpu, 0, level]) for level in ("step", "stage", "cause"))
        assert abs(step - stage) < 1e-6
        assert abs(step - cause) < 1e-6


def test_tracks_carry_the_names_of_the_machine() -> None:
    names = {event["args"]["name"] for event in events_of(result_of()) if event["ph"] == "M"}  # type: ignore[index]
    assert {"Gpu[0]", "Gpu[1]", "Gpu[1].Die[1].Block[3].consumer", "critical path"} <= names


def test_a_loader_never_has_more_in_flight_than_its_window() -> None:
    levels = [event["args"]["slots"] for event in events_of(result_of()) if event["ph"] == "C"]  # type: ignore[index]
    assert min(levels) == 0
    assert 0 < max(levels) <= Options().window_slots


def test_the_critical_path_covers_the_step_without_gap() -> None:
    result = result_of()
    spans = sorted((e["ts"], e["dur"]) for e in events_of(result) if e["ph"] == "X" and e["pid"] == CRITICAL)
    assert abs(sum(float(str(d)) for _, d in spans) - result.step_ps / 1e6) < 1e-6
    assert all(abs(float(str(a)) + float(str(d)) - float(str(b))) < 1e-6 for (a, d), (b, _) in pairwise(spans))


def test_a_trace_of_some_blocks_has_only_those() -> None:
    few, all_blocks = events_of(result_of(blocks=(1,))), events_of(result_of())
    assert len(few) < len(all_blocks) / 2
    assert {e["tid"] for e in few if e.get("cat") == "stage"} == {1}


def test_a_trace_does_not_change_the_result() -> None:
    node = node_of(usual(dies=2, per_die=2, io_dies=2), 2)
    plan = plan_for(node, Options(gpus=2, blocks=4, slot_bytes=512, tile_rows=2, max_context=256, collective=CollectiveKind.PUSH))
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
    assert not [path for path in paths if "launch" in path or "library" in path or "atomic" in path or "sample" in path]
