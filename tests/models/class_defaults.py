"""Configurations that leave keys out or set them to null, and what transformers' classes read then.

python -m tests.models.class_defaults    records class_defaults.json anew (needs the extra 'hf')
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.engine.hf_cases import ALL
from twin.data import data_dir, read_yaml

RECORD = Path(__file__).with_name("class_defaults.json")
AS_IT_IS = "as it is"
_LATENT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 3.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6}
_GEMMA3: dict[str, Any] = {
    key: value for key, value in ALL["gemma3"].items() if key != "torch_dtype"
}
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "sliding_window": 7,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def _without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def cases() -> dict[str, dict[str, Any]]:
    """Small configurations of every model_type that transformers knows, by name: as published, and
    with what few published ones switch on.
    """
    v4 = dict(read_yaml(data_dir("hwmodels") / "models" / "deepseek-v4-flash.yaml")["config"])
    v4 |= {"num_hidden_layers": 6, "compress_ratios": v4["compress_ratios"][:6]}
    found = dict(ALL)
    for name in ("qwen2", "qwen3", "qwen3-moe", "qwen2-moe", "smollm3"):
        found[f"{name}-slides"] = {**ALL[name], **_SLIDING, "max_window_layers": 1}
    found["qwen2-slides-by-layer"] = {
        **ALL["qwen2"],
        **_SLIDING,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    found["deepseek-v3"] = {"model_type": "deepseek_v3", **_LATENT}
    found["kimi-k2"] = {"model_type": "kimi_k2", **_LATENT}
    found["kimi-k25"] = {
        "model_type": "kimi_k25",
        "text_config": {"model_type": "kimi_k2", **_LATENT},
        "tie_word_embeddings": False,
        "vision_config": {"num_hidden_layers": 2},
    }
    found["deepseek-v4"] = _without(v4, "quantization_config", "torch_dtype")
    found["gemma4"] = _GEMMA4
    found["gemma4-separate-values"] = {**_GEMMA4, "attention_k_eq_v": False}
    found["gemma4-experts"] = {
        **_GEMMA4,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    }
    found["gemma4-seeing"] = {
        "model_type": "gemma4",
        "text_config": _GEMMA4,
        "tie_word_embeddings": True,
    }
    for name in ("qwen3-5", "qwen3-5-moe"):
        found[f"{name}-seeing"] = {
            "model_type": ALL[name]["model_type"].removesuffix("_text"),
            "text_config": ALL[name],
            "tie_word_embeddings": False,
        }
    found["gemma3-seeing"] = {
        "model_type": "gemma3",
        "text_config": _GEMMA3,
        "vision_config": {"num_hidden_layers": 2},
        "tie_word_embeddings": True,
    }
    return found


def variations(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was changed, and the configuration: as it is, without each of its keys, and with each
    null; of a text configuration inside, its keys too.
    """
    yield AS_IT_IS, dict(config)
    inner = config.get("text_config")
    if isinstance(inner, dict):
        for what, changed in variations(inner):
            if what != AS_IT_IS:
                yield f"text {what}", {**config, "text_config": changed}
    for key in config:
        if key not in ("model_type", "text_config"):
            yield f"without {key}", _without(config, key)
            yield f"{key} null", {**config, key: None}


def read_by_transformers(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration as its class writes it: every default of the class with its value. None
    where the class refuses it.
    """
    from transformers import AutoConfig

    given = copy.deepcopy(dict(config))
    kind = given["model_type"]
    if kind == "kimi_k2":  # of remote code, which is DeepSeek-V3's
        given["model_type"] = "deepseek_v3"
    try:
        made = AutoConfig.for_model(**given).to_dict()
    except Exception:  # its own validation raises errors of many kinds
        return None
    made = _of_the_model(json.loads(json.dumps(made)))
    inner = made.get("text_config")
    if inner is not None:
        text = _of_the_model(inner)
        made["text_config"] = {**text, "model_type": config["text_config"]["model_type"]}
    if _without_theta(made) or (inner is not None and _without_theta(inner)):
        return None
    return {**made, "model_type": kind}


def _of_the_model(made: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in made.items()
        if key not in _NOT_OF_THE_MODEL and not (key == "dtype" and value is None)
    }


def _without_theta(made: Mapping[str, Any]) -> bool:
    """Whether a rotation has no base: the class took the null, its model cannot be built."""
    parts = made.get("rope_parameters") or {}
    inner = [part for part in parts.values() if isinstance(part, dict)] or [parts]
    return any("rope_theta" in part and part["rope_theta"] is None for part in inner)


_NOT_OF_THE_MODEL = {
    "transformers_version",
    "output_hidden_states",
    "return_dict",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "id2label",
    "label2id",
    "problem_type",
    "_name_or_path",
    "output_attentions",
    "architectures",
    "initializer_range",
    "use_cache",
    "vision_config",
    "audio_config",
}


def built(config: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """Parameters of the model that transformers builds of a configuration, with its routers'
    corrections, and each layer's window (0: none). Of one that sees images, its text model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = copy.deepcopy(dict(config.get("text_config", config)))
    if given["model_type"] == "kimi_k2":
        given["model_type"] = "deepseek_v3"
    made = AutoConfig.for_model(**given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    added = ("e_score_correction_bias", "expert_bias")
    corrections = [b for key, b in model.named_buffers() if key.endswith(added)]
    # what all layers have alike, the classes of some families take from the configuration
    alike = given["model_type"] in ("mistral", "phi3", "mixtral")
    window = getattr(made, "sliding_window", None) if alike else None
    attentions = [getattr(layer, "self_attn", None) for layer in model.model.layers]
    # EXAONE 4 keeps the configuration's window in layers with full attention, too
    windows = (
        getattr(one, "sliding_window", window) if getattr(one, "is_sliding", True) else 0
        for one in attentions
    )
    return (
        sum(part.numel() for part in [*model.parameters(), *corrections]),
        tuple(seen or 0 for seen in windows),
    )


def defaults_elsewhere(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Variations of a case without a key that the class does not know either: what it means then,
    the code of the model says.
    """
    config = cases()[name]
    yield AS_IT_IS, config
    for key in config:
        changed = _without(config, key)
        if key in ("model_type", "text_config"):
            continue
        full = read_by_transformers(changed)
        if full is not None and key not in full and not key.startswith("rope_"):
            yield f"without {key}", changed


def main() -> None:
    import transformers

    record: dict[str, Any] = {"transformers": transformers.__version__, "read": {}, "built": {}}
    for name, config in cases().items():
        plain = read_by_transformers(config)
        assert plain is not None
        record["read"][name] = {AS_IT_IS: plain}
        for what, changed in variations(config):
            if what != AS_IT_IS:
                full = read_by_transformers(changed)
                record["read"][name][what] = None if full is None else difference(plain, full)
        record["built"][name] = {what: built(made) for what, made in defaults_elsewhere(name)}
    RECORD.write_text(_written(record))


def difference(plain: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """What `full` says otherwise than `plain`; keys that it has not are listed under ""."""
    changed = {key: value for key, value in full.items() if plain.get(key, ...) != value}
    gone = [key for key in plain if key not in full]
    return {**changed, **({"": gone} if gone else {})}


def applied(plain: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The way back."""
    return {
        key: value
        for key, value in {**plain, **change}.items()
        if key and key not in change.get("", [])
    }


def _written(record: Mapping[str, Any]) -> str:
    """One line a variation, so that a change of one default is a change of few lines."""
    parts = [f'"transformers": {json.dumps(record["transformers"])}']
    for kind in ("read", "built"):
        cases = [
            f"{json.dumps(name)}: {{\n"
            + ",\n".join(f"{json.dumps(what)}: {json.dumps(value)}" for what, value in of.items())
            + "\n}"
            for name, of in record[kind].items()
        ]
        parts.append(f'"{kind}": {{\n' + ",\n".join(cases) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
