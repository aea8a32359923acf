"""A matrix of few-bit weights: one code a byte, and the scales of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from twin.models.formats import WHOLE_ROW, Format

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Code:
    """What a format's codes and scales mean, and how a tile holds them."""

    format: Format  # as the engine streams it
    values: Floats  # [codes] before the scale
    scale_type: Any  # of a scale in a tile
    quantise: Callable[[Floats], Coded]  # the nearest weights, for models without a checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """Weights [rows, cols]: the value of each code times the scale of its block."""

    code: Code
    codes: Codes  # [rows, cols]
    scales: Floats  # [rows, blocks of a row]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, chosen: slice | NDArray[np.intp]) -> Coded:
        return Coded(self.code, self.codes[chosen], self.scales[chosen])

    def columns(self, lo: int, hi: int) -> Coded:
        """Columns of whole blocks, but for the last one."""
        wide = self.code.format.block[1]
        scales = self.scales if wide == WHOLE_ROW else self.scales[:, lo // wide : -(-hi // wide)]
        return Coded(self.code, self.codes[:, lo:hi], scales)

    def astype(self, dtype: DTypeLike) -> NDArray[Any]:
        """The weights themselves, rounded once."""
        wide = self.code.format.block[1]
        scales = (
            self.scales
            if wide == WHOLE_ROW
            else np.repeat(self.scales, wide, axis=1)[:, : self.codes.shape[1]]
        )
        return (self.code.values[self.codes].astype(np.float64) * scales).astype(dtype)


def joined(parts: Sequence[Coded]) -> Coded:
    """Matrices of the same columns, one below the other."""
    return Coded(
        parts[0].code,
        np.concatenate([p.codes for p in parts]),
        np.concatenate([p.scales for p in parts]),
    )


def paired(first: Coded, second: Coded) -> Coded:
    """Row 2i is row i of the first, row 2i + 1 row i of the second."""
    order = np.arange(2 * len(first.codes)).reshape(2, -1).T.reshape(-1)
    return joined([first, second]).rows(order)
