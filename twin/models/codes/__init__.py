"""Formats of weights that the engine decodes, one file each; `Coded` is a matrix in any of them."""

from __future__ import annotations

from twin.models.codes import fp4, fp8, int4, int8
from twin.models.codes.coded import Code, Coded, joined, paired
from twin.models.formats import Format

__all__ = ["CODES", "Code", "Coded", "code_of", "joined", "paired"]

CODES: dict[str, Code] = {
    code.format.name: code
    for code in (int8.INT8_CODE, fp8.ROWS, fp8.BLOCKS, *int4.GROUPS, fp4.MX, fp4.NV)
}  # the kernel's numbers: places, from 1 on


def code_of(format: Format) -> Code:
    """How a format is encoded and decoded."""
    return CODES[format.name]
