"""Writes a model as a Hugging Face directory that this engine and transformers both open: for tests
and the demo.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from twin.engine import safetensors
from twin.engine.safetensors import NUMPY, Array
from twin.errors import ConfigError
from twin.files import write
from twin.models.load import checkpoint, stored
from twin.models.spec import DType, LaneHead, ModelSpec, RopeScaling
from twin.plan.shards import Weights

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_NAMES = {DType.FP16: "float16", DType.BF16: "bfloat16", DType.FP32: "float32"}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def save_checkpoint(
    directory: Path, weights: Weights, *, shards: int = 1, dtype: DType | None = None
) -> None:
    """config.json and the tensors, in `shards` files, stored as `dtype` (the weights' own unless
    given). Raises OutputError.

    No file has its name before it is whole, and the configuration comes last: a folder without it
    is no checkpoint.
    """
    spec, dtype = weights.spec, dtype or weights.dtype
    texts = {CONFIG: hf_config(spec, dtype)}
    table = list(checkpoint(spec).items())
    where: dict[str, str] = {}
    total = 0
    for shard in range(shards):
        file = SINGLE if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {
            t.name: _in_shape(stored(spec, names, weights), t.shape).astype(NUMPY[dtype])
            for t, names in table[shard::shards]
        }
        safetensors.write(directory / file, part)
        where |= dict.fromkeys(part, file)
        total += sum(array.nbytes for array in part.values())
    if shards > 1:
        texts = {INDEX: {"metadata": {"total_size": total}, "weight_map": where}} | texts
    write({directory / name: json.dumps(value, indent=2) + "\n" for name, value in texts.items()})


def hf_config(spec: ModelSpec, dtype: DType) -> dict[str, Any]:
    """The config.json of a model: what `twin.models.load.from_config` reads back as the same
    spec.
    """
    config: dict[str, Any] = {
        "model_type": spec.family,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "tie_word_embeddings": spec.tied,
        "hidden_act": "silu",
        "rope_theta": spec.rope.theta,
        "torch_dtype": _NAMES[dtype],
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if spec.rope.scaling:
        config["rope_scaling"] = _scaling(spec.rope.scaling)
    return config | (_lanes(spec) if spec.lanes else _dense(spec))


def _dense(spec: ModelSpec) -> dict[str, Any]:
    if spec.family not in _CLASSES:
        known = ", ".join((*_CLASSES, "laneformer"))
        raise ConfigError(
            f"{spec.name}: a {spec.family} configuration cannot be written; allowed: {known}; use "
            "the model's own folder"
        )
    found = set(spec.windows) - {0}
    if len(found) > 1 or (found and spec.family == "llama"):
        raise ConfigError(
            f"{spec.name}: windows {sorted(found)} cannot be written in a {spec.family} "
            "configuration"
        )
    window = max(found, default=None)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[spec.family]],
        "rms_norm_eps": spec.norm_eps,
        "head_dim": spec.head_dim,
    }
    if spec.family != "llama":
        config["sliding_window"] = window
    if spec.family.startswith("qwen"):
        config["use_sliding_window"] = window is not None
        config["max_window_layers"] = 0
    if 0 < spec.windows.count(0) < spec.layers:
        config["layer_types"] = [
            "sliding_attention" if w else "full_attention" for w in spec.windows
        ]
    return config


def _lanes(spec: ModelSpec) -> dict[str, Any]:
    lanes = spec.lanes
    assert lanes is not None
    config: dict[str, Any] = {
        "norm_eps": spec.norm_eps,
        "num_lanes": lanes.count,
        "broadcast_delay": lanes.delay,
        "use_early_comm": lanes.early_exchange,
        "lm_head_type": "vocab_parallel" if lanes.head is LaneHead.VOCABULARY else "replicate",
        "pre_norm_lane_agg": lanes.head is LaneHead.SUM,
    }
    if any(spec.windows):
        config["sliding_window"] = max(spec.windows)
        config["swa_layers"] = [layer for layer, window in enumerate(spec.windows) if window]
    return config


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


def _in_shape(array: Array, shape: tuple[int, ...]) -> Array:
    """A canonical array in a checkpoint's shape: as it is, or with its rows or its columns divided
    over lanes.
    """
    if len(shape) == 3 and shape[1] == len(array):  # [lanes, out, in / lanes]
        return np.moveaxis(array.reshape(len(array), shape[0], shape[2]), 1, 0)
    return array.reshape(shape)
