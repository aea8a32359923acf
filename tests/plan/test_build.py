"""The builder: every weight streamed once, every span covered, every bad option refused with the
next step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from tests.proof.tiny import LANEFORMER, LIMITS, plan_of, some_plan, tiny
from twin.errors import PlanError
from twin.hardware.load import load_node
from twin.kernel.tables import tile_inverse
from twin.models.load import load_model
from twin.models.spec import DType, LaneHead, Lanes
from twin.plan.build import dies
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix, Span, tiles
from twin.plan.options import CollectiveKind, Execution, HandOffKind, Options, Placement, Sampling
from twin.plan.spans import scatter, spread, step_of
from twin.plan.types import Parts, Plan
from twin.proof.prove import prove, violations
from twin.schedule import plans
from twin.schedule.coded_tiles import MOST_ROWS, SmallSlot
from twin.schedule.options import plan_for
from twin.schedule.plans import build
from twin.schedule.probe import exchange_probe, sample_probe
from twin.schedule.ring import limits_of
from twin.schedule.tiles import WIDEST_TILE, cut

SEEDS = st.integers(0, 2**32 - 1)


def covered(spans: tuple[Span, ...]) -> list[int]:
    return [element for lo, hi in spans for element in range(lo, hi)]


def tile_bytes(plan: Plan) -> int:
    size = plan.options.weight_dtype.bytes
    return (
        plan.ranks
        * size
        * sum(
            (rows[1] - rows[0]) * (cols[1] - cols[0])
            for stage in plan.stages
            if stage.matrix
            for block in range(plan.blocks)
            for rows, cols in tiles(stage.matrix, block)
        )
    )


@drawn(50)
@given(SEEDS)
def test_the_tiles_of_all_blocks_are_the_weights(seed: int) -> None:
    plan = some_plan(seed, most=32)
    assert tile_bytes(plan) == plan.weight_bytes()
    if plan.spec:
        padding = (plan.shard.vocab * plan.ranks - plan.spec.vocab) * plan.spec.hidden
        replicated = (
            (plan.kernel_attention().kv_replicas - 1)
            * 2
            * plan.spec.kv_size
            * plan.spec.hidden
            * plan.spec.layers
        )
        weights = plan.spec.streamed_parameters + padding + replicated
        assert plan.weight_bytes() == weights * plan.options.weight_dtype.bytes


@drawn(50)
@given(SEEDS)
def test_spans_cover_everything_once(seed: int) -> None:
    plan = some_plan(seed, most=32)
    for value in plan.values:
        assert covered(value.owned) == list(range(value.elements))
    for stage in plan.stages:
        if stage.matrix:
            assert covered(stage.matrix.owned) == list(range(stage.matrix.rows))
        if stage.kind is StageKind.ATTENTION:
            assert covered(stage.items) == list(range(plan.kernel_attention().items))


@given(count=st.integers(0, 500), blocks=st.integers(1, 64), shift=st.integers(0, 100))
def test_shares_differ_by_at_most_one(count: int, blocks: int, shift: int) -> None:
    for spans in (spread(count, blocks, shift), scatter(count, blocks)):
        sizes = [hi - lo for lo, hi in spans]
        assert covered(spans) == list(range(count))
        assert max(sizes) - min(sizes) <= 1


@given(count=st.integers(1, 5000), blocks=st.integers(1, 140), shift=st.integers(0, 140))
def test_a_wider_step_gives_no_block_more_and_none_nothing(
    count: int, blocks: int, shift: int
) -> None:
    step = step_of(count, blocks)
    spans = spread(count, blocks, shift, step)
    assert covered(spans) == list(range(count))
    assert all(lo % step == hi % step == 0 for lo, hi in spans)
    assert max(hi - lo for lo, hi in spans) == -(-count // blocks)
    if step > 1:
        assert all(lo < hi for lo, hi in spans)


@pytest.mark.parametrize(("name", "step"), [("llama-3.2-1b", 8), ("qwen3-8b", 16)])
def test_sums_that_cross_gpus_are_owned_in_whole_sectors(name: str, step: int) -> None:
    plan = plan_for(load_model(name), load_node("2xh200"))
    for value in plan.values:
        if value.pushed and value.elements == plan.shard.hidden:
            assert all(lo % step == hi % step == 0 for lo, hi in value.owned)


def test_laneformer_streams_its_published_weights() -> None:
    """(15 x (3072 x 6144 + 3072 x 3072 + 3 x 3072 x 12288) + 32000 x 3072) x 2 bytes; 32,000 rows
    need no padding on 8 lanes.
    """
    plan = plan_of(LANEFORMER, gpus=8, blocks=256, slot_bytes=16384)
    assert plan.weight_bytes() == tile_bytes(plan) == 4_443_340_800
    matrices = [s.matrix for s in plan.stages if s.matrix]
    per_block = [
        sum((m.owned[block][1] - m.owned[block][0]) * m.cols for m in matrices)
        for block in range(plan.blocks)
    ]
    assert max(per_block) - min(per_block) <= plan.shard.hidden, (
        "blocks stream the same within one row"
    )


def test_padding_rows_are_counted() -> None:
    plan = plan_of(tiny(1), gpus=4, blocks=1)
    assert plan.shard.vocab * 4 - tiny(1).vocab == 3
    assert tile_bytes(plan) == plan.weight_bytes()


def test_delayed_lanes_read_what_the_model_was_trained_with() -> None:
    """Early layers: own part times sqrt(lanes). Later ones: own part now, the others' parts `delay`
    layers late.
    """
    plan = plan_of(tiny(4, Lanes(4, 1)), gpus=4, blocks=1)
    reads = {
        s.name: [(plan.values[r.value].name, r.parts, r.scale) for r in s.reads]
        for s in plan.stages
        if s.kind in (StageKind.GATE_UP, StageKind.LANE_MEAN)
    }
    assert reads["gate_up[0]"] == [("o_proj[0]", Parts.OWN, 2.0)]
    assert reads["gate_up[1]"] == [("o_proj[1]", Parts.OWN, 1.0), ("o_proj[0]", Parts.OTHERS, 1.0)]
    assert reads["lane_mean"] == [("down[3]", Parts.OWN, 1.0), ("down[2]", Parts.OTHERS, 1.0)]
    assert [v.name for v in plan.values if not v.pushed and v.name.startswith("down")] == [
        "down[3]"
    ]


def test_dies_hold_neighbours_or_are_dealt_round() -> None:
    assert dies(Options(blocks=6), 3) == (0, 0, 1, 1, 2, 2)
    assert dies(Options(blocks=6, placement=Placement.FLAT), 3) == (0, 1, 2, 0, 1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 3}, "gpus=3: the tensor-parallel degree is one of 1, 2, 4, 8, 16, 32, 64, 72"),
        ({"blocks": 0}, "blocks=0: at least 1 block"),
        ({"blocks": 9}, "o_proj has 8 outputs per rank for 9 blocks: use at most 8"),
        ({"gpus": 2, "collective": CollectiveKind.NONE}, "collective=none with 2 ranks"),
        (
            {"gpus": 2, "collective": CollectiveKind.LIBRARY},
            "cannot run inside a resident kernel: use push",
        ),
        (
            {"gpus": 2, "handoff": HandOffKind.GRID, "execution": Execution.GRAPH},
            "handoff=grid polls nothing",
        ),
        ({"delay": 1}, "delay=1: tiny was not trained with delayed tensor parallelism"),
        ({"context": 2000}, "context=2000: must lie between 1 and max_context=1024"),
        ({"copies": 0}, "copies=0: must be at least 1"),
        ({"slot_bytes": 1000}, "slot_bytes=1000: must be a multiple of 16"),
        ({"slot_bytes": 64}, "slot_bytes=64 holds no tile of 8 rows: use at least 128"),
        ({"tile_rows": 3}, "tile_rows=3: must be even"),
        (
            {"attention_splits": 99, "max_context": 64, "context": 8},
            "attention_splits=99: more than the 4 pages of 16 positions",
        ),
        (
            {"window_splits": 5, "max_context": 64, "context": 8},
            "window_splits=5: more than the 4 pages of 16 positions",
        ),
        ({"split_positions": 24}, "split_positions=24: a split takes whole pages of 16 positions"),
        ({"scanning_block_rows": -1}, "scanning_block_rows=-1: must be at least 0"),
        (
            {"scanning_block_rows": 0, "attention_splits": 4},
            "scanning_block_rows=0: all 2 blocks scan",
        ),
        ({"scanning_block_rows": 99}, "scanning_block_rows=99: an equal share of"),
        ({"gpus": 8}, "4 attention heads do not divide over 8 ranks"),
        (
            {"blocks": 8, "gpus": 4, "sampling": Sampling.FULL},
            "the vocabulary has 4 rows per rank for 8 blocks",
        ),
    ],
)
def test_bad_options_are_refused_with_the_next_step(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as refusal:
        plan_of(tiny(2), **{"blocks": 2, **options})
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("lanes", "options", "message"),
    [
        (Lanes(3, 0), {"gpus": 2}, "3 lanes, which do not divide over 2 GPUs"),
        (Lanes(4, 0), {"gpus": 2, "blocks": 3}, "blocks=3: 2 lanes per GPU need a multiple"),
        (Lanes(2, 1), {"gpus": 2, "delay": 2}, "has 2 layers, choose 0 to 1"),
        (Lanes(1, 0), {"gpus": 1}, "1 lane: a model of one lane is an ordinary one"),
        (
            Lanes(2, 1, LaneHead.VOCABULARY),
            {"gpus": 2},
            "half of the 2 layers leaves no time for resets",
        ),
        (None, {"lane_stagger_ns": 7000}, "lane_stagger_ns=7000: tiny has no lanes"),
        (Lanes(2, 1), {"gpus": 2, "lane_stagger_ns": 7000}, "each lane has a GPU of its own"),
        (Lanes(2, 1), {"lane_stagger_ns": -1}, "lane_stagger_ns=-1: must lie between 0 and 100000"),
        (
            Lanes(2, 1),
            {"lane_stagger_ns": 7000, "execution": Execution.GRAPH},
            "between kernels all lanes meet again",
        ),
    ],
)
def test_lanes_that_do_not_fit_are_refused(
    lanes: Lanes | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError) as refusal:
        plan_of(tiny(2, lanes), **{"blocks": 2, **options})
    assert message in str(refusal.value)


def test_columns_that_the_kernel_cannot_load_are_refused() -> None:
    with pytest.raises(PlanError, match="12 columns per rank; the kernel loads 8 at a time"):
        plan_of(replace(tiny(1), ffn=24), gpus=2)


def test_probes_refuse_what_they_cannot_ask() -> None:
    with pytest.raises(PlanError, match="sample_probe runs on 1 block, not 2"):
        sample_probe(Options(blocks=2), LIMITS, vocab=8)
    with pytest.raises(PlanError, match="4 elements for 8 blocks"):
        exchange_probe(Options(blocks=8, handoff=HandOffKind.COUNTER), LIMITS, elements=4)
    with pytest.raises(PlanError, match="its reset would fall two steps later"):
        exchange_probe(Options(blocks=2), LIMITS, elements=8, stages=1)


def test_two_copies_are_enough_without_a_delay() -> None:
    for gpus in (1, 4):
        assert not violations(plan_of(tiny(3), gpus=gpus, blocks=4, copies=2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "words"),
    [(4, 2, {"bf16": 12, "fp16": 12, "fp32": 20}), (3, 1, {"bf16": 20, "fp16": 20, "fp32": 32})],
)
def test_an_item_publishes_pairs_of_16_bit_outputs_and_whole_16_bytes(
    heads: int, kv_heads: int, words: dict[str, int]
) -> None:
    """Heads of 8 elements: outputs, a maximum and a sum for each head of the group, to a multiple
    of four words.
    """
    for dtype, width in words.items():
        plan = plan_of(tiny(heads=heads, kv_heads=kv_heads), blocks=2, kv_dtype=DType(dtype))
        items = kv_heads * plan.kernel_attention().splits
        value = next(
            plan.values[stage.publishes]
            for stage in plan.stages
            if stage.kind is StageKind.ATTENTION and stage.publishes is not None
        )
        assert value.elements == items * width
        prove(plan)


def test_lanes_of_one_gpu_begin_a_step_in_four_groups() -> None:
    eight = replace(tiny(4, Lanes(8, 2), heads=8, kv_heads=8), ffn=64)
    alone = plan_of(eight, blocks=8, lane_stagger_ns=7000)
    assert [alone.start_ns(rank) for rank in range(8)] == [
        0,
        7000,
        14000,
        21000,
        0,
        7000,
        14000,
        21000,
    ]
    two = plan_of(eight, gpus=4, blocks=8, lane_stagger_ns=7000)
    assert [two.start_ns(rank) for rank in range(8)] == [0, 7000] * 4
    prove(alone)


@pytest.mark.parametrize(
    ("cols", "slot_bytes", "batch"),
    [(64, 4096, 256), (512, 8192, 256), (1024, 16384, 128), (1024, 8192, 64)],
    ids=["one warp a row", "four", "eight", "two column slices"],
)
def test_the_fewer_warps_share_a_row_the_more_rows_are_a_batch(
    cols: int, slot_bytes: int, batch: int
) -> None:
    matrix = cut(Matrix(4096, cols, 1, 0, 0, ((0, 4096),)), Options(slot_bytes=slot_bytes))
    assert matrix.batch_rows == batch


def test_the_kernel_divides_a_batchs_rows_exactly() -> None:
    """By a multiplication, for as many rows as a batch and one more tile have."""
    for height in range(2, MOST_ROWS + 1, 2):
        matrix = Matrix(4096, 64, 1, height, 64, ((0, 4096),))
        inverse = tile_inverse(height)
        assert all(
            rows * inverse >> 16 == rows // height for rows in range(matrix.batch_rows + height)
        )


@pytest.mark.parametrize(
    ("model", "node"), [("gemma-4-31b@fp8", "1xh200"), ("deepseek-v3@int8", "8xh200")]
)
def test_a_scale_a_row_does_not_widen_the_tiles_of_models_that_are_only_planned(
    model: str, node: str
) -> None:
    """Their slots were to hold 2^31 columns, and the search for one did not end."""
    plan = plan_for(load_model(model), load_node(node))
    prove(plan)
    tiles = [m.tile_cols for s in plan.stages for m in s.matrices if m.format and m.format.coded]
    assert max(tiles) <= WIDEST_TILE


def test_a_slot_that_no_size_satisfies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object) -> None:
        raise SmallSlot(1024, 8, 4096)

    monkeypatch.setattr(plans, "_build", refuses)
    with pytest.raises(SmallSlot, match="use at least 4096"):
        build(load_model("llama-3.2-1b"), Options(), limits_of(load_node("1xh200")))
