"""The one row of each kind of stage agrees with what the kernel has code for."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.plan.family_models import DENSE, FEEDS, GROUPED, MIXERS, PACKED, family
from tests.proof.tiny import LIMITS, plan_of, tiny
from tests.rows import every
from twin.cost.causes import CAUSES
from twin.data import data_dir
from twin.models.feeds import DenseFeed, Feed
from twin.models.formats import FP8_BLOCK_E8M0, Role
from twin.models.layers import Layer
from twin.models.mixers import GroupedAttention, Mixer
from twin.plan.catalogue import ROWS, Input, Spent, StageKind, input_of
from twin.plan.options import CollectiveKind, Options
from twin.proof.prove import violations
from twin.schedule.probe import attention_probe, stream_probe


def test_every_kind_of_stage_has_a_row() -> None:
    assert set(ROWS) == set(StageKind)


def test_the_engine_runs_what_the_kernel_has_code_for() -> None:
    folder = data_dir("native") / "monokernel"
    kernel = "".join(
        (folder / name).read_text(encoding="utf-8")
        for name in ("kernel.cuh", "stages.cuh", "experts.cuh")
    )
    cases = {StageKind[name] for name in re.findall(r"case StageKind::(\w+):", kernel)}
    assert cases == {kind for kind, row in ROWS.items() if row.engine}


def test_only_what_the_engine_runs_has_an_input_or_a_norm_of_it() -> None:
    assert all(row.engine for row in ROWS.values() if row.input or row.norm)
    by_stage = {Input.DENSE, Input.OTHER, Input.STATES}
    assert {row.input for row in ROWS.values()} == {None, *Input} - by_stage


def test_a_down_projection_has_another_input_where_other_layers_have_experts() -> None:
    assert input_of(StageKind.DOWN, routed=False) is Input.FFN
    assert input_of(StageKind.ROUTED_DOWN, routed=True) is Input.FFN
    assert input_of(StageKind.DOWN, routed=True) is Input.DENSE
    assert input_of(StageKind.O_PROJ, routed=False, heads=1) is Input.OTHER
    assert input_of(StageKind.O_PROJ, routed=False, states=True) is Input.STATES


def test_every_row_names_a_cause_of_the_twin() -> None:
    assert {spent.value for spent in Spent} <= set(CAUSES)


@every("feed", FEEDS.values())
@every("mixer", MIXERS.values())
def test_the_rows_refuse_every_model_that_readers_of_configurations_refuse(
    mixer: Mixer, feed: Feed
) -> None:
    spec = family((mixer, feed))
    plan = plan_of(spec, blocks=2)
    assert plan.simulation_only() == spec.runnable_reason() is not None


def test_a_dense_layer_that_is_described_by_itself_is_refused_for_its_cache() -> None:
    plan = plan_of(family((replace(GROUPED, sinks=False, output_gate=False), DENSE)), blocks=2)
    assert {stage.kind for stage in plan.stages if not stage.has_code} == {StageKind.ATTENTION}


def test_formats_that_the_kernel_does_not_decode_are_refused() -> None:
    unknown = replace(FP8_BLOCK_E8M0, name="fp8-64x64")
    packed = replace(tiny(2), hidden=32, stored=PACKED.with_role(Role.ATTENTION, unknown))
    refused = [
        stage
        for stage in plan_of(packed, blocks=2).stages
        if any(matrix.format for matrix in stage.matrices)
    ]
    assert refused
    assert not any(stage.has_code for stage in refused)


def test_a_stage_without_code_is_named_where_the_model_is_dense() -> None:
    plan = plan_of(tiny(2), blocks=2)
    foreign = replace(
        plan, stages=(*plan.stages[:-1], replace(plan.stages[-1], kind=StageKind.ABSORB))
    )
    assert "absorb can be planned and simulated only" in (foreign.simulation_only() or "")


def test_a_dense_layer_and_the_same_layer_of_a_layout_stream_and_add_the_same() -> None:
    """One path builds both; only the cache differs, which the kernel knows of the first alone."""
    plain = tiny(2)
    own = GroupedAttention(heads=plain.heads, kv_heads=plain.kv_heads, head_dim=plain.head_dim)
    described = replace(plain, layout=(Layer(own, DenseFeed(width=plain.ffn)),) * plain.layers)
    for chosen in ({"gpus": 1}, {"gpus": 2, "collective": CollectiveKind.PUSH}):
        dense, layout = plan_of(plain, blocks=2, **chosen), plan_of(described, blocks=2, **chosen)
        for ours, theirs in zip(dense.stages, layout.stages, strict=True):
            assert (ours.kind, ours.layer, ours.matrices, ours.operations) == (
                theirs.kind,
                theirs.layer,
                theirs.matrices,
                theirs.operations,
            )
            assert [read.residual for read in ours.reads] == [
                read.residual for read in theirs.reads
            ]
            assert (theirs.scan is None) == (theirs.kind is not StageKind.ATTENTION)
        assert (dense.attention is None, layout.attention) == (False, None)


def test_the_kernels_attention_is_described_where_a_stage_runs_it() -> None:
    plan = plan_of(tiny(2), gpus=4, blocks=4)
    own = plan.kernel_attention()
    assert (own.heads, own.kv_heads, own.head_dim, own.kv_replicas) == (1, 1, 8, 2)
    assert own.splits * own.item_positions >= plan.options.max_context
    assert plan_of(tiny(2), blocks=2, batch=2).attention is None
    assert plan_of(family((GROUPED, DENSE)), blocks=2).attention is None
    assert stream_probe(Options(), LIMITS, rows=16, cols=64).attention is None
    assert (
        attention_probe(Options(), LIMITS, heads=4, kv_heads=2, head_dim=8).kernel_attention().group
        == 2
    )


def test_a_plan_with_another_attention_than_its_models_is_refused() -> None:
    plan = plan_of(tiny(2), blocks=2)
    own = plan.kernel_attention()
    assert any(
        "describes no attention" in str(found) for found in violations(replace(plan, attentions=()))
    )
    for changes in ({"heads": 8}, {"kv_heads": 4}, {"head_dim": 16}, {"kv_replicas": 2}):
        assert any(
            "is not 1/1 of tiny" in str(found)
            for found in violations(replace(plan, attentions=(replace(own, **changes),)))
        )
    several = plan_of(tiny(2), blocks=2, batch=2)
    assert any(
        "the kernel's is that of dense layers" in str(found)
        for found in violations(replace(several, attentions=(own,)))
    )
