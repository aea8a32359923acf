"""FP8 E4M3: a sign, four bits of exponent, three of mantissa; up to 448, and a NaN instead of
infinities.

Scales are FP32, one for each row, or one for each block of 128 x 128 as DeepSeek's and Qwen's
checkpoints have them (`weight_scale_inv`). A tile holds the scales of each of its rows: blocks
share rows out as they like, so the rows of a tile need not lie in one block; the same scale for 128
rows takes 4 bytes for 128 weights then, 3 % of the stream.

Error of what the kernel computes: weights become FP16 and FP32 exactly, and products and sums are
FP32.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from twin.models.codes.coded import Code, Coded, Floats
from twin.models.formats import DECODED

LARGEST = np.float32(448.0)
SMALLEST_SCALE = np.float32(2.0**-100)  # of a block of zeros: neither zero nor subnormal
VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def quantise(weights: Floats) -> Coded:
    """Each row scaled by its largest element."""
    scales = _scales(np.abs(weights).max(axis=1, keepdims=True))
    return Coded(ROWS, _codes(weights / scales), scales)


def quantise_blocks(weights: Floats) -> Coded:
    """Each block of 128 x 128 scaled by its largest element; blocks at an edge may be partial."""
    wide = BLOCKS.format.block[1]
    rows, cols = (-(-count // wide) for count in weights.shape)
    padded = np.zeros((rows * wide, cols * wide), np.float32)
    padded[: weights.shape[0], : weights.shape[1]] = np.abs(weights)
    blocks = _scales(padded.reshape(rows, wide, cols, wide).max(axis=(1, 3)))
    scales = np.repeat(blocks, wide, axis=0)[: len(weights)]
    return Coded(
        BLOCKS, _codes(weights / np.repeat(scales, wide, axis=1)[:, : weights.shape[1]]), scales
    )


def _scales(largest: Floats) -> Floats:
    scales: Floats = np.maximum(largest / LARGEST, SMALLEST_SCALE).astype(np.float32)
    return scales


def _codes(scaled: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.clip(scaled, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


ROWS = Code(DECODED["fp8"], VALUES, np.float32, quantise)
BLOCKS = Code(DECODED["fp8-128x128"], VALUES, np.float32, quantise_blocks)
