"""A quantised matrix: one code a byte, and the scales and zero points of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from twin.frozen import frozen
from twin.models.formats import WHOLE_ROW, Format

SMALLEST_SCALE = np.float32(2.0**-14)  # of a group of zeros: no subnormal in FP16 either
Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@frozen
class Code:
    """What a format's codes and scales mean, and how a tile holds them."""

    format: Format  # as the engine streams it
    values: Floats  # [codes] before the scale; with zero points before these are taken off
    scale_type: Any  # of a block's scale in a tile
    quantise: Callable[[Floats], Coded]  # the nearest weights, for models without a checkpoint

    @property
    def parts(self) -> tuple[str, ...]:
        """What a matrix of it consists of: fields of `Coded`."""
        form = self.format
        return (
            "codes",
            "scales",
            *(("zeros",) if form.zero_bytes else ()),
            *(("outer",) if form.row_bytes else ()),
        )

    def matrix(self, *parts: NDArray[Any]) -> Coded:
        """A matrix of `parts`, in this order."""
        return Coded(self, **dict(zip(self.parts, parts, strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """Weights [rows, cols]: the value of each code, less its block's zero point, times the scale of
    its block, times that of its row.
    """

    code: Code
    codes: Codes  # [rows, cols]
    scales: Floats  # [rows, blocks of a row]
    zeros: Codes | None = None  # [rows, blocks of a row]
    outer: Floats | None = None  # [rows, 1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, chosen: slice | NDArray[np.intp]) -> Coded:
        parts: list[Any] = [None if p is None else p[chosen] for p in self._parts()]
        return Coded(self.code, *parts)

    def columns(self, lo: int, hi: int) -> Coded:
        """Columns of whole blocks, but for the last one."""
        wide = self.code.format.block[1]
        blocks = slice(None) if wide == WHOLE_ROW else slice(lo // wide, -(-hi // wide))
        zeros = None if self.zeros is None else self.zeros[:, blocks]
        return Coded(self.code, self.codes[:, lo:hi], self.scales[:, blocks], zeros, self.outer)

    def astype(self, dtype: DTypeLike) -> NDArray[Any]:
        """The weights themselves, rounded once."""
        values = self.code.values[self.codes].astype(np.float64)
        if self.zeros is not None:
            values -= self._wide(self.zeros)
        values *= self._wide(self.scales)
        return (values if self.outer is None else values * self.outer).astype(dtype)

    def _wide(self, of_blocks: NDArray[Any]) -> NDArray[Any]:
        """For each column that of its block."""
        wide = self.code.format.block[1]
        if wide == WHOLE_ROW:
            return of_blocks
        return np.repeat(of_blocks, wide, axis=1)[:, : self.codes.shape[1]]

    def _parts(self) -> tuple[Any, ...]:
        return self.codes, self.scales, self.zeros, self.outer


def in_groups(weights: Floats, wide: int) -> Floats:
    """[rows, groups, wide]; what the last group lacks is zero."""
    rows, cols = weights.shape
    padded = np.zeros((rows, -(-cols // wide) * wide), np.float32)
    padded[:, :cols] = weights
    return padded.reshape(rows, -1, wide)


def rounded_scales(wanted: Floats, scale_type: Any) -> Floats:
    """As a group of 16 bits stores them."""
    scales: Floats = np.maximum(wanted, SMALLEST_SCALE).astype(scale_type).astype(np.float32)
    return scales
