"""How a checkpoint stores its matrices: bits per element, and the scales that a step must read
next to them.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from twin.errors import ConfigError
from twin.frozen import frozen
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


@frozen
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
    zero_bytes: int = 0  # of one block: the code that stands for zero
    row_bytes: int = 0  # of one row of a coded tile: NVFP4's second scale
    interleaved: int = 0  # rows whose blocks a coded tile interleaves: GGUF's, on CPUs alone
    # the engine decodes it (twin/models/codes), and [rows, cols] is a tile of its stream
    coded: bool = False

    def bytes(self, rows: int, cols: int) -> int:
        """Bytes that reading a matrix [rows, cols] moves, scales included.

        Each block column of a coded tile has scales for whole SCALED_ROWS, and the tile fills whole
        units.
        """
        if self.coded:
            filled = -(-rows // self.scaled_rows) * self.scaled_rows
            size = self.whole_rows(rows) * cols * self.bits // 8 + filled * self.scaling(cols)
            return -(-size // UNIT_BYTES) * UNIT_BYTES
        return (
            -(-rows * cols * self.bits // 8)
            + self.scales(rows, cols) * (self.scale_bytes + self.zero_bytes)
            + self.matrix_bytes
        )

    def whole_rows(self, rows: int) -> int:
        """Rows of a coded tile with those that fill its last loads: a load has PACK columns of as
        many rows as it then holds.
        """
        at_once = self.interleaved or max(1, LOAD_BITS // (PACK * self.bits))
        return -(-rows // at_once) * at_once

    @property
    def scaled_rows(self) -> int:
        """Rows of a coded tile that its scales are filled up to."""
        return self.interleaved or SCALED_ROWS

    def scaling(self, cols: int) -> int:
        """Bytes of a row's scales and zero points in a coded tile of so many columns."""
        return self.scales(1, cols) * (self.scale_bytes + self.zero_bytes) + self.row_bytes

    def scales(self, rows: int, cols: int) -> int:
        """Block scales of a matrix [rows, cols]."""
        high, wide = self.block
        return -(-rows // high) * -(-cols // wide) if high else 0

    @property
    def grain(self) -> int:
        """Columns that no tile divides: a whole load, and a whole block unless it is the row."""
        return max(PACK, self.block[1] if self.block[1] != WHOLE_ROW else 1)

    @property
    def row_group(self) -> int:
        """Neighbours in a row that share a scale of this row alone, which is not cut. 1: none, or
        the whole row, whose scale each of its slices has.
        """
        high, wide = self.block
        return wide if high == 1 and wide != WHOLE_ROW else 1


UNIT_BYTES = 16  # a lane's load, and the grain of bulk copies
SCALED_ROWS = 8  # of a tile, whose scales of a block column a lane loads at once
LOAD_BITS = 8 * UNIT_BYTES
# Elements of a row that a GPU's thread holds at once next to quantised weights, whatever a matrix's
# format: a load of 8-bit weights, or of those of two rows in four bits. Of 32 elements in four bits
# and one row, thread and load, the residual of 4,096 columns alone took 32 registers more: the
# kernels of Qwen3-8B and Llama-3.1-8B spilled 57 and 270 words.
PACK = 16
WHOLE_ROW = 1 << 30  # columns of a block that is as wide as any row

FP32 = Format("fp32", 32)
BF16 = Format("bf16", 16)
FP16 = Format("fp16", 16)
FP8_BLOCK = Format("fp8-128x128", 8, (128, 128), 4)  # DeepSeek-V3: E4M3, FP32 weight_scale_inv
FP8_BLOCK_E8M0 = Format("fp8-128x128-e8m0", 8, (128, 128), 1)  # DeepSeek-V4: scale_fmt ue8m0
MXFP4 = Format("mxfp4", 4, (1, 32), 1)  # OCP microscaling: E2M1, E8M0 scales
NVFP4 = Format("nvfp4", 4, (1, 16), 1, 4)  # E2M1, E4M3 scales, one FP32 a matrix
# -127..127 and one FP32 scale for each output
INT8 = Format("int8", 8, (1, WHOLE_ROW), 4, coded=True)
# -128..127 and an FP16 scale for each 32 neighbours: what GGUF's Q8_0 and Q5_0 mean
INT8_G32 = Format("int8-g32-fp16", 8, (1, 32), 2)
FP8 = Format("fp8", 8, (1, WHOLE_ROW), 4, coded=True)  # E4M3 and one FP32 scale for each output
# Whole numbers in groups of a row's neighbours with 16-bit scales: symmetric, or with a zero point
# (-zp) for each group, which takes a byte in a tile; scales in BF16, or as AWQ and GPTQ have them
# (-fp16).
INT4 = tuple(
    Format(f"int4-g{wide}{zero}{scale}", 4, (1, wide), 2, zero_bytes=int(bool(zero)))
    for wide in (32, 64, 128)
    for zero in ("", "-zp")
    for scale in ("", "-fp16")
)
FP4 = (MXFP4.name, NVFP4.name)
# GGUF's, of which CPUs multiply what a file stores; the scales of a block are all next to its codes
GGUF_32 = (
    Format("q4_0", 4, (1, 32), 2),
    Format("q4_1", 4, (1, 32), 4),
    Format("q5_0", 5, (1, 32), 2),
    Format("q5_1", 5, (1, 32), 4),
    Format("q8_0", 8, (1, 32), 2),
)
GGUF_256 = (
    Format("q4_k", 4, (1, 256), 16),
    Format("q5_k", 5, (1, 256), 16),
    Format("q6_k", 6, (1, 256), 18),
)
GGUF = (*GGUF_32, *GGUF_256)
# what holds several of them in one matrix without rounding (twin/models/codes/gguf.py)
MIXED_32, MIXED_256 = (
    Format("gguf-mixed-32", 8, (1, 32), 4),
    Format("gguf-mixed-256", 6, (1, 256), 36),
)
MIXED = (MIXED_32, MIXED_256)
# GGUF's types whose numbers a GPU's formats have, too, and which: the same codes and scales in
# another order. Others become the weight type there.
ON_GPUS = {"q4_0": "int4-g32-fp16", "q5_0": INT8_G32.name, "q8_0": INT8_G32.name}
BLOCK_ROWS = 16  # of a tile that are interleaved: lanes of the widest vector
FORMATS = (
    FP32,
    BF16,
    FP16,
    INT8,
    INT8_G32,
    FP8,
    FP8_BLOCK,
    FP8_BLOCK_E8M0,
    MXFP4,
    NVFP4,
    *INT4,
    *GGUF,
)
STORED = {f.name: f for f in FORMATS}
SHORT = {"int4": "int4-g128"}  # names for those that most people mean
# In the order of the kernel's numbers for them, from 1 on.
# What the engine streams of a dense model's matrices, by the name of what the model stores: there
# each row of a tile has its own scales, also where a checkpoint gives several rows, or all of a
# matrix, the same ones.
DECODED = {
    f.name: f
    for f in (
        INT8,
        FP8,
        Format("fp8-128x128", 8, (1, 128), 4, coded=True),
        *(replace(form, coded=True) for form in INT4),
        replace(MXFP4, coded=True),
        replace(NVFP4, matrix_bytes=0, row_bytes=4, coded=True),
        replace(INT8_G32, coded=True),
        *(replace(form, coded=True, interleaved=BLOCK_ROWS) for form in (*GGUF_32, MIXED_32)),
        *(replace(form, coded=True, interleaved=BLOCK_ROWS) for form in (*GGUF_256, MIXED_256)),
    )
}
# names of those without scales, which are the engine's weight types
PLAIN = ("fp32", "bf16", "fp16")
# what the engine decodes as another format, whose scales of blocks are FP32, one of each row
DECODED_AS = {FP8_BLOCK_E8M0.name: "fp8-128x128"}


def decoded(form: Format) -> Format | None:
    """As the engine has a matrix of this format; None where it decodes no such."""
    return DECODED.get(DECODED_AS.get(form.name, form.name))


@frozen
class Formats:
    """The format of each kind of matrix: `rest` unless `chosen` says otherwise, or `layers` of a
    single one.
    """

    rest: Format
    chosen: tuple[tuple[Role, Format], ...] = ()
    layers: tuple[
        tuple[tuple[str, Format], ...], ...
    ] = ()  # of each: (a matrix's name, its format)

    def of(self, role: Role) -> Format:
        return dict(self.chosen).get(role, self.rest)

    def with_role(self, role: Role, format: Format) -> Formats:
        """The same with another format for one kind."""
        kept = tuple((r, f) for r, f in self.chosen if r is not role)
        return replace(self, chosen=(*kept, (role, format)))

    def in_layer(self, layer: int, name: str) -> Format | None:
        """The format of one matrix of a layer, where it has one of its own."""
        return dict(self.layers[layer]).get(name) if self.layers else None

    def turned(self, plain: Format, *, on_gpus: bool = False) -> Formats | None:
        """The same with GGUF's blocks turned into `plain`, or `on_gpus` into what ON_GPUS says but
        for the LM head's, which no GPU has multiplied in few bits; None where all is in `plain`
        then.
        """

        def made(form: Format) -> Format | None:
            if form not in (*GGUF, *MIXED):
                return form
            name = ON_GPUS.get(form.name) if on_gpus else None
            return STORED[name] if name else None

        kept = tuple(
            (role, found)
            for role, form in self.chosen
            if (found := made(form)) and not (form in GGUF and role is Role.HEAD)
        )
        layers = tuple(
            tuple((name, found) for name, form in layer if (found := made(form)))
            for layer in self.layers
        )
        if self.rest == plain and not kept and not any(layers):
            return None
        return Formats(self.rest, kept, layers)


def format_named(name: str) -> Format:
    """The format of that name. Raises ConfigError."""
    name = SHORT.get(name, name)
    if name not in STORED:
        raise ConfigError(f"weight format {shown(name)} is not known; allowed: {', '.join(STORED)}")
    return STORED[name]
