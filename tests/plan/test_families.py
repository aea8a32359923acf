"""Plans of layers that are described one by one: what they count, what the proof proves of them,
what it refuses.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from tests.plan.family_models import (
    CHOSEN,
    DELTA,
    DENSE,
    EXPERTS,
    FEEDS,
    GROUPED,
    HASHED,
    LATENT,
    MIXERS,
    PACKED,
    SHARED,
    family,
)
from tests.proof.mutations import mutants
from tests.proof.oracle import find_fault, meaning, schedules
from tests.proof.tiny import LIMITS, plan_of, tiny
from twin.errors import InvalidPlan, PlanError
from twin.models.feeds import ExpertFeed
from twin.models.spec import ModelSpec
from twin.plan.catalogue import StageKind
from twin.plan.matrix import routed_share
from twin.plan.options import (
    CollectiveKind,
    Common,
    Execution,
    HandOffKind,
    Options,
    Residual,
    Sampling,
)
from twin.plan.types import Plan, Stage
from twin.proof.prove import prove, violations

PATTERNS = {
    **{
        name: family((mixer, DENSE), (mixer, EXPERTS), (mixer, SHARED))
        for name, mixer in MIXERS.items()
    },
    "alternating": family(*[(DELTA, SHARED)] * 3, (GROUPED, SHARED)),
    "v4": family(
        (MIXERS["window"], HASHED),
        (CHOSEN, HASHED),
        (MIXERS["compressed"], SHARED),
        hyper=True,
        stored=PACKED,
    ),
}


def family_plan(spec: ModelSpec, **chosen: Any) -> Plan:
    settled: dict[str, Any] = {
        "context": 64,
        "max_context": 256,
        "copies": 3,
        "blocks": 4,
        **chosen,
    }
    return plan_of(spec, **settled)


def first(plan: Plan, kind: StageKind) -> Stage:
    return next(stage for stage in plan.stages if stage.kind is kind)


def with_stage(plan: Plan, stage: Stage) -> Plan:
    return replace(plan, stages=tuple(stage if s.index == stage.index else s for s in plan.stages))


@pytest.mark.few(9)
@pytest.mark.parametrize("handoff", HandOffKind)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_family_is_proven_under_every_ordinary_option(
    name: str, handoff: HandOffKind
) -> None:
    chosen = [
        {"gpus": 1, "blocks": 5},
        {"gpus": 2, "common": Common.REPLICATED},
        {"gpus": 4, "batch": 3, "sampling": Sampling.FULL},
        {"gpus": 2, "draft": 2, "residual": Residual.SLICED},
        {"gpus": 4, "context": 3},
    ]
    for options in chosen:
        prove(family_plan(PATTERNS[name], handoff=handoff, **options))
    prove(
        family_plan(
            PATTERNS[name],
            gpus=2,
            handoff=handoff,
            execution=Execution.GRAPH,
            collective=CollectiveKind.LIBRARY,
        )
    )


@pytest.mark.parametrize(("gpus", "groups"), [(1, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_weights_of_a_step_are_those_of_the_model(gpus: int, groups: int) -> None:
    """However experts are placed; what every rank needs alike is streamed by each, or once where it
    is shared.
    """
    spec = PATTERNS["alternating"]
    plan = family_plan(spec, gpus=gpus, expert_ranks=groups, common=Common.SHARDED)
    # the row that gates the shared experts does not divide: each rank has it, in four layers
    gating = (gpus - 1) * 4 * 32 * 2
    # two heads of keys and values, in one layer
    heads = (max(1, gpus // 2) - 1) * 2 * 2 * 8 * 32 * 2
    replicated = gating + heads
    assert plan.weight_bytes() == spec.streamed_bytes + replicated


def test_packed_weights_count_their_scales() -> None:
    spec = family((GROUPED, SHARED), stored=PACKED)
    plan = family_plan(spec, gpus=1)
    expert = first(plan, StageKind.ROUTED_UP)
    assert plan.stage_bytes(expert) == 2 * 32 * (32 // 2 + 1)
    whole = sum(w.step_bytes for w in spec.weights())
    # tiles of a matrix each bring their own scale of a block
    assert whole <= plan.weight_bytes() <= 1.1 * whole


def test_all_experts_must_fit_the_memory() -> None:
    """Not only those of a step."""
    plan = family_plan(PATTERNS["grouped"])
    held = [s.routed.experts * plan.stage_bytes(s) for s in plan.stages if s.routed]
    assert held
    assert plan.memory_bytes() > sum(held)
    limits = replace(LIMITS, memory_bytes=plan.memory_bytes() - 1)
    assert [v.rule for v in violations(replace(plan, limits=limits))] == ["budget"]


def test_caches_are_read_once_a_sequence() -> None:
    one, four = (family_plan(PATTERNS["latent"], batch=batch).kv_bytes() for batch in (1, 4))
    assert 3.9 * one <= four <= 4.1 * one
    assert (
        family_plan(PATTERNS["latent"], batch=4).weight_bytes()
        < 4 * family_plan(PATTERNS["latent"]).weight_bytes()
    )


def test_states_are_read_and_written_whatever_the_context() -> None:
    """Besides, an item reads what the convolution saw of its channels, and writes a position."""
    spec = family((DELTA, DENSE))
    states = 2 * 4 * DELTA.state_elements
    for context in (1, 64, 256):
        seen = 4 * (8 + 8 + 8)  # of an item at a position
        assert family_plan(spec, context=context).kv_bytes() == states + 4 * 4 * seen
    halves = 4 * (8 + 8 + 4)  # of two items a head, which both keep queries and keys
    assert family_plan(spec, gpus=4).kv_bytes() == states + 8 * 4 * halves


def test_latents_are_cached_on_every_rank() -> None:
    spec = family((LATENT, DENSE))
    read = 64 * LATENT.latent_dim * 2
    assert family_plan(spec, gpus=1).kv_bytes() >= read
    assert family_plan(spec, gpus=4).kv_bytes() >= 4 * read


@pytest.mark.parametrize(("context", "heads", "entries"), [(64, 2, 16), (16384, 4, 2048)])
def test_ranks_divide_an_indexers_heads_or_its_many_entries(
    context: int, heads: int, entries: int
) -> None:
    plan = family_plan(
        family((CHOSEN, DENSE)), gpus=2, context=context, max_context=max(256, context)
    )
    prove(plan)
    scan = first(plan, StageKind.INDEX).scan
    assert scan
    assert (scan.group, scan.entries) == (heads, entries)


def test_zero_routed_experts_are_a_dense_layer() -> None:
    none = ExpertFeed(experts=0, top_k=0, width=32, shared_width=64)
    plan, dense = (family_plan(family((GROUPED, feed), (LATENT, feed))) for feed in (none, DENSE))
    assert [(s.kind, s.matrices, s.reads) for s in plan.stages] == [
        (s.kind, s.matrices, s.reads) for s in dense.stages
    ]


def test_a_dense_model_for_one_token_is_planned_as_before() -> None:
    kinds = {stage.kind for stage in plan_of(tiny(3), gpus=2, blocks=3).stages}
    assert StageKind.QKV in kinds
    assert not any(stage.scan for stage in plan_of(tiny(3), gpus=2, blocks=3).stages)


@pytest.mark.parametrize(("active", "blocks"), list(product((0, 1, 3), (1, 4, 7))))
def test_blocks_divide_the_chosen_experts_rows_evenly(active: int, blocks: int) -> None:
    shares = [routed_share(active * 10, blocks, block) for block in range(blocks)]
    sizes = [hi - lo for lo, hi in shares]
    assert sum(sizes) == active * 10
    assert max(sizes) - min(sizes) <= 1
    assert all(a[1] == b[0] for a, b in pairwise(shares))


# ---- run word by word ----------------------------------------------------------------------------


def some_family_plan(seed: int) -> Plan:
    """One or two layers of any kind on at most six blocks."""
    chance = random.Random(seed)
    while True:
        layers = [
            (chance.choice(list(MIXERS.values())), chance.choice(list(FEEDS.values())))
            for _ in range(chance.choice((1, 2, 2)))
        ]
        gpus = chance.choice((1, 1, 2))
        options: dict[str, Any] = {
            "gpus": gpus,
            "blocks": chance.choice((1, 2, 3)),
            "handoff": chance.choice((HandOffKind.SENTINEL, *HandOffKind)),
            "copies": chance.choice((1, 2, 3, 3)),
            "batch": chance.choice((1, 1, 2)),
            "residual": chance.choice(list(Residual)),
            "common": chance.choice(list(Common)),
            "sampling": chance.choice(list(Sampling)),
            "execution": chance.choice((Execution.RESIDENT, Execution.RESIDENT, Execution.GRAPH)),
            "collective": chance.choice((CollectiveKind.PUSH, CollectiveKind.LIBRARY)),
            "expert_ranks": chance.choice((1, gpus))
            if any(isinstance(feed, ExpertFeed) for _, feed in layers)
            else 1,
        }
        try:
            return family_plan(family(*layers, hyper=chance.random() < 0.3), **options)
        except PlanError:
            continue


@drawn(4)
@given(st.integers(0, 2**32 - 1))
def test_what_the_proof_accepts_of_families_runs_without_a_fault(seed: int) -> None:
    plan = some_family_plan(seed)
    if violations(plan):
        assert plan.options.copies < 3, "default copies are enough"
        return
    expected = meaning(plan, 2)
    assert find_fault(plan, schedules(seed, plan, 3), expected, 2) is None
    for name, mutant in mutants(plan, seed, 3):
        if not violations(mutant):
            fault = find_fault(mutant, schedules(seed, mutant, 2, plan), expected, 2)
            assert fault is None, f"{name}: {fault}"


# ---- what is refused -----------------------------------------------------------------------------


def _earlier_gate(plan: Plan) -> Plan:
    stage = first(plan, StageKind.ROUTED_UP)
    return with_stage(plan, replace(stage, gate=(stage.gate or 0) - 1))


def _no_gate(plan: Plan) -> Plan:
    return with_stage(plan, replace(first(plan, StageKind.ROUTED_DOWN), gate=None))


def _late_gate(plan: Plan) -> Plan:
    stage = first(plan, StageKind.ROUTED_UP)
    return with_stage(plan, replace(stage, gate=stage.index))


def _thrown_away(plan: Plan) -> Plan:
    return with_stage(plan, replace(first(plan, StageKind.SHARED_DOWN), kept=False))


def _other_rows(plan: Plan) -> Plan:
    stage = first(plan, StageKind.SHARED_DOWN)
    assert stage.matrix
    owned = (stage.matrix.owned[1], stage.matrix.owned[0], *stage.matrix.owned[2:])
    return with_stage(plan, replace(stage, matrix=replace(stage.matrix, owned=owned)))


def _fewer_experts(plan: Plan) -> Plan:
    stage = first(plan, StageKind.ROUTED_UP)
    assert stage.routed
    return with_stage(plan, replace(stage, routed=replace(stage.routed, most=1)))


def _no_room(plan: Plan) -> Plan:
    """Blocks that publish less than their largest share of the chosen experts' rows."""
    stage = first(plan, StageKind.ROUTED_UP)
    value = plan.values[stage.publishes or 0]
    small = replace(value, owned=((value.owned[0][0], value.owned[0][1] - 1), *value.owned[1:]))
    return replace(plan, values=tuple(small if v.id == value.id else v for v in plan.values))


def _exchanged_shares(plan: Plan) -> Plan:
    """Readers would take one block's rows for another's."""
    value = plan.values[first(plan, StageKind.ROUTED_UP).publishes or 0]
    swapped = replace(value, owned=(value.owned[1], value.owned[0], *value.owned[2:]))
    return replace(plan, values=tuple(swapped if v.id == value.id else v for v in plan.values))


def _blind_route(plan: Plan) -> Plan:
    return with_stage(plan, replace(first(plan, StageKind.ROUTE), reads=()))


def _other_format(plan: Plan) -> Plan:
    stage = first(plan, StageKind.ROUTED_DOWN)
    assert stage.matrix
    return with_stage(plan, replace(stage, matrix=replace(stage.matrix, format=None)))


def _shorter_scan(plan: Plan) -> Plan:
    stage = first(plan, StageKind.ATTENTION)
    assert stage.scan
    return with_stage(
        plan, replace(stage, scan=replace(stage.scan, entries=stage.scan.entries - 1))
    )


def _hasty_attention(plan: Plan) -> Plan:
    """Asks for entries before the scores have chosen them."""
    stage = next(s for s in plan.stages if s.scan and s.scan.chosen)
    assert stage.scan
    return with_stage(plan, replace(stage, scan=replace(stage.scan, chosen=False)))


def _wrong_words(plan: Plan) -> Plan:
    value = plan.values[first(plan, StageKind.ROUTER).publishes or 0]
    return replace(
        plan,
        values=tuple(replace(v, words=v.words + 1) if v.id == value.id else v for v in plan.values),
    )


REFUSED: list[tuple[Callable[[Plan], Plan], str]] = [
    (_earlier_gate, "fetches experts behind stage"),
    (_no_gate, "chosen by no stage"),
    (_late_gate, "is not before it"),
    (_thrown_away, "throws the shared experts' sums away"),
    (_other_rows, "blocks do not own the rows whose sums they kept"),
    (_fewer_experts, "its experts are"),
    (_no_room, "elements for up to"),
    (_exchanged_shares, "in block order"),
    (_blind_route, "does not read router"),
    (_other_format, "is stored as"),
    (_shorter_scan, "the model has"),
    (_hasty_attention, "chosen by scores"),
    (_wrong_words, "words an element"),
]


@pytest.mark.parametrize(
    ("breaks", "message"), REFUSED, ids=[breaks.__name__ for breaks, _ in REFUSED]
)
def test_a_broken_family_plan_is_refused_with_its_stage(
    breaks: Callable[[Plan], Plan], message: str
) -> None:
    plan = family_plan(family((CHOSEN, SHARED), (GROUPED, SHARED), stored=PACKED), gpus=2)
    prove(plan)
    broken = breaks(plan)
    assert any(message in str(violation) for violation in violations(broken))
    with pytest.raises(InvalidPlan):
        prove(broken)


def test_hashed_experts_may_be_fetched_from_the_token_on() -> None:
    plan = family_plan(family((GROUPED, HASHED), (GROUPED, SHARED)))
    gates = [stage.gate for stage in plan.stages if stage.kind is StageKind.ROUTED_UP]
    assert gates[0] == 0
    assert plan.stages[gates[1] or 0].kind is StageKind.ROUTE


def test_a_ring_that_others_can_fill_is_a_deadlock() -> None:
    plan = family_plan(PATTERNS["grouped"], ahead_slots=4, ring_slots=4, window_slots=4)
    assert {v.rule for v in violations(plan)} == {"deadlock"}
    prove(family_plan(PATTERNS["grouped"], ahead_slots=3, ring_slots=4, window_slots=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0: must be at least 1"),
        ({"draft": -1}, "draft=-1: must be at least 0"),
        ({"expert_ranks": 3, "gpus": 4}, "expert_ranks=3 groups do not divide 4 ranks"),
        ({"gpus": 8}, "4 attention heads do not divide over 8 ranks"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        family_plan(PATTERNS["grouped"], **options)


def test_experts_that_do_not_divide_are_refused() -> None:
    odd = family((GROUPED, replace(EXPERTS, experts=6)))
    with pytest.raises(PlanError, match="6 experts, which do not divide"):
        family_plan(odd, gpus=4, expert_ranks=4)
    with pytest.raises(PlanError, match="has no routed experts"):
        plan_of(tiny(2), gpus=2, blocks=2, expert_ranks=2)


@pytest.mark.parametrize("options", [{"batch": 2}, {"draft": 1}, {"residual": Residual.SLICED}])
def test_plans_that_the_engine_cannot_run_say_why(options: dict[str, Any]) -> None:
    plan = plan_of(tiny(2), blocks=2, **options)
    prove(plan)
    assert "simulated only" in (plan.simulation_only() or "")
    assert plan_of(tiny(2), blocks=2).simulation_only() is None
    assert "experts" in (family_plan(PATTERNS["grouped"]).simulation_only() or "")


def test_options_count_the_tokens_of_a_step() -> None:
    assert Options(batch=3, draft=2).tokens == 9
