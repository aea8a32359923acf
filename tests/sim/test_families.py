"""Laws of routed experts, states, several tokens and speculative decoding in the twin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean
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
from tests.sim.machines import MODEL, limits_of, node_of, nodes, number, usual
from twin.cost.causes import CAUSES
from twin.cost.lowering import compile_plan
from twin.cost.routing import Draws, Routing, RoutingKind, read_routing
from twin.errors import PlanError
from twin.hardware.load import load_node
from twin.hardware.override import apply_fit
from twin.hardware.types import Node
from twin.models.depth import first_layers
from twin.models.feeds import ExpertFeed
from twin.models.layers import Layer
from twin.models.load import load_model
from twin.models.spec import ModelSpec
from twin.plan.catalogue import StageKind
from twin.plan.options import CollectiveKind, Common, Execution, HandOffKind, Options, Residual
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.plans import build
from twin.sim.batch import planned
from twin.sim.gated import GatedRing
from twin.sim.machine import Machine
from twin.sim.run import Result, simulate
from twin.sim.speculation import Speculation

ANOMALY = 1.03
UNIFORM, SKEWED = Routing(seed=1), Routing(RoutingKind.ZIPF, exponent=4.0, seed=1)


def plan_on(node: Node, spec: ModelSpec, **chosen: Any) -> Plan:
    base: dict[str, Any] = {
        "gpus": node.gpus,
        "blocks": node.device.blocks,
        "slot_bytes": 512,
        "ring_slots": 4,
        "window_slots": 4,
        "tile_rows": 2,
        "context": 64,
        "max_context": 256,
        "collective": CollectiveKind.PUSH if node.gpus > 1 else CollectiveKind.NONE,
    }
    return build(spec, Options(**(base | chosen)), limits_of(node.device))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Node, Plan, Routing]:
    """Any family on any machine."""
    node = draw(nodes())
    mixers = draw(st.lists(st.sampled_from(sorted(MIXERS)), min_size=1, max_size=2))
    feeds = [draw(st.sampled_from(sorted(FEEDS))) for _ in mixers]
    stored = draw(st.sampled_from((None, PACKED)))
    spec = family(
        *((MIXERS[m], FEEDS[f]) for m, f in zip(mixers, feeds, strict=True)),
        hyper=draw(st.booleans()),
        stored=stored,
    )
    routed = any("experts" in f or "shared" in f or "hashed" in f for f in feeds)
    slots = draw(st.integers(2, 6))
    plan = plan_on(
        node,
        spec,
        ring_slots=slots,
        window_slots=draw(st.integers(1, slots)),
        ahead_slots=draw(st.integers(0, slots - 1)),
        handoff=draw(st.sampled_from(list(HandOffKind))),
        batch=draw(st.sampled_from((1, 1, 3))),
        draft=draw(st.sampled_from((0, 0, 2))),
        expert_ranks=draw(st.sampled_from([n for n in (1, 2, 4) if node.gpus % n == 0]))
        if routed
        else 1,
        common=draw(st.sampled_from(list(Common))),
        residual=draw(st.sampled_from((None, *Residual))),
        context=draw(st.sampled_from((2, 64))),
        tile_rows=4 if stored else 2,  # an even number of 16-bit rows next to FP4
    )
    prove(plan)
    return node, plan, draw(st.sampled_from((UNIFORM, SKEWED)))


def run(case: tuple[Node, Plan, Routing], **more: Any) -> Result:
    node, plan, routing = case
    drafts = Speculation(acceptance=0.5, draft_step_s=0.0) if plan.options.draft else None
    return simulate(plan, node, routing=routing, speculation=drafts, **more)


@drawn(30)
@given(cases(), st.integers(1, 3))
def test_every_byte_of_the_drawn_steps_is_delivered_once(
    case: tuple[Node, Plan, Routing], steps: int
) -> None:
    node, plan, routing = case
    result = run(case, steps=steps)
    program = compile_plan(plan, node.device, routing, steps)
    assert result.consumed_bytes == sum(program.step_bytes(step) for step in range(steps))
    assert result.delivered_bytes == result.consumed_bytes + result.in_ring_bytes


@drawn(20)
@given(cases())
def test_never_faster_than_the_floor(case: tuple[Node, Plan, Routing]) -> None:
    node, plan, routing = case
    result = run(case, steps=3)
    program = compile_plan(plan, node.device, routing, 3)
    moved = 0
    for step, end in enumerate(result.step_ends_ps):
        moved += program.step_bytes(step)
        assert end + 1 >= moved / result.stream_bytes_per_s * 1e12


@drawn(15)
@given(cases())
def test_the_attribution_sums_to_the_step_and_repeats(case: tuple[Node, Plan, Routing]) -> None:
    first, second = (run(case, steps=3) for _ in range(2))
    assert first.to_json() == second.to_json()
    assert sum(first.attribution_ps.values()) == first.step_ps
    assert set(first.attribution_ps) == set(CAUSES)


@drawn(15)
@given(cases(), st.booleans())
def test_no_expert_is_requested_before_its_routing_is_known(
    case: tuple[Node, Plan, Routing], ahead: bool
) -> None:
    node, plan, routing = case
    machine = Machine(
        plan, node, steps=2, keep_all=True, program=compile_plan(plan, node.device, routing, 2)
    )
    taken: list[tuple[GatedRing, int, int]] = []
    take = GatedRing._take

    def watching(ring: GatedRing, slot: int, now: int) -> None:
        behind = sum(1 for other in ring.there if other > ring.head)
        assert slot == ring.head or behind < plan.options.ahead_slots
        taken.append((ring, slot, now))
        take(ring, slot, now)

    GatedRing._take = watching  # type: ignore[method-assign]
    try:
        machine.run()
    finally:
        GatedRing._take = take  # type: ignore[method-assign]
    for ring, slot, now in taken:
        run_of_slot = next(at for at, bound in enumerate(ring.bounds) if slot < bound)
        gate = ring.gates[run_of_slot]
        assert gate in ring.finished
        assert ring.finished[gate] <= now


@drawn(12)
@given(nodes(sharing=False), st.sampled_from(sorted(MIXERS)), st.integers(1, 4))
def test_more_experts_per_token_are_never_faster(node: Node, mixer: str, top_k: int) -> None:
    times = []
    for chosen in (top_k, 2 * top_k):
        spec = family((MIXERS[mixer], replace(SHARED, top_k=chosen)))
        times.append(simulate(plan_on(node, spec), node).step_ps)
    assert times[0] <= times[1] * ANOMALY


@drawn(10)
@given(nodes(sharing=False, gpus=(4,)), st.sampled_from((2, 4)))
def test_popular_neighbours_are_never_faster_than_uniform_experts(node: Node, groups: int) -> None:
    """One token under expert parallelism: neighbours lie on one rank, which the others wait for.
    (With a batch, fewer different experts are streamed, and skew can win.)
    """
    spec = family(*[(GROUPED, replace(EXPERTS, experts=16, top_k=4, width=128))] * 3)
    plan = plan_on(node, spec, expert_ranks=groups)
    uniform, skewed = (
        mean(simulate(plan, node, steps=6, routing=routing).step_times_s)
        for routing in (UNIFORM, SKEWED)
    )
    assert uniform <= skewed * ANOMALY


def test_with_a_batch_skew_streams_fewer_experts() -> None:
    plan = plan_on(node_of(usual()), family((GROUPED, replace(EXPERTS, experts=16))), batch=8)
    uniform, skewed = (compile_plan(plan, usual(), routing, 4) for routing in (UNIFORM, SKEWED))
    assert mean(skewed.step_bytes(step) for step in range(4)) < mean(
        uniform.step_bytes(step) for step in range(4)
    )


@pytest.mark.parametrize("handoff", HandOffKind)
def test_zero_routed_experts_are_as_fast_as_a_dense_layer(handoff: HandOffKind) -> None:
    node = node_of(usual(), 2)
    none = ExpertFeed(experts=0, top_k=0, width=32, shared_width=64)
    times = [
        simulate(
            plan_on(node, family((GROUPED, feed), (DELTA, feed)), handoff=handoff), node
        ).step_ps
        for feed in (none, DENSE)
    ]
    assert times[0] == times[1]


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_dense_model_described_layer_by_layer_takes_the_same_time(gpus: int) -> None:
    """Within the bytes that its caches write, which only described layers count."""
    node = node_of(usual(), gpus)
    described = replace(MODEL, layout=tuple(MODEL.layer(index) for index in range(MODEL.layers)))
    assert isinstance(described.layout[0], Layer)
    one, two = (simulate(plan_on(node, spec), node).step_ps for spec in (MODEL, described))
    assert abs(one - two) <= 0.01 * one


def test_experts_stop_the_stream_and_slots_ahead_go_on() -> None:
    """A slow router: without slots ahead the ring drains behind it."""
    device = apply_fit(usual(), {"handoff.hop_s": number(5e-6)})
    node = node_of(device)
    spec = family(*[(GROUPED, replace(EXPERTS, width=128))] * 4)
    stopped, ahead = (
        simulate(plan_on(node, spec, ring_slots=8, ahead_slots=slots), node) for slots in (0, 4)
    )
    assert stopped.attribution_ps["routing"] > 0
    assert ahead.step_ps <= stopped.step_ps * ANOMALY


def test_hashed_experts_are_never_slower_than_routed_ones() -> None:
    node = node_of(usual())
    hashed, routed = (
        simulate(plan_on(node, family(*[(GROUPED, feed)] * 3)), node).step_ps
        for feed in (HASHED, replace(HASHED, hashed=False))
    )
    assert hashed <= routed * ANOMALY


@drawn(15)
@given(nodes(sharing=False), st.sampled_from(sorted(MIXERS)), st.sampled_from((2, 4)))
def test_a_larger_batch_is_never_faster_a_step_nor_slower_in_all(
    node: Node, mixer: str, batch: int
) -> None:
    """Weights are streamed once for all sequences; where nothing is streamed, sequences only
    add.
    """
    spec = family((MIXERS[mixer], DENSE))
    one, more = (
        simulate(plan_on(node, spec, batch=count, residual=Residual.REPLICATED), node)
        for count in (1, batch)
    )
    assert one.step_ps <= more.step_ps * ANOMALY
    assert more.step_ps <= batch * one.step_ps * ANOMALY
    assert more.total_tokens_per_s == pytest.approx(batch * more.tokens_per_s)


def test_steps_are_drawn_alike_however_many_there_are() -> None:
    plan = plan_on(node_of(usual(), 2), family((GROUPED, EXPERTS)), expert_ranks=2, batch=3)
    draws = Draws(plan, UNIFORM)
    assert [draws.step(step) for step in range(3)] == [
        Draws(plan, UNIFORM).step(step) for step in range(3)
    ]
    assert draws.step(0) != draws.step(1)
    for draw in draws.step(0):
        assert all(0 < tokens <= 3 for chosen in draw for tokens in chosen)
    assert sum(sum(chosen) for draw in draws.step(0) for chosen in draw) == 3 * 2


def test_one_token_on_slices_of_all_experts_always_does_the_same() -> None:
    plan = plan_on(node_of(usual(), 2), family((GROUPED, EXPERTS)))
    assert not compile_plan(plan, usual()).drawn
    assert Draws(plan, SKEWED).step(0) == [((1, 1),)] * 2


def test_steps_by_routing_are_reported_as_a_distribution() -> None:
    node = node_of(usual(), 4)
    plan = plan_on(node, family(*[(GROUPED, replace(EXPERTS, width=128))] * 2), expert_ranks=4)
    result = simulate(plan, node, steps=9, routing=UNIFORM)
    found = result.distribution
    assert found["p10"] <= found["p50"] <= found["p90"] <= found["max"]
    assert found["p10"] < found["max"]
    assert result.step_s == found["p50"]
    assert result.routing == "uniform, seed 1"
    assert (
        simulate(plan, node, steps=9, routing=replace(UNIFORM, seed=2)).step_ends_ps
        != result.step_ends_ps
    )


@pytest.mark.parametrize("execution", [Execution.GRAPH, Execution.LAUNCHES])
def test_experts_run_between_kernels_too(execution: Execution) -> None:
    node = node_of(usual(), 2)
    plan = plan_on(
        node,
        family((LATENT, SHARED), (CHOSEN, HASHED)),
        execution=execution,
        collective=CollectiveKind.LIBRARY,
        expert_ranks=2,
    )
    prove(plan)
    result = simulate(plan, node, steps=3)
    assert result.attribution_ps["launch"] > 0
    assert result.delivered_bytes == result.consumed_bytes + result.in_ring_bytes


def test_chosen_entries_wait_for_their_scores() -> None:
    node = node_of(usual())
    plan = plan_on(node, family((CHOSEN, DENSE)))
    works = [
        work
        for block in compile_plan(plan, node.device).stages
        for work in block
        if work.kind is StageKind.ATTENTION
    ]
    assert all(work.kv_after for work in works)
    assert any(work.stored > 0 for work in works)


# ---- speculative decoding ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "acceptance", "tokens"), [(0, 0.5, 1.0), (3, 0.0, 1.0), (3, 1.0, 4.0), (2, 0.5, 1.75)]
)
def test_accepted_drafts_multiply_a_step(draft: int, acceptance: float, tokens: float) -> None:
    assert Speculation(acceptance=acceptance, draft_step_s=0.0).tokens(draft) == pytest.approx(
        tokens
    )


def test_a_step_that_verifies_drafts_costs_more_and_yields_more() -> None:
    node = node_of(usual())
    spec = family((GROUPED, DENSE))
    plain = simulate(plan_on(node, spec), node)
    drafted = simulate(
        plan_on(node, spec, draft=3),
        node,
        speculation=Speculation(acceptance=0.8, draft_step_s=1e-6),
    )
    assert drafted.step_ps >= plain.step_ps
    assert drafted.tokens_per_s == pytest.approx((1 + 0.8 + 0.64 + 0.512) / (drafted.step_s + 3e-6))
    with pytest.raises(PlanError, match="draft=3: say how often"):
        simulate(plan_on(node, spec, draft=3), node)
    with pytest.raises(PlanError, match="drafts no tokens"):
        simulate(
            plan_on(node, spec), node, speculation=Speculation(acceptance=0.8, draft_step_s=0.0)
        )


@pytest.mark.parametrize(
    "wrong", [{"acceptance": 1.1, "draft_step_s": 0.0}, {"acceptance": 0.5, "draft_step_s": -1.0}]
)
def test_impossible_speculation_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=r"acceptance=1\.1|draft_step_s=-1\.0"):
        Speculation(**wrong)


# ---- what a routing may be -----------------------------------------------------------------------


def test_routing_is_read_from_text_or_a_recorded_file(tmp_path: Path) -> None:
    recorded = tmp_path / "counts.json"
    recorded.write_text("[[1, 0, 3], [2, 2, 2]]", encoding="utf-8")
    assert read_routing("uniform", 3) == Routing(seed=3)
    assert read_routing("zipf:1.5", 0) == Routing(RoutingKind.ZIPF, exponent=1.5)
    assert read_routing(str(recorded), 0).histogram == ((1.0, 0.0, 3.0), (2.0, 2.0, 2.0))


@pytest.mark.parametrize("text", ["zipf:x", "zipf:-1", "nowhere.json", "poisson"])
def test_other_routings_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"zipf|uniform"):
        read_routing(text, 0)


def test_a_histogram_of_another_model_is_refused() -> None:
    plan = plan_on(node_of(usual()), family((GROUPED, EXPERTS)), batch=2)
    for counts, message in (
        ((1.0, 1.0), "has 2 experts, layer 0 has 8"),
        ((1.0, *[0.0] * 7), "counts 1 of 8 experts; a token chooses 2"),
    ):
        routing = Routing(RoutingKind.HISTOGRAM, histogram=(counts,))
        with pytest.raises(PlanError, match=message):
            compile_plan(plan, usual(), routing)


def test_a_recorded_histogram_draws_only_what_it_counts() -> None:
    plan = plan_on(node_of(usual(), 2), family((GROUPED, EXPERTS)), expert_ranks=2, batch=4)
    routing = Routing(RoutingKind.HISTOGRAM, histogram=((0.0, 5.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0),))
    first, second = Draws(plan, routing).step(0)
    assert first == ((4, 4),)
    assert second == ((),)


def gathers(
    model: str, layers: int = 4, **chosen: Any
) -> list[tuple[StageKind, StageKind, int, int]]:
    """(reader, producer, FP32 words, time of the gather) of the reads of one block of an H200,
    whose warps pay for sectors.
    """
    node = load_node("1xh200")
    plan = planned(first_layers(load_model(model), layers), node, **chosen)
    works = compile_plan(plan, node.device).stages[0]
    return [
        (stage.kind, plan.stages[plan.values[read.value].stage].kind, done.size // 4, done.cost_ps)
        for stage, work in zip(plan.stages, works, strict=True)
        for read, done in zip([r for r in stage.reads if r.spans[0]], work.reads, strict=True)
    ]


def test_a_window_combines_its_own_splits_whatever_the_context() -> None:
    """Gemma 4: five layers attend 1,024 positions, the sixth all of them."""

    def combined(context: int) -> list[int]:
        found = gathers("gemma-4-31b", layers=6, context=context, max_context=context)
        return [
            ps
            for reader, producer, _, ps in found
            if (reader, producer) == (StageKind.O_PROJ, StageKind.ATTENTION)
        ]

    short, long = combined(1024), combined(16384)
    assert set(long[:5]) == set(short[:5]) == {short[0]}
    assert long[5] > short[5]


def test_a_few_elements_are_not_paid_for_as_a_vector() -> None:
    """DeepSeek-V4's weights of its residuals are a few elements; the vectors that they weigh are
    thousands.
    """
    found = gathers("deepseek-v4-flash", context=1024)
    few = [ps for _, producer, words, ps in found if producer is StageKind.HYPER and words < 128]
    whole = [ps for reader, _, words, ps in found if reader is StageKind.HYPER and words >= 4096]
    assert few
    assert whole
    assert 5 * max(few) < min(whole)
