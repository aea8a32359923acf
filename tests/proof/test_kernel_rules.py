"""Edited plans that would compute wrong tokens, hang or crash in the kernel, although every word is
reused in time.

Each is refused by the name of its stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.attack.bases import LANED, LIMITS, LLAMA
from twin.errors import InvalidPlan, PlanError
from twin.hardware.load import load_node
from twin.models.formats import BF16, FP8_BLOCK, MXFP4, Format
from twin.models.load import load_model
from twin.models.spec import DType, LaneHead, Lanes
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Routed, rows_bytes
from twin.plan.options import CollectiveKind, HandOffKind, Options, Sampling
from twin.plan.types import Plan, Read, Stage
from twin.proof.prove import prove, violations
from twin.schedule.options import plan_for
from twin.schedule.plans import build
from twin.schedule.probe import (
    attention_probe,
    exchange_probe,
    hop_probe,
    sample_probe,
    stream_probe,
)


def planned(**chosen: Any) -> Plan:
    base: dict[str, Any] = {
        "context": 8,
        "max_context": 64,
        "kv_page": 4,
        "slot_bytes": 1024,
        "weight_dtype": DType.FP32,
        "blocks": 4,
    }
    return build(LLAMA, Options(**(base | chosen)), LIMITS)


def first(plan: Plan, kind: StageKind) -> Stage:
    return next(stage for stage in plan.stages if stage.kind is kind)


def with_stage(plan: Plan, stage: Stage, **changes: Any) -> Plan:
    return replace(
        plan, stages=tuple(replace(s, **changes) if s is stage else s for s in plan.stages)
    )


def with_read(plan: Plan, stage: Stage, **changes: Any) -> Plan:
    return with_stage(plan, stage, reads=(replace(stage.reads[0], **changes), *stage.reads[1:]))


def with_options(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, options=replace(plan.options, **changes))


def refused(plan: Plan, words: str, stage: str = "") -> None:
    with pytest.raises(InvalidPlan):
        prove(plan)
    found = violations(plan)
    assert any(words in v.message and stage in v.stage for v in found), found


def test_attention_reads_exactly_its_heads() -> None:
    """The kernel finds a head by its place among the elements that were read: one more shifts all
    behind it.
    """
    plan = planned(blocks=2, attention_splits=1)
    attention = first(plan, StageKind.ATTENTION)
    everything = ((0, plan.values[attention.reads[0].value].elements),)
    spans = tuple(everything if mine else mine for mine in attention.reads[0].spans)
    assert all(spans)
    refused(with_read(plan, attention, spans=spans), "which it does not use", "attention[0]")


def test_a_block_without_items_reads_nothing() -> None:
    """The kernel does not poll there, so the block would be thought to know what it does not."""
    plan = planned(blocks=6, attention_splits=1)
    attention = first(plan, StageKind.ATTENTION)
    idle = next(block for block, (lo, hi) in enumerate(attention.items) if lo == hi)
    spans = list(attention.reads[0].spans)
    spans[idle] = ((0, 8),)
    refused(with_read(plan, attention, spans=tuple(spans)), f"block {idle} reads", "attention[0]")


def test_only_block_0_reads_the_summaries_of_the_full_sampler() -> None:
    plan = planned(sampling=Sampling.FULL)
    sample = first(plan, StageKind.SAMPLE)
    spans = list(sample.reads[0].spans)
    spans[1] = spans[0]
    refused(with_read(plan, sample, spans=tuple(spans)), "block 1 reads", "sample")


def test_blocks_of_the_full_sampler_publish_a_summary_and_no_logits() -> None:
    """The block that draws would take logits for best logits, tokens and masses."""
    plan = planned(sampling=Sampling.FULL)
    head = first(plan, StageKind.LM_HEAD)
    assert head.matrix
    changed = replace(
        plan.values[head.publishes or 0], owned=head.matrix.owned, elements=plan.shard.vocab
    )
    values = tuple(changed if v.id == changed.id else v for v in plan.values)
    buffers = tuple(
        replace(b, elements=changed.elements) if b.id == changed.buffer else b for b in plan.buffers
    )
    sample = first(plan, StageKind.SAMPLE)
    spans = tuple(((0, changed.elements),) if span else () for span in sample.reads[0].spans)
    logits = replace(with_read(plan, sample, spans=spans), values=values, buffers=buffers)
    refused(logits, "blocks' summaries of their logits have", "sample")


@pytest.mark.parametrize("handoff", list(HandOffKind))
def test_block_0_owns_the_token_that_it_chooses(handoff: HandOffKind) -> None:
    """With counters, block 1 would arrive for a token that block 0 has not written."""
    plan = planned(sampling=Sampling.FULL, handoff=handoff)
    sample = first(plan, StageKind.SAMPLE)
    token = plan.values[sample.publishes or 0]
    owned = ((0, 0), (0, 1), (1, 1), (1, 1))
    values = tuple(replace(v, owned=owned) if v is token else v for v in plan.values)
    spans = ((), *sample.reads[0].spans[:1], (), ())
    refused(
        replace(with_read(plan, sample, spans=spans), values=values),
        "block 0 chooses the token",
        "sample",
    )


def test_a_probe_that_samples_greedily_on_many_blocks_publishes_no_token() -> None:
    plan = sample_probe(Options(blocks=1, sampling=Sampling.GREEDY, copies=1), LIMITS, vocab=7)
    refused(plan, "a greedy candidate has two", "sample")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"routed": Routed(4, 2, 4, 2)}, "uses chosen experts"),
        ({"routed": Routed(4, 2, 4, 2), "gate": 0}, "uses chosen experts"),
        ({"gate": 0}, "a gate for its weights"),
        ({"kept": True, "publishes": None}, ""),
    ],
)
def test_a_dense_stage_has_no_experts(changes: dict[str, Any], words: str) -> None:
    plan = planned()
    down = first(plan, StageKind.DOWN)
    refused(with_stage(plan, down, **changes), words)


def test_a_dense_stage_with_routed_rows_that_nobody_owns_is_refused_by_name() -> None:
    plan = planned()
    down = first(plan, StageKind.DOWN)
    assert down.matrix
    refused(
        with_stage(
            plan, down, routed=Routed(4, 2, 4, 2), gate=0, matrix=replace(down.matrix, owned=())
        ),
        "chosen experts",
        "down[0]",
    )


def test_a_stored_format_is_refused_where_the_kernel_multiplies_plain_weights() -> None:
    plan = planned()
    down = first(plan, StageKind.DOWN)
    stored = [
        weight.format
        for weight in load_model("gpt-oss-20b").weights()
        if weight.format.name == "mxfp4"
    ]
    assert down.matrix
    assert isinstance(stored[0], Format)
    refused(
        with_stage(plan, down, matrix=replace(down.matrix, format=stored[0])),
        "stored as",
        "down[0]",
    )


@pytest.mark.parametrize("columns", [4, 12])
def test_tiles_are_cut_where_loads_begin(columns: int) -> None:
    plan = planned()
    down = first(plan, StageKind.DOWN)
    assert down.matrix
    refused(
        with_stage(plan, down, matrix=replace(down.matrix, tile_cols=columns)),
        "multiple of 8",
        "down[0]",
    )


@pytest.mark.parametrize("unit", [0, -1, 3])
def test_rows_make_elements_one_or_two_at_a_time(unit: int) -> None:
    plan = planned()
    down = first(plan, StageKind.DOWN)
    assert down.matrix
    refused(with_stage(plan, down, matrix=replace(down.matrix, unit=unit)), "", "down[0]")


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_chunk": 0},
        {"copies": 0},
        {"max_context": 0},
        {"draft": -1},
        {"ahead_slots": -1},
        {"delay": -1},
        {"delay": 5},
        {"ring_slots": 2**31},
        {"expert_ranks": 3},
        {"lane_stagger_ns": -1},
        {"lane_stagger_ns": 2**30},
        {"slot_bytes": 2**40},
        {"kv_page": 0},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(changes: dict[str, int]) -> None:
    name = next(iter(changes)).replace("expert_ranks", "groups of experts")
    refused(with_options(planned(), **changes), name)


@pytest.mark.parametrize("changes", [{"splits": 0}, {"item_positions": -4}], ids=str)
def test_a_cache_without_room_is_refused(changes: dict[str, int]) -> None:
    plan = planned()
    refused(
        replace(plan, attentions=(replace(plan.kernel_attention(), **changes),)),
        "positions in pages of",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"together": 0}, "0 splits take 0 pages each"),
        ({"first_pages": -1}, "take -1 pages each before others do"),
        ({"first_pages": 10**6}, "positions of a split, which holds"),
    ],
    ids=str,
)
def test_splits_take_their_first_pages_in_an_order_that_they_hold(
    changes: dict[str, int], message: str
) -> None:
    plan = planned()
    refused(replace(plan, attentions=(replace(plan.kernel_attention(), **changes),)), message)


def test_every_layer_has_a_window() -> None:
    plan = planned()
    assert plan.spec
    refused(replace(plan, spec=replace(plan.spec, windows=(0,))), "1 windows for 2 layers")


def test_a_vocabulary_that_fp32_cannot_number_is_refused() -> None:
    """Token 16,777,217 would be 16,777,216."""
    large = replace(LLAMA, vocab=2**24 + 8)
    with pytest.raises(PlanError, match="exact up to 16777216"):
        build(large, Options(context=8, max_context=64), LIMITS)
    plan = planned()
    refused(replace(plan, shard=replace(plan.shard, vocab=2**24 + 8)), "exact up to 16777216")


@pytest.mark.parametrize("delay", [6, 7, -1])
def test_a_delay_that_no_later_layer_waits_for_is_refused_by_its_number(delay: int) -> None:
    """Also where the model says it itself."""
    laned = replace(LANED, lanes=Lanes(4, delay))
    for model, chosen in ((laned, None), (LANED, delay)):
        with pytest.raises(PlanError, match=f"delay={delay}: .* has 6 layers, choose 0 to 5"):
            build(
                model,
                Options(blocks=4, max_context=64, collective=CollectiveKind.PUSH, delay=chosen),
                LIMITS,
            )


@pytest.mark.parametrize("delay", [3, 4, 5])
@pytest.mark.parametrize("head", list(LaneHead))
def test_any_delay_below_the_layers_can_be_planned(delay: int, head: LaneHead) -> None:
    """Where lanes share the vocabulary's head, resets need counters from half of the layers on."""
    laned = replace(LANED, lanes=Lanes(4, delay, head))
    options = Options(blocks=8, context=8, max_context=64, collective=CollectiveKind.PUSH)
    prove(build(laned, replace(options, handoff=HandOffKind.COUNTER), LIMITS))
    if head is LaneHead.VOCABULARY:
        with pytest.raises(PlanError, match="use counters"):
            build(laned, options, LIMITS)
    else:
        prove(build(laned, options, LIMITS))


@pytest.mark.parametrize(
    "chosen", [{"slot_bytes": 0}, {"max_context": 0}, {"gpus": 0}, {"kv_page": -1}], ids=str
)
def test_defaults_refuse_sizes_that_are_none(chosen: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=f"{next(iter(chosen))}=.*: must be at least 1"):
        plan_for(LLAMA, load_node("1xh200"), **chosen)


def test_a_model_of_few_positions_is_planned_by_default() -> None:
    plan = plan_for(LLAMA, load_node("1xh200"), blocks=8)
    assert (plan.options.context, plan.options.max_context) == (64, 64)
    assert plan_for(LLAMA, load_node("1xh200"), blocks=8, max_context=16).options.context == 16


@pytest.mark.parametrize(
    "shape", [(8, 64, 8, 64), (8, 64, 13, 200), (16, 32, 5, 24), (3, 40, 31, 120)]
)
@pytest.mark.parametrize("format", [FP8_BLOCK, BF16, MXFP4], ids=lambda f: f.name)
def test_stored_bytes_are_those_of_the_tiles_one_by_one(
    format: Format, shape: tuple[int, int, int, int]
) -> None:
    tile_rows, tile_cols, rows, cols = shape
    tiles = [
        (min(tile_rows, rows - r), min(tile_cols, cols - c))
        for r in range(0, rows, tile_rows)
        for c in range(0, cols, tile_cols)
    ]
    assert rows_bytes(format, tile_rows, tile_cols, rows, cols) == sum(
        format.bytes(high, wide) for high, wide in tiles
    )


def test_what_the_engine_holds_besides_weights_counts_as_memory() -> None:
    """Exchanged words lie on lines of their own: a value of one word takes 128 bytes, and so does
    its counter.
    """
    plan = planned(sampling=Sampling.FULL)
    prove(plan)
    tight = replace(plan, limits=replace(plan.limits, memory_bytes=plan.memory_bytes() + 1))
    refused(tight, "the engine holds")


PROBES: list[tuple[str, Callable[[], Plan], str]] = [
    ("a stream without weights", lambda: _stream(matrix=None), "lacks a matrix"),
    ("a stream that publishes nothing it makes", lambda: _stream(publishes=0), ""),
    (
        "heads that no group divides",
        lambda: _sized(
            attention_probe(Options(), LIMITS, heads=4, kv_heads=4, head_dim=8), kv_heads=8
        ),
        "whole groups",
    ),
]


def _stream(**changes: Any) -> Plan:
    plan = stream_probe(Options(), LIMITS, rows=16, cols=64, stages=2)
    return with_stage(plan, plan.stages[1], **changes)


def _sized(plan: Plan, **sizes: int) -> Plan:
    return replace(plan, attentions=(replace(plan.kernel_attention(), **sizes),))


@pytest.mark.parametrize(
    ("make", "words"), [case[1:] for case in PROBES], ids=[case[0] for case in PROBES]
)
def test_probes_are_held_to_what_the_kernel_does(make: Callable[[], Plan], words: str) -> None:
    refused(make(), words)


@pytest.mark.parametrize("changes", [{"draft": 1}, {"batch": 2}, {"ahead_slots": 1}], ids=str)
def test_a_probe_without_weights_is_examined_whatever_its_options(changes: dict[str, int]) -> None:
    """What lies in shared memory is the widest of no matrices."""
    violations(
        with_options(exchange_probe(Options(copies=1), LIMITS, elements=4, stages=2), **changes)
    )


def test_a_pair_that_is_all_blocks_leaves_none_to_stream() -> None:
    with pytest.raises(PlanError, match="16 rows on 2 blocks: a third one"):
        hop_probe(Options(blocks=2), LIMITS, pair=(0, 1), hops=2, rows=16, cols=64)


@pytest.mark.parametrize(
    "chosen", [{"tile_rows": 16, "slot_bytes": 8192}, {"slot_bytes": 65536}], ids=str
)
def test_a_cpu_is_not_held_to_the_teams_of_a_gpu(chosen: dict[str, int]) -> None:
    """A GPU's warps take so many rows and columns at once, a CPU any: `twin plan` and `twin run`
    say the same.
    """
    wide = replace(LLAMA, hidden=2048, heads=16, head_dim=128, ffn=8192, vocab=256)
    options = Options(blocks=2, context=8, max_context=64, **chosen)
    roomy = replace(LIMITS, memory_bytes=2**32)
    cpu = build(wide, options, roomy)
    prove(cpu)
    gpu = build(wide, options, replace(roomy, teams=True))
    assert any(violation.rule == "kernel" for violation in violations(gpu))


def test_a_read_that_is_exact_in_pieces_is_accepted() -> None:
    plan = planned()
    down = first(plan, StageKind.DOWN)
    read: Read = down.reads[0]
    elements = plan.values[read.value].elements
    prove(with_read(plan, down, spans=(((0, 8), (8, elements)),) * plan.blocks))


def test_a_ring_too_small_for_what_warps_prefetch_is_refused() -> None:
    """It hung on an H200, and was once accepted: the first team holds slices that leave no slot for
    its third.
    """
    small = plan_for(load_model("llama-3.2-1b"), load_node("1xh200"), ring_slots=4)
    refused(
        small,
        "hold 5 slots of weights before its inputs are there; ring_slots=4, use at least 5",
        "down[0]",
    )
    prove(plan_for(load_model("llama-3.2-1b"), load_node("1xh200"), ring_slots=5))
    # nothing ahead
    prove(
        plan_for(
            load_model("llama-3.2-1b"), load_node("1xh200"), ring_slots=4, weight_dtype=DType.FP32
        )
    )
