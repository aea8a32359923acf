"""The proof of passes that verify drafts: what is right is accepted, each planted fault refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from studies.common.rows import cut
from tests.engine.small_engine import planned
from twin.hardware.load import load_node
from twin.kernel.tables import Layout, layout
from twin.models.load import load_model
from twin.plan.catalogue import StageKind
from twin.plan.types import Plan
from twin.proof.handed import Rules, handed_on
from twin.proof.prove import prove, violations
from twin.proof.rounds import _rounds, check_rounds
from twin.schedule.options import plan_for

LOOKUP = 3


def drafted(**chosen: Any) -> Plan:
    return planned(**({"prompt_chunk": 16, "lookup": LOOKUP} | chosen))


def found(plan: Plan, made: Layout) -> str:
    return " ".join(str(one) for one in check_rounds(plan, made))


@pytest.mark.parametrize("chosen", [{}, {"gpus": 2}, {"blocks": 5, "lookup": 7}], ids=str)
def test_plans_with_drafts_are_proven(chosen: dict[str, Any]) -> None:
    prove(drafted(**chosen))


def test_rejected_tokens_are_overwritten_before_they_are_read() -> None:
    for lookup in (1, 2, 7):
        assert not list(_rounds(lookup, appends_first=True))


def test_tokens_that_look_before_all_have_appended_are_refused() -> None:
    assert "looks at position" in str(next(_rounds(LOOKUP, appends_first=False)))


def test_a_pass_that_begins_behind_a_rejected_token_is_refused() -> None:
    assert "looks at position 0" in str(next(_rounds(LOOKUP, appends_first=True, back=1)))


def test_a_stage_that_a_pass_leaves_out_is_found() -> None:
    plan = drafted()
    made = layout(plan)
    passes = made.schedule.of_passes()
    for at, one in enumerate(passes.rounds):
        left = replace(passes, rounds=passes.rounds[:at] + passes.rounds[at + 1 :])
        said = found(plan, replace(made, schedule=replace(made.schedule, passes=left)))
        last = one.stage.kind is StageKind.LM_HEAD
        assert ("ends a pass" if last else f"{one.stage.name}: drafts: is left out") in said


def test_a_read_of_the_pass_before_is_found() -> None:
    plan = drafted()
    made = layout(plan)
    passes = made.schedule.of_passes()
    stale = next(one for one in passes.rounds if one.stage.kind is StageKind.DOWN)
    reads = tuple(replace(read, previous_step=True) for read in stale.stage.reads)
    rounds = tuple(
        replace(one, stage=replace(one.stage, reads=reads)) if one is stale else one
        for one in passes.rounds
    )
    said = found(
        plan, replace(made, schedule=replace(made.schedule, passes=replace(passes, rounds=rounds)))
    )
    assert "of the pass before" in said


@pytest.mark.parametrize("names", [("logits", "best"), ("best", "round"), ("round", "history")])
def test_memory_of_a_round_that_lies_on_other_numbers_is_found(names: tuple[str, str]) -> None:
    plan = drafted()
    made = layout(plan)
    below, name = (f"round_{one}" for one in names)
    said = found(plan, replace(made, sizes=made.sizes | {name: made.sizes[below] + 1}))
    assert f"{name} begins" in said
    assert "floats of" in found(plan, replace(made, sizes=made.sizes | {"prompt_floats": 100}))


def test_a_counter_for_two_barriers_is_found() -> None:
    plan = drafted()
    made = layout(plan)
    twice = made.sizes | {"round_counter": made.sizes["prompt_counter"]}
    assert "counters" in found(plan, replace(made, sizes=twice))


def test_a_plan_without_room_for_drafts_is_refused() -> None:
    plan = drafted()
    wide = replace(plan, options=replace(plan.options, lookup=16))
    assert any(one.rule == "drafts" for one in violations(wide))


@functools.cache
def on_gpu() -> Layout:
    return layout(plan_for(cut(load_model("llama-3.2-1b")), load_node("1xh200"), lookup=7))


def test_numbers_that_are_handed_on_are_proven() -> None:
    plan = on_gpu().schedule.plan
    assert on_gpu().schedule.of_passes().handed_on
    assert not found(plan, on_gpu())
    assert not list(handed_on())
    for enough in (Rules(places=3), Rules(behind=2)):
        assert not list(handed_on(enough))


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (Rules(places=2), "inputs of turn 3 may be erased behind"),
        (Rules(waits=False), "heads of turn 1 may be erased behind"),
        (Rules(squares=False), "heads of turn 1 may be erased behind"),
        (Rules(behind=0), "inputs of turn 1 are erased before all have read"),
        (Rules(behind=3), "inputs of turn 5 may be erased behind"),
        (Rules(outputs_at="qkv"), "heads of turn 1 may be erased behind"),
    ],
    ids=str,
)
def test_planted_hand_offs_are_found(planted: Rules, message: str) -> None:
    assert message in " ".join(str(one) for one in handed_on(planted))


def test_stages_in_another_order_are_not_handed_on() -> None:
    made = on_gpu()
    passes = made.schedule.of_passes()
    rounds = (*passes.rounds[:4], *passes.rounds[5:])
    left = replace(made, schedule=replace(made.schedule, passes=replace(passes, rounds=rounds)))
    assert "follow each other in another order" in found(made.schedule.plan, left)


@pytest.mark.parametrize("name", ["round_inputs", "round_heads", "round_fed", "round_outputs"])
def test_what_is_handed_on_lies_separate(name: str) -> None:
    made = on_gpu()
    sizes = dict(made.sizes) | {name: made.sizes[name] - 10_000}
    assert f"{name} begins at" in found(made.schedule.plan, replace(made, sizes=sizes))
