"""DeepSeek-V4: compressed and sparse attention over one shared key-value head, hyper-connections,
hashed routing in the first layers.
"""

from __future__ import annotations

from dataclasses import replace

from twin.errors import ConfigError
from twin.models.config import Config, rope
from twin.models.deepseek_v3 import deepseek_experts
from twin.models.feeds import Feed
from twin.models.formats import MXFP4, Role
from twin.models.layered import check_experts, kinds_of_layers, layered, layout
from twin.models.layers import HyperConnections
from twin.models.mixers import CompressedAttention
from twin.models.modules import COMPRESSED
from twin.models.schemes import said_of_experts
from twin.models.spec import ModelSpec, RopeStyle

# the published code overlaps windows and runs the indexer exactly where the ratio is 4
SPARSE_RATIO = 4
_RATES = {  # class defaults
    "sliding_attention": 0,
    "compressed_sparse_attention": SPARSE_RATIO,
    "heavily_compressed_attention": 128,
}
_HASHED, _SHARE = 3, 64 / 512


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `deepseek_v4` configuration describes."""
    fields = _of_layers(fields)
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not described",
    )
    if fields.count("qk_rope_head_dim") > fields.count("head_dim"):
        raise fields.refuse(
            "qk_rope_head_dim",
            f"up to head_dim = {fields.count('head_dim')}",
            "correct one of the two",
        )
    fields.unused("num_nextn_predict_layers", "hc_eps")  # drafts; what moves no bytes
    ratios = _ratios(fields)
    experts = check_experts(
        fields, deepseek_experts(fields), "n_routed_experts", "num_experts_per_tok"
    )
    hashed = replace(experts, hashed=True, router_bias=False)  # its choice needs no correction
    hashed_layers = _hashed(fields)

    def feed(index: int) -> Feed:
        return hashed if index < hashed_layers else experts

    layers = layout(fields, lambda i: _attention(fields, ratios[i]), feed)
    spec = layered(
        fields,
        family="deepseek_v4",
        rope=rope(fields, theta=10000.0, style=RopeStyle.INTERLEAVED, simulated=True),
        layout=layers,
        table=COMPRESSED,
        kv_heads=fields.count("num_key_value_heads", 1),
        head_dim=fields.count("head_dim"),
        ffn=experts.width,
        hyper=HyperConnections(
            residuals=fields.count("hc_mult"), iterations=fields.count("hc_sinkhorn_iters")
        ),
    )
    return _with_expert_dtype(fields, spec)


def _attention(config: Config, ratio: int) -> CompressedAttention:
    sparse = ratio == SPARSE_RATIO
    return CompressedAttention(
        heads=config.count("num_attention_heads"),
        head_dim=config.count("head_dim"),
        rope_dim=config.count("qk_rope_head_dim"),
        q_rank=config.count("q_lora_rank"),
        o_groups=config.count("o_groups"),
        o_rank=config.count("o_lora_rank"),
        window=config.count("sliding_window"),
        ratio=ratio,
        theta=config.real("compress_rope_theta" if ratio else "rope_theta"),
        index_heads=config.count("index_n_heads") if sparse else 0,
        index_dim=config.count("index_head_dim") if sparse else 0,
        top_k=config.count("index_topk") if sparse else 0,
    )


def _of_layers(config: Config) -> Config:
    """The same, with what transformers 5 writes by kind of layer in the published file's words."""
    plain: dict[str, object] = {}
    if "layer_types" in config and "compress_ratios" not in config:
        rates = config.part("compress_rates")
        kinds = kinds_of_layers(config, "layer_types", tuple(_RATES)) or ()
        if rates:
            rates.unused(*rates)
        if rates:
            sparse = "compressed_sparse_attention"
            rates.require(sparse, SPARSE_RATIO, (SPARSE_RATIO,), "only this ratio has an indexer")
        said = _RATES | (dict(rates.values) if rates else {})
        plain["compress_ratios"] = [said[kind] for kind in kinds]
    config.unused("partial_rotary_factor")  # the same, where it says so itself
    if "qk_rope_head_dim" not in config and "head_dim" in config:
        share = config.real("partial_rotary_factor", _SHARE)
        plain["qk_rope_head_dim"] = int(config.count("head_dim") * share)
    parameters = config.part("rope_parameters")
    if parameters and "compress" in parameters:  # of layers that compress; the others have theta
        parameters.unused("main", "compress")
        plain["rope_scaling"], plain["rope_parameters"] = parameters.values["compress"], None
    scaling = config.changed(plain).part("rope_scaling")
    if scaling:  # YaRN, whose factor of rotated elements the published code leaves out
        kept = scaling.changed(without=("rope_theta", "partial_rotary_factor")).values
        plain["rope_scaling"] = {"attention_factor": 1.0, **kept}
    return config.changed(plain)


def _hashed(config: Config) -> int:
    """How many of the first layers route by a table."""
    kinds = kinds_of_layers(config, "mlp_layer_types", ("hash_moe", "moe"))
    if kinds is None:
        return config.whole("num_hash_layers", _HASHED)
    hashed = sum(kind == "hash_moe" for kind in kinds)
    if "moe" in kinds[:hashed]:
        raise config.refuse("mlp_layer_types", "hash_moe in the first layers only")
    return hashed


def _ratios(config: Config) -> tuple[int, ...]:
    """`compress_ratios` of the decoder's layers; entries after them belong to drafts."""
    config.require("num_key_value_heads", 1, (1,), "one shared key-value head is described")
    heads = config.count("num_attention_heads")
    config.divides("num_attention_heads", heads, "o_groups", config.count("o_groups"))
    ratios, layers = config.wholes("compress_ratios"), config.count("num_hidden_layers")
    if len(ratios) < layers:
        count = (
            f"compress_ratios has {len(ratios)} entries; allowed: at least num_hidden_layers = "
            f"{layers}"
        )
        raise ConfigError(f"{config.name}: {count}; correct one of the two")
    return ratios[:layers]


def _with_expert_dtype(config: Config, spec: ModelSpec) -> ModelSpec:
    """`expert_dtype: fp4` stores the routed experts in blocks of 32 with E8M0 scales, whatever the
    rest is stored in.
    """
    part = config.part("quantization_config")  # transformers 5 writes it there
    holder = part if part and "expert_dtype" in part else config
    kind = holder.text("expert_dtype", "same")
    if kind not in ("same", "fp4", "fp8"):
        raise holder.refuse("expert_dtype", "fp4, fp8 or absent")
    if kind != "fp4" or (part and said_of_experts(part.values)):
        return spec
    return replace(spec, stored=spec.formats.with_role(Role.EXPERT, MXFP4))
