"""One ceiling and one floor: what plain reads reach, whatever rate the twin's pipe was fitted
to.
"""

from __future__ import annotations

import json

import pytest

from tests.command_line import Twin
from twin.calibrate.node import calibrated_node
from twin.cost.prompt import prompt_time
from twin.hardware.floor import ceiling, floor_s
from twin.hardware.load import device_names, load_device, load_node
from twin.hardware.number import Kind
from twin.hardware.override import with_number, with_numbers
from twin.models.load import load_model
from twin.schedule.options import plan_for
from twin.sim.run import simulate

H200 = load_device("h200")


def test_the_ceiling_of_the_h200_is_measured_and_its_pipe_is_fitted() -> None:
    memory = calibrated_node("1xh200").device.memory
    assert ceiling(calibrated_node("1xh200").device) is memory.ceiling_bytes_per_s
    assert memory.ceiling_bytes_per_s is not None
    assert (memory.ceiling_bytes_per_s.kind, memory.stream_bytes_per_s.kind) == (
        Kind.MEASURED,
        Kind.FITTED,
    )
    assert memory.ceiling_bytes_per_s.value == 4.61e12
    assert memory.ceiling_bytes_per_s.high is not None
    assert memory.stream_bytes_per_s.value < memory.ceiling_bytes_per_s.high


def test_the_ceiling_of_the_h100_is_the_vendors() -> None:
    assert (ceiling(load_device("h100")).value, ceiling(load_device("h100")).kind) == (
        3.18e12,
        Kind.VENDOR,
    )


def test_without_a_measured_ceiling_the_pipe_is_the_ceiling() -> None:
    devices = [load_device(name) for name in device_names()]
    unmeasured = [one for one in devices if one.memory.ceiling_bytes_per_s is None]
    assert unmeasured
    for device in unmeasured:
        assert ceiling(device) == device.memory.stream_bytes_per_s, device.name


def test_a_pipe_that_is_faster_is_the_ceiling() -> None:
    faster = with_numbers(H200, [("memory.stream", "4.7 TB/s"), ("memory.ceiling", "4.61 TB/s")])
    assert ceiling(faster).value == 4.7e12


@pytest.mark.parametrize("change", ["x0.5", "-10%", "5 TB/s"])
def test_another_memory_has_another_ceiling(change: str) -> None:
    slower = with_number(H200, "memory.stream", change)
    pipes = slower.memory.stream_bytes_per_s.value / H200.memory.stream_bytes_per_s.value
    assert ceiling(slower).value / ceiling(H200).value == pytest.approx(pipes)


def test_a_changed_ceiling_changes_the_floor_and_no_time() -> None:
    node = load_node("1xh200")
    plan = plan_for(load_model("llama-3.2-1b"), node, max_context=256)
    before, after = (
        simulate(plan, one) for one in (node, with_number(node, "memory.ceiling", "4.7 TB/s"))
    )
    assert (after.step_ps, after.attribution_ps) == (before.step_ps, before.attribution_ps)
    assert after.floor_s == pytest.approx(before.floor_s * 4.61 / 4.7)
    assert after.floor_s == floor_s(
        with_number(H200, "memory.ceiling", "4.7 TB/s"), 1, plan.bytes_per_step()
    )


def test_plan_simulation_and_prompt_share_the_floor(twin: Twin) -> None:
    node = calibrated_node("1xh200")
    planned = json.loads(twin("plan", "llama-3.2-1b", "1xh200", "--json").out)
    simulated = json.loads(twin("simulate", "llama-3.2-1b", "1xh200", "--json").out)
    assert planned["floor_s"] == simulated["floor_s"] == planned["bytes_per_step"] / 4.61e12
    prompt = prompt_time(plan_for(load_model("llama-3.2-1b"), node), node, 512)
    assert prompt.floor_s == pytest.approx(prompt.passes * prompt.pass_bytes / 4.61e12)
