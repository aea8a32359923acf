"""Slots under way by default: enough to keep the memory busy, fewer where it is idle anyway."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twin.errors import PlanError
from twin.hardware.load import load_node
from twin.models.formats import format_named
from twin.models.load import load_model
from twin.models.quantized import requantized
from twin.models.spec import ModelSpec
from twin.schedule.options import plan_for

SHORT_CONTEXT = {"context": 96, "max_context": 160}


def slots(spec: ModelSpec, node: str) -> int:
    return plan_for(spec, load_node(node), **SHORT_CONTEXT).options.window_slots


def sized(hidden: int, ffn: int) -> ModelSpec:
    base = load_model("llama-3.2-1b")
    return replace(
        base, hidden=hidden, ffn=ffn, heads=16, kv_heads=4, layers=2, windows=base.windows[:2]
    )


@pytest.mark.parametrize("node", ["1xh200", "1xh100"])
def test_short_layers_have_fewer_slots_under_way(node: str) -> None:
    assert slots(sized(1024, 3072), node) == 2
    assert slots(sized(2048, 8192), node) == 3
    assert slots(load_model("llama-3.1-8b"), node) == 3


def test_a_rank_of_several_gpus_has_a_part_of_each_layer() -> None:
    spec = load_model("llama-3.2-1b")
    assert (slots(spec, "1xh200"), slots(spec, "2xh200")) == (3, 2)


def test_the_lm_head_has_more_under_way_where_its_tiles_fill_slots() -> None:
    def head(name: str, node: str) -> int | None:
        return plan_for(
            load_model(name), load_node(node), **SHORT_CONTEXT
        ).options.head_window_slots

    assert (head("llama-3.2-1b", "1xh200"), head("llama-3.2-1b", "1xh100")) == (5, 4)
    assert head("qwen2.5-coder-1.5b", "1xh200") is None  # tiles of 768 columns
    assert head("gpt-oss-20b", "1xh200") is None
    assert head("laneformer-2b", "1xh200") is None
    assert head("llama-3.2-1b", "2xh200") is None


def test_a_head_window_stands_for_rows_behind_those_that_the_ring_holds() -> None:
    plan = plan_for(load_model("llama-3.2-1b"), load_node("1xh200"), **SHORT_CONTEXT)
    assert plan.options.ring_slots == 13
    assert plan.head_rows == 7 * 8  # two slices a row
    alike = replace(plan.options, head_window_slots=None)
    assert replace(plan, options=alike).head_rows == 0
    assert replace(plan.options, ring_slots=4, window_slots=3).head_window == 4


@pytest.mark.parametrize(
    ("name", "node"), [("gpt-oss-20b", "1xh200"), ("llama-3.2-1b", "1xmi300x")]
)
def test_a_head_window_that_no_loader_knows_is_refused(name: str, node: str) -> None:
    with pytest.raises(PlanError, match="head_window_slots=5: only models without experts"):
        plan_for(load_model(name), load_node(node), head_window_slots=5)


@pytest.mark.parametrize(
    ("name", "h200", "h100"),
    [("int8", 3, 2), ("int4-g128", 3, 2), ("fp8", 3, 3), ("mxfp4", 3, 3), ("nvfp4", 3, 3)],
)
def test_few_bit_weights_have_as_many_as_their_blocks_decode(
    name: str, h200: int, h100: int
) -> None:
    base = load_model("llama-3.1-8b")
    spec = requantized(replace(base, layers=2, windows=base.windows[:2]), format_named(name))
    assert (slots(spec, "1xh200"), slots(spec, "1xh100")) == (h200, h100)


@pytest.mark.parametrize("node", ["1xh200", "1xh100"])
def test_experts_tiles_are_small(node: str) -> None:
    assert slots(load_model("gpt-oss-20b"), node) == 3


def test_lanes_of_one_gpu_are_staggered_and_fill_the_memory_for_each_other() -> None:
    spec = load_model("laneformer-2b")
    assert (slots(spec, "1xh200"), slots(spec, "2xh200")) == (5, 3)
