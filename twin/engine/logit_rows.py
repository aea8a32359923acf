"""Logits that a running kernel leaves beside its tokens."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from twin.errors import EngineError

FLOAT_BYTES = 4


class LogitRows:
    """Logits of each step [steps][vocab], written by the kernel, each read once in order.

    A row that was read is given back to the system: a long text holds a few rows, not all.
    """

    def __init__(self, steps: int, vocab: int) -> None:
        self._row_bytes = vocab * FLOAT_BYTES
        try:
            self._memory = mmap.mmap(
                -1,
                steps * self._row_bytes,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            )
        except OSError as error:
            raise EngineError(
                f"{steps * self._row_bytes / 1e9:.1f} GB for logits cannot be had "
                f"({error.strerror}): ask for fewer tokens, or for none of their log probabilities"
            ) from error
        self._rows = np.frombuffer(self._memory, np.float32).reshape(steps, vocab)
        self._freed = 0  # bytes at the beginning

    @property
    def address(self) -> int:
        return int(self._rows.ctypes.data)

    def take(self, step: int) -> NDArray[np.float32]:
        """[vocab] of a step; those of earlier ones are gone."""
        row: NDArray[np.float32] = self._rows[step].copy()
        done = (step + 1) * self._row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if done > self._freed and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, self._freed, done - self._freed)
            self._freed = done
        return row
