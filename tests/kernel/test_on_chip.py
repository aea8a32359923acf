"""What an NVIDIA block of a low-bit plan keeps in its shared memory instead of registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.small_engine import probes
from twin.cost import vectors
from twin.hardware.load import load_node
from twin.kernel.tables import layout
from twin.models.feeds import ExpertFeed
from twin.models.formats import format_named
from twin.models.load import load_model
from twin.models.quantized import requantized
from twin.models.spec import ModelSpec
from twin.plan.catalogue import StageKind
from twin.plan.options import Execution, HandOffKind
from twin.plan.types import Plan
from twin.schedule.block import WARP
from twin.schedule.choose import schedule_of
from twin.schedule.homes import REGISTER_PORTIONS, WHOLE_PORTIONS, Home
from twin.schedule.memory import Scratch
from twin.schedule.options import plan_for
from twin.schedule.prefetch import prefetches
from twin.schedule.ring import limits_of
from twin.schedule.types import WarpSchedule


def planned(name: str, hidden: int, heads: int, ffn: int, node: str = "1xh200") -> Plan:
    base = load_model("llama-3.1-8b")
    sized = replace(base, hidden=hidden, heads=heads, ffn=ffn, layers=2, windows=base.windows[:2])
    return plan_for(requantized(sized, format_named(name)), load_node(node))


def made(plan: Plan) -> tuple[WarpSchedule, Scratch]:
    schedule = schedule_of(plan)
    return schedule.warps, schedule.memory.scratch


def mixtral(top_k: int, width: int, **sizes: int) -> ModelSpec:
    """Two layers of Mixtral-8x7B with other experts."""
    base = load_model("mixtral-8x7b")
    assert base.layout
    assert isinstance(base.layout[0].feed, ExpertFeed)
    feed = replace(base.layout[0].feed, top_k=top_k, width=width)
    layers = tuple(replace(layer, feed=feed) for layer in base.layout[:2])
    sized: dict[str, Any] = {"ffn": width, **sizes}
    return replace(base, layers=2, windows=base.windows[:2], layout=layers, **sized)


@pytest.mark.parametrize(
    ("name", "ffn", "wide"),
    [
        ("fp8", 14_336, False),  # four slices of a team
        ("fp8", 17_408, True),
        ("int8", 8192, False),  # two
        ("int8", 12_288, True),
        ("int4-g128", 12_288, True),
        ("mxfp4", 8192, False),
        ("nvfp4", 12_288, True),
    ],
)
def test_inputs_of_wide_feed_forwards_lie_in_shared_memory(name: str, ffn: int, wide: bool) -> None:
    plan = planned(name, 4096, 32, ffn)
    most = REGISTER_PORTIONS if name == "fp8" else WHOLE_PORTIONS
    warps, scratch = made(plan)
    assert (warps.teams["ffn"].portions > most) is wide
    assert warps.ffn.in_memory is wide
    if wide and "fp4" not in name:  # tensor cores have room of their own
        assert scratch.whole > 0


@pytest.mark.parametrize(
    ("top_k", "width", "in_registers", "at_once"),
    [
        (2, 10_240, 80, 80),  # elements of a thread
        (2, 14_336, 112, 32),  # Mixtral-8x7B
        (3, 14_336, 112, 32),  # 56 of 168 lie in shared memory
    ],
)
def test_wide_inputs_before_16_bit_weights_are_gathered_in_rounds(
    top_k: int, width: int, in_registers: int, at_once: int
) -> None:
    """Threads keep what they have registers for, and the block's memory the rest."""
    plan = plan_for(mixtral(top_k, width), load_node("1xh200"))
    warps, scratch = made(plan)
    team = warps.teams["ffn"]
    assert warps.ffn.in_registers * team.vector == in_registers
    assert warps.ffn.at_once * team.vector == at_once
    assert scratch.whole == (team.portions * team.vector - in_registers) * team.warps * WARP
    assert warps.prefetch["ffn"].portions == 0


def test_a_dense_input_is_gathered_at_once_as_far_as_registers_go() -> None:
    base = load_model("llama-3.1-8b")
    for ffn, rounds in ((28_672, False), (30_720, True)):
        sized = replace(base, ffn=ffn, layers=2, windows=base.windows[:2])
        plan = plan_for(sized, load_node("1xh200"))
        warps, scratch = made(plan)
        assert (warps.ffn.at_once < warps.teams["ffn"].portions) is rounds
        assert (scratch.whole > 0) is rounds


def test_a_probe_without_feed_forward_gathers_one_slice_of_no_columns() -> None:
    """The kernel's vector of none has one: with none at once no probe compiled."""
    limits = limits_of(load_node("1xh200"))
    for plan in probes(limits, Execution.RESIDENT, HandOffKind.SENTINEL, blocks=5, vocab=5000):
        sizes = layout(plan).sizes
        assert (sizes["ffn_cols"], sizes["ffn_in_registers"], sizes["ffn_at_once"]) == (0, 1, 1)


def test_nothing_is_prefetched_for_such_an_input() -> None:
    """Its tiles are multiplied as they come: what was taken before would stay, and the block
    wait.
    """
    plan = planned("int8", 2048, 16, 8192)
    warps, _ = made(plan)
    assert not warps.ffn.in_memory
    assert warps.prefetch["ffn"].portions > 0
    assert prefetches(plan, warps.teams, ffn_in_memory=True, short_ahead=False)["ffn"].portions == 0


@pytest.mark.parametrize(
    ("name", "node", "hidden", "heads", "ffn", "held"),
    [
        ("int4-g128", "2xh200", 8192, 64, 28_672, True),  # its feed-forward lies there too
        ("int8", "2xh200", 5120, 40, 17_408, True),
        ("fp8", "2xh200", 5120, 40, 17_408, False),
        ("fp8", "2xh200", 8192, 64, 28_672, False),
        ("int4-g128", "2xh200", 4096, 32, 28_672, False),  # one slice of a team
        ("int8", "1xh200", 5120, 40, 17_408, False),  # nothing spills
        ("int4-g128", "1xh200", 8192, 64, 28_672, False),
    ],
)
def test_who_adds_up_several_ranks_parts_keeps_the_residual_in_shared_memory(
    name: str, node: str, hidden: int, heads: int, ffn: int, held: bool
) -> None:
    plan = planned(name, hidden, heads, ffn, node)
    warps, scratch = made(plan)
    assert (warps.residual.home is Home.SHARED) is held
    sizes, team = layout(plan).sizes, warps.teams["hidden"]
    assert ("held" in sizes) is held
    if held:
        assert scratch.held == team.portions * 16 * 256  # of each of eight warps' threads
        assert sizes["held"] + scratch.held == sizes["whole"]
        assert sizes["whole"] + scratch.whole + scratch.choice == sizes["scratch_floats"]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("model", "node", "together"),
    [
        ("llama-3.2-1b", "2xh200", 1),
        ("llama-3.2-1b", "8xh200", 4),  # one portion of a thread
        ("llama-3.1-8b", "4xh200", 2),
        ("llama-3.1-70b", "8xh200", 1),  # four
        ("llama-3.1-8b@fp8", "4xh200", 1),
        ("laneformer-2b", "8xh200", 1),
        ("qwen3-coder-next", "8xh200", 1),  # recurrent states
        ("llama-3.1-8b", "4xmi300x", 0),  # has no such size
    ],
)
def test_parts_of_many_gpus_are_looked_at_together_where_registers_are_left(
    model: str, node: str, together: int
) -> None:
    assert layout(plan_for(load_model(model), load_node(node))).sizes["parts_together"] == together


@pytest.mark.parametrize("node", ["1xmi300x", "1xhost"])
def test_other_devices_keep_neither_there(node: str) -> None:
    sizes = layout(planned("int8", 5120, 40, 17_408, node)).sizes
    assert {"held", "whole"}.isdisjoint(sizes)


def test_the_twin_counts_a_round_of_loads_for_each_slice_of_the_heads_outputs() -> None:
    """`packs` in cuda_activation.cuh: inputs of low-bit weights come one slice after the other."""
    rounds = []
    for heads in (32, 40):  # one slice of a team, and two
        plan = planned("int8", 5120, heads, 17_408)
        output = next(stage.matrix for stage in plan.stages if stage.kind is StageKind.O_PROJ)
        rounds.append(vectors.vector_rounds(output, parts=1, splits=4))
    assert rounds[1] == 2 * rounds[0] > 0
