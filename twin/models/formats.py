"""How a checkpoint stores its matrices: bits per element, and the scales that a step must read
beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from twin.errors import ConfigError
from twin.text import shown


class Role(Enum):
    """Kinds of matrices. Checkpoints choose their formats by kind; hand-offs and routing differ by
    kind too.
    """

    EMBED = "embed"  # the token table: one row a token
    HEAD = "head"  # the LM head
    ATTENTION = "attention"  # projections of an attention or linear-attention layer
    # its narrow ones that checkpoints leave unquantized: DeltaNet's decay and gate rows, an
    # indexer's head weights
    SMALL = "small"
    COMPRESS = "compress"  # DeepSeek-V4: what makes compressed keys
    INDEX = "index"  # DeepSeek-V4: the indexer's queries
    ROUTER = "router"
    DENSE = "dense"  # a feed-forward layer without experts
    SHARED = "shared"  # experts that every token visits
    EXPERT = "expert"  # routed experts
    HYPER = "hyper"  # the mixing matrices of hyper-connections


@dataclass(frozen=True, slots=True)
class Format:
    """A stored element type, with the scales of its blocks.

    A block is block[0] rows by block[1] columns and has one scale; blocks at an edge may be
    partial.
    """

    name: str
    bits: int  # of one element
    block: tuple[int, int] = (0, 0)  # (0, 0): no scales
    scale_bytes: int = 0  # of one block
    matrix_bytes: int = 0  # of one matrix: NVFP4's second scale

    def bytes(self, rows: int, cols: int) -> int:
        """Bytes that reading a matrix [rows, cols] moves, scales included."""
        return (
            -(-rows * cols * self.bits // 8)
            + self.scales(rows, cols) * self.scale_bytes
            + self.matrix_bytes
        )

    def scales(self, rows: int, cols: int) -> int:
        """Block scales of a matrix [rows, cols]."""
        high, wide = self.block
        return -(-rows // high) * -(-cols // wide) if high else 0


FP32 = Format("fp32", 32)
BF16 = Format("bf16", 16)
FP16 = Format("fp16", 16)
FP8_BLOCK = Format("fp8-128x128", 8, (128, 128), 4)  # DeepSeek-V3: E4M3, FP32 weight_scale_inv
FP8_BLOCK_E8M0 = Format("fp8-128x128-e8m0", 8, (128, 128), 1)  # DeepSeek-V4: scale_fmt ue8m0
MXFP4 = Format("mxfp4", 4, (1, 32), 1)  # OCP microscaling: E2M1, E8M0 scales
NVFP4 = Format("nvfp4", 4, (1, 16), 1, 4)  # E2M1, E4M3 scales, one FP32 a matrix
INT4_G32 = Format("int4-g32", 4, (1, 32), 2)  # compressed-tensors pack-quantized, BF16 scales
STORED = {f.name: f for f in (FP32, BF16, FP16, FP8_BLOCK, FP8_BLOCK_E8M0, MXFP4, NVFP4, INT4_G32)}


@dataclass(frozen=True, slots=True)
class Formats:
    """The format of each kind of matrix: `rest` unless `chosen` says otherwise."""

    rest: Format
    chosen: tuple[tuple[Role, Format], ...] = ()

    def of(self, role: Role) -> Format:
        return dict(self.chosen).get(role, self.rest)

    def with_role(self, role: Role, format: Format) -> Formats:
        """The same with another format for one kind."""
        kept = tuple((r, f) for r, f in self.chosen if r is not role)
        return Formats(self.rest, (*kept, (role, format)))


def format_named(name: str) -> Format:
    """The format of that name. Raises ConfigError."""
    if name not in STORED:
        raise ConfigError(f"weight format {shown(name)} is not known; allowed: {', '.join(STORED)}")
    return STORED[name]
