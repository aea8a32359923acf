"""The lowest and highest value of every number in a configuration, each with its reason. No reader
has a limit of its own.

Where zero switches something off, the lowest value is 0; a reader that needs the field requires at
least 1 (`Config.count`).
"""

from __future__ import annotations

from twin.frozen import frozen

# the normal numbers of FP32: smaller ones may be flushed to zero
FP32_SMALLEST, FP32_LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
LARGEST_VOCABULARY = 2**24
MOST_LAYERS = 256
# of a model's matrices or caches: FP64, in which times are computed from them, counts exactly up to
# here
MOST_BYTES = 2**53


@frozen
class Range:
    """What a field may be, both ends included."""

    lowest: float
    highest: float
    reason: str

    def holds(self, value: float) -> bool:
        """False for NaN, too; an integer of any size is compared exactly."""
        return self.lowest <= value <= self.highest


_LAYERS = Range(
    0,
    MOST_LAYERS,
    "twice the deepest published model; building and proving a plan takes 3 s for 256 layers and "
    "grows with their square",
)
_WIDTH = Range(
    0,
    2**20,
    "19 times the widest published matrix; the product of three widths stays within 64 bits",
)
_HEADS = Range(0, 4096, "32 times the most published heads; every head is an item of the plan")
_EXPERTS = Range(0, 2**14, "32 times the most published experts; the plan numbers each of them")
_POSITIONS = Range(0, 2**30, "positions are 32-bit integers in the kernel, sums of two included")
_FACTOR = Range(
    2.0**-20,
    2.0**20,
    "published factors lie between 1 and 64; beyond 2^20 a rotation is lost in FP32",
)
_SCALE = Range(
    FP32_SMALLEST,
    FP32_LARGEST,
    "the engine computes in FP32 and a smaller number counts as zero there",
)
_RESIDUALS = Range(0, 64, "ranks and residuals are counted up to 64")

FIELDS: dict[str, Range] = {
    "vocab_size": Range(
        1,
        LARGEST_VOCABULARY,
        "token indices travel between blocks as FP32, which counts exactly up to 2^24",
    ),
    "max_position_embeddings": _POSITIONS,
    "original_max_position_embeddings": _POSITIONS,
    "sliding_window": _POSITIONS,
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "max_window_layers",
            "first_k_dense_replace",
            "num_hash_layers",
            "full_attention_interval",
            "decoder_sparse_step",
            "mlp_only_layers",
            "broadcast_delay",
            "no_rope_layer_interval",
            "sliding_window_pattern",
        ),
        _LAYERS,
    ),
    **dict.fromkeys(
        (
            "hidden_size",
            "intermediate_size",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "q_lora_rank",
            "kv_lora_rank",
            "o_lora_rank",
            "index_topk",
            "compress_ratios",
        ),
        _WIDTH,
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "global_head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "index_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
        ),
        Range(
            0,
            2**14,
            "32 times the largest published head; a head's query lies in the memory of one block",
        ),
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "num_key_value_heads",
            "num_global_key_value_heads",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "index_n_heads",
            "o_groups",
        ),
        _HEADS,
    ),
    **dict.fromkeys(
        (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "n_shared_experts",
            "num_experts_per_tok",
            "n_group",
            "topk_group",
        ),
        _EXPERTS,
    ),
    **dict.fromkeys(("num_lanes", "hc_mult"), _RESIDUALS),
    "no_rope_layers": Range(0, 1, "a layer has positions or it has not"),
    "hc_sinkhorn_iters": Range(
        1, 1024, "50 times the published rounds; each is computed in every layer"
    ),
    "rope_theta": Range(
        1.0,
        1e15,
        "below 1 later pairs turn faster than earlier ones; beyond 1e15 they do not turn within "
        "2^30 positions",
    ),
    "compress_rope_theta": Range(1.0, 1e15, "as for rope_theta"),
    "partial_rotary_factor": Range(2.0**-14, 1.0, "a share of a head"),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), _FACTOR),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha", "routed_scaling_factor"), _SCALE),
    "attention_factor": _FACTOR,
    **dict.fromkeys(
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        Range(0, 2.0**20, "published ones lie between 0.7 and 32; 0 means the default"),
    ),
    **dict.fromkeys(
        (
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
            "logits_scaling",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        ),
        Range(
            2.0**-20,
            2.0**20,
            "published ones lie between 1/128 and 256; beyond 2^20 FP32 loses what they are added "
            "to",
        ),
    ),
    **dict.fromkeys(("short_factor", "long_factor", "attention_factor"), _FACTOR),
    "rope_local_base_freq": Range(1.0, 1e15, "as for rope_theta"),
    **dict.fromkeys(
        ("rms_norm_eps", "norm_eps"),
        Range(FP32_SMALLEST, 1.0, "smaller is zero in FP32, larger than a normed mean square"),
    ),
    **dict.fromkeys(
        ("num_bits", "group_size", "weight_block_size"),
        Range(1, 2**16, "a format's block has two sides of at most 2^16"),
    ),
}
MOST_LISTED = 4 * MOST_LAYERS  # numbers in a list: those of every layer, with room for drafts
MOST_TEXTS = 2**16  # texts in a list: modules that a quantization leaves out
LONGEST_TEXT = 512  # characters of one of them


def quantity(number: float) -> str:
    """A limit as people write it: 1024, 2^20, 1e+15."""
    if isinstance(number, int):
        return (
            f"2^{number.bit_length() - 1}"
            if number >= 2**14 and not number & (number - 1)
            else str(number)
        )
    return f"{number:g}"


def whole(value: object) -> bool:
    """Whether a value is an integer, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)
