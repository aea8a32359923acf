"""Shared experts, dense layers among experts, and gated DeltaNet on an NVIDIA GPU: the reference's
numbers, and the same bits every time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine import test_choice_bias, test_coded_experts, test_recurrent
from tests.engine.hf_cases import FAMILIES
from tests.engine.small_engine import TOKENS
from tests.engine.test_convolution import convolved
from tests.engine.test_cuda_codes import agree, checked
from tests.engine.test_cuda_engine import TOLERANCE, expected, gpu, weights_of
from tests.engine.test_experts import MANY, SHARED, routed
from tests.engine.test_mamba import EXPERTS, MAMBA, mixed
from tests.engine.test_recurrent import DELTA, recurrent
from twin.engine.cuda import CudaEngine
from twin.models.feeds import DenseFeed, ExpertFeed, NoFeed
from twin.models.formats import format_named
from twin.models.layers import Layer
from twin.models.load import from_config, load_model
from twin.models.mixers import DeltaNet, GroupedAttention, NoMixer
from twin.models.quantized import requantized
from twin.models.spec import DType, ModelSpec, Rope
from twin.plan.options import HandOffKind, Sampling

pytestmark = gpu

# as many columns for output projections as attention has heads' outputs
STATES = replace(DELTA, value_dim=8)
BF16 = {"weight_dtype": DType.BF16, "kv_dtype": DType.BF16}
PASSES_BOUND = 5e-2  # a rounding may decide a choice otherwise


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        (routed(SHARED), {"blocks": 5}),
        (routed(SHARED), {"blocks": 40, "slot_bytes": 512, "tile_rows": 4}),
        (routed(SHARED), {"handoff": HandOffKind.COUNTER, "sampling": Sampling.FULL}),
        (routed(SHARED), {"handoff": HandOffKind.GRID, **BF16}),
        (routed(replace(SHARED, shared_gate=False, shared_width=264)), {}),
        (routed(replace(SHARED, shared_width=40)), {"blocks": 5}),
        (routed(replace(MANY, shared_width=80)), {"blocks": 40, **BF16}),
        (routed(dense=(1,)), {}),
        (routed(replace(SHARED, shared_width=64), dense=(0, 2)), {"blocks": 11, **BF16}),
        (routed(replace(SHARED, experts=135, top_k=5)), {"blocks": 40}),
        (routed(replace(SHARED, experts=512, top_k=10)), {"blocks": 40}),
        (routed(replace(SHARED, experts=128, top_k=8)), {"blocks": 40}),
    ],
    ids=(
        *("few", "many", "counter", "grid", "ungated", "chosen", "two chosen"),
        *("dense", "both", "135", "512", "128"),
    ),
)
def test_shared_experts_and_dense_layers_match_the_reference(
    spec: ModelSpec, chosen: dict[str, Any]
) -> None:
    agree(checked(spec, **({"slot_bytes": 1024} | chosen)))


@pytest.mark.parametrize("prompt_chunk", [1, 16])
def test_prompts_of_dense_layers_among_experts_match_the_reference(prompt_chunk: int) -> None:
    plan = checked(routed(dense=(1,)), slot_bytes=1024, prompt_chunk=prompt_chunk, **BF16)
    wanted = expected(plan, TOKENS)[-2:]
    with CudaEngine(plan, weights_of(plan)) as running:
        found = running.logits(TOKENS[-2:], after=TOKENS[:-2])
    assert np.abs(found - wanted).max() < TOLERANCE[DType.BF16] * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["fp8-128x128", "int8", "int4-g32", "mxfp4", "nvfp4"])
def test_shared_experts_of_few_bits_match_the_reference(name: str) -> None:
    base = test_coded_experts.shared(name).spec
    assert base is not None
    agree(checked(base, blocks=5))


@pytest.mark.parametrize(
    ("delta", "chosen"),
    [
        (STATES, {"blocks": 5}),  # several items a block
        (STATES, {"blocks": 35}),  # two items a head, blocks without one
        (STATES, {"handoff": HandOffKind.COUNTER, "sampling": Sampling.FULL}),
        (STATES, {"handoff": HandOffKind.GRID, **BF16}),
        (replace(STATES, key_heads=2, conv=2), {}),
        (DeltaNet(key_heads=1, key_dim=128, value_heads=1, value_dim=64, conv=4), {"blocks": 3}),
        (DeltaNet(key_heads=1, key_dim=72, value_heads=1, value_dim=64, conv=4), {"blocks": 9}),
        (replace(STATES, value_dim=16), {"blocks": 20}),
    ],
    ids=("few", "many", "counter", "grid", "shared keys", "wide", "uneven", "more than heads"),
)
def test_states_match_the_reference(delta: DeltaNet, chosen: dict[str, Any]) -> None:
    agree(checked(recurrent(delta), **({"slot_bytes": 1024} | chosen)))


@pytest.mark.parametrize("name", ["fp8-128x128", "int4-g32", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("blocks", [5, 20])
def test_states_of_low_bit_models_match_the_reference(name: str, blocks: int) -> None:
    spec = requantized(recurrent(replace(DELTA, value_dim=16)), format_named(name))
    layers = [test_recurrent.widened(layer) for layer in spec.layout]
    agree(checked(replace(spec, layout=tuple(layers), head_dim=16), blocks=blocks, **BF16))


def test_states_of_the_published_shape_match_the_reference() -> None:
    """All 132 blocks, four items a head, heads of 256 elements of which 64 are rotated."""
    delta = DeltaNet(key_heads=16, key_dim=128, value_heads=32, value_dim=128, conv=4)
    attention = GroupedAttention(heads=16, kv_heads=2, head_dim=256, qk_norm=True, output_gate=True)
    base = recurrent()
    feed = replace(SHARED, experts=64, top_k=10, width=64, shared_width=512)
    layers = (Layer(delta, feed), Layer(attention, feed), Layer(delta, DenseFeed(width=512)))
    spec = replace(
        base, layers=3, windows=(0,) * 3, layout=layers, hidden=512, heads=16, kv_heads=2,
        head_dim=256, rope=replace(base.rope, rotated=64),
    )  # fmt: skip
    agree(checked(spec, blocks=132, slot_bytes=16384, **BF16))


# Output projections of Mamba-2 and of attention multiply 64 columns, unless a name says otherwise.
MAMBA_CASES: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "few": (mixed(), {"blocks": 5}),
    "many": (mixed(), {"blocks": 35}),  # two items a head, and blocks without one
    "counter": (mixed(), {"handoff": HandOffKind.COUNTER, "sampling": Sampling.FULL}),
    "grid": (mixed(), {"handoff": HandOffKind.GRID, **BF16}),
    "two taps": (mixed(replace(MAMBA, conv=2, conv_bias=False)), {}),
    "one group": (mixed(replace(MAMBA, key_heads=1, value_heads=4, value_dim=16)), {"blocks": 9}),
    "steps clamped": (mixed(replace(MAMBA, least_step=0.6, most_step=0.8)), {"blocks": 40}),
    "own shared stages": (mixed(feed=replace(EXPERTS, shared_width=104)), {"blocks": 20}),
    "more than heads": (mixed(replace(MAMBA, value_dim=32)), {"blocks": 9, **BF16}),
    "fewer than heads": (mixed(replace(MAMBA, value_heads=4)), {"blocks": 9}),
    "long keys": (mixed(replace(MAMBA, key_heads=2, key_dim=72)), {"blocks": 7, **BF16}),
}


@pytest.mark.parametrize("name", MAMBA_CASES)
def test_mamba_and_layers_of_one_half_match_the_reference(name: str) -> None:
    spec, chosen = MAMBA_CASES[name]
    agree(checked(spec, **({"slot_bytes": 1024} | chosen)))


def published_mamba(name: str) -> ModelSpec:
    """Mamba-2, experts of which a token visits all, Mamba-2, attention."""
    base = load_model(name)
    layers = [base.layout[at] for at in (0, 1, 4, 5)]
    feed = layers[1].feed
    assert isinstance(feed, ExpertFeed)
    layers[1] = Layer(NoMixer(), replace(feed, experts=feed.top_k))
    return replace(
        base, layers=4, windows=(0,) * 4, ropes=(None,) * 4, layout=tuple(layers), vocab=512
    )


@pytest.mark.parametrize("name", ["nemotron-3-nano-30b-a3b", "nemotron-3-nano-30b-a3b@fp8"])
def test_mamba_of_the_published_widths_matches_the_reference(name: str) -> None:
    """All 132 blocks, two items a head, eight groups of 512 outputs."""
    agree(checked(published_mamba(name), blocks=132, slot_bytes=16512, **BF16))


@pytest.mark.parametrize("value_dim", [64, 32, 128])
def test_threads_of_the_same_columns_share_states(value_dim: int) -> None:
    """512 columns, which four teams hold: one of them asks, for the squares of 16 items a head."""
    delta = DeltaNet(
        key_heads=4, key_dim=64, value_heads=512 // value_dim, value_dim=value_dim, conv=4
    )
    attention = GroupedAttention(heads=8, kv_heads=2, head_dim=64, qk_norm=True, output_gate=True)
    layers = (Layer(delta, SHARED), Layer(attention, SHARED), Layer(delta, SHARED))
    spec = replace(
        recurrent(), layers=3, windows=(0,) * 3, layout=layers, hidden=512, heads=8, kv_heads=2,
        head_dim=64,
    )  # fmt: skip
    agree(checked(spec, blocks=132, slot_bytes=16384, **BF16))


@pytest.mark.parametrize(
    "chosen",
    [
        {"blocks": 5},
        {"blocks": 40, "slot_bytes": 512, "tile_rows": 4},
        {"handoff": HandOffKind.COUNTER, "sampling": Sampling.FULL},
        {"handoff": HandOffKind.GRID, **BF16},
    ],
    ids=("few", "many", "counter", "grid"),
)
def test_short_convolutions_match_the_reference(chosen: dict[str, Any]) -> None:
    agree(checked(convolved(), **({"slot_bytes": 1024} | chosen)))


def test_short_convolutions_of_the_published_width_match_the_reference() -> None:
    """All 132 blocks, of 15 or 16 channels each."""
    base = load_model("lfm2.5-1.2b")
    layers = base.layout[1:3]  # a convolution, attention
    spec = replace(base, layers=2, windows=(0, 0), layout=layers, vocab=512)
    agree(checked(spec, blocks=132, slot_bytes=16384, **BF16))


@pytest.mark.parametrize("name", ["glm4-moe", "glm4-moe-plain", "minimax-m2", "ernie4-5-moe"])
@pytest.mark.parametrize(
    "chosen",
    [{"blocks": 5}, {"blocks": 40, "slot_bytes": 512, "tile_rows": 4}, {"blocks": 20, **BF16}],
    ids=("few", "many", "bf16"),
)
def test_routers_with_biases_of_the_choice_match_the_reference(
    name: str, chosen: dict[str, Any]
) -> None:
    agree(checked(from_config(FAMILIES[name], name), **({"slot_bytes": 1024} | chosen)))


@pytest.mark.parametrize("name", ["glm-4.5-air@fp8", "minimax-m2.7@nvfp4"])
def test_sigmoid_routers_of_the_published_widths_match_the_reference(name: str) -> None:
    """All 132 blocks, the first two layers, of whose experts there are fewer."""
    base = load_model(name)
    layers = tuple(
        replace(layer, feed=replace(layer.feed, experts=16))
        if isinstance(layer.feed, ExpertFeed)
        else layer
        for layer in base.layout[:2]
    )
    spec = replace(base, layers=2, windows=(0, 0), layout=layers, vocab=512)
    agree(checked(spec, blocks=132, slot_bytes=18560, **BF16))


@pytest.mark.parametrize(
    ("feed", "chosen"),
    [
        ({}, {"blocks": 5}),
        ({"experts": 135, "top_k": 5}, {"blocks": 40}),
        ({"experts": 256, "top_k": 8, "scaling": 2.5}, {"blocks": 40, **BF16}),
    ],
    ids=("few", "groups", "many"),
)
def test_a_bias_of_the_choice_matches_the_reference(
    feed: dict[str, Any], chosen: dict[str, Any]
) -> None:
    spec = convolved(feed=replace(test_choice_bias.FEED, **feed))
    agree(checked(spec, slot_bytes=1024, **chosen))


def test_a_request_begins_with_empty_histories() -> None:
    plan = checked(convolved(), slot_bytes=1024, blocks=20)
    with CudaEngine(plan, weights_of(plan)) as running:
        first = running.generate(TOKENS[:5], max_tokens=20).tokens
        running.generate(TOKENS[::-1], max_tokens=9)
        again = running.generate(TOKENS[:5], max_tokens=20, reuse=True)
        assert (again.tokens, again.kept) == (first, 0)


def test_a_request_begins_with_empty_states() -> None:
    plan = checked(recurrent(STATES), slot_bytes=1024, blocks=20)
    with CudaEngine(plan, weights_of(plan)) as running:
        first = running.generate(TOKENS[:5], max_tokens=20).tokens
        running.generate(TOKENS[::-1], max_tokens=9)
        again = running.generate(TOKENS[:5], max_tokens=20, reuse=True)
        assert (again.tokens, again.kept) == (first, 0)


# ---- prompts in passes ---------------------------------------------------------------------------

HEADS_16 = GroupedAttention(heads=8, kv_heads=4, head_dim=16, qk_norm=True, output_gate=True)
STATES_16 = DeltaNet(key_heads=2, key_dim=32, value_heads=4, value_dim=32, conv=4)


def carried(delta: DeltaNet = STATES_16, feed: ExpertFeed | DenseFeed = SHARED) -> ModelSpec:
    """Heads and states that tensor cores take: gated attention among states, the last one behind
    it.
    """
    layers = (Layer(delta, feed), Layer(HEADS_16, feed), Layer(delta, DenseFeed(width=64)))
    return replace(
        recurrent(), layers=3, windows=(0,) * 3, layout=layers, head_dim=16, context=1100
    )


def carried_mamba(feed: ExpertFeed = EXPERTS, columns: int = 32) -> ModelSpec:
    """The same of Mamba-2, whose outputs one norm is over are two heads'."""
    mamba = replace(MAMBA, key_heads=2, key_dim=32, value_heads=128 // columns, value_dim=columns)
    heads = GroupedAttention(heads=8, kv_heads=4, head_dim=16)
    layers = (
        Layer(mamba, NoFeed()),
        Layer(NoMixer(), feed),
        Layer(heads, NoFeed()),
        Layer(NoMixer(), DenseFeed(width=64, gated=False)),
        Layer(mamba, NoFeed()),
    )
    return replace(
        mixed(), layers=5, windows=(0,) * 5, ropes=(None,) * 5, layout=layers, head_dim=16,
        context=1100,
    )  # fmt: skip


def published_states() -> ModelSpec:
    """Of the published shape, four items a head; heads of 256 elements, of which 64 are rotated; a
    shared expert that every token visits.
    """
    delta = DeltaNet(key_heads=16, key_dim=128, value_heads=32, value_dim=128, conv=4)
    attention = GroupedAttention(heads=16, kv_heads=2, head_dim=256, qk_norm=True, output_gate=True)
    feed = replace(SHARED, experts=64, top_k=8, width=64, shared_width=64)
    layers = (Layer(delta, feed), Layer(attention, feed), Layer(delta, DenseFeed(width=512)))
    return replace(
        recurrent(), layers=3, windows=(0,) * 3, layout=layers, hidden=512, heads=16, kv_heads=2,
        head_dim=256, rope=Rope(1e4, rotated=64), context=1100,
    )  # fmt: skip


def published_group() -> ModelSpec:
    """Mamba-2 whose 48 heads share a key, and are normed together; they make twice as many outputs
    as heads of attention. A token visits all experts.
    """
    base = load_model("granite-4.0-h-tiny")
    feed = base.layout[0].feed
    assert isinstance(feed, ExpertFeed)
    layers = tuple(replace(base.layout[at], feed=replace(feed, experts=6)) for at in (4, 5, 6))
    return replace(base, layers=3, windows=(0,) * 3, ropes=(None,) * 3, layout=layers, vocab=512)


def published_channels() -> ModelSpec:
    base = load_model("lfm2.5-1.2b")
    return replace(base, layers=3, windows=(0,) * 3, layout=base.layout[1:4], vocab=512)


IN_PASSES: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "convolutions": (convolved(), {"blocks": 20, "prompt_chunk": 64}),
    "convolutions and biases": (convolved(feed=test_choice_bias.FEED), {"prompt_chunk": 16}),
    "published channels": (published_channels(), {"blocks": 132, "slot_bytes": 16384}),
    "states": (carried(), {"blocks": 5}),
    "more than heads": (carried(replace(STATES_16, value_dim=64)), {"blocks": 20}),
    "dense": (carried(feed=DenseFeed(width=64)), {"blocks": 20, "handoff": HandOffKind.COUNTER}),
    "always chosen": (carried(feed=replace(SHARED, shared_width=40)), {"blocks": 7}),
    "few columns": (carried(replace(STATES_16, key_dim=16)), {"blocks": 13}),
    "published states": (published_states(), {"blocks": 132, "slot_bytes": 16384}),
    "low-bit states": (
        requantized(
            carried(feed=replace(SHARED, width=48, shared_width=96)), format_named("fp8-128x128")
        ),
        {"blocks": 5, "slot_bytes": 4096},
    ),
}
IN_PASSES |= {
    "Mamba-2": (carried_mamba(), {"blocks": 5}),
    "Mamba-2, many": (carried_mamba(replace(EXPERTS, shared_width=104), 16), {"blocks": 20}),
    "published Mamba-2": (
        published_mamba("nemotron-3-nano-30b-a3b"),
        {"blocks": 132, "slot_bytes": 16512},
    ),
    "published Mamba-2, one group": (published_group(), {"blocks": 132, "slot_bytes": 16384}),
    "published Mamba-2 in FP8": (
        published_mamba("nemotron-3-nano-30b-a3b@fp8"),
        {"blocks": 132, "slot_bytes": 16512},
    ),
}
LENGTHS = (1, 63, 64, 65, 200, 515)


@pytest.mark.parametrize("name", IN_PASSES)
def test_prompts_in_passes_are_those_read_by_steps(name: str) -> None:
    """And the reference's, after short ones; tokens, and bits, are the same every time."""
    spec, chosen = IN_PASSES[name]
    chosen = {"slot_bytes": 1024, "prompt_chunk": 128, "max_context": 600} | BF16 | chosen
    found = []
    prompt = [int(t) for t in np.random.default_rng(2).integers(0, spec.vocab, max(LENGTHS) + 2)]
    for chunk in (chosen["prompt_chunk"], 1):
        plan = checked(spec, **(chosen | {"prompt_chunk": chunk}))
        assert plan.options.prompt_chunk == chunk
        with CudaEngine(plan, weights_of(plan)) as running:
            found.append({n: running.logits(prompt[n : n + 2], after=prompt[:n]) for n in LENGTHS})
            made = [running.generate(prompt[:200], max_tokens=12) for _ in range(3)]
            again = running.logits(prompt[200:202], after=prompt[:200])
        assert len({tuple(one.tokens) for one in made}) == 1
        assert np.array_equal(again, found[-1][200])
    passes, steps = found
    wanted = expected(plan, prompt[:67])
    largest = np.abs(wanted).max()
    for n in LENGTHS:
        assert np.abs(passes[n] - steps[n]).max() < PASSES_BOUND * largest, n
        if n + 2 <= len(wanted):
            assert np.abs(passes[n] - wanted[n : n + 2]).max() < PASSES_BOUND * largest, n
