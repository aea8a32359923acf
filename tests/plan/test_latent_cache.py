"""A latent cache whose positions the ranks divide: what a plan then counts, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.plan.family_models import DENSE, DIRECT, EXPERTS, GROUPED, LATENT, family
from tests.plan.test_families import family_plan, first, with_stage
from tests.proof.oracle import find_fault, meaning, schedules
from tests.sim.machines import node_of, usual
from tests.sim.test_families import plan_on
from twin.errors import PlanError
from twin.models.mixers import LatentAttention
from twin.plan.catalogue import StageKind
from twin.plan.options import CollectiveKind, Common, Execution, HandOffKind, LatentCache
from twin.plan.types import Parts, Plan
from twin.proof.prove import prove, violations
from twin.sim.executor import Executor
from twin.sim.run import simulate

SPEC = family((LATENT, DENSE), (LATENT, EXPERTS))


def split_plan(**chosen: Any) -> Plan:
    return family_plan(SPEC, latent_cache=LatentCache.SPLIT, **{"gpus": 2, **chosen})


OPTIONS: tuple[dict[str, Any], ...] = (
    {"blocks": 5},
    {"gpus": 4, "batch": 3},
    {"draft": 2, "attention_splits": 3},
    {"gpus": 4, "context": 3},
    {"execution": Execution.GRAPH, "collective": CollectiveKind.LIBRARY},
)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("handoff", "chosen"),
    list(product(HandOffKind, OPTIONS)),
)
def test_a_split_cache_is_proven_under_every_ordinary_option(
    handoff: HandOffKind, chosen: dict[str, Any]
) -> None:
    prove(split_plan(handoff=handoff, common=Common.SHARDED, **chosen))


def test_ranks_read_each_position_once() -> None:
    whole, split = family_plan(SPEC, gpus=4), split_plan(gpus=4)
    mixer = SPEC.layer(0).mixer
    assert isinstance(mixer, LatentAttention)
    read, written = 64 * mixer.latent_dim * 2, mixer.latent_dim * 2
    layers = 2
    assert whole.kv_bytes() == 4 * layers * (read + written)
    assert split.kv_bytes() == layers * (read + written)
    held = (first(plan, StageKind.ATTENTION).scan for plan in (whole, split))
    one, part = (scan.held_bytes for scan in held if scan)
    assert one == 4 * part


def test_all_heads_attend_and_each_rank_hears_of_its_own() -> None:
    plan = split_plan()
    attention, merge = first(plan, StageKind.ATTENTION), first(plan, StageKind.MERGE)
    assert attention.scan is not None
    assert attention.scan.group == 4
    assert all(
        read.parts is Parts.ALL for read in attention.reads if plan.values[read.value].pushed
    )
    assert merge.publishes is not None
    merged = plan.values[merge.publishes]
    assert merged.pushed
    assert 2 * merged.elements == plan.values[merge.reads[0].value].elements // attention.scan.items


def test_a_block_that_merges_less_is_found() -> None:
    plan = split_plan()
    merge = first(plan, StageKind.MERGE)
    (read,) = merge.reads
    for less in (read.spans[0][1:], read.spans[0][:-1]):
        spans = (less, *read.spans[1:])
        broken = with_stage(plan, replace(merge, reads=(replace(read, spans=spans),)))
        assert any("merge" in str(one) for one in violations(broken))


def test_no_schedule_finds_a_fault() -> None:
    plan = split_plan(blocks=2)
    assert find_fault(plan, schedules(1, plan, 3), meaning(plan, 2), 2) is None


@pytest.mark.parametrize(
    ("spec", "chosen", "reason"),
    [
        (SPEC, {"gpus": 1}, "one rank keeps all"),
        (SPEC, {"gpus": 2, "common": Common.REPLICATED}, "only with common=sharded"),
        (family((GROUPED, DENSE)), {"gpus": 2}, "has no latent cache"),
        (family((DIRECT, DENSE)), {"gpus": 2}, "no compressed queries"),
    ],
)
def test_what_cannot_be_split_is_refused(spec: Any, chosen: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=rf"latent_cache=split: .*{reason}.*use latent_cache=repl"):
        family_plan(spec, latent_cache=LatentCache.SPLIT, **chosen)


def test_both_executors_say_the_same_of_a_split_cache() -> None:
    node = node_of(usual(per_die=4), 2)
    plan = plan_on(node, SPEC, latent_cache=LatentCache.SPLIT, context=100, max_context=128)
    one, other = (simulate(plan, node, executor=executor) for executor in Executor)
    assert one.step_ends_ps == other.step_ends_ps
    assert one.delivered_bytes == one.consumed_bytes + one.in_ring_bytes
