"""Plans that a builder made, or that a proof with one rule less lets through. Each is refused, and
shown to fail.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.proof.oracle import Schedule, find_fault, meaning, operations, schedules
from tests.proof.tiny import LIMITS, plan_of, tiny
from twin.errors import PlanError
from twin.models.spec import LaneHead, Lanes, ModelSpec
from twin.plan.catalogue import StageKind
from twin.plan.options import CollectiveKind, Execution, HandOffKind, LateParts, Options, Sampling
from twin.plan.resets import with_resets
from twin.plan.types import Buffer, Parts, Plan, Read, Reset, Stage, Value
from twin.proof.happens_before import _Machine
from twin.proof.prove import prove, violations
from twin.schedule.probe import _plan, exchange_probe


def refused(plan: Plan, rule: str, words: str) -> None:
    """The proof names the rule, and the oracle shows what happens without it."""
    found = [v for v in violations(plan) if v.rule == rule]
    assert any(words in v.message for v in found), violations(plan)
    held = [
        Schedule(1, "priority", "random", op) for step in (1, 0, 2) for op in operations(plan, step)
    ]
    assert find_fault(plan, schedules(0, plan, 0) + held, None)


def rotated(plan: Plan, name: str, copies: int) -> Plan:
    """The same plan with another number of copies of one buffer, resets placed anew."""
    buffer = next(b for b in plan.buffers if b.name == name)
    layer_of = {v.id: plan.stages[v.stage].layer for v in plan.values}
    values = tuple(
        replace(v, copy=layer_of[v.id] % copies) if v.buffer == buffer.id else v
        for v in plan.values
    )
    buffers = tuple(replace(b, copies=copies) if b is buffer else b for b in plan.buffers)
    return reset_anew(replace(plan, values=values, buffers=buffers))


def reset_anew(plan: Plan) -> Plan:
    return with_resets(replace(plan, stages=tuple(replace(s, resets=()) for s in plan.stages)))


def moved(plan: Plan, value: str, to: str) -> Plan:
    """The same plan with one value's reset at another stage of the same step."""
    id = next(v.id for v in plan.values if v.name == value)
    stages = [replace(s, resets=tuple(r for r in s.resets if r.value != id)) for s in plan.stages]
    index = next(s.index for s in stages if s.name == to)
    stages[index] = replace(stages[index], resets=(*stages[index].resets, Reset(id)))
    return replace(plan, stages=tuple(stages))


def test_a_step_border_brings_the_same_copy_twice_in_a_row() -> None:
    """16 hand-offs over 3 copies: the last one and the next step's first share copy 0, which nobody
    has reset yet.
    """
    refused(
        exchange_probe(Options(blocks=2, copies=3), LIMITS, elements=4, stages=16),
        "race",
        "is known to have reset exchange[15]",
    )


def test_a_poll_begins_when_its_stage_is_entered() -> None:
    """With 2 copies the reset precedes the next write, but a faster block already polls and takes
    the old word.
    """
    refused(
        exchange_probe(Options(blocks=2, copies=2), LIMITS, elements=4, stages=4),
        "race",
        "may take a stale exchange[2]",
    )


def test_late_parts_need_copies_for_the_delay_there_and_back() -> None:
    """The builder rotated copies + delay: down[5] was pushed over down[0], whose reset other ranks
    hear of in layer 6.
    """
    plan = plan_of(tiny(8, Lanes(2, 2)), gpus=2, blocks=2, max_context=128)
    prove(plan)
    refused(
        rotated(plan, "down", 5),
        "race",
        "writes down[5][0] before block 0 of another rank is known to have reset down[0]",
    )


def test_the_last_late_part_is_reset_after_the_candidates_left() -> None:
    """Without a lane mean LM_HEAD reads down[1] of 3 layers; next step's layer 0 knows nothing of
    its reset yet.
    """
    plan = plan_of(tiny(3, Lanes(2, 1, LaneHead.VOCABULARY)), gpus=2, blocks=1)
    prove(plan)
    refused(rotated(plan, "down", 1), "race", "of another rank is known to have reset")
    refused(
        rotated(plan_of(tiny(6, Lanes(2, 1, LaneHead.VOCABULARY)), gpus=2, blocks=1), "down", 4),
        "race",
        "known to have reset down[4]",
    )


def test_a_local_value_clears_the_other_ranks_parts_too() -> None:
    """down[6] is never pushed, but its reset clears every part, and the next step's down[0] may
    have arrived there.
    """
    plan = plan_of(tiny(7, Lanes(2, 1, LaneHead.VOCABULARY)), gpus=2, blocks=1)
    prove(plan)
    refused(rotated(plan, "down", 6), "race", "known to have reset down[6]")


def test_a_delay_of_half_the_layers_leaves_no_time_for_resets() -> None:
    """down[0] is both the first value of a step and the last late one; only counters, which need no
    reset, allow it.
    """
    spec = tiny(2, Lanes(2, 1, LaneHead.VOCABULARY))
    with pytest.raises(PlanError, match="delay=1: half of the 2 layers leaves no time"):
        plan_of(spec, gpus=2)
    prove(plan_of(spec, gpus=2, handoff=HandOffKind.COUNTER))


def test_a_block_without_logits_tells_nobody_how_far_it_is() -> None:
    """Full sampling over fewer rows than blocks: the token proves nothing about the blocks that
    publish no logits.
    """
    with pytest.raises(PlanError, match="7 rows per rank for 8 blocks"):
        plan_of(tiny(1), gpus=2, blocks=8, sampling=Sampling.FULL)
    plan = plan_of(tiny(1), gpus=2, blocks=2, sampling=Sampling.FULL, max_context=128)
    prove(plan)
    head = plan.stages[-2]
    assert head.matrix
    lone = ((0, 7), (7, 7))
    stages = tuple(
        replace(s, matrix=replace(head.matrix, owned=lone)) if s is head else s for s in plan.stages
    )
    values = tuple(replace(v, owned=lone) if v.id == head.publishes else v for v in plan.values)
    refused(
        reset_anew(replace(plan, stages=stages, values=values)),
        "race",
        "of another rank is known to have reset down[0]",
    )


def test_a_library_call_resets_nothing() -> None:
    """With one block per rank the part that a library gathers looks like a join, and a reset was
    placed inside the call.
    """
    plan = plan_of(
        tiny(2), gpus=2, blocks=1, collective=CollectiveKind.LIBRARY, execution=Execution.GRAPH
    )
    prove(plan)
    gather = next(s for s in plan.stages if s.kind is StageKind.COLLECTIVE)
    found = violations(moved(plan, "attention[0]", gather.name))
    assert [v.rule for v in found] == ["collective"]


def test_kernels_of_two_gpus_do_not_wait_for_each_other() -> None:
    """A grid hand-off between kernels polls nothing, so the parts of another GPU may not have
    arrived.
    """
    plan = plan_of(
        tiny(2), gpus=2, blocks=1, handoff=HandOffKind.COUNTER, execution=Execution.GRAPH
    )
    prove(plan)
    refused(
        replace(plan, options=replace(plan.options, handoff=HandOffKind.GRID)),
        "collective",
        "whose kernels do not poll",
    )


def test_a_reader_of_one_head_knows_nothing_of_the_others_writers() -> None:
    """An attention block sees only its own heads' producers, so it may not reset what another block
    still reads.
    """
    plan = plan_of(tiny(2), blocks=4, max_context=1024)
    prove(plan)
    refused(moved(plan, "down[0]", "attention[1]"), "race", "resets down[0]")


def test_a_store_that_nobody_polls_may_land_after_its_reset() -> None:
    """The last layers' parts are not needed elsewhere; pushed all the same, they arrive whenever
    they like.
    """
    plan = plan_of(tiny(2, Lanes(2, 1)), gpus=2, blocks=1)
    last = next(v for v in plan.values if v.name == "down[1]")
    values = tuple(replace(v, pushed=v.pushed or v is last) for v in plan.values)
    refused(replace(plan, values=values), "unread", "no block reads down[1][0]")


def test_one_rank_pushes_to_nobody() -> None:
    """A value marked as pushed on a single rank was refused for a race with a rank that does not
    exist.
    """
    plan = plan_of(tiny(2), blocks=2, collective=CollectiveKind.NONE)
    found = violations(
        replace(plan, values=tuple(replace(v, pushed=v.name == "down[0]") for v in plan.values))
    )
    assert [(v.rule, v.message) for v in found] == [
        ("structure", "down[0]: pushed, but there is no other rank")
    ]


def test_a_forgotten_read_computes_something_else() -> None:
    """Every hand-off of this plan is safe; it merely never adds the first layer's output
    projection.
    """
    plan = plan_of(tiny(2), blocks=1, handoff=HandOffKind.GRID)
    stages = tuple(replace(s, reads=()) if s.name == "gate_up[0]" else s for s in plan.stages)
    broken = replace(plan, stages=stages)
    assert any(
        v.rule == "data flow" and "does not read o_proj[0]" in v.message for v in violations(broken)
    )
    assert (
        find_fault(broken, schedules(0, broken, 0), meaning(plan))
        == f"{schedules(0, broken, 0)[0]}: computes something else"
    )


def test_with_two_ranks_the_others_foreign_rank_is_the_readers_own() -> None:
    """What rank 1 knows of foreign blocks is about rank 0: taken for news of rank 1 it would prove
    resets not yet done.
    """
    options = Options(gpus=2, blocks=2, handoff=HandOffKind.COUNTER, collective=CollectiveKind.PUSH)
    both, first = ((0, 2),), ((0, 1),)
    stages = (
        Stage(0, StageKind.EXCHANGE, 0, (), (), 0, None, 0, ("exchange",)),
        Stage(
            1,
            StageKind.EXCHANGE,
            1,
            (Read(0, Parts.OTHERS, (both, ())),),
            (),
            1,
            None,
            0,
            ("exchange",),
        ),
        Stage(
            2,
            StageKind.EXCHANGE,
            2,
            (Read(1, Parts.OTHERS, (first, first)),),
            (),
            None,
            None,
            0,
            ("exchange",),
        ),
    )
    values = (
        Value(0, "a", 0, 0, 0, 2, True, ((0, 1), (1, 2))),
        Value(1, "b", 1, 1, 0, 2, True, ((0, 2), (2, 2))),
    )
    buffers = (Buffer(0, "a", 2, 1, 2), Buffer(1, "b", 2, 1, 2))
    plan = replace(
        _plan("two ranks", options, LIMITS, stages), ranks=2, values=values, buffers=buffers
    )
    machine = _Machine(plan)
    for stage in plan.stages:
        machine.walk(stage, 0)
    # Block 1 heard only of the other rank's block 0, which has heard of block 1 of this rank.
    assert machine.foreign[1].tolist() == [1, -1]
    assert machine.own[1].tolist() == [0, 2]


# ---- sums of late parts --------------------------------------------------------------------------


def summed(delay: int = 2) -> Plan:
    plan = plan_of(
        tiny(2 * delay + 2, Lanes(2, delay)),
        gpus=2,
        blocks=2,
        max_context=128,
        late_parts=LateParts.REDUCED,
    )
    prove(plan)
    return plan


def with_read(plan: Plan, stage: Stage, **changes: Any) -> Plan:
    """The same plan with another first read of a stage."""
    read = replace(stage.reads[0], **changes)
    return reset_anew(
        replace(
            plan,
            stages=tuple(
                replace(s, reads=(read, *s.reads[1:])) if s is stage else s for s in plan.stages
            ),
        )
    )


def sums(plan: Plan) -> list[Stage]:
    return [stage for stage in plan.stages if stage.late]


def computes_something_else(plan: Plan, sound: Plan) -> bool:
    return find_fault(plan, schedules(0, plan, 0), meaning(sound)) is not None


def test_a_sum_of_late_parts_reads_all_that_its_block_owns() -> None:
    plan = summed()
    stage = sums(plan)[0]
    (lo, hi), *_ = stage.reads[0].spans[0]
    broken = with_read(plan, stage, spans=(((lo + 1, hi),), *stage.reads[0].spans[1:]))
    assert any("block 0 needs" in v.message for v in violations(broken))
    assert computes_something_else(broken, plan)


def test_a_sum_of_late_parts_is_of_the_layer_that_is_due() -> None:
    plan = summed()
    first, second = [
        stage for stage in sums(plan) if plan.values[stage.reads[0].value].name.startswith("o_proj")
    ][:2]
    broken = with_read(plan, first, value=second.reads[0].value)
    assert {v.rule for v in violations(broken)} & {"data flow", "deadlock"}
    assert computes_something_else(broken, plan)


def test_late_parts_are_not_added_twice() -> None:
    """Once in their sum, and once more each."""
    plan = summed()
    sum_ = sums(plan)[0]
    user = next(s for s in plan.stages if any(read.value == sum_.publishes for read in s.reads))
    parts = replace(sum_.reads[0], spans=user.reads[0].spans, residual=True)
    both = tuple(replace(s, reads=(*s.reads, parts)) if s is user else s for s in plan.stages)
    broken = reset_anew(replace(plan, stages=both))
    assert any("which the model does not call for" in v.message for v in violations(broken))
    assert computes_something_else(broken, plan)


def test_late_parts_are_summed_behind_the_stage_that_makes_them() -> None:
    plan = summed(1)
    early = sums(plan)[0]
    later = next(v for v in plan.values if v.name == f"down[{early.layer}]")
    refused(
        with_read(plan, early, value=later.id),
        "deadlock",
        "which down[0] publishes later in the step",
    )


def test_a_block_sums_only_what_it_owns_and_resets_nothing_there() -> None:
    """It publishes sums while it waits for the next parts: nobody else may then take these to be
    read and reset them.
    """
    plan = summed()
    stage = sums(plan)[0]
    more = with_read(plan, stage, spans=(((0, plan.shard.hidden),), *stage.reads[0].spans[1:]))
    assert any("blocks read more of" in v.message for v in violations(more))
    moved_there = moved(plan, "gate_up[1]", stage.name)
    assert any("resets something" in v.message for v in violations(moved_there))


@pytest.mark.parametrize(
    ("spec", "delay", "words"),
    [(tiny(2), None, "has no lanes"), (tiny(4, Lanes(2, 2)), 0, "all parts are needed at once")],
)
def test_late_parts_are_summed_only_where_some_are_late(
    spec: ModelSpec, delay: int | None, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        plan_of(spec, blocks=4, delay=delay, late_parts=LateParts.REDUCED)


def test_late_parts_are_summed_where_a_block_then_reads_fewer_bytes() -> None:
    eight = tiny(4, Lanes(8, 2), heads=8, kv_heads=8)
    assert plan_of(replace(eight, ffn=64), blocks=8).options.late_parts is LateParts.EACH
    assert plan_of(replace(eight, ffn=64), blocks=32).options.late_parts is LateParts.REDUCED
    assert (
        plan_of(replace(eight, ffn=64), blocks=32, handoff=HandOffKind.COUNTER).options.late_parts
        is LateParts.EACH
    )
    assert plan_of(tiny(4, Lanes(2, 2)), blocks=8).options.late_parts is LateParts.EACH
