"""Qwen 3 with experts: Qwen 3's attention, routed experts without shared ones."""

from __future__ import annotations

from twin.models import decoder
from twin.models.config import Config, rope
from twin.models.decoder import Tensor, layer_types
from twin.models.experts import Names
from twin.models.feeds import ExpertFeed
from twin.models.layered import check_experts, feed_of, grouped_heads, layered, layout
from twin.models.mixers import GroupedAttention
from twin.models.modules import QWEN_EXPERTS
from twin.models.spec import ModelSpec

_SAVED = "num_local_experts"
_NAMES = Names("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint."""
    return decoder.tensors(spec, _NAMES)


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `qwen3_moe` configuration describes."""
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not described",
    )
    # unlike Qwen 3's dense class this one has no default of its own for a head
    heads, kv_heads, head_dim = grouped_heads(fields)
    fields.require("use_qk_norm", True, (True,), "queries and keys of this family are normed")
    fields.require("shared_expert_intermediate_size", 0, (0,), "this family has no shared expert")
    window = _window(fields)
    experts = check_experts(fields, routed(fields), "num_experts", "num_experts_per_tok")
    layers = layout(
        fields,
        lambda i: GroupedAttention(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window, qk_norm=True
        ),
        feed_of(
            fields,
            experts,
            step=fields.count("decoder_sparse_step", 1),
            dense_layers=dense_layers(fields),
        ),
    )
    return layered(
        fields,
        family="qwen3_moe",
        rope=rope(fields, theta=None),
        layout=layers,
        table=QWEN_EXPERTS,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=experts.width,
    )


def _window(config: Config) -> int:
    """Of every layer, whatever max_window_layers says; 0: full attention, which null means."""
    config.unused("max_window_layers", "sliding_window")
    slides = config.flag("use_sliding_window", False)
    if slides and "sliding_window" in config.values:
        slides = "sliding_window" in config
    window = config.count("sliding_window") if slides else 0
    kinds = layer_types(config, window)
    if kinds and set(kinds) != {window}:
        raise config.refuse("layer_types", "layers that are all alike")
    return window


def routed(config: Config) -> ExpertFeed:
    """The routed experts of the Qwen families."""
    return ExpertFeed(
        experts=_count(config),
        top_k=config.count("num_experts_per_tok"),
        width=config.count("moe_intermediate_size"),
        renormalise=config.flag("norm_topk_prob", False),
    )


def _count(config: Config) -> int:
    """transformers 5 writes `num_local_experts`."""
    if "num_experts" not in config and _SAVED in config:
        return config.count(_SAVED)
    count = config.count("num_experts")
    if _SAVED in config and config.count(_SAVED) != count:
        raise config.refuse(_SAVED, f"the same as num_experts, {count}", "remove one of the two")
    return count


def dense_layers(config: Config) -> tuple[int, ...]:
    """`mlp_only_layers`: layers without experts."""
    return config.wholes("mlp_only_layers") if "mlp_only_layers" in config else ()
