"""One stored matrix of a model, and the bytes that a step moves in addition to matrices.

Sizes are those of the whole model (all ranks). A matrix [rows, cols] takes `cols` inputs to `rows`
outputs.
"""

from __future__ import annotations

from collections.abc import Iterable

from twin.frozen import frozen
from twin.models.formats import Format, Role


@frozen
class Weight:
    """One stored matrix, or `experts` equal ones of which a token uses `active`.

    With groups > 1 it is block-diagonal: the input has groups * cols elements, and rows / groups
    rows see each part of it.
    """

    name: str
    role: Role
    rows: int
    cols: int
    format: Format
    groups: int = 1
    experts: int = 1
    active: int = 1

    @property
    def parameters(self) -> int:
        return self.rows * self.cols * self.experts

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self.rows * self.cols * self.active

    @property
    def copy_bytes(self) -> int:
        """Bytes of one expert's matrix (of the matrix, where there are no experts), scales
        included.
        """
        return self.format.bytes(self.rows, self.cols)

    @property
    def stored_bytes(self) -> int:
        return self.copy_bytes * self.experts

    @property
    def step_bytes(self) -> int:
        """Bytes that a step of one token streams."""
        return self.copy_bytes * self.active


@frozen
class Traffic:
    """Bytes of caches and states that one step of one sequence moves in one layer."""

    read_bytes: int
    written_bytes: int


def total(weights: Iterable[Weight], what: str) -> int:
    """Sum of a property of Weight over several."""
    return sum(getattr(w, what) for w in weights)
