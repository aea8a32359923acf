"""GPT-OSS's own layout of experts: all of a layer in two tensors of bytes, `*_blocks` with two
MXFP4 codes a byte, the lower one first, and `*_scales` with an exponent for each 32 of them. The
engine takes them as they are stored or, where a type is requested, turned into 16 or 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from twin.engine.safetensors import NUMPY, Array, Entry
from twin.errors import CheckpointError
from twin.models.codes import CODES, Encoded
from twin.models.decoder import Tensor
from twin.models.formats import MXFP4, Role
from twin.models.load import packed_tensors
from twin.models.spec import DType, ModelSpec
from twin.plan.shards import Weights
from twin.text import shown

# E2M1: a sign, two bits of exponent, one of mantissa
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
BIAS = 127  # of a scale's exponent
NO_NUMBER = 255  # a scale that is a NaN
BLOCK = MXFP4.block[1]  # codes that share a scale
_EXPERT = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.(gate|up|down)\Z")


@dataclass(frozen=True, slots=True)
class Packed:
    """The two tensors that experts' matrices are parts of."""

    blocks: Entry  # [experts, rows, blocks of a row, 16]
    scales: Entry  # [experts, rows, blocks of a row]

    def codes(self, files: Mapping[Path, Array], expert: int, rows: slice) -> Array:
        """[rows, columns] of an expert, a byte each."""
        own = _bytes_of(self.blocks, files)[expert][rows]
        pairs: Array = np.stack([own & 15, own >> 4], axis=-1).reshape(len(own), -1)
        return pairs

    def exponents(self, files: Mapping[Path, Array], expert: int, rows: slice) -> Array:
        """[rows, blocks of a row] of an expert, of two. Raises CheckpointError for a scale that is
        no number.
        """
        own = _bytes_of(self.scales, files)[expert][rows]
        if (own == NO_NUMBER).any():
            raise CheckpointError(
                f"{self.scales.path}: {shown(self.scales.name)} holds a NaN; download the file "
                "again"
            )
        exponents: Array = own.astype(np.int32) - BIAS
        return exponents

    def values(self, files: Mapping[Path, Array], expert: int, rows: slice) -> Array:
        """[rows, columns] of an expert, FP32. Raises as `exponents` does."""
        exponents = self.exponents(files, expert, rows)
        codes = self.codes(files, expert, rows).reshape(*exponents.shape, BLOCK)
        whole: Array = np.ldexp(VALUES[codes], exponents[..., None]).reshape(len(codes), -1)
        return whole

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.blocks, self.scales

    @property
    def file_bytes(self) -> int:
        return sum(entry.end - entry.begin for entry in self.entries)


@dataclass(frozen=True, slots=True)
class PackedExpert:
    """A matrix of one expert as it is stored."""

    packed: Packed
    expert: int
    rows: slice

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.packed.entries

    def matrix(self, files: dict[Path, Array]) -> Encoded:
        """Raises CheckpointError for a scale that is no number."""
        return CODES[MXFP4.name].matrix(self.part("codes", files), self.part("scales", files))

    def part(self, part: str, files: dict[Path, Array]) -> Array:
        """Raises as `matrix` does."""
        if part == "codes":
            return self.packed.codes(files, self.expert, self.rows)
        exponents = self.packed.exponents(files, self.expert, self.rows)
        scales: Array = np.ldexp(np.float32(1), exponents)
        return scales


# by what a matrix is: its rows of the tensor, where gates and what passes them take turns
_ROWS = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}


def packed_matrix(
    name: str, experts: Mapping[str, Packed], names: Mapping[str, Tensor]
) -> PackedExpert | None:
    """A matrix by its canonical name; None where it is not packed."""
    found = _EXPERT.match(name)
    if found is None:
        return None
    return PackedExpert(experts[names[name].name], int(found[2]), _ROWS[found[3]])


def coded_matrices(
    experts: Mapping[str, Packed], names: Mapping[str, Tensor]
) -> dict[str, PackedExpert]:
    """All that are packed, by canonical name."""
    found = {name: packed_matrix(name, experts, names) for name in names}
    return {name: matrix for name, matrix in found.items() if matrix is not None}


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights of one type: experts are unpacked when they are requested, the rest is turned into
    the type where it is stored in another one. Raises CheckpointError for what is no number in it.
    """

    spec: ModelSpec
    dtype: DType
    experts: dict[str, Packed]  # by the name of the tensor that a checkpoint in 16 bits has
    names: dict[str, Tensor]
    plain: Weights  # what is not packed, as it is stored
    files: dict[Path, Array]

    def __getitem__(self, name: str) -> Array:
        found = packed_matrix(name, self.experts, self.names)
        if found is None:
            return _in(self.dtype, self.plain[name], name)
        return _in(self.dtype, found.packed.values(self.files, found.expert, found.rows), name)

    @property
    def note(self) -> str:
        """What a user should know."""
        held = sum(packed.file_bytes for packed in self.experts.values())
        made = sum(
            int(np.prod(packed.blocks.shape)) * 2 * self.dtype.bytes
            for packed in self.experts.values()
        )
        return (
            f"experts: {held / 1e9:.2f} GB of MXFP4 in the files, turned into "
            f"{self.dtype.value.upper()}: {made / 1e9:.2f} GB in memory and in every pass over them"
        )


def _bytes_of(entry: Entry, files: Mapping[Path, Array]) -> Array:
    return np.asarray(files[entry.path][entry.begin : entry.end]).reshape(entry.shape)


def _in(dtype: DType, array: Array, name: str) -> Array:
    with np.errstate(over="ignore"):
        made: Array = array.astype(NUMPY[dtype], copy=False)
    if not np.isfinite(made.astype(np.float32)).all():
        raise CheckpointError(
            f"{name}: a weight exceeds what {dtype.value} holds; use --dtype bf16 or fp32"
        )
    return made


def is_packed(spec: ModelSpec) -> bool:
    """Does a checkpoint of the model hold its experts in this layout?"""
    return bool(packed_tensors(spec)) and spec.formats.of(Role.EXPERT).name == MXFP4.name


def unpacked(spec: ModelSpec, dtype: DType) -> ModelSpec:
    """The model with its experts in `dtype`."""
    return replace(spec, stored=None, dtype=dtype)


def note_as_stored(experts: Mapping[str, Packed], dtype: DType) -> str:
    """What a user should know of experts that stay as they are; `dtype`: of the rest."""
    held = sum(packed.file_bytes for packed in experts.values())
    return f"experts: {held / 1e9:.2f} GB of MXFP4, as stored; the rest in {dtype.value.upper()}"


def packed_entries(path: Path, spec: ModelSpec, found: Mapping[str, Entry]) -> dict[str, Packed]:
    """By the name of the tensor in 16 bits. Raises CheckpointError for missing tensors, and for
    those of other types or shapes.
    """
    made = {}
    for tensor, (experts, rows, cols) in packed_tensors(spec).items():
        groups = cols // BLOCK
        made[tensor] = Packed(
            _bytes(path, f"{tensor}_blocks", (experts, rows, groups, BLOCK // 2), found),
            _bytes(path, f"{tensor}_scales", (experts, rows, groups), found),
        )
    return made


def _bytes(path: Path, name: str, shape: tuple[int, ...], found: Mapping[str, Entry]) -> Entry:
    if name not in found:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} is missing; is its quantization_config that of these "
            "weights?"
        )
    entry = found[name]
    if entry.dtype != "U8" or entry.shape != shape:
        raise CheckpointError(
            f"{entry.path}: {shown(name)} is {entry.dtype} {list(entry.shape)}, expected U8 "
            f"{list(shape)}; use another checkpoint"
        )
    return entry


def others(named: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """The tensors that are not packed."""
    packed = packed_tensors(spec)
    return {name: tensor for name, tensor in named.items() if tensor.name not in packed}
