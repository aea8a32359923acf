"""Chains of layers in shapes that fill space: columns, rows, heads, groups, layers, types,
families, positions, splits and hand-offs of a Latin hypercube of least centred discrepancy, made
by SciPy with the seed 20261124 (`design` of 85766dd9 wrote gpu_designed.csv).

Benchmarks and held-out runs repeat few shapes; a fit to those learns them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from msgspec import convert

from twin.calibrate.gpu_layers import CHAIN, WINDOW, Question, chain_plan, chain_spec
from twin.models.spec import DType
from twin.plan.options import HandOffKind, Limits
from twin.schedule.choose import schedule_of
from twin.schedule.ring import is_short, tight

PREFIX = "shape-"  # records of chains called design- have other windows, and are not fitted again
SHORT_WINDOW = 2  # slots in flight where layers are short, as the engine's default


class Shape(NamedTuple):
    """Of one chain."""

    layers: int
    hidden: int
    group: int  # query heads of a KV head
    kv_heads: int
    head_dim: int
    ffn: int
    dtype: DType
    family: str  # its norms and biases
    positions: int
    splits: int
    handoff: HandOffKind


@lru_cache(maxsize=1)
def shapes() -> tuple[Shape, ...]:
    """The design."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as table:
        return convert(list(csv.reader(table))[1:], tuple[Shape, ...], strict=False)


def designed(limits: Limits) -> Iterator[Question]:
    """A chain of each shape, as the engine's layers; fitted with the other chains. Its ring is the
    engine's default: size and number of slots, and how many are under way; but not of rows that
    warps take in folds, as none did when these chains were probed. With ten slots, as the other
    chains have, the stream pauses earlier, and a fit to that was 3 % too fast for drawn models.
    """
    for number, shape in enumerate(shapes(), start=1):
        name = f"{PREFIX}{number:02d}"
        spec = chain_spec(
            name,
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.group * shape.kv_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            ffn=shape.ffn,
        )
        spec = replace(
            spec,
            dtype=shape.dtype,
            family=shape.family,
            qkv_bias=shape.family == "qwen2",
            qk_norm=shape.family == "qwen3",
        )
        plan = chain_plan(
            limits,
            spec,
            positions=shape.positions,
            attention_splits=max(1, min(shape.splits, limits.blocks // shape.kv_heads)),
            handoff=shape.handoff,
            ring_slots=1,
        )
        room = schedule_of(plan).most_slots
        window = SHORT_WINDOW if is_short(plan, room) else WINDOW
        plan = tight("hopper", plan)
        slots = schedule_of(plan).most_slots
        options = replace(plan.options, ring_slots=slots, window_slots=window)
        yield name, CHAIN, replace(plan, options=options)
