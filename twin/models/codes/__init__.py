"""Formats of weights that the engine decodes, one file each; `Coded` is a matrix in any of them but
GGUF's, whose blocks stay as they are (`Blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twin.models.codes import fp4, fp8, gguf, int4, int8
from twin.models.codes.coded import Code, Coded
from twin.models.codes.gguf import BlockCode, Blocks
from twin.models.formats import DECODED_AS, Format

__all__ = [
    "CODES",
    "BlockCode",
    "Blocks",
    "Code",
    "Coded",
    "Encoded",
    "code_of",
    "joined",
    "paired",
]

Encoded = Coded | Blocks

_CODES: tuple[Code | BlockCode, ...] = (
    int8.INT8_CODE,
    fp8.ROWS,
    fp8.BLOCKS,
    *int4.GROUPS,
    fp4.MX,
    fp4.NV,
    int8.INT8_GROUPS,
    *gguf.BLOCK_CODES,
)
CODES = {code.format.name: code for code in _CODES}


def code_of(format: Format) -> Code | BlockCode:
    """How a format is encoded and decoded."""
    return CODES[DECODED_AS.get(format.name, format.name)]


def joined(parts: Sequence[Encoded]) -> Encoded:
    """Matrices of the same columns and format, one below the other."""
    code = parts[0].code
    fields = ([getattr(part, name) for part in parts] for name in code.parts)
    return code.matrix(*(np.concatenate(field) for field in fields))


def paired(first: Encoded, second: Encoded) -> Encoded:
    """Row 2i is row i of the first, row 2i + 1 row i of the second."""
    order = np.arange(2 * first.shape[0]).reshape(2, -1).T.reshape(-1)
    return joined([first, second]).rows(order)
