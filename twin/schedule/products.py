"""Which of an NVIDIA block's units multiply a matrix, by the format that stores it."""

from __future__ import annotations

from twin.models.formats import FP4
from twin.plan.matrix import Matrix

TENSOR = FP4  # formats that tensor cores multiply


def tensor_products(matrix: Matrix) -> bool:
    """Whether tensor cores multiply it (cuda_fragments.cuh)."""
    return matrix.format is not None and matrix.format.name in TENSOR


def whole_products(matrix: Matrix) -> bool:
    """Whether threads multiply it as whole numbers (cuda_coded.cuh)."""
    return matrix.format is not None and matrix.format.name.startswith("int")
