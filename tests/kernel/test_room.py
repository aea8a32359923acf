"""A model too large for a node: both sizes in GB, and the smallest node on file that holds it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from twin.errors import PlanError
from twin.hardware.load import device_names, load_device, load_node, node_names
from twin.kernel.room import check_room, free_bytes, smallest_node
from twin.models.load import load_model
from twin.models.spec import DType
from twin.schedule.options import plan_for
from twin.schedule.ring import limits_of

LARGE = load_model("llama-3.1-70b")


def refusal(
    node: str, *, free: int | None = None, suggest: bool = True, max_context: int = 1024
) -> str:
    plan = plan_for(LARGE, load_node(node), max_context=max_context)
    with pytest.raises(PlanError) as error:
        check_room(plan, load_node(node), {} if suggest else None, free_bytes=free)
    return str(error.value)


def test_what_fits_passes() -> None:
    node = load_node("2xh200")
    check_room(plan_for(LARGE, node), node, {})


def test_both_sizes_are_said_in_gb_per_gpu() -> None:
    assert (
        "needs 141 GB of memory per GPU, a h100-sxm has 84.3 GB, 57.1 GB too few: 2xh100-sxm is "
        "the smallest node of h100-sxm" in refusal("1xh100")
    )


def test_sizes_that_round_alike_are_said_with_what_is_missing() -> None:
    said = refusal("1xh200", max_context=26_000)
    assert re.search(r"needs 150 GB of memory per GPU, a h200-sxm has 150 GB, \d+ MB too few", said)


def test_a_device_holds_what_its_driver_shows_less_what_it_keeps() -> None:
    """Datasheets count GB or GiB and round: no driver shows a whole number of GB, and each leaves
    something to programs' contexts.
    """
    for name in device_names()[1:]:
        memory = load_device(name).memory
        assert memory.capacity_bytes.value % 1e9, name
        assert memory.reserved_bytes is not None, name
        assert memory.usable_bytes == memory.capacity_bytes.value - memory.reserved_bytes.value
    assert load_device("h200").memory.capacity_bytes.value == 143_771 * 2**20
    assert load_device("h100").memory.capacity_bytes.value == 81_559 * 2**20


def test_seventy_billion_parameters_in_16_bits_fit_one_h200() -> None:
    """141.1 GB of weights; "141 GB" of the datasheet are 150.8."""
    node = load_node("1xh200")
    check_room(plan_for(LARGE, node, context=128, max_context=256), node, {})


@pytest.mark.few(1)
@pytest.mark.parametrize("node", ["1xh200", "4xh100"])
def test_the_node_that_is_named_is_the_smallest_that_holds_it(node: str) -> None:
    """Of the same device, found by trying every number of GPUs."""
    spec = load_model("llama-3.1-405b")
    device = load_node(node).device.name
    own = [load_node(name) for name in node_names() if load_node(name).device.name == device]
    fits = [
        other
        for other in own
        if plan_for(spec, other).memory_bytes() <= limits_of(other).memory_bytes
    ]
    named = smallest_node(spec, load_node(node), {})
    assert named is not None
    if fits:
        assert named.startswith(
            f"{min(fits, key=lambda n: n.gpus).name} is the smallest node of {device}"
        )
    else:
        assert "is the smallest node on file" in named


def test_another_device_is_named_where_no_number_of_this_one_holds_it() -> None:
    """Of all nodes on file that hold it, none has less memory in all."""
    spec = LARGE
    named = smallest_node(spec, load_node("1xhost"), {})
    assert named is not None
    assert "is the smallest node on file that holds it" in named
    holder = load_node(named.split()[0])
    for other in (load_node(name) for name in node_names() if "host" not in name):
        if (
            other.gpus * limits_of(other).memory_bytes
            < holder.gpus * limits_of(holder).memory_bytes
        ):
            plan = plan_for(spec, other)
            assert plan.memory_bytes() > plan.limits.memory_bytes, other.name


def test_smaller_weights_need_a_smaller_node() -> None:
    spec = dataclasses.replace(LARGE, dtype=DType.FP32)
    wide, narrow = (
        smallest_node(spec, load_node("1xh200"), {"weight_dtype": dtype})
        for dtype in (DType.FP32, DType.BF16)
    )
    assert wide is not None
    assert narrow is not None
    assert wide.startswith("2xh200")
    assert narrow.startswith("1xh200")


def test_emulated_gpus_share_this_computers_memory() -> None:
    node = load_node("2xhost")
    spec = load_model("llama-3.2-1b")
    plan = plan_for(spec, node)
    check_room(plan, node, free_bytes=2 * plan.memory_bytes())
    with pytest.raises(PlanError, match=r"needs .* GB of memory, this computer has .* GB free"):
        check_room(plan, node, free_bytes=2 * plan.memory_bytes() - 1)


def test_without_options_no_node_is_looked_for() -> None:
    """A study refuses thousands of cells."""
    assert "smallest" not in refusal("1xh100", suggest=False)


def test_free_memory_is_what_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "meminfo"
    said.write_text("MemTotal: 4096 kB\nMemAvailable:    1024 kB\n")
    monkeypatch.setattr("twin.kernel.room.MEMINFO", said)
    assert free_bytes() == 2**20
    monkeypatch.setattr("twin.kernel.room.MEMINFO", tmp_path / "absent")
    assert free_bytes() is None
