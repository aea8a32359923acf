"""Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention without positions, a dense
feed-forward layer and routed experts next to a shared one. Feed-forward layers have two matrices:
squared ReLU stands between them.

The draft layers (num_nextn_predict_layers) are no part of the model.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from twin.models import linear
from twin.models.bounds import FP32_LARGEST
from twin.models.config import Config
from twin.models.decoder import Tensor, whole
from twin.models.experts import Names, feed_shape
from twin.models.feeds import DenseFeed, ExpertFeed, Feed, NoFeed, Scoring
from twin.models.formats import Role
from twin.models.layered import check_experts, layered
from twin.models.layers import Layer
from twin.models.mixers import GroupedAttention, Mamba2, Mixer, NoMixer
from twin.models.modules import NEMOTRON_H
from twin.models.spec import ModelSpec, Rope
from twin.models.variant import Activation, Variant

NO_PART = ("mtp.",)  # draft layers
_MAMBA, _EXPERTS, _FULL, _DENSE = "M", "E", "*", "-"  # of hybrid_override_pattern
_KINDS = {  # the same of layers_block_type
    "mamba": _MAMBA,
    "linear_attention": _MAMBA,
    "moe": _EXPERTS,
    "attention": _FULL,
    "full_attention": _FULL,
    "mlp": _DENSE,
}
_COUNT = "n_routed_experts"
_NAMES = Names(
    *("mixer.gate", "mixer.experts", "", "up_proj", "down_proj"),
    shared="mixer.shared_experts",
    choice_bias="mixer.gate.e_score_correction_bias",
)


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `nemotron_h` configuration describes."""
    for key in ("attention_bias", "use_bias", "mamba_proj_bias"):
        fields.require(key, False, (False,), "biases of matrices are not described in this family")
    fields.require("sliding_window", None, (None,), "this family attends to all positions")
    fields.require("moe_latent_size", None, (None,), "experts in a latent space are not described")
    for key, function in (
        ("mamba_hidden_act", Activation.SILU),
        ("mlp_hidden_act", Activation.RELU2),
    ):
        fields.require(key, function.value, function.names, "other functions are not described")
    # of training, of other engines, of drafts, or what the fields that are read say, too
    fields.unused("rescale_prenorm_residual", "residual_in_fp32", "num_logits_to_keep", "norm_eps")
    fields.unused("time_step_min", "time_step_max", "time_step_floor", "chunk_size", "expand")
    fields.unused("use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap")
    fields.unused("rms_norm_eps", "time_step_rank")
    fields.unused("num_nextn_predict_layers", "mtp_layers_block_type")
    fields.unused("mtp_hybrid_override_pattern", "keep_mtp_spec_in_bf16")
    fields.unused("rope_theta", "partial_rotary_factor", "rope_scaling")  # nothing is rotated
    kinds = _kinds(fields)
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    fields.divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    head_dim = fields.count("head_dim" if "head_dim" in fields else "attention_head_dim")
    mixers: dict[str, Mixer] = {
        _FULL: GroupedAttention(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    }
    feeds: dict[str, Feed] = {}
    ffn = 0
    if _MAMBA in kinds:
        mixers[_MAMBA] = _mamba(fields)
    if _DENSE in kinds:
        ffn = fields.count("intermediate_size")
        feeds[_DENSE] = DenseFeed(width=ffn, gated=False)
    if _EXPERTS in kinds:
        experts = check_experts(fields, _experts(fields), _COUNT, "num_experts_per_tok")
        feeds[_EXPERTS], ffn = experts, experts.width
    # of a model without such layers
    fields.unused("intermediate_size", *_OF_EXPERTS, *_OF_STATES)
    layout = [Layer(mixers.get(kind, NoMixer()), feeds.get(kind, NoFeed())) for kind in kinds]
    return layered(
        fields.changed({"rms_norm_eps": fields.real("layer_norm_epsilon")}),
        family="nemotron_h",
        rope=Rope(10000.0),
        layout=layout,
        table=NEMOTRON_H,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        variant=Variant(activation=Activation.RELU2),
        ropes=(None,) * len(layout),
        by_layer=(Role.ATTENTION,),  # published ones leave some layers in 16 bits
    )


_OF_EXPERTS = (
    *(_COUNT, "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "routed_scaling_factor", "norm_topk_prob"),
    *("n_group", "topk_group"),
)
_OF_STATES = (
    *("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    *("use_conv_bias", "time_step_limit"),
)


def _kinds(config: Config) -> str:
    """A letter for each layer, from hybrid_override_pattern or layers_block_type."""
    said = config.texts("layers_block_type")
    if any(kind not in _KINDS for kind in said):
        raise config.refuse("layers_block_type", f"a list of {', '.join(_KINDS)}")
    named = "".join(_KINDS[kind] for kind in said)
    pattern = config.text("hybrid_override_pattern", named)
    if not pattern or set(pattern) - set(_KINDS.values()):
        raise config.refuse("hybrid_override_pattern", f"a letter of {_LETTERS} for each layer")
    if said and pattern != named:
        raise config.refuse("hybrid_override_pattern", f"{named}, as layers_block_type says")
    if "num_hidden_layers" in config and config.count("num_hidden_layers") != len(pattern):
        raise config.refuse("num_hidden_layers", f"{len(pattern)}, the layers that are named")
    return pattern


_LETTERS = f"{_MAMBA} (Mamba-2), {_EXPERTS} (experts), {_FULL} (attention) and {_DENSE} (dense)"


def _mamba(config: Config) -> Mamba2:
    heads, groups = config.count("mamba_num_heads"), config.count("n_groups")
    config.divides("mamba_num_heads", heads, "n_groups", groups)
    least, most = step_limit(config)
    return Mamba2(
        key_heads=groups,
        key_dim=config.count("ssm_state_size"),
        value_heads=heads,
        value_dim=config.count("mamba_head_dim"),
        conv=config.count("conv_kernel"),
        conv_bias=config.flag("use_conv_bias", True),
        least_step=least,
        most_step=most,
    )


def step_limit(config: Config) -> tuple[float, float | None]:
    """`time_step_limit`, whose end may be infinite: transformers 5 writes that as a mapping, others
    as more than FP32 has.

    The class of transformers takes time_step_min for the least step of a prompt's, and none for
    single steps; NVIDIA's code, and other engines, take this field for both.
    """
    value = config.get("time_step_limit")
    if value is None:
        return 0.0, None
    if isinstance(value, list | tuple) and value and _endless(value[-1]):
        ended = config.changed({"time_step_limit": [*value[:-1], 0.0]})
        return ended.reals("time_step_limit", 2)[0], None
    least, most = config.reals("time_step_limit", 2)
    if most < least:
        raise config.refuse("time_step_limit", "a least time step, and one that is not below it")
    return least, most


def _endless(value: object) -> bool:
    return value in _INFINITE or (isinstance(value, float) and value > FP32_LARGEST)


_INFINITE: tuple[object, ...] = ("Infinity", {"__float__": "Infinity"})


def _experts(config: Config) -> ExpertFeed:
    config.require("n_shared_experts", 1, (1,), "one shared expert is described")
    count, groups = config.count(_COUNT), config.count("n_group", 1)
    top_groups = config.count("topk_group", 1)
    if top_groups > groups:
        raise config.refuse("topk_group", f"up to n_group = {groups}", "correct one of the two")
    config.divides(_COUNT, count, "n_group", groups)
    return ExpertFeed(
        experts=count,
        top_k=config.count("num_experts_per_tok"),
        width=config.count("moe_intermediate_size"),
        shared_width=config.count("moe_shared_expert_intermediate_size"),
        scoring=Scoring.SIGMOID,
        renormalise=config.flag("norm_topk_prob", True),
        scaling=config.real("routed_scaling_factor", 1.0),
        groups=groups,
        top_groups=top_groups,
        choice_bias=True,
        gated=False,
    )


# ---- tensors -------------------------------------------------------------------------------------


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint."""
    return whole(
        spec,
        lambda i: {name: Tensor(*stored) for name, stored in _layer(spec, i).items()},
        embed="backbone.embeddings",
        norm="backbone.norm_f",
        layers="backbone.layers",
    )


def _layer(spec: ModelSpec, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Canonical name -> name and shape."""
    mixer, feed = spec.layer(layer).mixer, spec.layer(layer).feed
    norm = "ffn_norm" if isinstance(mixer, NoMixer) else "attn_norm"
    names: dict[str, str] = {}
    if isinstance(mixer, Mamba2):
        names = {name: f"mixer.{stored_as}" for name, stored_as in linear.MAMBA_TENSORS.items()}
        if not mixer.conv_bias:
            del names[linear.TAPS_BIAS]
    elif isinstance(mixer, GroupedAttention):
        names = {name: f"mixer.{name}_proj.weight" for name in "qkvo"}
    elif isinstance(feed, DenseFeed):
        names = {name: f"mixer.{name}_proj.weight" for name in ("up", "down")}
    elif isinstance(feed, ExpertFeed):
        names = _NAMES.alone(feed)
        for expert in range(feed.experts):
            names |= _NAMES.of(expert)
        names = {name: f"{module}.weight" for name, module in names.items()}
        names["choice_bias"] = _NAMES.choice_bias
    found: dict[str, tuple[str, tuple[int, ...]]] = {norm: ("norm.weight", (spec.hidden,))}
    for name, stored_as in names.items():
        shape = linear.mixer_shape(mixer, spec.hidden, name) or feed_shape(feed, spec.hidden, name)
        assert shape is not None
        if name == linear.TAPS:  # of a convolution of one channel each
            shape = (shape[0], 1, shape[1])
        found[name] = (stored_as, shape)
    return found


def canonical(spec: ModelSpec, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Taps without the channel that each has to itself."""
    return array[:, 0] if name.endswith(f".{linear.TAPS}") else array


def stored(spec: ModelSpec, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """The way back."""
    return array[:, None] if name.endswith(f".{linear.TAPS}") else array
