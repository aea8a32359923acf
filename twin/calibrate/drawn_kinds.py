"""Models with low-bit weights or experts that a seed draws: families and formats are dealt in
turns, so that few models hold all of them; sizes are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from twin.models.formats import WHOLE_ROW, Role, format_named
from twin.models.load import from_config
from twin.models.quantized import requantized
from twin.models.spec import DType, ModelSpec

Card = TypeVar("Card")
DECK = 4  # tells the generator of a deal from that of sizes
GRAIN = 128  # of hidden sizes and of experts' widths
# as public checkpoints store them
FORMATS = ("fp8", "fp8-128x128", "int8", "int4-g128", "mxfp4", "nvfp4")
ATTENDED = (0.6, 2.0)  # elements of all query heads over the hidden size
KV_HEADS = (1, 2, 4, 8)
GROUPS = (1, 2, 4, 7, 8)
EMBEDDED = DType.BF16.value


@dataclass(frozen=True, slots=True)
class Mixture:
    """What is drawn of a family. Public models: Mixtral has 8 experts of 14,336 or 16,384 rows and
    takes 2, Qwen3 128 of 768 or 1,536 and takes 8, GPT-OSS 32 or 128 of 2,880 and takes 4.
    """

    family: str
    experts: tuple[int, ...]
    chosen: tuple[int, ...]
    width: tuple[int, int]
    hidden: tuple[int, int]
    head_dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertScope:
    """What is drawn for a kind of device."""

    mixtures: Mapping[str, Mixture]  # by family
    layers: tuple[int, int]
    vocab: tuple[int, int]
    stored_bytes: tuple[float, float]  # fewest, most


GPU = ExpertScope(
    mixtures={
        "mixtral": Mixture("mixtral", (8, 16), (2, 3), (3584, 14_336), (1536, 4096), (64, 128)),
        "qwen3_moe": Mixture(
            "qwen3_moe", (32, 64, 96, 128), (4, 6, 8), (768, 2560), (1536, 4096), (64, 128)
        ),
        "gpt_oss": Mixture("gpt_oss", (16, 32, 64, 128), (2, 4), (1024, 4096), (1536, 4096), (64,)),
    },
    layers=(8, 48),
    vocab=(32_000, 201_088),
    stored_bytes=(1e9, 40e9),
)
CPU = ExpertScope(
    mixtures={
        "mixtral": Mixture("mixtral", (4, 8), (2,), (128, 256), (128, 256), (32, 64)),
        "qwen3_moe": Mixture("qwen3_moe", (8, 16), (2, 4), (128, 256), (128, 256), (32, 64)),
        "gpt_oss": Mixture("gpt_oss", (4, 8), (2,), (128, 256), (128, 256), (32, 64)),
    },
    layers=(1, 3),
    vocab=(256, 2048),
    stored_bytes=(0.1e6, 20e6),
)
# families in the formats in which they are published, or most often converted to; GPT-OSS stores
# its experts in low-bit formats, the others their attention too
STORED = (
    ("gpt_oss", "mxfp4"),
    ("gpt_oss", "bf16"),
    ("qwen3_moe", "bf16"),
    ("qwen3_moe", "fp8-128x128"),
    ("qwen3_moe", "int4-g128"),
    ("mixtral", "bf16"),
    ("mixtral", "fp8-128x128"),
    ("mixtral", "int4-g128"),
)


def dealt(cards: Sequence[Card], seed: int, number: int) -> Card:
    """The card of model `number`: each of them once, shuffled, before any comes again."""
    turn, at = divmod(number, len(cards))
    order = np.random.default_rng((DECK, turn, seed)).permutation(len(cards))
    return cards[int(order[at])]


def dividing_heads(
    kv_heads: Sequence[int], groups: Sequence[int], ranks: int, shares: tuple[float, float]
) -> tuple[int, int]:
    """KV heads and the query heads on each, of those that divide over `ranks`; KV heads may also
    stand on several of them. `shares`: of the groups and of the KV heads.
    """
    kv = one_of([n for n in kv_heads if n % ranks == 0 or ranks % n == 0], shares[1])
    return kv, one_of([group for group in groups if group * kv % ranks == 0], shares[0])


def in_few_bits(spec: ModelSpec, name: str, ranks: int = 1) -> ModelSpec | None:
    """A dense shape stored in that format; None where its blocks do not divide a row, or a rank's
    part of it, as checkpoints have it.
    """
    wide = format_named(name).block[1]
    rows = (spec.hidden, spec.ffn / ranks, spec.q_size / ranks)
    if wide != WHOLE_ROW and any(row % wide for row in rows):
        return None
    return requantized(spec, format_named(name))


def with_experts(
    scope: ExpertScope, stored: tuple[str, str], generator: np.random.Generator, ranks: int = 1
) -> ModelSpec | None:
    """None for a draw without a model in the scope. All numbers are drawn before any is judged.
    Experts divide over `ranks` by their rows.
    """
    u = generator.uniform(size=9)
    family, name = stored
    mixture = scope.mixtures[family]
    hidden = grained(log_between(*mixture.hidden, u[0]), GRAIN)
    head_dim = one_of(mixture.head_dims, u[1])
    kv_heads, group = dividing_heads(KV_HEADS, GROUPS, ranks, (u[3], u[2]))
    heads = kv_heads * group
    experts, chosen = one_of(mixture.experts, u[4]), one_of(mixture.chosen, u[5])
    width = grained(log_between(*mixture.width, u[6]), GRAIN * ranks)
    layers, vocab = (
        round(log_between(*scope.layers, u[7])),
        grained(log_between(*scope.vocab, u[8]), GRAIN),
    )
    if not ATTENDED[0] <= heads * head_dim / hidden <= ATTENDED[1]:
        return None
    config = expert_config(
        family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        experts=experts,
        chosen=chosen,
        width=width,
    )
    spec = stored_in(from_config(config, family), name, ranks)
    if spec is None:
        return None
    low, high = scope.stored_bytes
    return spec if low <= spec.stored_bytes <= high else None


def expert_config(
    family: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    experts: int,
    chosen: int,
    width: int,
) -> dict[str, Any]:
    """A configuration of that family as Hugging Face has it."""
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rope_theta": 500_000.0,
        "num_experts_per_tok": chosen,
        **_own(family, layers, experts, width),
    }


def _own(family: str, layers: int, experts: int, width: int) -> dict[str, Any]:
    """What a family's configuration calls by names of its own."""
    if family == "qwen3_moe":
        own = {"num_experts": experts, "moe_intermediate_size": width, "norm_topk_prob": True}
        return {**own, "intermediate_size": width, "mlp_only_layers": []}
    own = {"num_local_experts": experts, "intermediate_size": width}
    if family == "mixtral":
        return own
    kinds = ("sliding_attention", "full_attention")
    return {
        **own,
        "layer_types": [kinds[layer % 2] for layer in range(layers)],
        "sliding_window": 128,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_scaling": {"rope_type": "default"},  # the class would have YaRN, with its own theta
    }


def stored_in(spec: ModelSpec, name: str, ranks: int = 1) -> ModelSpec | None:
    """A mixture of experts in that format, as its family is published; None as `in_few_bits`."""
    if name == EMBEDDED:
        return spec
    if spec.family == "gpt_oss":
        formats = spec.formats.with_role(Role.EXPERT, format_named(name))
        return replace(spec, stored=formats)
    return in_few_bits(spec, name, ranks)


def one_of(values: Sequence[Card], share: float) -> Card:
    return values[int(share * len(values))]


def log_between(low: float, high: float, share: float) -> float:
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def grained(size: float, grain: int) -> int:
    return max(grain, round(size / grain) * grain)
