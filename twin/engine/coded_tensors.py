"""Coded matrices of a checkpoint, checked before they are used: of eight bits a tensor of codes and
one of scales each, of four as in `four_bit_tensors.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from twin.engine.four_bit_tensors import (
    ACTIVATIONS,
    BYTES,
    EXPONENTS,
    FourBitTensor,
    Layout,
    four_bit_tensor,
    names_known,
    names_of,
)
from twin.engine.safetensors import NUMPY, STORED, Array, Entry
from twin.errors import CheckpointError
from twin.models.codes import Encoded, code_of
from twin.models.decoder import Tensor
from twin.models.formats import INT4, WHOLE_ROW, Format
from twin.models.formats import STORED as FORMATS
from twin.models.spec import ModelSpec
from twin.text import shown

E8M0 = "F8_E8M0"  # exponents, a byte each
CODE_TYPES = {
    "int8": "I8",
    **dict.fromkeys(("fp8", "fp8-128x128", "fp8-128x128-e8m0"), "F8_E4M3"),
}
SCALES = {
    "int8": "weight_scale",
    "fp8": "weight_scale",
    "fp8-128x128": "weight_scale_inv",
    "fp8-128x128-e8m0": "scale",
}
FOUR_BITS = 4
NAN_BITS = 0x7F  # of E4M3 without the sign


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """Where a matrix's codes and scales lie."""

    format: Format
    codes: Entry
    scales: Entry

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.codes, self.scales

    def matrix(self, files: dict[Path, Array]) -> Encoded:
        return code_of(self.format).matrix(self._codes(files), self._scales(files))

    def part(self, part: str, files: dict[Path, Array]) -> Array:
        """Raises CheckpointError for a code or a scale that is no number."""
        return self._codes(files) if part == "codes" else self._scales(files)

    def _codes(self, files: dict[Path, Array]) -> Array:
        rows, cols = self.codes.shape
        stored = np.asarray(files[self.codes.path][self.codes.begin : self.codes.end]).reshape(
            rows, cols
        )
        if self.codes.dtype == "F8_E4M3" and ((stored & NAN_BITS) == NAN_BITS).any():
            raise CheckpointError(
                f"{self.codes.path}: {shown(self.codes.name)} holds a NaN; download the file again"
            )
        return stored

    def _scales(self, files: dict[Path, Array]) -> Array:
        rows, cols = self.codes.shape
        kind = EXPONENTS if self.scales.dtype == E8M0 else NUMPY[STORED[self.scales.dtype]]
        raw = np.asarray(files[self.scales.path][self.scales.begin : self.scales.end]).view(kind)
        scales = raw.astype(np.float32)
        if not np.isfinite(scales).all():
            raise CheckpointError(
                f"{self.scales.path}: {shown(self.scales.name)} is not finite everywhere; "
                "download the file again"
            )
        high, wide = self.format.block
        if scales.size == 1:  # of the tensor
            return np.repeat(scales, rows).reshape(rows, 1)
        if wide == WHOLE_ROW:
            return scales.reshape(rows, 1)
        blocks = scales.reshape(-(-rows // high), -(-cols // wide))
        return np.repeat(blocks, high, axis=0)[:rows]


def coded_tensor(
    path: Path, tensor: Tensor, format: Format, layout: Layout | None, found: dict[str, Entry]
) -> CodedTensor | FourBitTensor:
    """A matrix of a checkpoint, by the names of its tensors. Raises CheckpointError."""
    layout = _layout(layout, format)
    if layout is not None:
        return four_bit_tensor(path, tensor, format, layout, found)
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
    kinds = (E8M0,) if format.name.endswith("e8m0") else tuple(STORED)
    if list(scales.shape) not in allowed or scales.dtype not in kinds:
        wanted = f"expected {allowed[0]} of {', '.join(kinds)}"
        raise CheckpointError(
            f"{scales.path}: {shown(scales.name)} is {scales.dtype} {list(scales.shape)}, {wanted}"
        )
    return CodedTensor(format, matrix, scales)


def with_stored_scales(
    spec: ModelSpec, named: Mapping[str, Tensor], layout: Layout | None, found: Mapping[str, Entry]
) -> ModelSpec:
    """The model whose INT4 groups have scales of the type that the first of them has in the
    checkpoint: a configuration does not say it.
    """
    ends = () if layout is None else (names_of(layout, one)["scales"] for one in named.values())
    first = next((found[name] for name in ends if name in found), None)
    if first is None or spec.stored is None or first.dtype not in ("F16", "BF16"):
        return spec

    def typed(form: Format) -> Format:
        name = form.name.removesuffix("-fp16") + ("-fp16" if first.dtype == "F16" else "")
        return FORMATS[name] if form in INT4 else form

    chosen = tuple((role, typed(form)) for role, form in spec.stored.chosen)
    return replace(spec, stored=replace(spec.stored, chosen=chosen))


def names_read(tensor: Tensor, format: Format, layout: Layout | None) -> set[str]:
    """The names of a coded matrix's tensors, those that are read over among them."""
    layout = _layout(layout, format)
    if layout is None:
        module = tensor.name.removesuffix("weight")
        activations = {f"{module}{name}" for name in ACTIVATIONS}
        return {tensor.name, scale_name(tensor, format)} | activations
    return names_known(layout, tensor, format)


def _layout(layout: Layout | None, format: Format) -> Layout | None:
    """Of a matrix of four bits among others of eight, whose configuration names no layout."""
    return BYTES if layout is None and format.bits == FOUR_BITS else layout


def scale_name(tensor: Tensor, format: Format) -> str:
    return f"{tensor.name.removesuffix('weight')}{SCALES[format.name]}"


def _entry(path: Path, name: str, found: dict[str, Entry]) -> Entry:
    if name not in found:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} is missing; is its quantization_config that of these "
            "weights?"
        )
    return found[name]
