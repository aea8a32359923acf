"""Small models of each family, with the configurations transformers takes and weights from a frozen
generator.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from twin.models.decoder import canonical_shape
from twin.models.experts import CHOSEN
from twin.models.load import checkpoint, from_config, stored, tensors
from twin.models.spec import DType, ModelSpec
from twin.plan.options import CollectiveKind, Limits, Options, Sampling
from twin.plan.shards import Array
from twin.plan.types import Plan
from twin.schedule.plans import build

SEED = 2024
AROUND_ONE = (
    "norm",
    "layer_scalar",
    "expert_scales",
    "hyper_scale",
)  # names of vectors that multiply
POSITIONS = 20  # more than the sliding windows below
TOLERANCE = 3e-5  # logits are about 4; the largest difference seen in FP32 is 2.3e-5, of Qwen 3.5

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_HYBRID: dict[str, Any] = {  # Qwen 3.5
    **{key: value for key, value in _SIZES.items() if key != "rope_theta"},
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-3,  # with less, transformers' own FP32 is 1e-4 from its FP64
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    },
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_NO_NEMOTRON = ("num_hidden_layers", "rms_norm_eps", "rope_theta")
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES, "rope_scaling": _LLAMA3},
    "llama-tied": {
        "model_type": "llama",
        **_SIZES,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "mistral": {"model_type": "mistral", **_SIZES, "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", **_SIZES, "tie_word_embeddings": True},
    "qwen2-window": {
        "model_type": "qwen2",
        **_SIZES,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **_SIZES, "head_dim": 16, "rope_theta": 1e6},
    "qwen3-yarn": {
        "model_type": "qwen3",
        **_SIZES,
        "head_dim": 16,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}

# Families that do something otherwise than Llama. All heads have 16 elements, so that those with
# the same kernel share it.
_WIDE: dict[str, Any] = {**_SIZES, "hidden_size": 128, "num_hidden_layers": 4}
_GEMMA: dict[str, Any] = {
    **_WIDE,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 10,
    "sliding_window": 7,
    "torch_dtype": "float32",
}
_GEMMA4: dict[str, Any] = {
    **{key: value for key, value in _SIZES.items() if key != "rope_theta"},
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 7,
    "hidden_size_per_layer_input": 0,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {"model_type": "phi3", **_WIDE, "sliding_window": 9, "pad_token_id": 0},
    "phi4": {
        "model_type": "phi3",
        **_WIDE,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 16,
        "pad_token_id": 0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        },
    },
    "granite": {
        "model_type": "granite",
        **_WIDE,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.375,
    },
    "smollm3": {"model_type": "smollm3", **_WIDE, "pad_token_id": 0},
    "internlm3": {
        "model_type": "internlm3",
        **_WIDE,
        "head_dim": 16,
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
    },
    "olmo2": {"model_type": "olmo2", **_WIDE},
    "olmo3": {
        "model_type": "olmo3",
        **_WIDE,
        "rope_theta": 500000.0,
        "sliding_window": 7,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "attention_factor": 1.2,
            "original_max_position_embeddings": 32,
        },
    },
    "ernie4-5": {
        "model_type": "ernie4_5",
        **_WIDE,
        "hidden_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "use_bias": False,
        "tie_word_embeddings": True,
    },
    "seed-oss": {"model_type": "seed_oss", **_WIDE, "head_dim": 16, "num_key_value_heads": 2},
    "exaone4": {
        "model_type": "exaone4",
        **_WIDE,
        "sliding_window": 7,
        "sliding_window_pattern": 4,
        "rope_scaling": _LLAMA3,
    },
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        **_WIDE,
        "hidden_size": 72,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 24,
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
    "hunyuan-moe": {
        "model_type": "hunyuan_v1_moe",
        **_SIZES,
        "hidden_size": 72,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "intermediate_size": 40,
        "num_experts": 9,
        "moe_topk": 3,
    },
    "gemma": {
        "model_type": "gemma",
        **_WIDE,
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
    "gemma2": {
        "model_type": "gemma2",
        **_GEMMA,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_GEMMA,
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma4": {"model_type": "gemma4_text", **_GEMMA4},
    "gemma4-experts": {
        "model_type": "gemma4_text",
        **_GEMMA4,
        "hidden_size": 72,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "intermediate_size": 88,
        "num_experts": 9,
        "top_k_experts": 3,
        "moe_intermediate_size": 40,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        **_SIZES,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3-moe-plain": {
        "model_type": "qwen3_moe",
        **_SIZES,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": False,
        "num_hidden_layers": 2,
    },
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        **_SIZES,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 96,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],  # intermediate_size wide, which is another width
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        **_SIZES,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 16,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "qwen3-5-moe": {
        "model_type": "qwen3_5_moe_text",
        **_HYBRID,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3-5": {
        "model_type": "qwen3_5_text",
        **_HYBRID,
        "linear_num_value_heads": 12,  # three a key head
        "linear_value_head_dim": 16,
    },
    "lfm2": {
        "model_type": "lfm2",
        **{key: value for key, value in _SIZES.items() if key != "rms_norm_eps"},
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "hidden_size": 96,
        "num_attention_heads": 12,
        "intermediate_size": 150,  # 128 of it, in whole thirty-seconds
        "block_multiple_of": 32,
        "conv_L_cache": 4,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "lfm2-moe": {
        "model_type": "lfm2_moe",
        **{key: value for key, value in _SIZES.items() if key != "rms_norm_eps"},
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "moe_intermediate_size": 48,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "glm4-moe": {
        "model_type": "glm4_moe",
        **_SIZES,
        "num_hidden_layers": 4,
        "hidden_size": 72,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "intermediate_size": 160,
        "moe_intermediate_size": 40,
        "n_routed_experts": 9,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
    "glm4-moe-plain": {
        "model_type": "glm4_moe",
        **_SIZES,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "use_qk_norm": False,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    "ernie4-5-moe": {
        "model_type": "ernie4_5_moe",
        **_SIZES,
        "num_hidden_layers": 4,
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 160,
        "moe_intermediate_size": 40,
        "moe_num_experts": 9,
        "moe_num_shared_experts": 2,
        "moe_k": 3,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        **_SIZES,
        "hidden_size": 88,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "intermediate_size": 40,
        "num_local_experts": 9,
        "num_experts_per_tok": 3,
        "rms_norm_eps": 1e-6,
    },
    "nemotron-h": {
        "model_type": "nemotron_h",
        **{key: value for key, value in _SIZES.items() if key not in _NO_NEMOTRON},
        "hidden_size": 72,
        "hybrid_override_pattern": "ME*-ME",
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "mamba_num_heads": 12,
        "mamba_head_dim": 8,
        "n_groups": 4,
        "ssm_state_size": 12,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_min": 1e-9,  # transformers clamps a prompt's steps to it, and no others
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 96,
        "n_routed_experts": 9,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "layer_norm_epsilon": 1e-3,
    },
    "nemotron-h-dense": {
        "model_type": "nemotron_h",
        **{key: value for key, value in _SIZES.items() if key not in _NO_NEMOTRON},
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 4,
        "ssm_state_size": 16,
        "conv_kernel": 2,
        "use_conv_bias": False,
        "time_step_min": 0.6,
        "time_step_limit": [0.6, float("inf")],
        "layer_norm_epsilon": 1e-3,
    },
    "granite4": {
        "model_type": "granitemoehybrid",
        **{key: value for key, value in _SIZES.items() if key != "rope_theta"},
        "num_hidden_layers": 4,
        "hidden_size": 96,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        "mamba_n_heads": 12,
        "mamba_n_groups": 1,
        "mamba_d_head": 16,
        "mamba_d_state": 12,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "intermediate_size": 40,
        "shared_intermediate_size": 88,
        "num_local_experts": 9,
        "num_experts_per_tok": 3,
        "position_embedding_type": "nope",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.25,
        "attention_multiplier": 0.5,
        "logits_scaling": 3.0,
        "rms_norm_eps": 1e-3,
    },
    "granite4-dense": {
        "model_type": "granitemoehybrid",
        **_SIZES,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_d_conv": 2,
        "mamba_conv_bias": False,
        "shared_intermediate_size": 96,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "rope",
        "attention_multiplier": 0.3,
        "rms_norm_eps": 1e-3,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
    },
    "deepseek-v4": {
        "model_type": "deepseek_v4",
        **{key: value for key, value in _SIZES.items() if key != "intermediate_size"},
        "num_hidden_layers": 5,
        "hidden_size": 72,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 24,
        "o_groups": 4,
        "o_lora_rank": 16,
        "sliding_window": 6,
        "layer_types": [
            "sliding_attention",
            *(2 * ["compressed_sparse_attention", "heavily_compressed_attention"]),
        ],
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 8,
        },
        "compress_rope_theta": 160000.0,
        "index_n_heads": 8,  # of few all may be negative, and entries equal
        "index_head_dim": 16,
        "index_topk": 2,  # of up to five entries
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 0.5,  # which gates reach
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "rms_norm_eps": 1e-6,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        **_SIZES,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "swiglu_limit": 0.5,  # which gates reach
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
}
ALL = CASES | FAMILIES

# GPUs, blocks per GPU, splits of a KV head, positions of a page, sampling
PLANS = [
    (1, 1, 1, 16, Sampling.GREEDY),
    (1, 4, 3, 2, Sampling.FULL),
    (2, 3, 2, 4, Sampling.GREEDY),
    (4, 2, 2, 1, Sampling.FULL),
]


class Table(dict[str, Array]):
    """Weights held in a dictionary."""

    def __init__(self, spec: ModelSpec, values: dict[str, Array]) -> None:
        super().__init__(values)
        self.spec = spec
        self.dtype = DType.FP32


def weights(config: dict[str, Any]) -> Table:
    """FP32 weights of a configuration. RandomState, because its numbers never change with numpy's
    version.
    """
    spec = from_config(config, "case")
    return Table(spec, _values(spec))


@lru_cache(maxsize=8)
def _values(spec: ModelSpec) -> dict[str, Array]:
    random = np.random.RandomState(SEED)
    values: dict[str, Array] = {}
    for name in tensors(spec):
        shape = canonical_shape(spec, name)
        if name.endswith(CHOSEN):  # a token's experts
            order = np.argsort(random.standard_normal((shape[0], spec.layer(0).feed.experts)))
            values[name] = order[:, : shape[1]]
            continue
        scale = 0.1 if len(shape) == 1 else shape[1] ** -0.5
        values[name] = (name.endswith(AROUND_ONE) + scale * random.standard_normal(shape)).astype(
            np.float32
        )
        values[name].flags.writeable = False  # they are shared
    return values


def as_stored(table: Table) -> dict[str, Array]:
    """The same weights as a checkpoint names and stores them."""
    return {
        tensor.name: stored(table.spec, names, table)
        for tensor, names in checkpoint(table.spec).items()
    }


def plans(config: dict[str, Any]) -> list[tuple[int, int, int, int, Sampling]]:
    """Those of PLANS that the family can have."""
    spec = from_config(config, "case")
    states = spec.recurrence
    # heads that are normed together, or states that share one key, are not divided
    together = spec.whole_qk_norm or (states is not None and states.key_heads == 1)
    return [
        options
        for options in PLANS
        if options[0] == 1
        or not (together or spec.heads % options[0] or spec.q_size % (8 * options[0]))
    ]


def tokens(config: dict[str, Any]) -> list[int]:
    return [
        int(t) for t in np.random.RandomState(SEED + 1).randint(0, config["vocab_size"], POSITIONS)
    ]


def plan(
    spec: ModelSpec, gpus: int, blocks: int, splits: int, page: int, sampling: Sampling, **more: Any
) -> Plan:
    """A plan on a machine without limits, unless `limits` are given."""
    limits = more.pop("limits", Limits(64, 1, 2**30, 2**40, True))
    collective = more.pop(
        "collective", CollectiveKind.PUSH if gpus > 1 or spec.lanes else CollectiveKind.NONE
    )
    options = Options(
        gpus=gpus,
        blocks=blocks,
        attention_splits=splits,
        kv_page=page,
        sampling=sampling,
        collective=collective,
        **{"context": 8, "max_context": 32, **more},
    )
    return build(spec, options, limits)
