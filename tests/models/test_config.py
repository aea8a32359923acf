"""Configurations: what is read, and every refusal with its field, value and next step."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import CHARACTERS, drawn
from tests.rows import every
from twin.errors import ConfigError
from twin.models.load import from_config, load_model
from twin.models.spec import DType, LaneHead, RopeScaling, RopeStyle

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def base(family: str, **changes: object) -> dict[str, Any]:
    """A small valid configuration; a change to ... removes the field."""
    config: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    }
    if family == "mistral":
        config["sliding_window"] = None
    if family.startswith("laneformer"):
        config |= {"num_lanes": 4, "broadcast_delay": 1, "norm_eps": config.pop("rms_norm_eps")}
    config |= changes
    return {key: value for key, value in config.items() if value is not ...}


ALL = ["llama", "mistral", "qwen2", "qwen3", "laneformer", "laneformer_tp"]


@pytest.mark.parametrize("family", ALL)
def test_a_small_model_of_every_family(family: str) -> None:
    spec = from_config(base(family), "tiny")
    assert (spec.name, spec.layers, spec.hidden, spec.heads, spec.kv_heads) == ("tiny", 4, 64, 8, 4)
    assert spec.windows == (0, 0, 0, 0)
    assert spec.dtype is DType.BF16
    assert not spec.tied
    assert spec.head_dim == (128 if family == "qwen3" else 8)
    assert spec.qkv_bias == (family == "qwen2")
    assert spec.qk_norm == (family == "qwen3")
    assert (spec.lanes is not None) == family.startswith("laneformer")


SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


@pytest.mark.parametrize("family", ALL)
def test_a_size_that_is_missing_or_wrong_is_named(family: str) -> None:
    for field, value in product(SIZES, (..., 0, -1, 1.5, "64", True, [64])):
        with pytest.raises(ConfigError, match=field):
            from_config(base(family, **{field: value}), "tiny")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_norm_epsilon_must_be_said(family: str) -> None:
    for value in (..., 0, -1e-5, "1e-5", float("nan"), float("inf"), True):
        with pytest.raises(ConfigError, match="rms_norm_eps"):
            from_config(base(family, rms_norm_eps=value), "tiny")


@every(
    ("changes", "field"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads is 8"),
        ({"num_key_value_heads": 16}, "num_attention_heads is 8"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": -8}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "torch_dtype"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}},
            "type is 'dynamic'",
        ),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta"),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
    ],
)
def test_a_contradiction_is_named(changes: dict[str, object], field: str) -> None:
    for family in ALL:
        with pytest.raises(ConfigError, match="allowed") as error:
            from_config(base(family, **changes), "tiny")
        assert field in str(error.value), family
        assert "tiny" in str(error.value), family


@pytest.mark.parametrize("family", [name for name in ALL if "laneformer" not in name])
@pytest.mark.parametrize(
    ("scaling", "theta", "field"),
    [
        ({"original_max_position_embeddings": None}, 1e4, "original_max_position_embeddings is"),
        ({"beta_fast": 0.5}, 1e4, "beta_fast is 0.5"),
        ({"attention_factor": -1.0}, 1e4, "attention_factor is -1.0"),
        ({}, 1.0, "rope_theta is 1"),
    ],
)
def test_a_contradiction_in_yarn_is_named(
    family: str, scaling: dict[str, object], theta: float, field: str
) -> None:
    with pytest.raises(ConfigError, match=r"allowed|missing") as error:
        from_config(base(family, rope_scaling=YARN | scaling, rope_theta=theta), "tiny")
    assert field in str(error.value)


def test_lanes_were_not_trained_with_yarn() -> None:
    with pytest.raises(ConfigError, match="rope_type is 'yarn'"):
        from_config(base("laneformer", rope_scaling=YARN), "tiny")


@every(
    ("family", "changes", "field"),
    [
        ("llama", {"hidden_size": 66}, "hidden_size is 66"),
        ("llama", {"head_dim": 7}, "head_dim"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"sliding_window": 128}, "sliding_window"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod"),
        ("phi3", {"interpolate_factor": 2.0}, "interpolate_factor"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias"),
        ("gemma2", {"hidden_act": ..., "sliding_window_size": 7}, "sliding_window_size"),
        ("llama", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("mistral", {"sliding_window": ...}, "sliding_window"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("qwen2", {"rope_theta": ...}, "rope_theta"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "sliding_window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "max_window_layers"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 5},
            "max_window_layers is 5",
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": -1},
            "max_window_layers",
        ),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries"),
        ("qwen2", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ("qwen2", {"layer_types": "full_attention"}, "layer_types"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("laneformer", {"num_lanes": ...}, "num_lanes"),
        ("laneformer", {"num_lanes": 3}, "num_lanes"),
        ("laneformer", {"num_lanes": 8}, "num_key_value_heads is 4"),
        ("laneformer", {"broadcast_delay": ...}, "broadcast_delay"),
        ("laneformer", {"broadcast_delay": 5}, "broadcast_delay is 5"),
        ("laneformer", {"broadcast_delay": -1}, "broadcast_delay"),
        ("laneformer", {"use_comm": False}, "use_comm"),
        ("laneformer", {"use_mlp_comm": False}, "use_mlp_comm"),
        ("laneformer", {"lm_head_type": "lane"}, "lm_head_type"),
        (
            "laneformer",
            {"lm_head_type": "vocab_parallel", "pre_norm_lane_agg": True},
            "pre_norm_lane_agg",
        ),
        ("laneformer", {"lm_head_type": "vocab_parallel", "vocab_size": 255}, "vocab_size is 255"),
        (
            "laneformer",
            {"lm_head_type": "vocab_parallel", "tie_word_embeddings": True},
            "tie_word_embeddings",
        ),
        ("laneformer", {"replicated_rmsn_scale": False}, "replicated_rmsn_scale"),
        ("laneformer", {"unclamped_layers": [1]}, "unclamped_layers"),
        ("laneformer", {"head_dim": 16}, "head_dim"),
        ("laneformer", {"norm_eps": 0}, "norm_eps"),
        ("laneformer", {"sliding_window": 8}, "sliding_window"),
        ("laneformer", {"swa_layers": [0]}, "sliding_window"),
        ("laneformer", {"sliding_window": 8, "swa_layers": [4]}, "swa_layers"),
        ("laneformer", {"sliding_window": 8, "swa_layers": ["0"]}, "swa_layers"),
        (
            "laneformer",
            {"sliding_window": 8, "sliding_window_n_layers": 5},
            "sliding_window_n_layers",
        ),
        (
            "laneformer",
            {"sliding_window": 8, "sliding_window_n_layers": [1]},
            "sliding_window_n_layers",
        ),
        (
            "laneformer",
            {"sliding_window": 8, "swa_layers": 1, "sliding_window_n_layers": 1},
            "swa_layers",
        ),
        ("laneformer", {"rope_scaling_args": {"factor": 8.0}}, "low_freq_factor"),
        ("laneformer", {"rope_scaling_args": LLAMA3, "rope_scaling": LLAMA3}, "rope_scaling_args"),
    ],
)
def test_a_family_names_what_it_cannot_do(
    family: str, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError, match="allowed") as error:
        from_config(base(family, **changes), "tiny")
    assert field in str(error.value)


@pytest.mark.parametrize("given", [..., None])
def test_key_heads_that_glm_leaves_out_are_not_taken_for_the_query_heads(given: object) -> None:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    with pytest.raises(ConfigError, match="num_key_value_heads is missing"):
        from_config(base("glm4_moe", num_key_value_heads=given, **experts), "tiny")


@pytest.mark.parametrize("kind", [..., None, "mixtrall", "gpt2", "phimoe", 3])
def test_an_unknown_family_lists_the_known_ones(kind: object) -> None:
    with pytest.raises(
        ConfigError, match=r"(allowed:|the engine runs) llama, mistral, qwen2, qwen3, laneformer"
    ):
        from_config(base("llama", model_type=kind), "tiny")


@pytest.mark.parametrize(
    ("kind", "changes", "meant"),
    [
        ("lama", {}, "llama"),
        ("qwen-3", {"head_dim": 16}, "qwen3"),
        ("mixtrall", {"num_local_experts": 8, "num_experts_per_tok": 2}, "mixtral"),
        ("mixtrall", {}, None),  # no experts
        ("gemma-2", {}, None),  # gates with SiLU
        ("minimax_m3", {"num_local_experts": 8, "num_experts_per_tok": 2}, "minimax_m2"),
        ("dbrx", {"num_local_experts": 8, "num_experts_per_tok": 2}, None),
        ("qwen3_moee", {}, None),
    ],
)
def test_a_family_is_hinted_at_only_where_its_fields_agree(
    kind: str, changes: dict[str, object], meant: str | None
) -> None:
    config = base("llama", model_type=kind, hidden_act="silu", **changes)
    with pytest.raises(ConfigError, match="model_type") as error:
        from_config(config, "tiny")
    hint = re.search(r"did you mean (.*?)\?", str(error.value))
    assert (meant in hint[1].split(" or ")) if hint and meant else not (hint or meant)


FIRST = ["sliding_attention"] + ["full_attention"] * 3
SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


@every("family", ALL)
@every(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 500000}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, SCALING),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            5e5,
            RopeScaling("linear", 2.0),
        ),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, 5e5, None),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            5e5,
            None,
        ),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5} | LLAMA3}, 5e5, SCALING),
        ({"rope_theta": 5e5, "rope_parameters": LLAMA3, "rope_scaling": LLAMA3}, 5e5, SCALING),
    ],
)
def test_both_spellings_of_rope(
    family: str, changes: dict[str, object], theta: float, scaling: RopeScaling | None
) -> None:
    rope = from_config(base(family, **changes), "tiny").rope
    assert (rope.theta, rope.scaling) == (theta, scaling)
    assert rope.style is (
        RopeStyle.INTERLEAVED if family.startswith("laneformer") else RopeStyle.HALF
    )


def test_an_old_llama_has_the_class_default_theta_and_all_its_heads() -> None:
    spec = from_config(base("llama", rope_theta=..., num_key_value_heads=...), "llama-2")
    assert spec.rope.theta == 10000.0
    assert spec.kv_heads == 8


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 100}, (100,) * 4),
        (
            "mistral",
            {"sliding_window": 100, "layer_types": ["full_attention", "sliding_attention"] * 2},
            (0, 100, 0, 100),
        ),
        (
            "qwen2",
            {"sliding_window": 100, "use_sliding_window": False, "max_window_layers": 2},
            (0,) * 4,
        ),
        (
            "qwen2",
            {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3},
            (0, 0, 0, 100),
        ),
        (
            "qwen3",
            {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 0},
            (100,) * 4,
        ),
        (
            "qwen3",
            {"sliding_window": 9, "use_sliding_window": True, "layer_types": FIRST},
            (9, 0, 0, 0),
        ),
        ("laneformer", {"sliding_window": 9, "swa_layers": [0, 2]}, (9, 0, 9, 0)),
        ("laneformer", {"sliding_window": 9, "swa_layers": 2}, (9, 9, 0, 0)),
        ("laneformer", {"sliding_window": 9, "sliding_window_n_layers": -1}, (0, 0, 0, 9)),
        ("laneformer", {"sliding_window": 9, "sliding_window_n_layers": 0}, (0,) * 4),
    ],
)
def test_windows_by_layer(
    family: str, changes: dict[str, object], windows: tuple[int, ...]
) -> None:
    assert from_config(base(family, **changes), "tiny").windows == windows


@pytest.mark.parametrize(
    ("changes", "head"),
    [
        ({}, LaneHead.MEAN),
        ({"pre_norm_lane_agg": True}, LaneHead.SUM),
        ({"lm_head_type": "vocab_parallel"}, LaneHead.VOCABULARY),
    ],
)
def test_how_lanes_end(changes: dict[str, object], head: LaneHead) -> None:
    lanes = from_config(base("laneformer", use_early_comm=True, **changes), "tiny").lanes
    assert lanes is not None
    assert (lanes.count, lanes.delay, lanes.head, lanes.early_exchange) == (4, 1, head, True)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("float16", DType.FP16), ("torch.bfloat16", DType.BF16), ("float32", DType.FP32)],
)
def test_both_spellings_of_the_type(text: str, dtype: DType) -> None:
    assert from_config(base("llama", torch_dtype=text), "tiny").dtype is dtype
    assert from_config(base("llama", torch_dtype=..., dtype=text), "tiny").dtype is dtype


def test_a_folder_and_its_file_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(base("llama")))
    assert load_model(folder) == load_model(str(folder / "config.json"))
    assert load_model(folder).name == "tiny-llama"


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_broken_config_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path)


_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10),
    st.floats(),
    st.text(CHARACTERS, max_size=5),
    st.lists(st.integers(), max_size=3),
    st.just({}),
)


@drawn(40)
@given(st.sampled_from(ALL), st.data())
def test_any_junk_is_either_a_model_or_a_clear_error(family: str, data: st.DataObject) -> None:
    config = base(family)
    field = data.draw(
        st.sampled_from(
            [
                *config,
                "rope_scaling",
                "rope_parameters",
                "layer_types",
                "sliding_window",
                "swa_layers",
                "head_dim",
            ]
        )
    )
    config[field] = data.draw(_JUNK)
    try:
        spec = from_config(config, "tiny")
    except ConfigError:
        return
    assert spec.parameters > 0
    assert len(spec.windows) == spec.layers
