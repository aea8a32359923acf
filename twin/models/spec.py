"""What the plan needs to know about a model, independent of the family it came from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DType(Enum):
    """Storage types of weights and caches. The engine computes and exchanges in FP32."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def bytes(self) -> int:
        return 4 if self is DType.FP32 else 2


class RopeStyle(Enum):
    """HALF rotates element i with i + head_dim/2 (Hugging Face); INTERLEAVED rotates 2i with 2i+1."""

    HALF = "half"
    INTERLEAVED = "interleaved"


class LaneHead(Enum):
    """How lanes end: MEAN of normed lanes, norm of their SUM, or each lane its own VOCABULARY slice."""

    MEAN = "replicate"
    SUM = "pre_norm_lane_agg"
    VOCABULARY = "vocab_parallel"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling; `linear` uses `factor` alone."""

    kind: str  # "llama3" or "linear"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    style: RopeStyle = RopeStyle.HALF
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class Lanes:
    """Delayed tensor parallelism: `count` residual streams, others' partials land `delay` layers later."""

    count: int
    delay: int  # layers; 0 is ordinary tensor parallelism
    head: LaneHead = LaneHead.MEAN
    early_exchange: bool = False  # True: the first `delay` layers reduce at once; False: own part times sqrt(count)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense decoder: pre-norm RMSNorm, rotary attention with grouped queries, SwiGLU."""

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int  # most positions the checkpoint was trained for
    norm_eps: float
    rope: Rope
    windows: tuple[int, ...]  # per layer: attended positions including the newest, 0 for all
    tied: bool = False  # LM head shares the embedding table
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k before RoPE
    dtype: DType = DType.BF16
    lanes: Lanes | None = None

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_matrix_parameters(self) -> int:
        """Weights of one layer that every decoded token streams."""
        attention = self.hidden * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden
        return attention + 3 * self.hidden * self.ffn

    @property
    def layer_vector_parameters(self) -> int:
        """Norm scales and biases of one layer: resident, never streamed."""
        bias = self.q_size + 2 * self.kv_size if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return norms + bias

    @property
    def parameters(self) -> int:
        """All parameters, as published."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        layers = self.layers * (self.layer_matrix_parameters + self.layer_vector_parameters)
        return tables + layers + self.hidden

    @property
    def streamed_parameters(self) -> int:
        """Weights that one decode step must read: every layer's matrices and the LM head."""
        return self.layers * self.layer_matrix_parameters + self.vocab * self.hidden

    def kv_bytes(self, context: int, dtype: DType) -> int:
        """KV bytes that one step at `context` cached positions reads, over all layers."""
        per_position = 2 * self.kv_size * dtype.bytes
        return sum(min(context, w) if w else context for w in self.windows) * per_position
