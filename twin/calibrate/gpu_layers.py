"""Chains of layers of no model: what only a stage that waits, gathers, norms and multiplies can
tell, one question each.

They run the stages of the engine (twin/plan/build.py), because a probe's own stages stop short of
it: none of those both gathers and multiplies. Their shapes are those of no model that
`twin validate` runs, and their steps are fitted, so they are never held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from twin.models.spec import DType, Lanes, ModelSpec, Rope
from twin.plan.options import CollectiveKind, Execution, HandOffKind, Limits, Options
from twin.plan.types import Plan
from twin.schedule.plans import build

PROMPT = 48  # positions before the steps that count
TOKENS = 120  # steps that count: as many positions more
ROOM = 16  # positions for steps that warm up
KIB = 2**10
SLOT = 16 * KIB
RING = 10  # slots: what every chain's vectors leave of a block's memory
WINDOW = 3  # slots in flight, as the engine's default
SPLITS = 8
VOCAB = 4224  # 32 rows of a block of 132

Question = tuple[str, str, Plan]  # name, group, plan
CHAIN = "chain"  # group


def chains(limits: Limits) -> Iterator[Question]:
    """All chains. `chain-small` is bound by hand-offs, `chain-large` by its weights; each other one
    changes one thing of a third shape.
    """

    def ask(name: str, spec: ModelSpec, group: str = CHAIN, **changes: Any) -> Question:
        return f"chain-{name}", group, chain_plan(limits, spec, **changes)

    small = chain_spec("small", layers=16, hidden=1024, heads=16, kv_heads=8, head_dim=64, ffn=1024)
    middle = chain_spec(
        "middle", layers=6, hidden=1536, heads=24, kv_heads=8, head_dim=64, ffn=6144
    )
    large = chain_spec("large", layers=3, hidden=4096, heads=32, kv_heads=8, head_dim=64, ffn=8192)
    yield ask("small", small)
    yield ask("middle", middle)
    yield ask("large", large)
    yield ask(
        "feed",
        chain_spec("feed", layers=4, hidden=3072, heads=8, kv_heads=8, head_dim=64, ffn=8192),
    )
    yield ask(
        "attend",
        chain_spec("attend", layers=16, hidden=1024, heads=64, kv_heads=16, head_dim=64, ffn=1024),
        attention_splits=4,
    )
    yield ask(
        "head128",
        replace(
            middle, name="head128", heads=12, kv_heads=4, head_dim=128, qk_norm=True, family="qwen3"
        ),
    )
    yield ask("group4", replace(middle, name="group4", heads=32))
    yield ask("down4", replace(middle, name="down4", ffn=8192))
    group7 = replace(middle, name="group7", heads=14, kv_heads=2, family="qwen2", qkv_bias=True)
    yield ask("group7", group7)
    # five slices for two teams
    yield ask("ragged", replace(group7, name="ragged", hidden=896, ffn=5120))
    yield ask("vocab", replace(small, name="vocab", layers=2, vocab=64 * 1024))
    for window in (1, 2, 4, RING):
        yield ask(f"middle-window{window}", middle, window_slots=window)
    yield ask("large-window10", large, window_slots=RING)
    yield ask("middle-ring5", middle, ring_slots=5)
    yield ask(
        "middle-slot8K", middle, slot_bytes=SLOT // 2, ring_slots=2 * RING, window_slots=2 * WINDOW
    )
    yield ask("middle-b66", middle, blocks=limits.blocks // 2)
    for splits in (1, 2, 4):
        yield ask(f"middle-s{splits}", middle, attention_splits=splits)
    yield ask("middle-300", middle, positions=300)
    yield ask("middle-1000", middle, positions=1000)
    yield ask("middle-1000-s16", middle, positions=1000, attention_splits=16)
    for kind in (HandOffKind.COUNTER, HandOffKind.GRID):
        yield ask(f"middle-{kind.value}", middle, handoff=kind)
        yield ask(f"small-{kind.value}", small, handoff=kind)
        yield ask(f"large-{kind.value}", large, handoff=kind)
    for spec in (small, middle):
        yield ask(f"{spec.name}-graph", spec, "launch", execution=Execution.GRAPH)
    lanes = chain_spec("lanes", layers=4, hidden=3072, heads=32, kv_heads=16, head_dim=96, ffn=8192)
    lanes = replace(
        lanes, family="laneformer", lanes=Lanes(8, 2), windows=(0,) * lanes.layers, dtype=DType.FP16
    )
    few = limits.blocks // 8 * 8
    yield ask("lanes", lanes, blocks=few, collective=CollectiveKind.PUSH)
    yield ask(
        "lanes-delay0",
        replace(lanes, name="lanes-delay0", lanes=Lanes(8, 0)),
        blocks=few,
        collective=CollectiveKind.PUSH,
    )


def chain_spec(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int = VOCAB,
) -> ModelSpec:
    return ModelSpec(
        name=name,
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        context=4096,
        norm_eps=1e-5,
        rope=Rope(10000.0),
        windows=(0,) * layers,
    )


def chain_plan(limits: Limits, spec: ModelSpec, *, positions: int = PROMPT, **changes: Any) -> Plan:
    options = Options(
        blocks=limits.blocks,
        slot_bytes=SLOT,
        ring_slots=RING,
        window_slots=WINDOW,
        attention_splits=SPLITS,
        weight_dtype=spec.dtype,
        kv_dtype=spec.dtype,
        context=positions + TOKENS // 2,
        max_context=positions + TOKENS + ROOM,
    )
    options = replace(options, **changes)
    options = replace(options, window_slots=min(options.window_slots, options.ring_slots))
    return build(spec, options, limits)
