"""Layers as data: their matrices add up, their traffic follows its laws, and checkpoints' formats
are read from configurations.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from tests.rows import every
from twin.data import data_dir, read_yaml
from twin.errors import ConfigError
from twin.models.feeds import DenseFeed, ExpertFeed
from twin.models.formats import FP8_BLOCK, MXFP4, NVFP4, STORED, Format, Role
from twin.models.load import from_config, load_model, model_names
from twin.models.mixers import (
    CompressedAttention,
    DeltaNet,
    GroupedAttention,
    LatentAttention,
    Mixer,
)
from twin.models.weight import Weight, total

NAMES = model_names()
CONTEXTS = st.integers(0, 1 << 20)


def config_of(name: str) -> dict[str, Any]:
    """A deep copy of a named model's configuration."""
    return copy.deepcopy(read_yaml(data_dir("hwmodels") / "models" / f"{name}.yaml")["config"])


def mixers() -> list[Mixer]:
    """Every kind of mixer that a named model has."""
    specs = [load_model(name) for name in NAMES]
    return list(dict.fromkeys(spec.layer(i).mixer for spec in specs for i in range(spec.layers)))


@every("name", NAMES)
def test_the_matrices_of_the_layers_are_the_parameters(name: str) -> None:
    spec = load_model(name)
    table = 0 if spec.tied else spec.vocab * spec.hidden
    assert table + total(spec.weights(), "parameters") + spec.vector_parameters == spec.parameters
    assert spec.streamed_parameters < spec.active_parameters <= spec.parameters
    assert spec.streamed_bytes <= spec.stored_bytes


@every("name", NAMES)
def test_inputs_and_outputs_of_a_layer_meet_the_residual(name: str) -> None:
    spec = load_model(name)
    for index in range(spec.layers):
        layer = spec.layer(index)
        for weights in (
            layer.mixer.weights(spec.hidden, spec.formats),
            layer.feed.weights(spec.hidden, spec.formats),
        ):
            if weights:  # of layers without a half
                assert weights[0].cols == spec.hidden
                assert weights[-1].rows == spec.hidden


def test_absorbed_matrices_are_the_stored_one_in_two() -> None:
    spec = load_model("deepseek-v3")
    mixer = spec.layer(0).mixer
    assert isinstance(mixer, LatentAttention)
    parts = {w.name: w for w in mixer.weights(spec.hidden, spec.formats)}
    kv_b = mixer.heads * (mixer.nope_dim + mixer.value_dim) * mixer.kv_rank
    assert parts["k_up"].parameters + parts["v_up"].parameters == kv_b
    assert parts["k_up"].groups * parts["k_up"].cols == mixer.heads * mixer.nope_dim
    assert parts["v_up"].groups * parts["v_up"].cols == mixer.heads * mixer.kv_rank


@drawn(20)
@given(CONTEXTS, st.integers(1, 4096))
def test_a_longer_context_never_reads_less(context: int, more: int) -> None:
    for mixer in mixers():
        now, later = mixer.traffic(context, 2), mixer.traffic(context + more, 2)
        assert now.read_bytes <= later.read_bytes
        assert now.written_bytes == later.written_bytes
        assert mixer.held_bytes(context, 2) <= mixer.held_bytes(context + more, 2)


@drawn(20)
@given(CONTEXTS)
def test_a_step_reads_at_most_what_is_held(context: int) -> None:
    """Compressed attention spreads its closing windows evenly, so that an almost empty cache may
    read a little more.
    """
    for mixer in mixers():
        spare = mixer.traffic(0, 2).read_bytes
        assert mixer.traffic(context, 2).read_bytes <= mixer.held_bytes(context, 2) + spare


def test_a_recurrent_state_is_read_and_written_whatever_the_context() -> None:
    mixer = DeltaNet(key_heads=16, key_dim=128, value_heads=32, value_dim=128, conv=4)
    assert mixer.traffic(1, 2) == mixer.traffic(1 << 18, 2)
    # 75.5 MB in FP32 over the 36 layers of Qwen3-Coder-Next
    assert mixer.state_elements * 36 == 18_874_368
    assert mixer.traffic(1, 2).written_bytes >= 4 * mixer.state_elements


def test_deepseek_v4_caches_what_its_report_counts() -> None:
    """3,514 bytes a position: 21 layers of (584 + 68) / 4 and 20 of 584 / 128 (DSV4-REPORT with
    FlashMLA's rows).
    """
    spec = load_model("deepseek-v4-flash")
    context = 1 << 20
    grown = spec.held_bytes(2 * context, 2) - spec.held_bytes(context, 2)
    assert grown / context == pytest.approx(3514, rel=1e-3)


def test_windows_and_chosen_entries_bound_what_is_attended() -> None:
    spec = load_model("deepseek-v4-flash")
    kinds = [spec.layer(i).mixer for i in range(spec.layers)]
    assert all(isinstance(m, CompressedAttention) for m in kinds)
    assert [m.positions(1 << 20) for m in kinds[:4]] == [128, 128, 128 + 512, 128 + 8192]
    gpt = load_model("gpt-oss-120b")
    assert [gpt.layer(i).mixer.positions(4096) for i in range(3)] == [128, 4096, 128]


@given(st.integers(1, 8), st.integers(1, 8))
def test_more_experts_a_token_stream_more(fewer: int, more: int) -> None:
    def streamed(top_k: int) -> int:
        feed = ExpertFeed(experts=64, top_k=top_k, width=32, shared_width=16)
        return total(feed.weights(64, load_model("qwen3-8b").formats), "step_bytes")

    assert streamed(fewer) < streamed(fewer + more)


@given(st.sampled_from(sorted(STORED)), st.integers(1, 600), st.integers(1, 600))
def test_scales_never_make_a_format_smaller(name: str, rows: int, cols: int) -> None:
    form = STORED[name]
    plain = Format("plain", form.bits)
    assert form.bytes(rows, cols) >= plain.bytes(rows, cols)
    assert form.bytes(rows + 1, cols) >= form.bytes(rows, cols)


def test_bits_per_weight_are_the_known_ones() -> None:
    assert MXFP4.bytes(4096, 4096) * 8 == 4096 * 4096 * 4.25
    assert STORED["int4-g32"].bytes(4096, 4096) * 8 == 4096 * 4096 * 4.5
    assert (NVFP4.bytes(4096, 4096) - 4) * 8 == 4096 * 4096 * 4.5
    assert FP8_BLOCK.bytes(4096, 4096) == 4096 * 4096 + 32 * 32 * 4


@pytest.mark.parametrize(
    ("name", "role", "form"),
    [
        ("gpt-oss-120b", Role.EXPERT, "mxfp4"),
        ("gpt-oss-120b", Role.ATTENTION, "bf16"),
        ("gpt-oss-120b", Role.HEAD, "bf16"),
        ("deepseek-v3", Role.ATTENTION, "fp8-128x128"),
        ("deepseek-v3", Role.EXPERT, "fp8-128x128"),
        ("deepseek-v3", Role.ROUTER, "bf16"),
        ("kimi-k2.6", Role.EXPERT, "int4-g32"),
        ("kimi-k2.6", Role.ATTENTION, "bf16"),
        ("kimi-k2.6", Role.SHARED, "bf16"),
        ("kimi-k2.6", Role.DENSE, "bf16"),
        ("deepseek-v4-flash", Role.EXPERT, "mxfp4"),
        ("deepseek-v4-flash", Role.INDEX, "fp8-128x128-e8m0"),
        ("deepseek-v4-flash", Role.COMPRESS, "bf16"),
        ("deepseek-v4-flash", Role.HYPER, "fp32"),
        ("qwen3-coder-next", Role.EXPERT, "bf16"),
        ("qwen3-coder-next@fp8-128x128", Role.EXPERT, "fp8-128x128"),
        ("qwen3-coder-next@fp8-128x128", Role.HEAD, "bf16"),
    ],
)
def test_each_kind_of_matrix_has_its_format(name: str, role: Role, form: str) -> None:
    assert load_model(name).formats.of(role).name == form


def test_deepseek_v4_weighs_what_its_files_weigh() -> None:
    """148.66 GiB of safetensors hold 43 layers and the draft layer, which has the experts and
    attention of a window-only one.
    """
    spec = load_model("deepseek-v4-flash")
    draft = total(spec.layer_weights(0), "stored_bytes")
    assert spec.stored_bytes + draft == pytest.approx(148.66 * 2**30, rel=0.003)


def test_a_dense_model_in_a_format_without_code_is_only_simulated() -> None:
    assert load_model("llama-3.1-8b@fp8-128x128-e8m0").runnable_reason() is not None


def test_a_dense_model_is_named_in_another_format() -> None:
    spec = load_model("llama-3.1-8b@mxfp4")
    assert spec.name == "llama-3.1-8b@mxfp4"
    assert spec.parameters == load_model("llama-3.1-8b").parameters
    assert spec.streamed_bytes < load_model("llama-3.1-8b").streamed_bytes / 3
    assert spec.runnable_reason() is None
    assert load_model("llama-3.1-8b@int4").name == "llama-3.1-8b@int4-g128"


def test_dense_shape_as_layers() -> None:
    spec = load_model("qwen3-8b")
    layer = spec.layer(3)
    assert layer.mixer == GroupedAttention(heads=32, kv_heads=8, head_dim=128, qk_norm=True)
    assert layer.feed == DenseFeed(width=12288)
    assert [w.name for w in spec.layer_weights(3)] == ["q", "k", "v", "o", "gate", "up", "down"]


def test_experts_after_the_dense_layers_and_hashed_ones_first() -> None:
    v3 = load_model("deepseek-v3")
    assert [isinstance(v3.layer(i).feed, DenseFeed) for i in range(5)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    v4 = load_model("deepseek-v4-flash")
    feeds = [v4.layer(i).feed for i in range(4)]
    assert [isinstance(f, ExpertFeed) and f.hashed for f in feeds] == [True, True, True, False]


def test_active_bytes_of_a_matrix_with_experts() -> None:
    weight = Weight("up", Role.EXPERT, 6, 64, MXFP4, experts=8, active=2)
    assert (weight.parameters, weight.active_parameters) == (8 * 384, 2 * 384)
    assert weight.step_bytes == 2 * (192 + 12)
    assert weight.stored_bytes == 8 * (192 + 12)


def test_kimi_behind_its_vision_tower() -> None:
    text = config_of("kimi-k2.6")
    quantization = text.pop("quantization_config")
    outer = {"model_type": "kimi_k25", "text_config": text, "quantization_config": quantization}
    spec = from_config(outer, "kimi-k2.6")
    assert spec.parameters == load_model("kimi-k2.6").parameters
    assert spec.formats == load_model("kimi-k2.6").formats
    assert replace(spec, name="x").layout == load_model("kimi-k2.6").layout


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "mixtral-8x7b",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok is 9; allowed: up to num_local_experts = 8",
        ),
        ("qwen3-30b-a3b", {"mlp_only_layers": "none"}, "mlp_only_layers"),
        ("qwen3-30b-a3b", {"attention_bias": True}, "attention_bias"),
        ("qwen3-coder-next", {"full_attention_interval": 99}, "up to num_hidden_layers = 48"),
        ("qwen3-coder-next", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("qwen3-coder-next", {"partial_rotary_factor": 2.0}, "a share of a head"),
        (
            "qwen3-coder-next",
            {"linear_num_value_heads": 33},
            "multiples of linear_num_key_heads = 16",
        ),
        ("gpt-oss-20b", {"layer_types": None}, "layer_types is None"),
        ("gpt-oss-20b", {"swiglu_limit": -7.0}, "swiglu_limit is -7.0"),
        (
            "gpt-oss-20b",
            {"quantization_config": {"quant_method": "gptq"}},
            "quant_method is 'gptq'",
        ),
        ("deepseek-v3", {"scoring_func": "tanh"}, "scoring_func is 'tanh'"),
        ("deepseek-v3", {"n_group": 7}, "multiples of n_group = 7"),
        (
            "deepseek-v3",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size",
        ),
        (
            "kimi-k2.6",
            {"quantization_config": {"quant_method": "compressed-tensors"}},
            "config_groups",
        ),
        ("deepseek-v4-flash", {"compress_ratios": [4, 128]}, "compress_ratios has 2 entries"),
        ("deepseek-v4-flash", {"compress_ratios": [-4] * 43}, "a list of whole numbers"),
        ("deepseek-v4-flash", {"expert_dtype": "fp3"}, "expert_dtype is 'fp3'"),
        ("deepseek-v4-flash", {"o_groups": 7}, "multiples of o_groups = 7"),
        ("deepseek-v4-flash", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_a_wrong_field_is_named(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_config({**config_of(name), **changes}, "wrong")
    assert message in str(error.value)
    assert "allowed" in str(error.value)


def test_nvfp4_of_another_publisher() -> None:
    weights = {"num_bits": 4, "type": "float", "group_size": 16}
    quantization = {
        "quant_method": "modelopt",
        "config_groups": {"group_0": {"weights": weights}},
        "ignore": ["lm_head", "*self_attn*"],
    }
    spec = from_config(
        {**config_of("kimi-k2.6"), "quantization_config": quantization}, "kimi-k2.6-nvfp4"
    )
    assert spec.formats.of(Role.EXPERT) is NVFP4
    assert spec.formats.of(Role.SHARED) is NVFP4
    assert spec.formats.of(Role.ATTENTION).name == "bf16"


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'int3' is not known; allowed: fp32, bf16"):
        load_model("llama-3.1-8b@int3")
