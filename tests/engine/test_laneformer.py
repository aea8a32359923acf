"""Laneformer has no class in transformers: the reference against a direct implementation of the
published definition.

`direct` computes whole sequences with a lane axis, from stored tensors, and shares nothing with the
plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.hf_cases import Table, plan
from twin.models.load import canonical, tensors
from twin.models.spec import LaneHead, Lanes, ModelSpec, Rope, RopeStyle
from twin.plan.options import CollectiveKind, Execution, HandOffKind, Sampling
from twin.plan.shards import Array
from twin.reference.step import Reference

LAYERS, LANES = 9, 8
SPEC = ModelSpec(
    name="lanes",
    family="laneformer",
    layers=LAYERS,
    hidden=64,
    heads=16,
    kv_heads=8,
    head_dim=4,
    ffn=64,
    vocab=80,
    context=64,
    norm_eps=1e-5,
    rope=Rope(10000.0, RopeStyle.INTERLEAVED),
    windows=(4, 4, 4, 0, 0, 4, 0, 0, 3),
    lanes=Lanes(LANES, 2),
)
PROMPT = [3, 17, 17, 0, 79, 42, 8]
TOLERANCE = 2e-6  # FP64 but for the angles, whose cosines the engine holds in FP32


def stored(spec: ModelSpec) -> dict[str, Array]:
    """FP64 tensors in the checkpoint's own shapes, by canonical name."""
    random = np.random.RandomState(5)
    out: dict[str, Array] = {}
    for name, tensor in tensors(spec).items():
        values = random.standard_normal(tensor.shape)
        out[name] = 1 + 0.1 * values if name.endswith("norm") else values * tensor.shape[-1] ** -0.5
    return out


def table(spec: ModelSpec, tensors: dict[str, Array]) -> Table:
    return Table(spec, {name: canonical(spec, name, array) for name, array in tensors.items()})


# ---- the definition ------------------------------------------------------------------------------


def norm(x: Array, scale: Array, eps: float) -> Array:
    normed: Array = x * scale / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return normed


def linear(x: Array, w: Array) -> Array:
    """[sequence, lane, in] by [lane, out, in]."""
    out: Array = np.einsum("sli,loi->slo", x, w)
    return out


def turn(x: Array, theta: float) -> Array:
    """Adjacent elements are one complex number, multiplied by exp(i * position * frequency)."""
    z = x[..., 0::2] + 1j * x[..., 1::2]
    frequency = theta ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    z = z * np.exp(1j * np.arange(len(x))[:, None, None] * frequency)
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def attention(spec: ModelSpec, w: dict[str, Array], layer: int, x: Array) -> Array:
    """Partial outputs [sequence, lane, hidden] from x [sequence, lane, hidden]."""
    length = len(x)
    q, k, v = (
        linear(x, w[f"layers.{layer}.{n}"]).reshape(length, -1, spec.head_dim) for n in "qkv"
    )
    q, k = turn(q, spec.rope.theta), turn(k, spec.rope.theta)
    k, v = (np.repeat(t, spec.heads // spec.kv_heads, axis=1) for t in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * spec.head_dim**-0.5
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    seen = (distance >= 0) & (distance < (spec.windows[layer] or length))
    p = np.exp(np.where(seen, scores, -np.inf))
    out = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)
    return linear(out.reshape(length, LANES, -1), w[f"layers.{layer}.o"])


def feed_forward(w: dict[str, Array], layer: int, x: Array) -> Array:
    gate, up = (linear(x, w[f"layers.{layer}.{n}"]) for n in ("gate", "up"))
    return linear(gate / (1 + np.exp(-gate)) * up, w[f"layers.{layer}.down"])


def reduce_lanes(mode: str, x: Array, past: Array | None) -> Any:
    match mode:
        case "NO_REDUCE":
            return x * np.sqrt(LANES)
        case "PRESENT":
            return x.sum(1, keepdims=True)
        case _:
            assert past is not None
            return x + (past.sum(1, keepdims=True) - past)


def mode(lanes: Lanes, delay: int, layer: int) -> str:
    if layer >= delay > 0:
        return "PAST"
    return "PRESENT" if lanes.early_exchange or delay == 0 else "NO_REDUCE"


def direct(spec: ModelSpec, w: dict[str, Array], prompt: list[int], delay: int) -> Any:
    """Logits [sequence, vocab]. Delay 0, which the published code does not have, is an all-reduce
    in every layer.
    """
    assert spec.lanes is not None
    x = np.repeat(w["embed"][prompt][:, None], LANES, axis=1)
    past: dict[str, list[Array]] = {"attn": [], "ffn": []}
    for layer in range(spec.layers):
        for kind in ("attn", "ffn"):
            h = norm(x, w[f"layers.{layer}.{kind}_norm"], spec.norm_eps)
            out = attention(spec, w, layer, h) if kind == "attn" else feed_forward(w, layer, h)
            late = past[kind][layer - delay] if layer >= delay > 0 else None
            x = x + reduce_lanes(mode(spec.lanes, delay, layer), out, late)
            past[kind].append(out)
    match spec.lanes.head:
        case LaneHead.SUM:
            return norm(x.sum(1), w["final_norm"], spec.norm_eps) @ w["lm_head"].T
        case LaneHead.MEAN:
            return norm(x, w["final_norm"], spec.norm_eps).mean(1) @ w["lm_head"].T
        case LaneHead.VOCABULARY:
            return linear(norm(x, w["final_norm"], spec.norm_eps), w["lm_head"]).reshape(
                len(prompt), -1
            )


# ---- comparisons ---------------------------------------------------------------------------------


def error(spec: ModelSpec, gpus: int, blocks: int, **more: Any) -> float:
    w = stored(spec)
    reference = Reference(
        plan(spec, gpus, blocks, 2, 2, Sampling.GREEDY, **more),
        table(spec, w),
        np.float64,
        kv_dtype=None,
    )
    found = np.array([reference.step(token) for token in PROMPT])
    assert spec.lanes is not None
    return float(np.abs(found - direct(spec, w, PROMPT, more.get("delay", spec.lanes.delay))).max())


@pytest.mark.few(4)
@pytest.mark.parametrize("head", list(LaneHead))
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 2, 4])
def test_reference_follows_the_definition(delay: int, early: bool, head: LaneHead) -> None:
    spec = replace(SPEC, lanes=Lanes(LANES, delay, head, early))
    assert error(spec, 2, 8) < TOLERANCE


@pytest.mark.few(3)
@pytest.mark.parametrize("collective", [CollectiveKind.PUSH, CollectiveKind.LIBRARY])
@pytest.mark.parametrize(("gpus", "blocks"), [(1, 8), (1, 16), (2, 4), (4, 6), (8, 1), (8, 3)])
def test_any_number_of_gpus_and_blocks(gpus: int, blocks: int, collective: CollectiveKind) -> None:
    execution = Execution.GRAPH if collective is CollectiveKind.LIBRARY else Execution.RESIDENT
    assert error(SPEC, gpus, blocks, collective=collective, execution=execution) < TOLERANCE


@pytest.mark.parametrize("handoff", list(HandOffKind))
def test_any_hand_off(handoff: HandOffKind) -> None:
    assert error(SPEC, 4, 4, handoff=handoff) < TOLERANCE


def test_the_delay_can_be_chosen() -> None:
    assert error(SPEC, 8, 1, delay=0) < TOLERANCE
    assert error(SPEC, 8, 1, delay=3) < TOLERANCE
