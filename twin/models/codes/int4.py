"""INT4 in groups of 32, 64 or 128 neighbours of a row: numbers of four bits, and a scale of 16 bits
for each group. Symmetric groups hold -8 to 7; with a zero point, 0 to 15 less that.

A tile holds two codes a byte, those of eight neighbours in a word from its lowest bits on. A
thread's load of 16 bytes is 16 neighbours of two rows, those of a row all of one group. Behind the
codes lie the scales, and behind these the zero points, a byte each. A byte a group of 128 is 1.5 %
of the stream.

Error of what the kernel computes: a thread multiplies its inputs as whole numbers of 16 bits,
scaled by the largest of the 16 that it holds, so each input is off by at most 1 in 57,000 of that
one. Products and sums are exact up to there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from twin.models.codes.coded import Code, Coded, Floats, in_groups, rounded_scales
from twin.models.formats import DECODED, INT4, Format

LARGEST, MOST = 7, 15  # codes of a symmetric group on each side of zero; of one with a zero point
HALF = 8  # the code that stands for zero in a symmetric group


def _quantiser(form: Format, scale_type: Any) -> Callable[[Floats], Coded]:
    """Each group scaled by its largest element, or by the distance of its smallest and its largest;
    scales are rounded before the codes are chosen.
    """

    def quantise(weights: Floats) -> Coded:
        code, groups = CODES_OF[form.name], in_groups(weights, form.block[1])
        if not form.zero_bytes:
            scales = rounded_scales(np.abs(groups).max(axis=2) / np.float32(LARGEST), scale_type)
            whole = np.clip(np.rint(groups / scales[:, :, None]), -LARGEST, LARGEST) + HALF
            return Coded(code, _codes(whole, weights), scales)
        low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
        scales = rounded_scales((high - low) / np.float32(MOST), scale_type)
        zeros = np.rint(-low / scales)
        whole = np.clip(np.rint(groups / scales[:, :, None]) + zeros[:, :, None], 0, MOST)
        return Coded(code, _codes(whole, weights), scales, zeros.astype(np.uint8))

    return quantise


def _codes(whole: Floats, weights: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return whole.reshape(len(weights), -1)[:, : weights.shape[1]].astype(np.uint8)


def _code(form: Format) -> Code:
    scale_type = np.float16 if form.name.endswith("-fp16") else ml_dtypes.bfloat16
    values = np.arange(MOST + 1, dtype=np.float32) - np.float32(0 if form.zero_bytes else HALF)
    return Code(DECODED[form.name], values, scale_type, _quantiser(form, scale_type))


GROUPS = tuple(_code(form) for form in INT4)
CODES_OF = {code.format.name: code for code in GROUPS}
