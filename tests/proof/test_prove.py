"""The proof against a word-by-word oracle: it accepts nothing that fails, and refuses no race that
cannot happen.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from tests.proof.mutations import mutants
from tests.proof.oracle import Schedule, find_fault, meaning, operations, schedules
from tests.proof.tiny import LANEFORMER, LIMITS, plan_of, some_plan, tiny
from twin.errors import InvalidPlan, PlanError
from twin.models.spec import LaneHead, Lanes
from twin.plan.options import CollectiveKind, Execution, HandOffKind, Options, Placement, Sampling
from twin.plan.types import Plan
from twin.proof.prove import Report, prove, violations
from twin.schedule.probe import (
    attention_probe,
    exchange_probe,
    hop_probe,
    sample_probe,
    stream_probe,
)

MUTANTS = 7  # per plan
SEEDS = st.integers(0, 2**32 - 1)


@drawn(15)
@given(SEEDS)
def test_what_the_proof_accepts_runs_without_a_fault(seed: int) -> None:
    plan = some_plan(seed)
    if violations(plan):
        # of probes, which have nothing but exchanges, four
        assert plan.options.copies < (3 if plan.spec else 4), "default copies are enough"
        return
    expected = meaning(plan)
    for name, mutant in mutants(plan, seed, MUTANTS):
        if not violations(mutant):
            fault = find_fault(mutant, schedules(seed, mutant, 3, plan), expected)
            assert fault is None, f"{name}: {fault}"


@drawn(20)
@given(SEEDS)
def test_what_the_builder_makes_runs_without_a_fault(seed: int) -> None:
    plan = some_plan(seed)
    if not violations(plan):
        assert find_fault(plan, schedules(seed, plan, 6), meaning(plan)) is None


@drawn(30)
@given(SEEDS)
def test_a_refused_race_can_happen(seed: int) -> None:
    """Exact, not merely safe: some schedule of the oracle shows each race."""
    plan = some_plan(seed, most=3)
    for name, mutant in mutants(plan, seed, 3):
        found = violations(mutant)
        if found and all(violation.rule == "race" for violation in found):
            assert _shown(mutant), f"{name}: {found[0]}"


def _shown(plan: Plan) -> bool:
    """Does any operation, held back as long as possible, break the plan?"""
    if find_fault(plan, schedules(0, plan, 0), None):
        return True
    counters = (False, True) if plan.options.handoff is HandOffKind.COUNTER else (False,)
    ops = [op for step in (1, 0, 2) for op in operations(plan, step)]
    return (
        find_fault(
            plan, [Schedule(1, "priority", "random", op, c) for op in ops for c in counters], None
        )
        is not None
    )


MODELS = [
    tiny(1),
    tiny(3),
    tiny(4, Lanes(2, 2)),
    *(
        tiny(layers, Lanes(4, 1, head, early))
        for layers, head, early in product((3, 7), LaneHead, (False, True))
    ),
    tiny(7, Lanes(2, 3, LaneHead.SUM)),
    tiny(5, Lanes(2, 0)),
]


@pytest.mark.few(4)
@pytest.mark.parametrize("handoff", HandOffKind)
@pytest.mark.parametrize(
    "spec",
    MODELS,
    ids=lambda s: f"{s.layers} {s.lanes.head.value + str(s.lanes.delay) if s.lanes else ''}",
)
def test_every_plan_of_the_ordinary_options_is_accepted(spec, handoff) -> None:  # type: ignore[no-untyped-def]
    accepted = 0
    for (gpus, blocks), sampling, execution, collective in product(
        ((1, 4), (1, 8), (2, 6), (4, 8)),
        Sampling,
        Execution,
        (CollectiveKind.PUSH, CollectiveKind.LIBRARY),
    ):
        chosen = {
            "gpus": gpus,
            "blocks": blocks,
            "handoff": handoff,
            "sampling": sampling,
            "execution": execution,
        }
        try:
            plan = plan_of(spec, collective=collective, **chosen)
        except PlanError:
            continue
        prove(plan)
        accepted += 1
    assert accepted >= 12


@pytest.mark.parametrize("handoff", HandOffKind)
def test_probes_are_accepted(handoff: HandOffKind) -> None:
    options = Options(blocks=4, handoff=handoff, copies=5)
    for plan in (
        stream_probe(options, LIMITS, rows=64, cols=64, stages=3),
        exchange_probe(options, LIMITS, elements=64),
        exchange_probe(replace(options, blocks=64), LIMITS, elements=64, stages=10),
        attention_probe(options, LIMITS, heads=8, kv_heads=4, head_dim=8, stages=2, window=16),
    ):
        prove(plan)


@pytest.mark.parametrize("handoff", HandOffKind)
def test_sample_probe_is_accepted(handoff: HandOffKind) -> None:
    prove(sample_probe(Options(blocks=1, handoff=handoff), LIMITS, vocab=100))


def test_a_full_size_plan_is_proven_within_three_seconds() -> None:
    """8 ranks x 256 blocks, 105 stages; processor time, since other work may share the cores."""
    plan = plan_of(
        LANEFORMER,
        gpus=8,
        blocks=256,
        slot_bytes=16384,
        ring_slots=2,
        window_slots=2,
        context=4096,
        max_context=4096,
        placement=Placement.FLAT,
    )
    before = time.process_time()
    report = prove(plan)
    assert time.process_time() - before < 3
    assert report == Report(plan.name, 8, 256, 105, 103, report.orderings)
    assert report.orderings > 3 * report.values


def test_a_refusal_names_stage_block_element_rule_and_next_step() -> None:
    plan = plan_of(tiny(2), blocks=4)
    stage = next(s for s in plan.stages if s.resets)
    early = plan.stages[stage.index - 1]
    moved = replace(early, resets=stage.resets), replace(stage, resets=())
    stages = tuple(next((m for m in moved if m.index == s.index), s) for s in plan.stages)
    expected = (
        rf"{early.kind.value}\[\d\]: race: block \d resets \w+\[\d\]\[\d+\] before block \d .*; "
        r"raise copies"
    )
    with pytest.raises(InvalidPlan, match=expected):
        prove(replace(plan, stages=stages))


@pytest.mark.parametrize(
    ("limit", "rule", "message"),
    [
        ({"blocks": 3}, "residency", "4 blocks per GPU wait for each other, 3 can be resident"),
        ({"memory_bytes": 1000}, "budget", "bytes of memory per GPU, the limit is 1000"),
        ({"on_chip_bytes": 100}, "budget", "bytes on chip per block, the limit is 100"),
        ({"dies": 1}, "structure", "die table"),
    ],
)
def test_limits_of_the_node_are_kept(limit: dict[str, int], rule: str, message: str) -> None:
    plan = plan_of(tiny(2), blocks=4)
    found = violations(replace(plan, limits=replace(LIMITS, **limit)))
    assert [v.rule for v in found] == [rule]
    assert message in str(found[0])


def test_more_blocks_than_cores_are_accepted_where_they_take_turns() -> None:
    plan = plan_of(tiny(2), blocks=4, limits=replace(LIMITS, blocks=2, oversubscribe=True))
    prove(plan)


def test_kernels_need_no_resident_blocks() -> None:
    prove(plan_of(tiny(2), blocks=4, execution=Execution.GRAPH, limits=replace(LIMITS, blocks=2)))


def without_listener(plan: Plan, block: int, *, only_if_idle: bool) -> Plan:
    """`block` reads nothing more, in all exchanges or in those where it publishes nothing."""
    stages = []
    for stage in plan.stages:
        assert stage.publishes is not None
        lo, hi = plan.values[stage.publishes].owned[block]
        keeps = only_if_idle and lo < hi
        reads = tuple(
            replace(
                r, spans=tuple(s if at != block or keeps else () for at, s in enumerate(r.spans))
            )
            for r in stage.reads
        )
        stages.append(replace(stage, reads=reads))
    return replace(plan, stages=tuple(stages))


def test_a_block_that_publishes_nothing_in_an_exchange_need_not_listen() -> None:
    probe = hop_probe(Options(blocks=3), LIMITS, pair=(0, 1), hops=4)
    assert violations(without_listener(probe, 2, only_if_idle=True)) == []
    assert {v.rule for v in violations(without_listener(probe, 2, only_if_idle=False))} >= {
        "data flow"
    }
