"""Small plans of every family that the engine runs, and what they compute: where attacks on plans
begin.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.engine.weights import random_weights
from twin.errors import PlanError
from twin.models.spec import DType, LaneHead, Lanes, ModelSpec, Rope, RopeScaling, RopeStyle
from twin.plan.options import (
    CollectiveKind,
    Execution,
    HandOffKind,
    LateParts,
    Limits,
    Options,
    Sampling,
)
from twin.plan.shards import Weights
from twin.plan.types import Plan
from twin.reference.step import Reference
from twin.schedule.plans import build
from twin.schedule.probe import (
    attention_probe,
    exchange_probe,
    hop_probe,
    sample_probe,
    stream_probe,
    turns_probe,
)

SEED = 3
LIMITS = Limits(blocks=64, dies=1, on_chip_bytes=2**26, memory_bytes=2**26, oversubscribe=True)
TOKENS = (5, 74, 0, 33, 100, 2, 61)
LLAMA = ModelSpec(
    name="llama",
    family="llama",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    vocab=101,
    context=64,
    norm_eps=1e-5,
    rope=Rope(10000.0, scaling=RopeScaling("llama3", 8.0)),
    windows=(0, 5),
)
QWEN2 = replace(LLAMA, name="qwen2", family="qwen2", qkv_bias=True, rope=Rope(10000.0))
QWEN3 = replace(LLAMA, name="qwen3", family="qwen3", qk_norm=True, tied=True, head_dim=24)
WIDE = replace(LLAMA, name="wide", ffn=512, kv_heads=4)  # many column slices to a row
ROUND = replace(LLAMA, name="round", kv_heads=1, head_dim=16)  # four query heads a key head
LANED = replace(
    LLAMA,
    name="lanes",
    family="laneformer",
    layers=6,
    windows=(4,) * 4 + (0, 0),
    rope=Rope(10000.0, RopeStyle.INTERLEAVED),
    kv_heads=4,
    ffn=64,
    lanes=Lanes(4, 2),
)
DENSE = (LLAMA, QWEN2, QWEN3, WIDE, ROUND)
TYPES = (DType.FP32, DType.FP32, DType.FP32, DType.FP16, DType.BF16)


def some_spec(chance: random.Random) -> ModelSpec:
    """A model of any dense family, or of lanes."""
    if chance.random() < 0.7:
        return chance.choice(DENSE)
    count = chance.choice((2, 4))
    return replace(
        LANED,
        lanes=Lanes(
            count,
            chance.choice((0, 1, 2, 3, 5)),
            chance.choice(list(LaneHead)),
            chance.random() < 0.3,
        ),
    )


def some_options(chance: random.Random, spec: ModelSpec) -> Options:
    """Options that a user might mix; not every mix can be planned."""
    gpus = chance.choice((1, 1, 1, 2, 4))
    ranks = spec.lanes.count if spec.lanes else gpus
    collective = (
        chance.choice((CollectiveKind.PUSH, CollectiveKind.PUSH, CollectiveKind.LIBRARY))
        if ranks > 1
        else CollectiveKind.NONE
    )
    dtype = chance.choice(TYPES)
    return Options(
        gpus=gpus,
        blocks=chance.choice((1, 2, 3, 4, 6)) * max(1, ranks // gpus),
        slot_bytes=chance.choice((256, 512, 1024, 4096)),
        ring_slots=chance.choice((1, 2, 8)),
        window_slots=1,
        tile_rows=chance.choice((2, 4, 8, 8, 16)),
        handoff=chance.choice((HandOffKind.SENTINEL, *HandOffKind)),
        collective=collective,
        execution=chance.choice((Execution.RESIDENT, Execution.RESIDENT, *Execution)),
        sampling=chance.choice(list(Sampling)),
        weight_dtype=dtype,
        kv_dtype=chance.choice((dtype, DType.FP32)),
        context=chance.choice((1, 8)),
        max_context=chance.choice((16, 24, 64)),
        kv_page=chance.choice((1, 4, 16)),
        attention_splits=chance.choice((None, None, 1, 2, 3)),
        copies=chance.choice((1, 2, 3, 3, 3)),
        prompt_chunk=chance.choice((1, 1, 3, 16)),
        late_parts=chance.choice((None, *LateParts)) if spec.lanes else None,
        lane_stagger_ns=chance.choice((0, 0, 20_000)) if spec.lanes else 0,
    )


def some_plan(chance: random.Random) -> Plan:
    """The builder's plan of a mix of options that it can plan."""
    while True:
        spec = some_spec(chance)
        try:
            plan = build(spec, some_options(chance, spec), LIMITS)
        except PlanError:
            continue
        if plan.ranks * plan.blocks <= 16:
            return plan


def some_probe(chance: random.Random) -> Plan:
    """A probe's plan: streams, exchanges, turns of both, hops, scans, samples."""
    while True:
        options = Options(
            blocks=chance.choice((1, 2, 3, 4)),
            slot_bytes=chance.choice((256, 1024)),
            ring_slots=2,
            window_slots=1,
            handoff=chance.choice(list(HandOffKind)),
            sampling=chance.choice(list(Sampling)),
            copies=chance.choice((1, 2, 3)),
            execution=chance.choice((Execution.RESIDENT, Execution.RESIDENT, Execution.GRAPH)),
            weight_dtype=chance.choice(TYPES),
            kv_dtype=DType.FP32,
            context=chance.choice((1, 8)),
            max_context=16,
            kv_page=4,
        )
        stages = options.copies * chance.choice((1, 2))
        try:
            match chance.choice(("stream", "exchange", "turns", "hop", "attention", "sample")):
                case "stream":
                    return stream_probe(
                        options,
                        LIMITS,
                        rows=chance.choice((16, 40)),
                        cols=chance.choice((32, 512)),
                        stages=2,
                    )
                case "exchange":
                    return exchange_probe(
                        options, LIMITS, elements=chance.choice((4, 9, 64)), stages=stages
                    )
                case "turns":
                    return turns_probe(options, LIMITS, elements=8, rows=16, cols=64, stages=stages)
                case "hop":
                    return hop_probe(
                        options,
                        LIMITS,
                        pair=(0, options.blocks - 1),
                        hops=2,
                        rows=chance.choice((0, 16)),
                        cols=64,
                    )
                case "attention":
                    return attention_probe(
                        options,
                        LIMITS,
                        heads=4,
                        kv_heads=2,
                        head_dim=8,
                        stages=2,
                        window=chance.choice((0, 4)),
                    )
                case _:
                    return sample_probe(
                        replace(options, blocks=1), LIMITS, vocab=chance.choice((2, 100, 101))
                    )
        except PlanError:
            continue


@lru_cache(maxsize=64)
def weights_of(spec: ModelSpec, dtype: DType) -> Weights:
    return random_weights(spec, SEED, dtype)


@lru_cache(maxsize=256)
def _computed(
    spec: ModelSpec, dtype: DType, kv: DType, delay: int | None
) -> tuple[NDArray[np.float32], list[int]]:
    ranks = spec.lanes.count if spec.lanes else 1
    collective = CollectiveKind.PUSH if ranks > 1 else CollectiveKind.NONE
    options = Options(
        blocks=ranks,
        weight_dtype=dtype,
        kv_dtype=kv,
        collective=collective,
        context=8,
        max_context=64,
        delay=delay,
        handoff=HandOffKind.COUNTER,
    )
    plan, weights = build(spec, options, LIMITS), weights_of(spec, dtype)
    reference: Any = Reference(plan, weights)
    logits = np.stack([reference.step(token).copy() for token in TOKENS])
    return logits, Reference(plan, weights).generate(list(TOKENS), 4)


def computed(plan: Plan) -> tuple[NDArray[np.float32], list[int]]:
    """(logits after each of TOKENS, four greedy tokens after all of them) by the FP32 reference,
    for a plan's stored types and delay.
    """
    assert plan.spec is not None
    return _computed(
        plan.spec,
        plan.options.weight_dtype,
        plan.options.kv_dtype,
        plan.options.delay if plan.spec.lanes else None,
    )


def tolerance(plan: Plan) -> float:
    """Of the largest logit: cached values of 16 bits may round to their other neighbours."""
    bound = {DType.FP32: 2e-5, DType.FP16: 2e-3, DType.BF16: 1.6e-2}
    return max(bound[plan.options.weight_dtype], bound[plan.options.kv_dtype])
