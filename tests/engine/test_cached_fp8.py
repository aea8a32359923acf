"""Caches of eight bits: the reference is what NumPy computes by the definition of E4M3, the CPU
engine agrees with it, and a checkpoint's scales are read or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.engine import test_cuda_engine as on_gpu
from tests.engine import test_prompt_chunks
from tests.engine.families import TURNED
from tests.engine.small_engine import LLAMA, QWEN3, SEED, TOKENS, engine, error, planned
from tests.engine.test_coded_checkpoints import Stored, opened
from tests.engine.test_gpt_oss import model
from tests.models.test_public_configs import RECORDS, folder
from twin.engine.weights import random_weights
from twin.errors import CheckpointError, PlanError
from twin.hardware.load import load_node
from twin.models.load import load_model
from twin.models.mixers import GroupedAttention
from twin.models.spec import CacheScales, DType, ModelSpec
from twin.plan.shards import Array, rope_tables
from twin.plan.types import Plan
from twin.proof.prove import prove, violations
from twin.reference.step import Reference
from twin.schedule.options import default_options, plan_for

LARGEST = 448.0
SCALES = (
    CacheScales((0.013,), (0.021,)),
    CacheScales((0.02, 0.01, 0.03, 0.005), (0.5, 0.25, 0.013, 0.7)),
    CacheScales((1.3,), (2.0,)),
)
SCALED = replace(LLAMA, cache_scales=SCALES)
# a number near the middle of two cached ones may go to either: no rounding of FP32 decides it
NEIGHBOUR = 5e-3


def e4m3(x: Array) -> Array:
    """The nearest number with four significant bits, from 2^-6 on, else a multiple of 2^-9; ties to
    the even one, at most 448.
    """
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    rounded: Array = np.clip(np.round(x / step) * step, -LARGEST, LARGEST)
    return rounded


def attended(spec: ModelSpec, tokens: list[int]) -> Array:
    """Logits [tokens][vocab] of a Llama with caches of eight bits, by the definition of its layers,
    in double precision. All positions at once.
    """
    weights = random_weights(spec, SEED, DType.FP32)
    count, heads, own, dim = len(tokens), spec.heads, spec.kv_heads, spec.head_dim
    cos, sin = (t[:count] for t in rope_tables(spec, spec.context, present=count)[0])

    def normed(x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.norm_eps) * weights[name]

    def turned(x: Array) -> Array:
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        by, across = cos[:, None], sin[:, None]
        return np.concatenate([a * by - b * across, b * by + a * across], -1)

    x = weights["embed"][tokens].astype(np.float64)
    places = np.arange(count)
    for layer in range(spec.layers):
        at = f"layers.{layer}"
        q, k, v = (
            (normed(x, f"{at}.attn_norm") @ weights[f"{at}.{name}"].T).reshape(count, -1, dim)
            for name in "qkv"
        )
        scale_k, scale_v = (
            np.broadcast_to(scales, own)[:, None] for scales in spec.cache_scales[layer]
        )
        k, v = e4m3(turned(k) / scale_k) * scale_k, e4m3(v / scale_v) * scale_v
        q, k, v = turned(q), np.repeat(k, heads // own, 1), np.repeat(v, heads // own, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        behind = places[:, None] - places[None]
        hidden = (behind < 0) | ((behind >= spec.windows[layer]) & (spec.windows[layer] > 0))
        shares = np.exp(np.where(hidden, -np.inf, scores))
        shares /= shares.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", shares, v).reshape(count, -1) @ weights[f"{at}.o"].T
        y = normed(x, f"{at}.ffn_norm")
        gate, up = (y @ weights[f"{at}.{name}"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{at}.down"].T
    return normed(x, "final_norm") @ weights["lm_head"].T


def test_the_reference_is_what_numpy_computes_by_the_definition_of_e4m3() -> None:
    plan = planned(SCALED, kv_dtype=DType.FP8, blocks=3, attention_splits=2)
    reference = Reference(plan, random_weights(SCALED, SEED, DType.FP32), np.float64)
    made = np.stack([reference.step(token).copy() for token in TOKENS])
    wanted = attended(SCALED, TOKENS)
    assert np.abs(made - wanted).max() < 1e-5 * np.abs(wanted).max()
    exact = Reference(plan, random_weights(SCALED, SEED, DType.FP32), kv_dtype=None)
    unrounded = np.stack([exact.step(token).copy() for token in TOKENS])
    assert np.abs(unrounded - wanted).max() > 1e-3 * np.abs(wanted).max()


def test_what_a_scale_leaves_too_large_is_cached_as_the_largest_number() -> None:
    spec = replace(LLAMA, cache_scales=3 * (CacheScales((1e-4,), (1e-4,)),))
    plan = planned(spec, kv_dtype=DType.FP8)
    reference = Reference(plan, random_weights(spec, SEED, DType.FP32))
    logits = np.stack([reference.step(token).copy() for token in TOKENS])
    held = np.abs(reference.keys[0].astype(np.float32))
    assert held.max() == LARGEST
    assert np.isfinite(logits).all()
    with engine(plan) as running:
        assert np.abs(running.logits(TOKENS) - logits).max() < NEIGHBOUR * np.abs(logits).max()


OSS = replace(model(), cache_scales=SCALES)


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        (LLAMA, {}),
        (SCALED, {"blocks": 5, "attention_splits": 2}),
        (SCALED, {"gpus": 2, "blocks": 3}),  # KV heads of a rank have scales of their own
        (replace(SCALED, ffn=128), {"gpus": 8, "blocks": 1}),  # two ranks share a KV head
        pytest.param(OSS, {"blocks": 3, "attention_splits": 2}, marks=pytest.mark.slow),
        pytest.param(QWEN3, {}, marks=pytest.mark.slow),
        pytest.param(replace(TURNED, cache_scales=SCALES), {}, marks=pytest.mark.slow),
    ],
    ids=["llama", "scaled", "ranks", "shared heads", "oss", "qwen3", "turned"],
)
def test_the_engine_gives_the_references_numbers(spec: ModelSpec, chosen: dict[str, Any]) -> None:
    plan = planned(spec, kv_dtype=DType.FP8, **chosen)
    prove(plan)
    assert plan.simulation_only() is None
    assert error(plan) < NEIGHBOUR


def test_passes_read_and_write_the_same_caches() -> None:
    plan = planned(SCALED, kv_dtype=DType.FP8, prompt_chunk=16)
    assert test_prompt_chunks.error(plan, (20, 40)) < NEIGHBOUR


def test_a_conversation_keeps_its_caches() -> None:
    plan = planned(SCALED, kv_dtype=DType.FP8, prompt_chunk=16)
    with engine(plan) as running:
        first = running.generate(TOKENS[:9], max_tokens=4)
        longer = [*TOKENS[:9], *first.tokens, 7, 8]
        kept = running.generate(longer, max_tokens=6)
    with engine(plan) as fresh:
        assert fresh.generate(longer, max_tokens=6).tokens == kept.tokens


# ---- plans and predictions -----------------------------------------------------------------------


def test_caches_take_half_the_bytes_and_as_many_words_are_exchanged() -> None:
    plans = [planned(kv_dtype=dtype, context=40) for dtype in (DType.BF16, DType.FP8)]
    wide, narrow = (plan.kv_bytes() for plan in plans)
    assert wide == 2 * narrow
    assert plans[0].memory_bytes() > plans[1].memory_bytes()
    assert [b.elements for b in plans[0].buffers] == [b.elements for b in plans[1].buffers]


def test_weights_are_not_of_a_type_of_caches() -> None:
    with pytest.raises(PlanError, match=r"weight_dtype=fp8: .*NAME@FORMAT"):
        planned(weight_dtype=DType.FP8)
    plan = planned()
    wrong = replace(plan, options=replace(plan.options, weight_dtype=DType.FP8))
    assert any("weight_dtype=fp8" in str(found) for found in violations(wrong))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt-oss-20b", "qwen3-8b"])
def test_tensor_cores_scan_them_on_nvidia(name: str) -> None:
    """Also heads of 64, whose rows are half as long, and in as many splits."""
    spec, node = load_model(name), load_node("1xh200")
    plans: list[Plan] = [
        plan_for(spec, node, max_context=4096, context=4000, kv_dtype=dtype)
        for dtype in (DType.BF16, DType.FP8)
    ]
    for plan in plans:
        prove(plan)
    own = [plan.kernel_attention() for plan in plans]
    assert own[0].splits == own[1].splits


# ---- checkpoints ---------------------------------------------------------------------------------

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def scaled(stored: Stored, name: str, **changed: float) -> None:
    """Adds a number for the keys and the values of each layer."""
    for layer in range(2):
        for at, which in enumerate("kv"):
            value = changed.get(f"{which}{layer}", 0.25 * (1 + layer) + at)
            key = f"model.layers.{layer}.self_attn.{name.format(which)}"
            stored[key] = ("F32", np.array(value, np.float32))


@pytest.mark.parametrize("name", ["{0}_proj.{0}_scale", "{0}_scale"])
def test_a_checkpoints_scales_are_read_by_both_names(name: str, tmp_path: Path) -> None:
    found = opened(
        tmp_path, "fp8", lambda stored: scaled(stored, name), kv_cache_scheme=SCHEME
    ).spec
    assert found.cached is DType.FP8
    assert found.cache_scales == (
        CacheScales((0.25,), (1.25,)),
        CacheScales((0.5,), (1.5,)),
    )
    assert default_options(found, load_node("1xhost")).kv_dtype is DType.FP8
    assert default_options(found, load_node("1xhost"), kv_dtype=DType.BF16).kv_dtype is DType.BF16


def test_scales_that_no_configuration_speaks_of_wait_for_the_users_choice(tmp_path: Path) -> None:
    found = opened(tmp_path, "fp8", lambda stored: scaled(stored, "{0}_scale")).spec
    assert found.cached is None
    assert found.cache_scales
    assert default_options(found, load_node("1xhost")).kv_dtype is found.dtype


def lacking(stored: Stored) -> None:
    scaled(stored, "{0}_scale")
    del stored["model.layers.1.self_attn.v_scale"]


def by_token(stored: Stored) -> None:
    scaled(stored, "{0}_scale")
    stored["model.layers.1.self_attn.k_scale"] = ("F32", np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lacking, r"model\.layers\.1\.self_attn\.v_scale.* is missing"),
        (by_token, r"k_scale.* expected one number, or one for each of \d+ KV heads"),
        (lambda stored: scaled(stored, "{0}_scale", k0=0.0), r"k_scale.* is 0\.0; allowed"),
        (lambda stored: scaled(stored, "{0}_scale", v1=float("nan")), r"v_scale.* is nan; allowed"),
        (lambda stored: scaled(stored, "{0}_scale", v1=1e-45), r"v_scale.* allowed: finite"),
    ],
)
def test_scales_that_scale_nothing_are_refused(
    change: Callable[[Stored], None], wanted: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=wanted):
        opened(tmp_path, "fp8", change, kv_cache_scheme=SCHEME)


def test_modelopts_own_file_says_what_caches_are_in(tmp_path: Path) -> None:
    record = deepcopy(next(one for one in RECORDS if "Gemma-4-26B-A4B-NVFP4" in one["name"]))
    scheme = record["config"]["quantization_config"].pop("kv_cache_scheme")
    assert scheme["num_bits"] == 8
    assert load_model(folder(record, tmp_path)).cached is DType.FP8


def test_one_scale_for_each_head_is_read(tmp_path: Path) -> None:
    def each(stored: Stored) -> None:
        scaled(stored, "{0}_scale")
        heads = np.arange(1, 1 + found.kv_heads, dtype=np.float32).reshape(-1, 1, 1)
        stored["model.layers.0.self_attn.k_scale"] = ("F32", heads)

    (tmp_path / "plain").mkdir()
    found = opened(tmp_path / "plain", "fp8").spec
    read = opened(tmp_path, "fp8", each, kv_cache_scheme=SCHEME | {"strategy": "attn_head"}).spec
    assert read.cache_scales[0].keys == tuple(range(1, 1 + found.kv_heads))


# ---- on a GPU ------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(bool(on_gpu.REASON), reason=on_gpu.REASON or "a GPU")
# inputs of matrices are rounded to their type, which moves cached numbers to their neighbours
ON_GPU = 3e-2


def oss(**shape: int) -> ModelSpec:
    """GPT-OSS's layers with other heads."""
    spec = OSS
    layout = tuple(
        replace(layer, mixer=replace(cast(GroupedAttention, layer.mixer), **shape))
        for layer in spec.layout
    )
    return replace(spec, layout=layout, **shape)


GPU_PLANS: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "llama, heads of 64": (replace(SCALED, head_dim=64), {"attention_splits": 2}),
    "heads of 128, two sets": (replace(SCALED, head_dim=128, heads=32), {}),
    "qwen3, heads of 128": (replace(QWEN3, head_dim=128, cache_scales=SCALES), {}),
    "sinks, windows, experts": (oss(head_dim=64), {}),
    "sixteen heads a key": (
        replace(SCALED, head_dim=64, heads=64, windows=(0, 21, 0)),
        {"attention_splits": 2},
    ),
    "heads of 256": (replace(SCALED, head_dim=256), {}),
    "without tensor cores": (replace(SCALED, head_dim=48), {}),
}


def gpu_plan(name: str, **chosen: Any) -> Plan:
    spec, own = GPU_PLANS[name]
    base: dict[str, Any] = {
        "kv_dtype": DType.FP8,
        "weight_dtype": DType.BF16,
        "slot_bytes": 16384,
        "ring_slots": 4,
        "window_slots": 4,
        "prompt_chunk": 16,
    }
    return on_gpu.planned(spec, **(base | own | chosen))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", GPU_PLANS)
def test_gpu_steps_and_passes_give_the_references_numbers(name: str) -> None:
    plan = gpu_plan(name)
    prove(plan)
    prompt = test_prompt_chunks.PROMPT
    wanted = on_gpu.expected(plan, prompt[:44])
    with on_gpu.CudaEngine(plan, on_gpu.weights_of(plan)) as running:
        steps = running.logits(prompt[:44])
        again = running.logits(prompt[:44])
        passes = test_prompt_chunks.error_after(running, wanted, (20, 42), prompt)
    assert on_gpu.off(steps, wanted) < ON_GPU
    assert passes < ON_GPU
    assert np.array_equal(steps, again)
