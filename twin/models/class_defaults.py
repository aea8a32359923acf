"""What a key means that a configuration leaves out: the value that the family's configuration class
in transformers gives it (`tests/models/test_class_defaults.py` compares all of them).

Sizes that no published configuration leaves out are not here: readers require them by name. Null is
no missing key, and keeps the meaning that the family's code gives it.
"""

from __future__ import annotations

from collections.abc import Mapping

_LATENT: dict[str, object] = {  # of remote code too, by which Kimi K2 was published
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
}
_GEMMA4: dict[str, object] = {
    "num_key_value_heads": 4,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
}
_DEFAULTS: dict[str, dict[str, object]] = {  # by model_type
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32},
    "smollm3": {"num_key_value_heads": 4},
    "internlm3": {"num_key_value_heads": 2, "head_dim": 128},
    "gemma": {"num_key_value_heads": 16},
    "gemma2": {"num_key_value_heads": 4},
    "gemma3_text": {"num_key_value_heads": 4},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3_moe": {"num_key_value_heads": 4},
    "qwen3_next": {"norm_topk_prob": True},
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "deepseek_v4": {
        "scoring_func": "sqrtsoftplus",
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
    },
    "gemma4_text": _GEMMA4,
}


def completed(kind: str, config: Mapping[str, object]) -> dict[str, object]:
    """The configuration of a `model_type` with what its class gives to keys that it leaves out."""
    return {**_DEFAULTS.get(kind, {}), **config}
