"""Experts next to a dense MLP (Gemma 4): inputs normed for each, outputs normed for each."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from tests.engine.hf_cases import FAMILIES, plan, tokens, weights
from twin.engine.host import HostEngine
from twin.models.load import from_config
from twin.models.spec import DType
from twin.plan.catalogue import StageKind
from twin.plan.options import CollectiveKind, Execution, Residual, Sampling
from twin.plan.shards import Array
from twin.plan.types import Plan
from twin.proof.prove import violations
from twin.reference.step import Reference

CONFIG = FAMILIES["gemma4-experts"]
OPTIONS = (1, 3, 2, 4, Sampling.GREEDY)
READ = 6  # tokens
VECTORS = (
    *("router_norm", "experts_norm", "shared_post_norm", "experts_post_norm", "expert_scales"),
    *("ffn_norm", "ffn_post_norm", "layer_scalar"),
)


@lru_cache
def made(options: tuple[int, int, int, int, Sampling] = OPTIONS, **changes: Any) -> Plan:
    spec = from_config({**CONFIG, **changes}, "case")
    return plan(spec, *options, weight_dtype=DType.FP32, kv_dtype=DType.FP32)


def difference(one: Plan, table: Any, other: Any) -> float:
    """The largest of logits in FP32, against the largest logit: the engine's with `table`, the
    reference's with `other`.
    """
    words = tokens(CONFIG)[:READ]
    reference = Reference(one, other)
    wanted = np.stack([reference.step(token).copy() for token in words])
    with HostEngine(one, table) as running:
        return float(np.abs(running.logits(words) - wanted).max() / np.abs(wanted).max())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (OPTIONS, {}),
        ((2, 3, 2, 4, Sampling.FULL), {}),
        # of many experts a block chooses in groups; each scale follows its expert
        ((1, 5, 1, 16, Sampling.FULL), {"num_experts": 70, "top_k_experts": 5}),
        ((1, 2, 3, 2, Sampling.GREEDY), {"intermediate_size": 120, "moe_intermediate_size": 24}),
    ],
    ids=("odd", "two ranks", "many", "wide"),
)
def test_both_halves_add_to_the_residual(
    options: tuple[int, int, int, int, Sampling], changes: dict[str, Any]
) -> None:
    one, table = made(options, **changes), weights({**CONFIG, **changes})
    assert violations(one) == []
    assert one.simulation_only() is None
    assert difference(one, table, table) < 1e-5


def test_a_dense_mlp_of_whole_experts_width_is_not_chosen_as_they_are() -> None:
    """Its input is another, and its output is normed alone."""
    one = made(intermediate_size=120)  # three experts'
    assert from_config({**CONFIG, "intermediate_size": 120}, "case").shared_like_routed == 0
    kinds = [stage.kind for stage in one.stages if stage.layer == 1]
    assert kinds[3:] == [
        *(StageKind.ROUTER, StageKind.SHARED_UP, StageKind.ROUTE),
        *(StageKind.SHARED_DOWN, StageKind.ROUTED_UP, StageKind.ROUTED_DOWN),
    ]
    ends = [s for s in one.stages if s.kind in (StageKind.QKV, StageKind.LM_HEAD) and s.reads]
    read = [[one.stages[one.values[r.value].stage].kind for r in stage.reads] for stage in ends]
    assert read == [[StageKind.SHARED_DOWN, StageKind.ROUTED_DOWN]] * 6


@pytest.mark.parametrize("name", VECTORS)
def test_a_wrong_vector_is_noticed(name: str) -> None:
    table = weights(CONFIG)

    class Turned:
        spec, dtype = table.spec, table.dtype

        def __getitem__(self, wanted: str) -> Array:
            own = table[wanted]
            return np.roll(own, 1) * np.float32(1.1) if wanted == f"layers.1.{name}" else own

    assert difference(made(), Turned(), table) > 1e-3


def test_every_run_gives_the_same_bits_and_the_references_tokens() -> None:
    words, table = tokens(CONFIG)[:5], weights(CONFIG)
    with HostEngine(made(), table) as running:
        runs = [running.generate(words, max_tokens=10).tokens for _ in range(3)]
    assert runs[0] == runs[1] == runs[2] == Reference(made(), table).generate(words, 10)


def test_planted_faults_are_refused() -> None:
    """The dense rows are not read, come second, or stay in the block."""
    one = made()
    end = next(s for s in one.stages if s.kind is StageKind.QKV and len(s.reads) == 2)
    down = next(s for s in one.stages if s.kind is StageKind.SHARED_DOWN)
    for stage in (
        replace(end, reads=end.reads[1:]),
        replace(end, reads=end.reads[::-1]),
        replace(down, publishes=None, kept=True),
    ):
        stages = tuple(stage if s.index == stage.index else s for s in one.stages)
        assert violations(replace(one, stages=stages))


def test_a_sliced_residual_takes_both_outputs_at_once() -> None:
    spec = from_config(CONFIG, "case")
    one = plan(spec, *OPTIONS, residual=Residual.SLICED)
    assert violations(one) == []
    reduced = [s for s in one.stages if s.kind is StageKind.REDUCE and len(s.reads) == 2]
    assert len(reduced) == spec.layers
    gathered = plan(
        spec,
        2,
        3,
        2,
        4,
        Sampling.GREEDY,
        collective=CollectiveKind.LIBRARY,
        execution=Execution.GRAPH,
    )
    assert violations(gathered) == []
