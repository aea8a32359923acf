"""What the kernel takes by its place is proven by its place: each plan here was once accepted, and
computed something else, aborted, or read memory that is not its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.hf_cases import ALL, plan
from tests.engine.small_engine import planned
from tests.proof.tiny import plan_of, tiny
from twin.errors import InvalidPlan
from twin.hardware.load import load_node
from twin.models.formats import format_named
from twin.models.load import from_config, load_model
from twin.models.quantized import requantized
from twin.models.spec import Lanes
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.options import CollectiveKind, Execution, LateParts, Options, Sampling
from twin.plan.types import Plan, Stage
from twin.proof.prove import prove, violations
from twin.schedule.options import plan_for
from twin.schedule.probe import sample_probe


def family(name: str, sampling: Sampling = Sampling.GREEDY, **more: Any) -> Plan:
    return plan(from_config(ALL[name], name), more.pop("gpus", 1), 3, 2, 2, sampling, **more)


def first(plan: Plan, kind: StageKind, layer: int | None = None) -> Stage:
    return next(s for s in plan.stages if s.kind is kind and layer in (None, s.layer))


def changed(plan: Plan, stage: Stage, **changes: Any) -> Plan:
    stages = (replace(s, **changes) if s.index == stage.index else s for s in plan.stages)
    return replace(plan, stages=tuple(stages))


def refused(plan: Plan, rule: str, words: str, stage: str) -> None:
    """By the stage's name, the value, the limit and a next step."""
    with pytest.raises(InvalidPlan):
        prove(plan)
    found = [v for v in violations(plan) if v.rule == rule and words in v.message]
    assert any(stage in v.stage for v in found), violations(plan)


HEADS: list[tuple[tuple[Span, ...], str, str]] = [
    (((214, 320), (107, 214), (0, 107)), "outputs", "blocks divide in their order"),
    (((0, 100), (100, 200), (200, 320)), "kernel", "its logits buffer has room for 108"),
    (((0, 0), (0, 160), (160, 320)), "kernel", "block 1 has 160 of 320 rows"),
]


@pytest.mark.parametrize(("owned", "rule", "words"), HEADS)
def test_blocks_have_even_shares_of_the_vocabulary_in_their_order(
    owned: tuple[Span, ...], rule: str, words: str
) -> None:
    """The full sampler finds a token by its block's number, in a buffer of an even share's size."""
    made = family("mistral", Sampling.FULL)
    prove(made)
    head = first(made, StageKind.LM_HEAD)
    assert head.matrix
    refused(changed(made, head, matrix=replace(head.matrix, owned=owned)), rule, words, "lm_head")


def test_a_probe_samples_on_the_one_block_whose_buffer_holds_its_logits() -> None:
    probe = sample_probe(Options(blocks=1, sampling=Sampling.FULL), planned().limits, vocab=100)
    prove(probe)
    small = replace(probe, shard=replace(probe.shard, vocab=50))
    refused(small, "kernel", "100 logits on 1 blocks", "sample")


def test_reads_come_in_the_order_in_which_the_kernel_takes_them() -> None:
    """Gated attention multiplies what its second read has by sigmoids of it."""
    made = family("qwen3-next")
    prove(made)
    out = first(made, StageKind.O_PROJ, 3)
    swapped = changed(made, out, reads=out.reads[::-1])
    refused(swapped, "data flow", "not in the order in which they are taken: attention[3]", "[3]")


@pytest.mark.parametrize("name", [*ALL, "lanes"])
def test_every_stage_of_several_reads_is_refused_with_them_in_another_order(name: str) -> None:
    made = family(name) if name in ALL else plan_of(tiny(4, Lanes(2, 1)), blocks=4)
    prove(made)
    for stage in made.stages:
        reads = stage.reads[::-1]
        if reads != stage.reads:
            refused(changed(made, stage, reads=reads), "data flow", "", stage.name)


def _divided(plan: Plan, stage: Stage, order: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Plan:
    """Blocks exchange all that they do of a stage."""
    reads = tuple(replace(r, spans=order(r.spans)) for r in stage.reads)
    matrix = stage.matrix and replace(stage.matrix, owned=order(stage.matrix.owned))
    made = changed(plan, stage, reads=reads, matrix=matrix, items=order(stage.items))
    values = tuple(
        replace(v, owned=order(v.owned)) if v.id == stage.publishes else v for v in made.values
    )
    return replace(made, values=values)


@pytest.mark.parametrize("name", ["llama", "qwen3-next", "gpt-oss", "qwen2-moe"])
def test_blocks_divide_in_their_order_whatever_a_stage_makes(name: str) -> None:
    made = family(name, prompt_chunk=4)
    for stage in made.stages:
        if stage.publishes is not None or stage.matrix:
            mirrored = _divided(made, stage, lambda spans: spans[::-1])
            assert violations(mirrored), stage.name


def test_few_bit_tiles_of_experts_lie_in_the_order_of_blocks() -> None:
    """Where a block's tiles of an expert begin is computed from its number and its first row."""
    wide = {"moe_intermediate_size": 64, "mlp_only_layers": []}
    spec = requantized(from_config(ALL["qwen3-moe"] | wide, "few"), format_named("int4-g32-zp"))
    made = planned(spec, blocks=3, slot_bytes=4096)
    prove(made)
    down = first(made, StageKind.ROUTED_DOWN)
    mirrored = _divided(made, down, lambda spans: spans[::-1])
    refused(mirrored, "outputs", "blocks divide in their order", "routed_down[0]")


def test_the_head_is_stored_as_the_models_is() -> None:
    """Found by the attack on places: a low-bit plan gave the head a format that it has not."""
    wide = {"moe_intermediate_size": 64, "mlp_only_layers": []}
    spec = requantized(from_config(ALL["qwen3-moe"] | wide, "few"), format_named("int8"))
    made = planned(spec, blocks=3, slot_bytes=4096)
    head, qkv = first(made, StageKind.LM_HEAD), first(made, StageKind.QKV)
    assert head.matrix
    assert qkv.matrix
    coded = replace(head.matrix, format=qkv.matrix.format)
    refused(changed(made, head, matrix=coded), "data flow", "lm_head is stored as", "lm_head")


def test_a_collective_publishes_what_it_reads() -> None:
    """It hands on the elements that it publishes; those that it waits for are another list."""
    made = family("llama", gpus=2, collective=CollectiveKind.LIBRARY, execution=Execution.GRAPH)
    prove(made)
    stage = first(made, StageKind.COLLECTIVE)
    gathered = made.values[stage.publishes or 0]
    (_, end), (_, last), *rest = gathered.owned
    moved = replace(gathered, owned=((0, end + 1), (end + 1, last), *rest))
    values = tuple(moved if v.id == moved.id else v for v in made.values)
    refused(replace(made, values=values), "data flow", "that they read", stage.name)


def test_recurrent_states_are_alike_in_all_layers_and_as_the_model_has_them() -> None:
    """The kernel is compiled for those of the first layer."""
    made = family("qwen3-next")
    second = first(made, StageKind.DELTA, 1)
    assert second.scan
    longer = replace(second.scan, held_bytes=second.scan.held_bytes + 256)
    refused(changed(made, second, scan=longer), "kernel", "delta[0] has", "delta[1]")
    narrow = replace(second.scan, dim=4)
    refused(changed(made, second, scan=narrow), "data flow", "states of 4 rows", "delta[1]")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"joined": 2}, "2 matrices side by side"), ({"folded": True}, "folds of tiles")],
)
def test_only_experts_stand_side_by_side_and_only_an_nvidia_warp_folds(
    changes: dict[str, Any], words: str
) -> None:
    made = family("llama")
    down = first(made, StageKind.DOWN)
    assert down.matrix
    refused(changed(made, down, matrix=replace(down.matrix, **changes)), "kernel", words, down.name)


def test_tiles_of_an_input_are_alike_where_warps_are_divided_once() -> None:
    """The kernel's division is that of the last such matrix."""
    made = plan_for(load_model("llama-3.2-1b"), load_node("1xh200"))
    prove(made)
    stage = first(made, StageKind.QKV)
    assert stage.matrix
    half = replace(stage.matrix, tile_cols=stage.matrix.tile_cols // 2)
    found = violations(changed(made, stage, matrix=half))
    assert any("of the same input, has" in v.message for v in found), found


def test_an_output_projection_stands_right_behind_what_makes_its_input() -> None:
    """A sum of late parts between them would be taken for the stage whose weights come next."""
    made = plan_of(
        tiny(4, Lanes(2, 1)), gpus=2, blocks=2, late_parts=LateParts.REDUCED, max_context=128
    )
    prove(made)
    late = next(s for s in made.stages if s.late)
    after = first(made, StageKind.ATTENTION, late.layer)
    stages = [s for s in made.stages if s is not late]
    stages.insert(stages.index(after) + 1, late)
    numbered = tuple(replace(s, index=at) for at, s in enumerate(stages))
    where = {s.publishes: s.index for s in numbered if s.publishes is not None}
    values = tuple(replace(v, stage=where[v.id]) for v in made.values)
    moved = replace(made, stages=numbered, values=values)
    refused(moved, "kernel", "right behind what makes heads' outputs", "o_proj")
