"""Small GGUF files as llama.cpp's converter writes them, by the package's own writer."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.engine.hf_cases import ALL, Table, weights
from twin.engine.tokenizer import byte_characters
from twin.models.load import from_config, tensors
from twin.plan.shards import Array

HEADS = {"llama": "llama", "llama-tied": "llama", "internlm3": "llama", "gemma3_text": "gemma3"}
_NOT_READ = ("olmo3", "seed-oss", "exaone4", "ernie4-5", "hunyuan")  # files of these architectures
PERMUTED = ("llama", "granite", "smollm3")


def _configs() -> dict[str, dict[str, Any]]:
    """The cases that a GGUF file can hold: it knows no windows of Mistral and Qwen 2. Experts, YaRN
    in one and architectures that are not read are refused.
    """
    left_out = ("mistral", "qwen2-window", "internlm3", "qwen3-yarn", *_NOT_READ)
    kept = {
        name: copy.deepcopy(config)
        for name, config in ALL.items()
        if name not in left_out and not from_config(config, name).layout
    }
    for config in kept.values():
        if "query_pre_attn_scalar" in config:  # a file says nothing of it: it is a head's size
            config["query_pre_attn_scalar"] = config["head_dim"]
    return kept


CONFIGS = _configs()


def architecture(config: dict[str, Any]) -> str:
    kind: str = config["model_type"]
    return HEADS.get(kind, kind)


def write_case(
    path: Path,
    config: dict[str, Any],
    stored: dict[str, Any] | None = None,
    *,
    words: bool = False,
    template: str = "{{ messages }}",
) -> Table:
    """A file of a case in FP32, whose weights are returned. `words`: with a tokenizer of bytes and
    a chat template.

    `stored`: in place of a matrix its (bytes, type) by its name in the file.
    """
    table = weights(config)
    writer = start(path, config)
    if words:
        add_words(writer)
        writer.add_chat_template(template)
    for name, tensor in named(config, table).items():
        data, kind = (stored or {}).get(name, (tensor, None))
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    finish(writer)
    return table


def add_words(writer: Any, way: str = "smollm") -> list[str]:
    """Byte-level BPE of 256 bytes, three merges, and tokens that begin, end and separate texts."""
    tokens = [*byte_characters(), "th", "the", "Ġthe", "<begin>", "<|im_end|>", "<|sep|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(way)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 259 + [3, 3, 4])
    writer.add_token_merges(["t h", "th e", "Ġ the"])
    writer.add_bos_token_id(259)
    writer.add_eos_token_id(260)
    return tokens


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def start(path: Path, config: dict[str, Any]) -> Any:
    """A writer with what the converter says of a model."""
    arch = architecture(config)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if "head_dim" in config:
        writer.add_key_length(head)
        writer.add_value_length(head)
    writer.add_rope_dimension_count(int(head * config.get("partial_rotary_factor", 1.0)))
    if arch in ("phi3", "gemma2", "gemma3"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    _own(writer, arch, config)
    _scaling(writer, config, head)
    return writer


def _own(writer: Any, arch: str, config: dict[str, Any]) -> None:
    if arch == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)
        writer.add_float32("gemma3.rope.freq_base_swa", config["rope_local_base_freq"])


def _scaling(writer: Any, config: dict[str, Any], head: int) -> None:
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array(_llama3(config, head), np.float32))
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        reach = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(reach) / math.log(original)))
        for name in ("short", "long"):
            factors = np.array(scaling[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


def _llama3(config: dict[str, Any], head: int) -> list[float]:
    """What Llama 3 divides each frequency by, as the converter computes it."""
    scaling, out = config["rope_scaling"], []
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    for pair in range(0, head, 2):
        length = 2 * math.pi * config["rope_theta"] ** (pair / head)
        if length < context / high:
            out.append(1.0)
        elif length > context / low:
            out.append(scaling["factor"])
        else:
            smooth = (context / length - low) / (high - low)
            out.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return out


def named(config: dict[str, Any], table: Table) -> dict[str, Array]:
    """FP32 tensors by their names in a file, rows of q and k as the converter turns them."""
    spec, arch = from_config(config, "case"), architecture(config)
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    known = gguf.get_tensor_name_map(kind, spec.layers)
    parts: dict[str, list[Array]] = {}
    for name, tensor in tensors(spec).items():
        array, leaf = table[name], name.rpartition(".")[2]
        if arch in PERMUTED and leaf in ("q", "k"):
            array = permuted(array, spec.heads if leaf == "q" else spec.kv_heads)
        module, _, end = tensor.name.rpartition(".")
        parts.setdefault(f"{known.get_name(module)}.{end}", []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def permuted(array: Array, heads: int) -> Array:
    """Halves of a head's rows become pairs."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
