"""Which stored formats our kernel multiplies: the proof's own list."""

from __future__ import annotations

from twin.models.formats import WHOLE_ROW, Format
from twin.models.spec import ModelSpec
from twin.plan.matrix import Matrix

PLAIN = ("fp32", "bf16", "fp16")  # in a plan that the engine runs: its weight type
DECODED = {  # name -> bits, columns of a block; bytes of its scale, its zero point, a row's scale
    "int8": (8, None, 4, 0, 0),
    "fp8": (8, None, 4, 0, 0),
    "fp8-128x128": (8, 128, 4, 0, 0),
    "fp8-128x128-e8m0": (8, 128, 4, 0, 0),  # multiplied as the one above
    "int8-g32-fp16": (8, 32, 2, 0, 0),
    "mxfp4": (4, 32, 1, 0, 0),
    "nvfp4": (4, 16, 1, 0, 4),
    **{
        f"int4-g{wide}{zero}{scale}": (4, wide, 2, int(zero != ""), 0)
        for wide in (32, 64, 128)
        for zero in ("", "-zp")
        for scale in ("", "-fp16")
    },
    # GGUF's, on CPUs: a block's scales and addends all lie next to its codes
    "q4_0": (4, 32, 2, 0, 0),
    "q4_1": (4, 32, 4, 0, 0),
    "q5_0": (5, 32, 2, 0, 0),
    "q5_1": (5, 32, 4, 0, 0),
    "q8_0": (8, 32, 2, 0, 0),
    "gguf-mixed-32": (8, 32, 4, 0, 0),
    "q4_k": (4, 256, 16, 0, 0),
    "q5_k": (5, 256, 16, 0, 0),
    "q6_k": (6, 256, 18, 0, 0),
    "gguf-mixed-256": (6, 256, 36, 0, 0),
}
INTERLEAVED = 16  # rows of a tile of GGUF's blocks


def in_blocks(name: str) -> bool:
    """Is it one of GGUF's, which our kernel multiplies on CPUs alone?"""
    return name.startswith(("q", "gguf-"))


def streams(matrix: Matrix, stored: Format | None) -> bool:
    """Is the matrix stored as a model's weights are, as the kernel streams these? None: in the
    plan's weight type.
    """
    has = matrix.format
    if has is None or stored is None:
        return has is stored
    bits, wide, *sizes = DECODED[stored.name]
    return (
        has.name == stored.name.removesuffix("-e8m0")
        and has.coded
        and (has.bits, has.block) == (bits, (1, wide or WHOLE_ROW))
        and has.interleaved == (INTERLEAVED if in_blocks(stored.name) else 0)
        and [has.scale_bytes, has.zero_bytes, has.row_bytes] == sizes
    )


def multiplied(spec: ModelSpec) -> bool:
    """Are all matrices of a model in formats that the kernel multiplies?"""
    return spec.stored is None or all(
        weight.format.name in (*PLAIN, *DECODED) for weight in spec.weights()
    )
