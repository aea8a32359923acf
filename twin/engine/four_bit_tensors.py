"""Matrices of four bits in a checkpoint, in each layout that is published: which tensors hold one,
and what their words mean.

- compressed-tensors `pack-quantized`: `weight_packed` [out, in / 8] has eight inputs to a word;
  `weight_scale` [out, groups]; `weight_zero_point` [out / 8, groups] has eight outputs to a word.
  Codes and zero points are stored 8 above their signed value.
- AWQ (`gemm`): `qweight` [in, out / 8] and `qzeros` [groups, out / 8] have eight outputs to a word,
  whose nibbles are of outputs 0 2 4 6 1 3 5 7; `scales` [groups, out].
- GPTQ: `qweight` [in / 8, out] has eight inputs to a word, `qzeros` [groups, out / 8] eight
  outputs, words of which, but for `gptq_v2`, are LESS than meant; `scales` [groups, out]; `g_idx`
  [in], the group of each column.
- compressed-tensors `mxfp4-` and `nvfp4-pack-quantized`: `weight_packed` [out, in / 2] has two
  inputs to a byte, the first in its lower half; `weight_scale` [out, blocks] is exponents, or E4M3
  numbers, which NVFP4 divides by `weight_global_scale`.
- DeepSeek-V4's experts: `weight` [out, in / 2], signed bytes that hold the same, and exponents
  `scale` [out, blocks].

Sources: compressed-tensors 0.20 (compressors/pack_quantized, nvfp4, mxfp4); AutoAWQ 0.2
(utils/packing_utils.py); GPTQModel 2 (nn_modules/qlinear, utils/model.py, convert_gptq_v1_to_v2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from twin.engine.safetensors import NUMPY, STORED, Array, Entry
from twin.errors import CheckpointError
from twin.models.codes import CODES, Encoded
from twin.models.decoder import Tensor
from twin.models.formats import Format
from twin.text import shown

WORD = 8  # codes of a word
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each nibble of a word is of
LESS = np.uint32(0x11111111)  # a word of GPTQ's zero points: one of each nibble, with borrows
HALF = 8  # above a signed number: compressed-tensors', and the zero of a symmetric GPTQ
NAN = {"U8": 0xFF, "F8_E8M0": 0xFF, "F8_E4M3": 0x7F}  # of scales of a byte, without the sign
AGAIN = "download the file again"


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a matrix by what they hold, as ends of names, and what is read over."""

    name: str
    tensors: Mapping[str, str]
    ignored: tuple[str, ...] = ()


GPTQ_TENSORS = {"codes": "qweight", "zeros": "qzeros", "scales": "scales"}
PACKED = {"codes": "weight_packed", "scales": "weight_scale"}
# what is said of activations is ignored: the engine keeps them more exact
ACTIVATIONS = ("input_global_scale", "input_scale", "input_zero_point")
BYTES = Layout("bytes", {"codes": "weight", "scales": "scale"})  # next to matrices of eight bits
EXPONENTS = np.dtype(ml_dtypes.float8_e8m0fnu)
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("pack-quantized", PACKED | {"zeros": "weight_zero_point"}, ("weight_shape",)),
        Layout("awq", GPTQ_TENSORS),
        Layout("gptq", GPTQ_TENSORS | {"order": "g_idx"}),
        Layout("gptq_v2", GPTQ_TENSORS | {"order": "g_idx"}),
        Layout("mxfp4-pack-quantized", PACKED, ACTIVATIONS),
        Layout("nvfp4-pack-quantized", PACKED | {"outer": "weight_global_scale"}, ACTIVATIONS),
    )
}


def layout_of(quantization: Mapping[str, Any]) -> Layout | None:
    """Of a `quantization_config`; None where its codes are not of four bits."""
    name = quantization.get("quant_method")
    if name == "gptq":
        name = quantization.get("checkpoint_format") or name
    return LAYOUTS.get(str(quantization.get("format") if name == "compressed-tensors" else name))


def names_of(layout: Layout, tensor: Tensor) -> dict[str, str]:
    """The names of a matrix's tensors by what they hold."""
    stem = tensor.name.removesuffix("weight")
    return {what: stem + end for what, end in layout.tensors.items()}


def names_known(layout: Layout, tensor: Tensor, format: Format) -> set[str]:
    """Names that a matrix's tensors may have, those that are read over among them."""
    stem, expected = tensor.name.removesuffix("weight"), _expected(format, layout, *tensor.shape)
    read = {name for what, name in names_of(layout, tensor).items() if what in expected}
    return read | {stem + end for end in layout.ignored}


@dataclass(frozen=True, slots=True)
class FourBitTensor:
    """Where a matrix's codes, scales and zero points lie."""

    format: Format
    layout: Layout
    shape: tuple[int, int]
    held: Mapping[str, Entry]

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self.held.values())

    def matrix(self, files: dict[Path, Array]) -> Encoded:
        code = CODES[self.format.name]
        return code.matrix(*(self.part(part, files) for part in code.parts))

    def part(self, part: str, files: dict[Path, Array]) -> Array:
        """Raises CheckpointError for a scale that is no number, and for columns in another order
        than their groups'.
        """
        match part:
            case "codes":
                self._check_order(files)
                return self._codes(files)
            case "scales":
                return self._scales(files)
            case "zeros":
                return self._zeros(files)
            case _:
                return self._outer(files)

    def _codes(self, files: dict[Path, Array]) -> Array:
        rows, cols = self.shape
        if self.held["codes"].dtype in ("U8", "I8"):
            packed = self._raw("codes", files)
            return np.stack([packed & 15, packed >> 4], axis=2).reshape(rows, cols)
        words = self._raw("codes", files)
        match self.layout.name:
            case "pack-quantized":
                return nibbles(words)
            case "awq":
                return nibbles(words)[:, _awq(rows)].T
            case _:
                return np.ascontiguousarray(nibbles(np.ascontiguousarray(words.T)))

    def _zeros(self, files: dict[Path, Array]) -> Array:
        words, rows = self._raw("zeros", files), self.shape[0]
        match self.layout.name:
            case "pack-quantized":
                return nibbles(np.ascontiguousarray(words.T)).T[:rows]
            case "awq":
                return nibbles(words)[:, _awq(rows)].T
            case "gptq":  # as its writers do: a nibble of 15 carries into its neighbour
                return nibbles(words + LESS).T
            case _:
                return nibbles(words).T

    def _scales(self, files: dict[Path, Array]) -> Array:
        entry = self.held["scales"]
        raw = self._raw("scales", files)
        if entry.dtype in NAN:
            if ((raw & (0x7F if entry.dtype == "F8_E4M3" else 0xFF)) == NAN[entry.dtype]).any():
                raise self._broken("scales", "holds a NaN")
            kind = ml_dtypes.float8_e4m3fn if entry.dtype == "F8_E4M3" else ml_dtypes.float8_e8m0fnu
            small: Array = raw.view(kind).astype(np.float32)
            return small
        scales: Array = raw.astype(np.float32)
        if not np.isfinite(scales).all():
            raise self._broken("scales", "is not finite everywhere")
        if "zeros" in self.held and not self.format.zero_bytes:
            self._check_symmetric(files)
        return scales if self.layout.name == "pack-quantized" else scales.T

    def _outer(self, files: dict[Path, Array]) -> Array:
        """NVFP4's second scale, for each row: checkpoints hold what they divide by."""
        divisor = self._raw("outer", files).reshape(-1)[0]
        if not np.isfinite(divisor) or divisor <= 0:
            raise self._broken("outer", f"is {divisor}, and scales are divided by it")
        return np.full((self.shape[0], 1), np.float32(1) / divisor, np.float32)

    def _check_symmetric(self, files: dict[Path, Array]) -> None:
        if (self._zeros(files) != HALF).any():
            entry = self.held["zeros"]
            raise CheckpointError(
                f"{entry.path}: {shown(entry.name)} has zero points other than {HALF}, and its "
                "quantization_config says sym; use another checkpoint"
            )

    def _check_order(self, files: dict[Path, Array]) -> None:
        if "order" not in self.held:
            return
        entry, wide = self.held["order"], self.format.block[1]
        if (self._raw("order", files) != np.arange(self.shape[1]) // wide).any():
            raise CheckpointError(
                f"{entry.path}: {shown(entry.name)} gives columns to groups out of order "
                "(act-order), which is not read; use a checkpoint with desc_act=false"
            )

    def _raw(self, what: str, files: dict[Path, Array]) -> NDArray[Any]:
        """A tensor as it is stored; words as U32, bytes as U8."""
        entry = self.held[what]
        bytes_ = ("U8", "I8", "F8_E4M3", "F8_E8M0")
        kind: Any = np.uint32 if entry.dtype == "I32" else np.uint8
        if entry.dtype not in ("I32", *bytes_):
            kind = NUMPY[STORED[entry.dtype]]
        stored: NDArray[Any] = np.asarray(files[entry.path][entry.begin : entry.end]).view(kind)
        return stored.reshape(entry.shape)

    def _broken(self, what: str, how: str) -> CheckpointError:
        entry = self.held[what]
        return CheckpointError(f"{entry.path}: {shown(entry.name)} {how}; {AGAIN}")


def nibbles(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """[rows, 8 * words], each word's lowest bits first."""
    bytes_ = np.ascontiguousarray(words).view(np.uint8)
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=2).reshape(len(words), -1)


def _awq(outputs: int) -> NDArray[np.intp]:
    """Where the nibble of each output lies."""
    place = np.argsort(AWQ_ORDER)
    return (np.arange(0, outputs, WORD)[:, None] + place).reshape(-1)


def four_bit_tensor(
    path: Path, tensor: Tensor, format: Format, layout: Layout, found: Mapping[str, Entry]
) -> FourBitTensor:
    """A matrix of a checkpoint, by the names of its tensors. Raises CheckpointError."""
    names = names_of(layout, tensor)
    rows, cols = tensor.shape
    wide = format.block[1]
    if cols % wide or rows % WORD:
        raise CheckpointError(
            f"{path}: {shown(tensor.name)} is [{rows}, {cols}]; {format.name} weights take "
            f"multiples of {WORD} rows and {wide} columns; use another checkpoint"
        )
    held = {}
    for what, (kinds, shape) in _expected(format, layout, rows, cols).items():
        name = names[what]
        if name not in found:
            if what == "order":
                continue
            raise CheckpointError(
                f"{path}: tensor {shown(name)} is missing; is its quantization_config that of "
                "these weights?"
            )
        entry = found[name]
        if entry.dtype not in kinds or entry.shape != shape:
            raise CheckpointError(
                f"{entry.path}: {shown(name)} is {entry.dtype} {list(entry.shape)}, expected "
                f"{' or '.join(kinds)} {list(shape)}, as its quantization_config says of all "
                "layers; use another checkpoint"
            )
        held[what] = entry
    return FourBitTensor(format, layout, (rows, cols), held)


def _expected(
    format: Format, layout: Layout, rows: int, cols: int
) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Types and shape of what is read of a matrix."""
    blocks = cols // format.block[1]
    scales = ("F16",) if format.name.endswith("-fp16") else ("BF16",)
    match layout.name:
        case "pack-quantized":
            zeros = {"zeros": (("I32",), (rows // WORD, blocks))} if format.zero_bytes else {}
            return {
                "codes": (("I32",), (rows, cols // WORD)),
                "scales": (scales, (rows, blocks)),
                **zeros,
            }
        case "bytes":
            return {"codes": (("I8",), (rows, cols // 2)), "scales": (("F8_E8M0",), (rows, blocks))}
        case "mxfp4-pack-quantized":
            return {"codes": (("U8",), (rows, cols // 2)), "scales": (("U8",), (rows, blocks))}
        case "nvfp4-pack-quantized":
            return {
                "codes": (("U8",), (rows, cols // 2)),
                "scales": (("F8_E4M3",), (rows, blocks)),
                "outer": (("F32",), (1,)),
            }
    codes = (cols, rows // WORD) if layout.name == "awq" else (cols // WORD, rows)
    order = {"order": (("I32",), (cols,))} if "order" in layout.tensors else {}
    return {
        "codes": (("I32",), codes),
        "zeros": (("I32",), (blocks, rows // WORD)),
        "scales": (scales, (blocks, rows)),
        **order,
    }
