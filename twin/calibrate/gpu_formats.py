"""What stored formats and experts cost a GPU's blocks: streams of low-bit weights in the
second-level cache, and chains of layers with low-bit weights or experts.

A stream shows the rate at which warps decode and multiply. Chains show what stages take next to it:
an input quantised, code that a stage runs once, rows taken a few at a time next to
experts, and the way from a choice to the first tile of an expert. Their shapes are of no model that
anybody runs or that a seed draws; their steps are fitted, so they are never held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from twin.calibrate.drawn_kinds import FORMATS, expert_config, stored_in
from twin.calibrate.gpu_layers import Question, chain_plan, chain_spec
from twin.models.formats import DECODED, format_named
from twin.models.load import from_config
from twin.models.quantized import requantized
from twin.models.spec import ModelSpec
from twin.plan.options import Limits, Options
from twin.plan.types import Plan
from twin.schedule.coded_tiles import coded_slot_bytes
from twin.schedule.probe import stream_probe

STREAMED, CODED, ROUTED = "decode-", "coded-", "routed-"  # how the names of probes begin
DECODING, CHOOSING = "decoding", "routing"  # groups
KIB, MB = 2**10, 10**6
SLOT = 16 * KIB
RING = 7  # slots of any format next to an input of tensor cores
IN_CACHE = 24 * MB  # at most half of the L2
FEW = 8  # blocks that L2 serves as fast as they can consume
COLS = (1024, 4096, 12288)  # one to six slices
VOCAB = 4224


class Dense(NamedTuple):
    """Of a chain of dense layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    positions: int  # before the steps that count
    splits: int


# hidden vectors of one slice and two warps, of one and four warps, of two slices; few heads behind
# many positions; feed-forwards of one to five slices
SHAPES = {
    "narrow": Dense(12, 1024, 12, 4, 64, 3072, 48, 4),
    "middle": Dense(6, 1792, 14, 2, 128, 6144, 700, 8),
    "heads": Dense(8, 2048, 16, 8, 64, 4096, 1500, 12),
    "wide": Dense(3, 4096, 16, 4, 128, 9216, 160, 4),
}


class Mixture(NamedTuple):
    """Of a chain of layers with experts."""

    family: str
    stored: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    width: int
    positions: int
    splits: int


# few experts: all probes lie in a GPU's memory together
MIXTURES = {
    "narrow-bf16": Mixture("qwen3_moe", "bf16", 8, 1664, 26, 2, 64, 12, 6, 640, 48, 4),
    "narrow-fp8": Mixture("qwen3_moe", "fp8-128x128", 8, 1664, 26, 2, 64, 12, 6, 640, 48, 4),
    "narrow-int4": Mixture("qwen3_moe", "int4-g128", 8, 1664, 26, 2, 64, 12, 6, 640, 700, 8),
    "many-fp8": Mixture("qwen3_moe", "fp8-128x128", 6, 2048, 16, 4, 128, 16, 8, 1152, 160, 8),
    "many-int4": Mixture("qwen3_moe", "int4-g128", 6, 2048, 16, 4, 128, 16, 8, 1152, 160, 8),
    "wide-bf16": Mixture("mixtral", "bf16", 4, 1920, 15, 5, 128, 4, 2, 4608, 48, 4),
    "wide-fp8": Mixture("mixtral", "fp8-128x128", 4, 1920, 15, 5, 128, 4, 2, 4608, 48, 4),
    "wide-int4": Mixture("mixtral", "int4-g128", 4, 1920, 15, 5, 128, 4, 2, 4608, 48, 4),
    "huge-fp8": Mixture("mixtral", "fp8-128x128", 2, 3328, 26, 2, 128, 3, 2, 12_032, 160, 8),
    "huge-int4": Mixture("mixtral", "int4-g128", 2, 3328, 26, 2, 128, 3, 2, 12_032, 160, 8),
    "few-mxfp4": Mixture("gpt_oss", "mxfp4", 8, 1792, 28, 4, 64, 12, 4, 1280, 48, 4),
    "wide-mxfp4": Mixture("gpt_oss", "mxfp4", 4, 2048, 32, 4, 64, 8, 4, 3584, 160, 8),
}
WINDOWS = (1, RING)  # of slots in flight, for one of them
WATCHED = "many-fp8"


def formats(limits: Limits) -> Iterator[Question]:
    """All of them: streams, dense chains, chains with experts."""
    for name in FORMATS:
        for cols in COLS:
            yield _stream(limits, name, cols)
    for name in FORMATS:
        for shape in SHAPES:
            spec = _dense(f"{CODED}{name}-{shape}", name, SHAPES[shape])
            yield spec.name, DECODING, _chain(limits, spec, SHAPES[shape])
    for shape, mixture in MIXTURES.items():
        spec = _routed(f"{ROUTED}{shape}", mixture)
        yield spec.name, CHOOSING, _chain(limits, spec, mixture)
    watched = MIXTURES[WATCHED]
    for window in WINDOWS:
        spec = _routed(f"{ROUTED}{WATCHED}-window{window}", watched)
        yield spec.name, CHOOSING, _chain(limits, spec, watched, window_slots=window)


def _stream(limits: Limits, name: str, cols: int) -> Question:
    form = DECODED[name]
    options = Options(
        blocks=FEW,
        slot_bytes=coded_slot_bytes((form,), SLOT),
        ring_slots=RING,
        window_slots=RING,
    )
    rows = IN_CACHE // form.bytes(1, cols)
    return (
        f"{STREAMED}{name}-{cols}",
        DECODING,
        stream_probe(options, limits, rows=rows, cols=cols, form=form),
    )


def _dense(name: str, stored: str, shape: Dense) -> ModelSpec:
    spec = chain_spec(
        name,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
    )
    return replace(requantized(spec, format_named(stored)), name=name)


def _routed(name: str, mixture: Mixture) -> ModelSpec:
    config = expert_config(
        mixture.family,
        layers=mixture.layers,
        hidden=mixture.hidden,
        heads=mixture.heads,
        kv_heads=mixture.kv_heads,
        head_dim=mixture.head_dim,
        vocab=VOCAB,
        experts=mixture.experts,
        chosen=mixture.chosen,
        width=mixture.width,
    )
    spec = stored_in(from_config(config, name), mixture.stored)
    assert spec is not None
    return replace(spec, name=name)


def _chain(limits: Limits, spec: ModelSpec, shape: Dense | Mixture, **changes: Any) -> Plan:
    slot = coded_slot_bytes(spec.coded, SLOT) if spec.coded else SLOT
    return chain_plan(
        limits,
        spec,
        positions=shape.positions,
        slot_bytes=slot,
        ring_slots=RING,
        attention_splits=shape.splits,
        **changes,
    )
