"""What cached keys and values of eight bits are multiplied by, as a checkpoint says it or 1.

A number that is cached is divided by its scale first: it is multiplied by the inverse, rounded to
FP32, which every executor has from here.
"""

from __future__ import annotations

import numpy as np

from twin.models.spec import CacheScales, DType
from twin.plan.catalogue import StageKind
from twin.plan.shards import Vector
from twin.plan.types import Plan, Stage

NUMBERS = 4  # of a KV head: 1 / scale and scale of its keys, the same of its values
LARGEST = 448.0  # of E4M3: what is larger, and infinities, are cached as this


def has_cache_scales(plan: Plan, stage: Stage) -> bool:
    """Does the kernel multiply what a stage caches?"""
    own = stage.kind is StageKind.ATTENTION and plan.spec is not None and plan.attention is not None
    return own and plan.options.kv_dtype is DType.FP8


def stage_cache_scales(plan: Plan, stage: Stage, rank: int) -> Vector:
    """[KV heads of the rank][NUMBERS], FP32, of a stage of attention."""
    own = plan.attention_of(stage)
    assert plan.spec is not None
    layers = plan.spec.cache_scales
    scales = layers[stage.layer] if layers else CacheScales((1.0,), (1.0,))
    first = rank // own.kv_replicas * own.kv_heads
    out = np.ones((own.kv_heads, NUMBERS), np.float32)
    for at, numbers in enumerate(scales):
        found = np.asarray(numbers, np.float32)
        own_heads = found if len(found) == 1 else found[first : first + own.kv_heads]
        out[:, 2 * at], out[:, 2 * at + 1] = np.float32(1) / own_heads, own_heads
    return out
