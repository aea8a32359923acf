"""What the matrices of a model are called in checkpoints of its family: the names that
configurations of a quantization use.

A table takes the name of a Weight to that of a module in its layer; "{}" stands for an expert's
number, and names of a mixer other than softmax attention have its kind before them. Matrices that
no quantization touches (`KEPT`) need no name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from twin.frozen import frozen
from twin.models.formats import Role
from twin.models.mixers import DeltaNet, Mamba2, ShortConvolution
from twin.models.spec import ModelSpec
from twin.models.weight import Weight

Table = Mapping[str, str]
# What quantization tools leave alone: tables, routers, and the small matrices whose outputs steer
# everything else.
KEPT = (Role.EMBED, Role.HEAD, Role.ROUTER, Role.SMALL, Role.COMPRESS, Role.HYPER)
HEAD = "lm_head"
# Before "layers.N": as text models are published, and as they are called within others.
PREFIXES = (
    *("model.", "", "language_model.model.", "model.language_model.", "language_model."),
    *("model.language_model.model.", "model.text_model.", "backbone."),
)


def of_experts(experts: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Names of routed experts' matrices, each expert by its number in `experts`."""
    names = {"gate": gate, "up": up, "down": down}
    return {f"experts.{key}": f"{experts}.{{}}.{name}" for key, name in names.items()}


def of_shared(shared: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Names of the matrices of shared experts, which stand together."""
    names = {"gate": gate, "up": up, "down": down}
    return {f"shared_{key}": f"{shared}.{name}" for key, name in names.items()}


_GATED = ("gate_proj", "up_proj", "down_proj")
DENSE: Table = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
FUSED: Table = {
    **dict.fromkeys("qkv", "self_attn.qkv_proj"),
    "o": DENSE["o"],
    **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
    "down": DENSE["down"],
}
QWEN_EXPERTS: Table = {
    **DENSE,
    **of_experts("mlp.experts", *_GATED),
    **of_shared("mlp.shared_expert", *_GATED),
    "delta.qkvz": "linear_attn.in_proj_qkvz",
    "delta.o": "linear_attn.out_proj",
}
QWEN3_5: Table = {**QWEN_EXPERTS, "delta.qkvz": "linear_attn.in_proj_qkv"}  # and in_proj_z
LATENT: Table = {
    "q_a": "self_attn.q_a_proj",
    "q_b": "self_attn.q_b_proj",
    "q": DENSE["q"],
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    **dict.fromkeys(("k_up", "v_up"), "self_attn.kv_b_proj"),
    "o": DENSE["o"],
    **{key: DENSE[key] for key in ("gate", "up", "down")},
    **of_experts("mlp.experts", *_GATED),
    **of_shared("mlp.shared_experts", *_GATED),
}
GLM_EXPERTS: Table = {
    **DENSE,
    **of_experts("mlp.experts", *_GATED),
    **of_shared("mlp.shared_experts", *_GATED),
}
HUNYUAN: Table = {
    **DENSE,
    **of_experts("mlp.experts", *_GATED),
    **of_shared("mlp.shared_mlp", *_GATED),
}
# its dense MLP stands next to the experts, as shared ones do
GEMMA4: Table = {
    **DENSE,
    **of_experts("experts", *_GATED),
    **of_shared("mlp", *_GATED),
}
MIXTRAL: Table = {**DENSE, **of_experts("block_sparse_moe.experts", "w1", "w3", "w2")}
LFM2: Table = {
    **{key: DENSE[key] for key in "qkv"},
    "o": "self_attn.out_proj",
    "conv.conv_in": "conv.in_proj",
    "conv.o": "conv.out_proj",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
    **of_experts("feed_forward.experts", "w1", "w3", "w2"),
}
NEMOTRON_H: Table = {
    **{key: f"mixer.{key}_proj" for key in "qkvo"},
    "mamba.state_in": "mixer.in_proj",
    "mamba.o": "mixer.out_proj",
    **{key: f"mixer.{key}_proj" for key in ("up", "down")},
    **{f"experts.{key}": f"mixer.experts.{{}}.{key}_proj" for key in ("up", "down")},
    **{f"shared_{key}": f"mixer.shared_experts.{key}_proj" for key in ("up", "down")},
}
# gates and ups are one module, and so are all experts
GRANITE4: Table = {
    **{key: DENSE[key] for key in "qkvo"},
    "mamba.state_in": "mamba.in_proj",
    "mamba.o": "mamba.out_proj",
    **dict.fromkeys(("gate", "up", "shared_gate", "shared_up"), "shared_mlp.input_linear"),
    **dict.fromkeys(("down", "shared_down"), "shared_mlp.output_linear"),
    **dict.fromkeys(("experts.gate", "experts.up"), "block_sparse_moe.input_linear"),
    "experts.down": "block_sparse_moe.output_linear",
}
# its experts are one module
GPT_OSS: Table = {
    **DENSE,
    **dict.fromkeys(("experts.gate", "experts.up", "experts.down"), "mlp.experts"),
}
COMPRESSED: Table = {
    "q_a": "attn.wq_a",
    "q_b": "attn.wq_b",
    "kv": "attn.wkv",
    "o_a": "attn.wo_a",
    "o": "attn.wo_b",
    "index_q": "attn.indexer.wq_b",
    **of_experts("ffn.experts", "w1", "w3", "w2"),
    **of_shared("ffn.shared_experts", "w1", "w3", "w2"),
}


_KINDS: Mapping[type, str] = {
    DeltaNet: "delta.",
    Mamba2: "mamba.",
    ShortConvolution: "conv.",
}


@frozen
class Module:
    """A matrix of a layer: its kind, and its name below the prefixes."""

    role: Role
    name: str  # "layers.3.mlp.experts.7.gate_proj"
    layer: int

    @property
    def names(self) -> tuple[str, ...]:
        """All that it may be called."""
        return tuple(prefix + self.name for prefix in PREFIXES)


def modules(spec: ModelSpec, table: Table, *, each_expert: bool) -> Iterator[Module]:
    """The modules of all layers that a quantization may touch; of experts the first one of a layer,
    unless `each_expert`.
    """
    for index in range(spec.layers):
        kind = _KINDS.get(type(spec.layer(index).mixer), "")
        found: dict[str, Weight] = {}
        for weight in spec.layer_weights(index):
            if weight.role not in KEPT:
                found.setdefault(table[_key(weight, kind)], weight)
        for name, weight in found.items():
            count = weight.experts if each_expert and "{}" in name else 1
            for expert in range(count):
                yield Module(weight.role, f"layers.{index}.{name.format(expert)}", index)


def _key(weight: Weight, kind: str) -> str:
    if weight.role is Role.EXPERT:
        return f"experts.{weight.name}"
    return f"{kind}{weight.name}" if weight.role is Role.ATTENTION else weight.name
