"""Dense families other than Llama, Mistral and Qwen: what their configurations mean, and what is
refused by name.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.models.test_config import LLAMA3, base
from tests.rows import every
from twin.errors import ConfigError
from twin.models.load import canonical, from_config, tensors
from twin.models.spec import DType, ModelSpec, Rope, RopeScaling
from twin.models.variant import LLAMA, Activation, Norms, Variant
from twin.plan.shards import rope_table, rope_tables, turning

FAMILIES = [
    *("phi3", "granite", "smollm3", "internlm3", "olmo2", "gemma", "gemma2", "gemma3_text"),
    *("seed_oss", "exaone4", "ernie4_5", "hunyuan_v1_dense"),
]
GELU = {"hidden_act": "gelu_pytorch_tanh"}


def of(family: str, **changes: object) -> ModelSpec:
    return from_config(base(family, **changes), "tiny")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_model_of_every_family_runs(family: str) -> None:
    spec = of(family)
    assert (spec.family, spec.layers, spec.hidden, spec.heads, spec.kv_heads) == (
        family,
        4,
        64,
        8,
        4,
    )
    assert spec.runnable_reason() is None
    shapes = {tensor.name: tensor.shape for tensor in tensors(spec).values()}
    assert sum(math.prod(shape) for shape in shapes.values()) == spec.parameters


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "seed_oss"])
def test_biases_of_attention_are_refused_where_the_family_has_none(family: str) -> None:
    with pytest.raises(ConfigError, match="attention_bias"):
        of(family, attention_bias=True)


@every("family", FAMILIES)
@every(
    ("changes", "field"),
    [
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "ntk"),
        ({"rms_norm_eps": ...}, "rms_norm_eps"),
    ],
)
def test_what_a_family_cannot_do_is_named(
    family: str, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError, match="allowed") as error:
        of(family, **changes)
    assert field in str(error.value)


@every(
    ("family", "changes", "field"),
    [
        ("granite", {"embedding_multiplier": 0}, "embedding_multiplier"),
        ("granite", {"residual_multiplier": "0.2"}, "residual_multiplier"),
        ("granite", {"attention_multiplier": float("nan")}, "attention_multiplier"),
        ("granite", {"logits_scaling": -1.0}, "logits_scaling"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 0]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("internlm3", {"bias": True}, "bias"),
        ("internlm3", {"qkv_bias": True}, "qkv_bias"),
        ("phi3", {"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        ("phi3", {"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor",
        ),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}, "long_factor"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1},
            "original_max_position_embeddings",
        ),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma2", {"attn_logit_softcapping": -50.0}, "attn_logit_softcapping"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation"),
    ],
)
def test_a_family_refuses_its_own_fields_by_name(
    family: str, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError, match="allowed") as error:
        of(family, **changes)
    assert field in str(error.value)


@pytest.mark.parametrize(
    "kind",
    [
        "phi",
        "phimoe",
        "internlm2",
        "apertus",
        "granitemoe",
        "falcon",
        "gemma3n",
        "cohere",
    ],
)
def test_a_family_that_is_not_understood_is_refused_by_its_name(kind: str) -> None:
    message = f"model_type is '{kind}'.* allowed: llama, .*gemma3_text.*; the engine runs all but "
    with pytest.raises(ConfigError, match=message):
        from_config(base("llama", model_type=kind), "tiny")


def test_what_each_family_does_otherwise_than_llama() -> None:
    root = 8.0  # of 64, exactly
    found = {family: of(family).variant for family in FAMILIES}
    assert found == {
        "phi3": LLAMA,
        "granite": Variant(score=1.0),
        "smollm3": LLAMA,
        "internlm3": LLAMA,
        "olmo2": Variant(norms=Norms.AFTER, whole_qk_norm=True),
        "gemma": Variant(activation=Activation.GELU, embedding=root),
        "gemma2": Variant(
            activation=Activation.GELU,
            norms=Norms.AROUND,
            embedding=root,
            score=1 / 16,
            score_cap=50.0,
            logit_cap=30.0,
        ),
        "gemma3_text": Variant(
            activation=Activation.GELU, norms=Norms.AROUND, embedding=root, score=1 / 16
        ),
        "seed_oss": LLAMA,
        "ernie4_5": LLAMA,
        "exaone4": Variant(norms=Norms.AFTER),
        "hunyuan_v1_dense": Variant(norms_turned=True),
    }


def test_an_alpha_of_hunyuan_stretches_the_base_of_all_rotations() -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    turned = of("hunyuan_v1_dense", rope_scaling=scaling, head_dim=128).rope
    assert turned == Rope(10000.0 * 1000.0 ** (128 / 126))
    with pytest.raises(ConfigError, match=r"rope_scaling: type is 'linear'; allowed: dynamic"):
        of("hunyuan_v1_dense", rope_scaling={**scaling, "type": "linear"})


def test_windows_of_exaone_4_are_where_positions_are() -> None:
    turned = Rope(10000.0)
    spec = of("exaone4", sliding_window=9, sliding_window_pattern=2)
    assert (spec.windows, spec.ropes) == ((9, 0, 9, 0), (turned, None, turned, None))
    plain = of("exaone4", sliding_window=None, sliding_window_pattern=None)
    assert (plain.windows, plain.ropes) == ((0,) * 4, ())


def test_only_full_attention_of_olmo_3_is_scaled() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    spec = of("olmo3", rope_theta=5e5, rope_scaling=scaling, sliding_window=9)
    near, far = Rope(5e5), Rope(5e5, scaling=RopeScaling("linear", 2.0))
    assert (spec.windows, spec.ropes) == ((9, 9, 9, 0), (near, near, near, far))
    with pytest.raises(ConfigError, match=r"rope_theta is 10000.*500000"):
        of("olmo3", sliding_window=9)


def test_a_bias_of_the_output_of_seed_oss_is_refused_by_its_field() -> None:
    with pytest.raises(ConfigError, match="attention_out_bias"):
        of("seed_oss", attention_out_bias=True)


def test_granites_multipliers_are_read() -> None:
    spec = of(
        "granite",
        embedding_multiplier=12,
        residual_multiplier=0.22,
        attention_multiplier=0.0078125,
        logits_scaling=16.0,
    )
    assert spec.variant == Variant(embedding=12.0, residual=0.22, score=0.0078125, logit=0.0625)


def test_a_cap_that_is_null_is_none_and_a_missing_one_the_classs() -> None:
    open_ = of("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None).variant
    assert (open_.score_cap, open_.logit_cap) == (None, None)
    assert of("gemma3_text", final_logit_softcapping=20.0).variant.logit_cap == 20.0


@pytest.mark.parametrize(("text", "factor"), [("float32", math.sqrt(2304)), ("bfloat16", 48.0)])
def test_gemmas_embeddings_grow_by_a_root_of_the_stored_type(text: str, factor: float) -> None:
    assert of("gemma2", hidden_size=2304, torch_dtype=text).variant.embedding == factor
    assert of("gemma", hidden_size=3072).variant.embedding == 55.5  # BF16 of 55.43


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("phi3", {"sliding_window": 9}, (9,) * 4),
        ("gemma2", {"sliding_window": 9}, (9, 0, 9, 0)),
        (
            "gemma2",
            {"sliding_window": 9, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            (0, 0, 0, 9),
        ),
        ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 3}, (9, 9, 0, 9)),
        ("smollm3", {"sliding_window": 9, "use_sliding_window": True}, (0, 0, 0, 9)),
        ("smollm3", {"sliding_window": 9, "use_sliding_window": False}, (0,) * 4),
    ],
)
def test_windows_by_layer(
    family: str, changes: dict[str, object], windows: tuple[int, ...]
) -> None:
    assert of(family, **changes).windows == windows


def test_layers_without_positions() -> None:
    turned = Rope(10000.0)
    assert of("smollm3").ropes == (turned, turned, turned, None)
    assert of("smollm3", no_rope_layers=[0, 1, 1, 1]).ropes == (None, turned, turned, turned)
    assert of("smollm3", no_rope_layers=[1] * 4).ropes == ()
    spec = of("smollm3", no_rope_layers=[0, 1, 1, 1])
    assert [spec.rotation(layer) for layer in range(4)] == [0, 1, 1, 1]
    (cos, sin), _ = rope_tables(spec, 5, present=5)
    assert (cos == 1).all()
    assert (sin == 0).all()


@pytest.mark.parametrize(
    "changes",
    [
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "rope_theta": ...,
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_type": "default"},
            },
        },
    ],
)
def test_gemma_3_turns_layers_with_a_window_otherwise(changes: dict[str, object]) -> None:
    spec = of("gemma3_text", sliding_window=9, sliding_window_pattern=2, **changes)
    far, near = Rope(1e6, scaling=RopeScaling("linear", 8.0)), Rope(1e4)
    assert spec.ropes == (near, far, near, far)
    assert spec.rope == far


def test_a_gemma_3_that_sees_images_is_its_text_model() -> None:
    """As the 4B model was published: what its text_config leaves out are the class's defaults."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    config = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"num_hidden_layers": 27},
        "torch_dtype": "bfloat16",
    }
    spec = from_config(config, "gemma-3-4b")
    assert spec.parameters == 3_880_263_168
    assert spec.rope == Rope(1e6, scaling=RopeScaling("linear", 8.0))
    assert spec.dtype is DType.BF16
    assert all(tensor.name.startswith("language_model.model.") for tensor in tensors(spec).values())
    with pytest.raises(ConfigError, match="text_config is missing"):
        from_config({"model_type": "gemma3"}, "gemma-3-4b")


def test_dynamic_rope_is_none_within_the_context() -> None:
    scaling = {"rope_type": "dynamic", "factor": 6.0}
    assert of("internlm3", rope_scaling=scaling).rope == Rope(10000.0)
    assert of(
        "internlm3", rope_theta=..., rope_parameters={"rope_theta": 5e7, **scaling}
    ).rope == Rope(5e7)
    with pytest.raises(ConfigError, match="dynamic"):
        of("llama", rope_scaling=scaling)


LONG = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phis_long_rope_has_a_factor_a_pair_and_grows_queries(kind: str) -> None:
    changes: dict[str, Any] = {
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": kind, **LONG},
    }
    spec = of("phi3", **changes)
    grown = math.sqrt(1 + math.log(8) / math.log(64))  # 512 positions of 64
    assert spec.rope == Rope(
        1e4,
        scaling=RopeScaling(
            "longrope", grown, original_context=64, short=(1.0, 1.5), long=(2.0, 4.0)
        ),
        rotated=4,
    )
    moved = {
        "rope_scaling": None,
        "partial_rotary_factor": None,
        "rope_parameters": {"rope_type": kind, "partial_rotary_factor": 0.5, **LONG},
    }
    assert of("phi3", **{**changes, **moved}).rope == spec.rope
    for present, factors in ((64, (1.0, 1.5)), (65, (2.0, 4.0))):
        cos, sin = rope_table(spec, 2, present=present)
        angles = np.array([1.0, 1e4**-0.5]) / factors
        assert np.allclose(cos[1], [*grown * np.cos(angles), 1, 1], atol=1e-7)
        assert np.allclose(sin[1], [*grown * np.sin(angles), 0, 0], atol=1e-7)


def test_a_part_of_a_head_is_turned_as_if_its_halves_were_neighbours() -> None:
    """The kernel turns element i with i + head_dim / 2: rows are packed so that it turns what the
    family means, and nothing else.
    """
    spec = of("phi3", hidden_size=128, partial_rotary_factor=0.75)  # 12 of 16 elements

    class Held:
        def __init__(self) -> None:
            self.spec, self.dtype = spec, DType.FP32

    rows = np.arange(32.0)[:, None]
    packed = turning(Held(), "q", rows)[:, 0].reshape(2, 2, 8)  # type: ignore[arg-type]
    assert packed[0].tolist() == [[0, 1, 2, 3, 4, 5, 12, 13], [6, 7, 8, 9, 10, 11, 14, 15]]
    assert (packed[1] == packed[0] + 16).all()
    assert turning(Held(), "v", rows) is rows  # type: ignore[arg-type]


def test_a_fused_matrix_gives_each_its_rows() -> None:
    spec = of("phi3")
    stored = np.arange((64 + 2 * 32) * 64, dtype=np.float32).reshape(-1, 64)
    parts = [canonical(spec, f"layers.1.{leaf}", stored) for leaf in "qkv"]
    assert [len(part) for part in parts] == [64, 32, 32]
    assert (np.concatenate(parts) == stored).all()
    both = np.arange(2 * 128 * 64, dtype=np.float32).reshape(-1, 64)
    assert (
        np.concatenate([canonical(spec, f"layers.0.{leaf}", both) for leaf in ("gate", "up")])
        == both
    ).all()


def test_gemmas_norms_are_stored_without_their_one() -> None:
    spec = of("gemma2")
    stored = np.full(64, 2.0**-9, np.float16)
    for name in ("final_norm", "layers.0.attn_norm", "layers.3.ffn_post_norm"):
        # BF16 and FP16 would lose it, or half of it
        assert (canonical(spec, name, stored) == np.float32(1 + 2.0**-9)).all()
    assert canonical(replace(spec, family="llama"), "final_norm", stored) is stored


# As published: families of before, by other names.
DISTILLED = {
    "DeepSeek-R1-Distill-Qwen-1.5B": (
        {
            "model_type": "qwen2",
            "num_hidden_layers": 28,
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "intermediate_size": 8960,
            "vocab_size": 151936,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rope_theta": 10000,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 21,
            "use_mrope": False,
            "torch_dtype": "bfloat16",
        },
        1_777_088_000,
    ),
    "DeepSeek-R1-Distill-Llama-8B": (
        {
            "model_type": "llama",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3,
            "attention_bias": False,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "torch_dtype": "bfloat16",
        },
        8_030_261_248,
    ),
}


@pytest.mark.parametrize("name", DISTILLED)
def test_deepseeks_distilled_models_are_ordinary_families(name: str) -> None:
    config, parameters = DISTILLED[name]
    spec = from_config(config, name)
    assert spec.parameters == parameters
    assert spec.runnable_reason() is None
    assert not any(spec.windows)
