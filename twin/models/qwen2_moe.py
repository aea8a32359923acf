"""Qwen 2 with experts (Qwen1.5-MoE): routed ones next to a gated shared one."""

from __future__ import annotations

from dataclasses import replace

from twin.models import decoder
from twin.models.config import Config, rope
from twin.models.decoder import Tensor
from twin.models.experts import Names
from twin.models.feeds import ExpertFeed
from twin.models.layered import check_experts, feed_of, grouped_heads, layered, layout
from twin.models.mixers import GroupedAttention
from twin.models.modules import QWEN_EXPERTS
from twin.models.qwen2 import windows
from twin.models.qwen3_moe import dense_layers, routed
from twin.models.spec import ModelSpec

NAMES = Names(
    *("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    shared="mlp.shared_expert",
    shared_gate="mlp.shared_expert_gate",
)


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint."""
    return decoder.tensors(spec, NAMES)


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `qwen2_moe` configuration describes."""
    heads, kv_heads, head_dim = grouped_heads(fields)
    biased, seen = fields.flag("qkv_bias", True), _windows(fields)
    experts = check_experts(fields, with_shared(fields), "num_experts", "num_experts_per_tok")
    return layered(
        fields,
        family="qwen2_moe",
        rope=rope(fields, theta=None),
        layout=layout(
            fields,
            lambda i: GroupedAttention(
                heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=seen[i], qkv_bias=biased
            ),
            feed_of(
                fields,
                experts,
                step=fields.count("decoder_sparse_step", 1),
                dense_layers=dense_layers(fields),
            ),
        ),
        table=QWEN_EXPERTS,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=experts.width,
    )


def with_shared(config: Config) -> ExpertFeed:
    """Routed experts, and a gated shared one."""
    shared = config.count("shared_expert_intermediate_size")
    return replace(routed(config), shared_width=shared, shared_gate=True)


def _windows(config: Config) -> tuple[int, ...]:
    """Without `layer_types` every second layer below max_window_layers has the window, the first
    one among them, where windows are switched on.
    """
    if "layer_types" in config or not config.flag("use_sliding_window", False):
        return windows(config)
    first, window = config.whole("max_window_layers"), config.count("sliding_window")
    layers = range(config.count("num_hidden_layers"))
    return tuple(window if i % 2 == 0 and i < first else 0 for i in layers)
