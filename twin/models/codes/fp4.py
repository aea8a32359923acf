"""FP4 E2M1: a sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and these
below zero.

MXFP4 has a power of two (E8M0) for each 32 neighbours of a row. NVFP4 has an E4M3 number for each
16 and one FP32 scale for the matrix, which a tile holds for each row: matrices of several scales
share a stage, and 4 bytes a row are 0.2 % of 4,096 columns.

A tile holds two codes a byte, those of eight neighbours in a word from its lowest bits on, as the
checkpoints do.

Error of what the kernel computes: twice a weight is a whole number, and a thread multiplies it with
its inputs as whole numbers of 16 bits, scaled by the largest of the 16 that it holds, so each input
is off by at most 1 in 65,000 of that one. Products and sums are exact up to there.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from twin.models.codes.coded import Code, Coded, Floats
from twin.models.formats import DECODED

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([VALUES, -VALUES])
LARGEST, LARGEST_SCALE = np.float32(6.0), np.float32(448.0)  # E2M1's, and that of E4M3
SMALLEST = np.float32(2.0**-100)  # of a block of zeros


def quantise_mx(weights: Floats) -> Coded:
    """Each block scaled by the smallest power of two with which its largest element fits."""
    blocks = _blocks(weights, MX.format.block[1])
    most = np.maximum(np.abs(blocks).max(axis=2), SMALLEST)
    scales = np.exp2(np.ceil(np.log2(most / LARGEST))).astype(np.float32)
    return Coded(MX, _codes(blocks / scales[:, :, None], weights), scales)


def quantise_nv(weights: Floats) -> Coded:
    """Each block scaled by its largest element, rounded to E4M3; the largest block by 448."""
    blocks = _blocks(weights, NV.format.block[1])
    most = np.maximum(np.abs(blocks).max(axis=2), SMALLEST)
    outer = np.float32(most.max() / (LARGEST * LARGEST_SCALE))
    scales = (most / LARGEST / outer).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scales[scales == 0] = np.float32(2.0**-9)  # E4M3's smallest
    codes = _codes(blocks / (scales * outer)[:, :, None], weights)
    return Coded(NV, codes, scales, outer=np.full((len(weights), 1), outer, np.float32))


def _blocks(weights: Floats, wide: int) -> Floats:
    """[rows, blocks, wide]; what the last block lacks is zero."""
    rows, cols = weights.shape
    padded = np.zeros((rows, -(-cols // wide) * wide), np.float32)
    padded[:, :cols] = weights
    return padded.reshape(rows, -1, wide)


def _codes(scaled: Floats, weights: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    near = np.clip(scaled, -LARGEST, LARGEST).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return near.reshape(len(weights), -1)[:, : weights.shape[1]] & np.uint8(15)


MX = Code(DECODED["mxfp4"], VALUES, ml_dtypes.float8_e8m0fnu, quantise_mx)
NV = Code(DECODED["nvfp4"], VALUES, ml_dtypes.float8_e4m3fn, quantise_nv)
