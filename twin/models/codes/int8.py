"""INT8: whole numbers from -127 to 127, and one FP32 scale for each row (output) of a matrix; or
from -128 on, and an FP16 scale for each 32 neighbours of a row, as GGUF's Q8_0 stores them.

A tile holds its rows one after the other, a byte a weight, and behind them a scale for each row. A
tile that is one of several column slices holds the scales again: 4 bytes for 2,048 weights cost
less than a place of their own, which each stage would have to look up in another memory, and which
routed experts would have to find by number.

Error of what the kernel computes: a thread multiplies its inputs as whole numbers of 16 bits,
scaled by the largest of the `pack` inputs that it holds, so each input is off by at most 1 in
65,000 of that one.
"""

from __future__ import annotations

import numpy as np

from twin.models.codes.coded import Code, Coded, Floats, in_groups, rounded_scales
from twin.models.formats import DECODED, INT8, INT8_G32

LARGEST = 127
SMALLEST_SCALE = np.float32(2.0**-100)  # of a row of zeros: neither zero nor subnormal


def quantise(weights: Floats) -> Coded:
    """Each row scaled by its largest element, and rounded to the nearest number, halves to even."""
    scales = np.maximum(
        np.abs(weights).max(axis=1, keepdims=True) / np.float32(LARGEST), SMALLEST_SCALE
    ).astype(np.float32)
    whole = np.clip(np.rint(weights / scales), -LARGEST, LARGEST)
    return Coded(INT8_CODE, whole.astype(np.int8).view(np.uint8), scales)


INT8_CODE = Code(
    INT8, np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32), np.float32, quantise
)


def quantise_groups(weights: Floats) -> Coded:
    """The same of each 32 neighbours, whose scale is rounded before the numbers are chosen."""
    groups = in_groups(weights, INT8_G32.block[1])
    scales = rounded_scales(np.abs(groups).max(axis=2) / np.float32(LARGEST), np.float16)
    whole = np.clip(np.rint(groups / scales[:, :, None]), -LARGEST, LARGEST).astype(np.int8)
    codes = whole.view(np.uint8).reshape(len(weights), -1)[:, : weights.shape[1]]
    return Coded(INT8_GROUPS, codes, scales)


INT8_GROUPS = Code(DECODED[INT8_G32.name], INT8_CODE.values, np.float16, quantise_groups)
