"""Gated DeltaNet and gated attention on the CPU engine: the reference's numbers from every plan,
states that begin anew with each request, and what the proof refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.engine.hf_cases import FAMILIES
from tests.engine.small_engine import (
    LIMITS,
    LLAMA,
    SEED,
    TOKENS,
    engine,
    error,
    expected,
    first,
    found,
    planned,
    sanitized,
    small_weights,
)
from tests.engine.test_packed_experts import write_safetensors
from tests.engine.test_prompt_chunks import CHUNK, LENGTHS, PROMPT
from tests.engine.test_prompt_chunks import error as passes_error
from twin.engine.host import HostEngine
from twin.engine.weights import format_of, open_checkpoint, random_weights
from twin.errors import ConfigError
from twin.kernel.header import header
from twin.models.feeds import DenseFeed, ExpertFeed
from twin.models.formats import format_named
from twin.models.layers import Layer
from twin.models.load import from_config, load_model, tensors
from twin.models.mixers import DeltaNet, GroupedAttention
from twin.models.quantized import requantized
from twin.models.spec import DType, ModelSpec, Rope
from twin.plan.catalogue import StageKind
from twin.plan.delta_shards import Rows, projected_rows, steering_rows
from twin.plan.options import CollectiveKind, Execution
from twin.plan.shards import Array
from twin.proof.prove import prove, violations
from twin.reference.step import Reference
from twin.schedule.plans import build

FEED = ExpertFeed(experts=6, top_k=3, width=40, shared_width=96, shared_gate=True)
DELTA = DeltaNet(key_heads=4, key_dim=8, value_heads=8, value_dim=16, conv=4)
GATED = GroupedAttention(heads=8, kv_heads=4, head_dim=8, qk_norm=True, output_gate=True)


def recurrent(delta: DeltaNet = DELTA, *, feed: ExpertFeed = FEED) -> ModelSpec:
    """Two layers of DeltaNet, one of attention whose heads are rotated in part, one of DeltaNet
    without experts.
    """
    layers = (
        *[Layer(delta, feed)] * 2,
        Layer(GATED, feed),
        Layer(delta, DenseFeed(width=64)),
    )
    return replace(
        LLAMA,
        name="recurrent",
        family="qwen3_next",
        layers=4,
        windows=(0,) * 4,
        qk_norm=True,
        ffn=feed.width,
        rope=Rope(1e4, rotated=4),
        layout=layers,
    )


@pytest.mark.slow  # each is a build of its own
@pytest.mark.parametrize(
    "delta",
    [
        replace(DELTA, conv=2),
        replace(DELTA, key_heads=8),
        replace(DELTA, key_heads=1, value_heads=3),
        replace(DELTA, key_dim=20, value_dim=4),
        replace(DELTA, key_dim=128, value_dim=128, key_heads=2, value_heads=2),
    ],
    ids=str,
)
def test_shapes_of_states(delta: DeltaNet) -> None:
    for blocks in (3, 16):
        assert error(planned(recurrent(delta), blocks=blocks)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_stored_types(dtype: DType) -> None:
    assert error(planned(recurrent(), weight_dtype=dtype)) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("blocks", [3, 20])
def test_low_bit_weights_and_gates_in_the_plans_own_type(blocks: int) -> None:
    spec = requantized(recurrent(), format_named("fp8-128x128"))
    spec = replace(spec, layout=tuple(widened(layer) for layer in spec.layout), head_dim=16)
    plan = planned(spec, blocks=blocks, slot_bytes=4096)
    kinds = [stage.kind for stage in plan.stages]
    assert kinds.count(StageKind.DELTA_GATES) == kinds.count(StageKind.DELTA) == 3
    prove(plan)
    assert error(plan) < 1e-5


def widened(layer: Layer) -> Layer:
    """Columns of low-bit weights are a multiple of 16."""
    attends = isinstance(layer.mixer, GroupedAttention)
    mixer = replace(layer.mixer, head_dim=16) if attends else layer.mixer
    if isinstance(layer.feed, ExpertFeed):
        return Layer(mixer, replace(layer.feed, width=48))
    return Layer(mixer, layer.feed)


# ---- requests ------------------------------------------------------------------------------------


def test_nothing_is_kept_of_a_request_for_the_next_one() -> None:
    """Of a recurrent state there is no way back to where two prompts part."""
    plan = planned(recurrent(), blocks=4, prompt_chunk=CHUNK)
    with engine(plan) as fresh, engine(plan) as running:
        first = running.generate(TOKENS, max_tokens=4, reuse=True)
        second = [*TOKENS, *first.tokens, 7, 8]
        again = running.generate(second, max_tokens=4, reuse=True)
        assert (again.kept, running.held) == (0, 0)
        assert again.tokens == fresh.generate(second, max_tokens=4).tokens


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"blocks": 35},  # blocks without an item
        {"gpus": 2, "blocks": 3},
        {"execution": Execution.GRAPH, "prompt_chunk": 3},  # shorter than a convolution's history
        {"gpus": 2, "execution": Execution.LAUNCHES, "collective": CollectiveKind.LIBRARY},
    ],
    ids=str,
)
def test_passes_carry_states_on_as_steps_do(more: dict[str, Any]) -> None:
    plan = planned(recurrent(), **({"prompt_chunk": CHUNK} | more))
    prove(plan)
    assert passes_error(plan, LENGTHS) < 1e-5


def test_a_prompt_goes_on_where_the_passes_end() -> None:
    plan = planned(recurrent(), blocks=4, prompt_chunk=CHUNK)
    wanted = Reference(plan, small_weights(recurrent(), DType.FP32)).generate(PROMPT[:20], 8)
    with engine(plan) as running:
        running.generate(PROMPT[:33], max_tokens=2)
        made = running.generate(PROMPT[:20], max_tokens=8)
        assert (made.tokens, len(made.pass_ns)) == (wanted, 2)


# ---- planted faults ------------------------------------------------------------------------------


VECTORS = ("conv", "decay", "step_bias", "gated_norm", "qkvz", "ba", "o")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", VECTORS)
def test_a_wrong_weight_of_a_state_is_noticed(name: str) -> None:
    class Turned:
        def __init__(self, spec: ModelSpec) -> None:
            self.spec, self.dtype = spec, DType.FP32
            self.random = random_weights(spec, SEED, DType.FP32)

        def __getitem__(self, wanted: str) -> Array:
            made = self.random[wanted]
            return np.roll(made, 1, axis=-1) if wanted == f"layers.1.{name}" else made

    plan = planned(recurrent(), blocks=3, prompt_chunk=CHUNK)
    wanted = expected(plan, TOKENS)
    with HostEngine(plan, Turned(recurrent())) as running:
        assert np.abs(running.logits(TOKENS) - wanted).max() > 1e-3 * np.abs(wanted).max()


def test_attention_without_its_gate_is_noticed() -> None:
    class Open:
        def __init__(self, spec: ModelSpec) -> None:
            self.spec, self.dtype = spec, DType.FP32
            self.random = random_weights(spec, SEED, DType.FP32)

        def __getitem__(self, wanted: str) -> Array:
            made = self.random[wanted].copy()
            if wanted == "layers.2.q":  # [heads][query, gate][head_dim]
                made.reshape(8, 2, 8, -1)[:, 1] = 0
            return made

    plan = planned(recurrent(), blocks=3, prompt_chunk=CHUNK)
    wanted = expected(plan, TOKENS)
    with HostEngine(plan, Open(recurrent())) as running:
        assert np.abs(running.logits(TOKENS) - wanted).max() > 1e-3 * np.abs(wanted).max()


def test_planted_faults_of_states_are_refused() -> None:
    plan = planned(recurrent(), blocks=16)
    delta, out = first(plan, StageKind.DELTA), first(plan, StageKind.O_PROJ)
    attention = next(s for s in plan.stages if s.kind is StageKind.O_PROJ and s.layer == 2)
    scan, read = delta.scan, delta.reads[0]
    assert scan is not None
    # the block of item 0 has no gates, or no write strength, of it
    gates, strengths = (
        replace(read, spans=(read.spans[0][:3] + read.spans[0][4:], *read.spans[1:])),
        replace(read, spans=(read.spans[0][:4] + read.spans[0][5:], *read.spans[1:])),
    )
    items = (delta.items[1], delta.items[0], *delta.items[2:])
    wrong = {
        "and does not read it": [
            replace(delta, reads=(gates,)),
            replace(delta, reads=(strengths,)),
            replace(delta, items=items),
        ],
        "does not read delta": [replace(out, reads=attention.reads)],
        "does not read qkv": [replace(attention, reads=attention.reads[:1])],
        "bytes of states": [replace(delta, scan=replace(scan, held_bytes=scan.held_bytes - 4))],
        "columns, a head has": [replace(delta, scan=replace(scan, page=scan.page // 2))],
        "entries of": [replace(delta, scan=replace(scan, entry_bytes=16))],
    }
    for says, stages in wrong.items():
        for stage in stages:
            assert any(says in one for one in found(plan, stage)), (says, found(plan, stage))


def test_what_an_nvidia_block_does_not_do_with_states_is_refused() -> None:
    gpu = replace(LIMITS, teams=True)
    for value_dim in (8, 16):  # as many outputs as heads have, and more
        spec = recurrent(replace(DELTA, value_dim=value_dim))
        assert not violations(build(spec, planned(spec).options, gpu))
    wide = recurrent(DeltaNet(key_heads=1, key_dim=8, value_heads=1, value_dim=512, conv=4))
    plan = build(wide, planned(wide, blocks=1).options, gpu)
    assert any("use more blocks" in str(one) for one in violations(plan))


def test_models_whose_states_the_kernel_does_not_know_are_refused_by_name() -> None:
    for delta in (replace(DELTA, conv=1), replace(DELTA, key_dim=6), replace(DELTA, value_dim=10)):
        reason = recurrent(delta).runnable_reason()
        assert reason is not None
        assert "gated DeltaNet" in reason
    alone = replace(recurrent(), layers=2, windows=(0, 0), layout=recurrent().layout[:2])
    assert "simulated only" in str(planned(alone).simulation_only())


# ---- what is held, and where ---------------------------------------------------------------------


def test_the_plan_counts_the_memory_of_states() -> None:
    plan = planned(recurrent(), blocks=16)
    scan = first(plan, StageKind.DELTA).scan
    assert scan is not None
    assert (scan.items, scan.page) == (16, 8)
    item = 4 * (8 * 8 + 3 * (8 + 8 + 8))
    assert scan.held_bytes == 16 * item
    assert plan.kernel_state_bytes == 3 * 16 * item


def test_only_a_plan_with_states_has_them_in_its_tables() -> None:
    assert "  int taps;" in header(planned(recurrent()))
    assert "static constexpr int taps = -1;" in header(planned())


def test_rows_of_a_rank_follow_each_other_by_what_they_are() -> None:
    kind = DeltaNet(key_heads=2, key_dim=4, value_heads=4, value_dim=4, conv=4)
    one = [*range(0, 4), *range(4, 8), *range(8, 16), *range(16, 24)]
    assert _listed(projected_rows(kind, 2, 0)) == {"qkvz": one}
    assert _listed(projected_rows(kind, 2, 1)) == {"qkvz": [row + 24 for row in one]}
    assert _listed(projected_rows(kind, 1, 0))["qkvz"][:8] == [0, 1, 2, 3, 24, 25, 26, 27]
    assert _listed(steering_rows(kind, 1, 0)) == {"ba": [0, 1, 4, 5, 2, 3, 6, 7]}


def test_a_rank_takes_its_rows_of_matrices_of_one_kind_each() -> None:
    kind = DeltaNet(key_heads=2, key_dim=2, value_heads=4, value_dim=3, conv=4, split=True)
    queries, keys, values = [2, 3], [6, 7], [14, 15, 16, 17, 18, 19]
    assert _listed(projected_rows(kind, 2, 1)) == {
        "qkv": queries + keys + values,
        "z": [6, 7, 8, 9, 10, 11],
    }
    assert _listed(steering_rows(kind, 2, 1)) == {"b": [2, 3], "a": [2, 3]}


def _listed(parts: Iterable[tuple[str, Rows]]) -> dict[str, list[int]]:
    return {name: rows.tolist() for name, rows in parts}


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "coded", "kept"),
    [
        ("qwen3-next", {"qkvz"}, {"ba"}),
        ("qwen3-5-moe", {"qkv", "z", "experts.7.down"}, {"a", "b"}),
    ],
)
def test_a_checkpoint_in_fp8_blocks_is_read(
    family: str, coded: set[str], kept: set[str], tmp_path: Path
) -> None:
    """As Qwen ships it: gates, routers and convolutions stay in 16 bits."""
    config = FAMILIES[family] | {
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
        },
    }
    spec = from_config(config, "case")
    random, stored, meant = random_weights(spec, SEED, DType.BF16), {}, {}
    for name, tensor in tensors(spec).items():
        if format_of(spec, name).name != "fp8-128x128":
            array = random[name].astype(np.float32)
            if name.endswith("norm") and not name.endswith("gated_norm"):
                array = array - 1
            stored[tensor.name] = array.reshape(tensor.shape).astype(ml_dtypes.bfloat16)
            continue
        codes, scales = random[f"{name}.codes"], random[f"{name}.scales"]
        stored[tensor.name] = codes.view(ml_dtypes.float8_e4m3fn)
        stored[f"{tensor.name}_scale_inv"] = scales[::128].astype(np.float32)
        meant[name] = random[name]
    stored["mtp.layers.0.mlp.gate.weight"] = np.zeros((8, 64), ml_dtypes.bfloat16)
    write_safetensors(tmp_path / "model.safetensors", stored)
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(tmp_path)
    assert opened.spec.runnable_reason() is None
    assert {"layers.3.q", *(f"layers.0.{n}" for n in coded | {"shared_up"})} <= meant.keys()
    assert not meant.keys() & {f"layers.0.{name}" for name in kept | {"conv", "router"}}
    for name, wanted in meant.items():
        assert np.array_equal(opened.weights[name], wanted), name
    assert opened.weights["layers.0.conv"].shape == (4 * 16 * 2 + 8 * 8, 4)


def test_the_share_of_a_head_that_is_rotated_is_a_quarter_unless_said() -> None:
    config = {k: v for k, v in FAMILIES["qwen3-next"].items() if k != "partial_rotary_factor"}
    assert from_config(config, "case").rope.rotated == 4
    assert from_config(config | {"partial_rotary_factor": 1.0}, "case").rope.rotated is None
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        from_config(config | {"partial_rotary_factor": 0.1}, "case")
    assert load_model("qwen3-coder-next").rope.rotated == 64


# ---- sanitizers ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitize: str) -> None:
    script = (
        "from tests.engine.test_recurrent import *\nfrom twin.plan.options import HandOffKind\n"
        "for more in ({'gpus': 2}, {'handoff': HandOffKind.COUNTER, 'blocks': 20}):\n"
        "    with engine(planned(recurrent(), **more), sanitize=SANITIZE) as e:\n"
        "        e.generate(TOKENS[:5], max_tokens=4)\n        e.logits(TOKENS[:5])\n"
        "print('clean')\n"
    )
    sanitized(script, sanitize)
