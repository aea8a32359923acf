"""Layers whose heads have two shapes: each kind has its own rows, items and caches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.hf_cases import ALL, plan, weights
from twin.hardware.load import load_node
from twin.kernel.tables import layout
from twin.models.load import from_config, load_model
from twin.plan.catalogue import StageKind
from twin.plan.options import Sampling
from twin.plan.types import Plan, Stage
from twin.proof.prove import violations
from twin.schedule.options import plan_for
from twin.schedule.splits import SPLITS_AT_ONCE, TENSOR_HEAD


def shaped() -> Plan:
    """Windows with heads of 16 elements; two key heads of 24, which are the values, elsewhere."""
    return plan(weights(ALL["gemma4"]).spec, 1, 2, 2, 4, Sampling.GREEDY)


def of_kind(made: Plan, kind: StageKind) -> list[Stage]:
    return [stage for stage in made.stages if stage.kind is kind]


def test_each_kind_of_layer_has_heads_and_rows_of_its_own() -> None:
    made = shaped()
    assert violations(made) == []
    assert [(own.head_dim, own.kv_heads, own.group) for own in made.attentions] == [
        (16, 4, 2),
        (24, 2, 4),
    ]
    assert [stage.heads for stage in of_kind(made, StageKind.ATTENTION)] == [0, 0, 1] * 2
    rows = [stage.matrix.rows for stage in of_kind(made, StageKind.QKV) if stage.matrix]
    # values that are keys have no rows
    assert rows[1:3] == [(8 + 2 * 4) * 16, (8 + 2) * 24]
    wide = [stage.matrix.cols for stage in of_kind(made, StageKind.O_PROJ) if stage.matrix]
    assert wide[1:3] == [8 * 16, 8 * 24]


def test_caches_of_both_kinds_lie_behind_each_other() -> None:
    made = shaped()
    attending = of_kind(made, StageKind.ATTENTION)
    table = layout(made)
    kv = [table.stages[stage.index][table.stage_fields.index("kv")] for stage in attending]
    assert kv == [0, 1, 0, 2, 3, 1]
    held = sum(
        own.items * own.item_positions * own.position_bytes(made.options.kv_dtype)
        for own in map(made.attention_of, attending)
    )
    assert table.cache_bytes == held


@pytest.mark.parametrize("kind", [StageKind.QKV, StageKind.ATTENTION, StageKind.O_PROJ])
def test_a_stage_with_the_heads_of_the_other_kind_is_refused(kind: StageKind) -> None:
    made = shaped()
    stage = of_kind(made, kind)[-1]
    other = replace(stage, heads=1 - stage.heads)
    stages = (*made.stages[: stage.index], other, *made.stages[stage.index + 1 :])
    found = [str(one) for one in violations(replace(made, stages=stages))]
    assert any("the layer's are" in one for one in found), found


def test_an_attention_less_is_refused() -> None:
    made = shaped()
    lone = tuple(replace(stage, heads=0) for stage in made.stages)
    found = [
        str(one) for one in violations(replace(made, stages=lone, attentions=made.attentions[:1]))
    ]
    assert found


def test_heads_of_three_shapes_are_not_run() -> None:
    config = {**ALL["gemma4"], "attention_k_eq_v": False}
    spec = from_config(config, "two")
    assert spec.runnable_reason() is None
    layer = spec.layout[0]
    third = replace(layer, mixer=replace(layer.mixer, head_dim=32))
    assert replace(spec, layout=(third, *spec.layout[1:])).runnable_reason()


@pytest.mark.parametrize("context", [168, 4232])
def test_heads_too_wide_for_tensor_cores_have_whole_rounds_of_splits(context: int) -> None:
    """Whoever combines partial outputs looks at so many at once: fewer would save nothing."""
    node = load_node("1xh200-sxm")
    made = plan_for(load_model("gemma-4-26b-a4b"), node, context=96, max_context=context)
    wide = made.attentions[1]
    assert wide.head_dim > TENSOR_HEAD
    assert wide.splits >= SPLITS_AT_ONCE
    assert wide.splits % SPLITS_AT_ONCE == 0
