"""DeepSeek-V4: compressed and sparse attention over one shared key-value head, hyper-connections,
hashed routing in the first layers.
"""

from __future__ import annotations

from dataclasses import replace

from twin.errors import ConfigError
from twin.models.config import Config, rope
from twin.models.decoder import Tensor, canonical_shape
from twin.models.deepseek_v3 import deepseek_experts
from twin.models.experts import CHOSEN, Names
from twin.models.feeds import ExpertFeed, Feed
from twin.models.formats import MXFP4, Role
from twin.models.layered import check_experts, kinds_of_layers, layered, layout
from twin.models.layers import HEAD_HYPER, HYPER_ENDS, HyperConnections
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
    fields.unused("num_nextn_predict_layers")  # drafts
    ratios = _ratios(fields)
    experts = check_experts(
        fields, deepseek_experts(fields), "n_routed_experts", "num_experts_per_tok"
    )
    # what its router adds corrects the choice, which a table needs none of
    experts = replace(experts, router_bias=False, choice_bias=experts.router_bias)
    hashed = replace(experts, hashed=True, choice_bias=False)
    hashed_layers = _hashed(fields)

    def feed(index: int) -> Feed:
        return hashed if index < hashed_layers else experts

    turned = rope(fields, theta=10000.0, style=RopeStyle.INTERLEAVED, simulated=True)
    wide = fields.real("compress_rope_theta")
    ropes = (replace(turned, scaling=None), replace(turned, theta=wide))
    layers = layout(fields, lambda i: _attention(fields, ratios[i]), feed)
    spec = layered(
        fields,
        family="deepseek_v4",
        rope=turned,
        layout=layers,
        table=COMPRESSED,
        ropes=tuple(ropes[ratio > 0] for ratio in ratios),  # only those that compress are stretched
        kv_heads=fields.count("num_key_value_heads", 1),
        head_dim=fields.count("head_dim"),
        ffn=experts.width,
        hyper=HyperConnections(
            residuals=fields.count("hc_mult"),
            iterations=fields.count("hc_sinkhorn_iters"),
            eps=fields.real("hc_eps", 1e-6),
        ),
    )
    return _with_expert_dtype(fields, spec)


_NAMES = {  # canonical name -> name, below a layer
    "attn_norm": "attn_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "q_a": "attn.wq_a.weight",
    "q_a_norm": "attn.q_norm.weight",
    "q_b": "attn.wq_b.weight",
    "kv": "attn.wkv.weight",
    "kv_norm": "attn.kv_norm.weight",
    "sinks": "attn.attn_sink",
    "o_a": "attn.wo_a.weight",
    "o": "attn.wo_b.weight",
    "compress_kv": "attn.compressor.wkv.weight",
    "compress_gate": "attn.compressor.wgate.weight",
    "compress_bias": "attn.compressor.ape",
    "compress_norm": "attn.compressor.norm.weight",
    "index_kv": "attn.indexer.compressor.wkv.weight",
    "index_gate": "attn.indexer.compressor.wgate.weight",
    "index_bias": "attn.indexer.compressor.ape",
    "index_norm": "attn.indexer.compressor.norm.weight",
    "index_q": "attn.indexer.wq_b.weight",
    "index_heads": "attn.indexer.weights_proj.weight",
    CHOSEN: "ffn.gate.tid2eid",
    **{f"{site}_hyper": f"hc_{site}_fn" for site in ("attn", "ffn")},
    **{f"{site}_hyper_{end}": f"hc_{site}_{end}" for site in ("attn", "ffn") for end in HYPER_ENDS},
}
_EXPERTS = Names(
    "ffn.gate", "ffn.experts", "w1", "w3", "w2", "ffn.shared_experts", choice_bias="ffn.gate.bias"
)


NO_PART = ("mtp.",)  # layers that only draft


def published_name(name: str) -> str:
    """The published name of a tensor that transformers wrote: it prefixes some, and takes one norm
    for another.
    """
    plain = name.removeprefix("model.").replace("embed_tokens.", "embed.")
    return plain.replace("hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint as it is published, without what only drafts."""
    assert spec.hyper is not None
    out = {
        name: Tensor(called, canonical_shape(spec, name))
        for name, called in (
            ("embed", "embed.weight"),
            ("lm_head", "head.weight"),
            ("final_norm", "norm.weight"),
            (HEAD_HYPER, "hc_head_fn"),
            *((f"{HEAD_HYPER}_{end}", f"hc_head_{end}") for end in HYPER_ENDS),
        )
    }
    for layer in range(spec.layers):
        for name, called in _of_layer(spec, layer).items():
            own = f"layers.{layer}.{name}"
            out[own] = Tensor(f"layers.{layer}.{called}", canonical_shape(spec, own))
    return out


def _of_layer(spec: ModelSpec, index: int) -> dict[str, str]:
    layer = spec.layer(index)
    assert isinstance(layer.mixer, CompressedAttention)
    assert isinstance(layer.feed, ExpertFeed)
    assert spec.hyper is not None
    own = {"attn_norm", "ffn_norm", *layer.mixer.vector_shapes()}
    own |= {weight.name for weight in layer.mixer.weights(spec.hidden, spec.formats)}
    own |= {name for name in spec.hyper.shapes(spec.hidden) if not name.startswith(HEAD_HYPER)}
    own |= {CHOSEN} if layer.feed.hashed else set()
    named = {name: called for name, called in _NAMES.items() if name in own}
    routed = _EXPERTS.alone(layer.feed)
    for expert in range(layer.feed.experts):
        routed |= _EXPERTS.of(expert)
    named |= {name: f"{called}.weight" for name, called in routed.items()}
    return named | ({"choice_bias": _EXPERTS.choice_bias} if layer.feed.choice_bias else {})


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
