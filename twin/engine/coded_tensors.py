"""Coded matrices of a checkpoint: a tensor of codes and a tensor of scales each, checked before
they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twin.engine.safetensors import NUMPY, STORED, Array, Entry
from twin.errors import CheckpointError
from twin.models.codes import CODES, Coded
from twin.models.decoder import Tensor
from twin.models.formats import WHOLE_ROW, Format
from twin.text import shown

CODE_TYPES = {"int8": "I8", "fp8": "F8_E4M3", "fp8-128x128": "F8_E4M3"}
SCALES = {"int8": "weight_scale", "fp8": "weight_scale", "fp8-128x128": "weight_scale_inv"}
NAN_BITS = 0x7F  # of E4M3 beside the sign


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """Where a matrix's codes and scales lie."""

    format: Format
    codes: Entry
    scales: Entry

    def matrix(self, files: dict[Path, Array]) -> Coded:
        """Raises CheckpointError for a code or a scale that is no number."""
        code, (rows, cols) = CODES[self.format.name], self.codes.shape
        stored = np.asarray(files[self.codes.path][self.codes.begin : self.codes.end]).reshape(
            rows, cols
        )
        if self.codes.dtype == "F8_E4M3" and ((stored & NAN_BITS) == NAN_BITS).any():
            raise CheckpointError(
                f"{self.codes.path}: {shown(self.codes.name)} holds a NaN; download the file again"
            )
        raw = np.asarray(files[self.scales.path][self.scales.begin : self.scales.end]).view(
            NUMPY[STORED[self.scales.dtype]]
        )
        scales = raw.astype(np.float32)
        if not np.isfinite(scales).all():
            raise CheckpointError(
                f"{self.scales.path}: {shown(self.scales.name)} is not finite everywhere; "
                "download the file again"
            )
        high, wide = self.format.block
        if scales.size == 1:  # of the tensor
            scales = np.repeat(scales, rows).reshape(rows, 1)
        elif wide == WHOLE_ROW:
            scales = scales.reshape(rows, 1)
        else:
            scales = np.repeat(scales.reshape(-(-rows // high), -(-cols // wide)), high, axis=0)[
                :rows
            ]
        return Coded(code, stored, scales)


def coded_tensor(
    path: Path, tensor: Tensor, format: Format, found: dict[str, Entry]
) -> CodedTensor:
    """A matrix of a checkpoint, by the names of its tensors. Raises CheckpointError."""
    matrix, scales = (
        _entry(path, name, found) for name in (tensor.name, scale_name(tensor, format))
    )
    if matrix.dtype != CODE_TYPES[format.name]:
        wanted = (
            f"expected {CODE_TYPES[format.name]}, as its quantization_config says of all layers"
        )
        raise CheckpointError(
            f"{matrix.path}: {shown(matrix.name)} is stored as {matrix.dtype}; {wanted}; use "
            "another checkpoint"
        )
    if matrix.shape != tensor.shape:
        raise CheckpointError(
            f"{matrix.path}: {shown(matrix.name)} has shape {list(matrix.shape)}, expected "
            f"{list(tensor.shape)}"
        )
    rows, cols = tensor.shape
    high, wide = format.block
    whole = wide == WHOLE_ROW
    allowed = [[rows, 1], [rows], [1], []] if whole else [[-(-rows // high), -(-cols // wide)]]
    if list(scales.shape) not in allowed or scales.dtype not in STORED:
        wanted = f"expected {allowed[0]} of {', '.join(STORED)}"
        raise CheckpointError(
            f"{scales.path}: {shown(scales.name)} is {scales.dtype} {list(scales.shape)}, {wanted}"
        )
    return CodedTensor(format, matrix, scales)


def scale_name(tensor: Tensor, format: Format) -> str:
    return f"{tensor.name.removesuffix('weight')}{SCALES[format.name]}"


def _entry(path: Path, name: str, found: dict[str, Entry]) -> Entry:
    if name not in found:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} is missing; is its quantization_config that of these "
            "weights?"
        )
    return found[name]
