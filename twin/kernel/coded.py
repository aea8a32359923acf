"""Coded weights as the kernel finds them: what the table of stages says of them."""

from __future__ import annotations

from collections.abc import Iterable

from twin.models.formats import DECODED
from twin.plan.matrix import Matrix
from twin.plan.types import Plan

NUMBERS = {name: at for at, name in enumerate(DECODED, start=1)}  # the kernel's, of codes


def bits_of(matrices: Iterable[Matrix]) -> int:
    """A bit for each code of these matrices."""
    return sum({1 << _number(matrix) for matrix in matrices})


def coded_fields(plan: Plan, matrix: Matrix | None) -> dict[str, int]:
    """How a stage's weights are stored; bytes of a row's codes and scales in a whole tile, and in
    the last column slice.
    """
    if matrix is None:
        return dict.fromkeys(("code", "row_bytes", "last_bytes", "row_scales", "last_scales"), 0)
    last = matrix.cols // matrix.joined % matrix.tile_cols or matrix.tile_cols
    bits, form = (
        matrix.format.bits if matrix.format else 8 * plan.options.weight_dtype.bytes,
        matrix.format,
    )
    scales = [form.scaling(cols) if form else 0 for cols in (matrix.tile_cols, last)]
    return {
        "code": _number(matrix),
        "row_bytes": matrix.tile_cols * bits // 8,
        "last_bytes": last * bits // 8,
        "row_scales": scales[0],
        "last_scales": scales[1],
    }


def _number(matrix: Matrix) -> int:
    return NUMBERS[matrix.format.name] if matrix.format else 0
