"""The safetensors file format, checked in full before any tensor is touched.

A file is 8 bytes (header length, little endian), a JSON header {name: {dtype, shape,
data_offsets}}, then the data, gapless. Source: https://huggingface.co/docs/safetensors (format).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from twin import files
from twin.errors import CheckpointError
from twin.models.files import MOST_JSON_BYTES, parse_json
from twin.models.spec import DType
from twin.text import shown

Array = NDArray[Any]

LENGTH_BYTES = 8
MOST_DIMENSIONS = 8
# of a shape and of an offset: more would not fit the format's own 64-bit arithmetic
LARGEST_NUMBER = 2**63 - 1
LONGEST_NAME = 512  # characters of a tensor's name
NUMPY: dict[DType, np.dtype[Any]] = {
    DType.FP16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.FP32: np.dtype(np.float32),
}
STORED = {"F16": DType.FP16, "BF16": DType.BF16, "F32": DType.FP32}
# of tables of numbers, which are no weights
INTEGERS: dict[str, np.dtype[Any]] = {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
# Bits of an element of every type. Source: the enumeration Dtype of the format's own library, 0.6.
_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
# bits; NaNs lie above it
_INFINITY = {DType.FP16: 0x7C00, DType.BF16: 0x7F80, DType.FP32: 0x7F800000}
_BLOCK_BYTES = 1 << 19  # looked through at once: the second pass finds it in the cache of its core


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies; begin and end are offsets in the file."""

    path: Path
    name: str
    dtype: str  # as the header spells it
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of a file. Raises CheckpointError unless the data is exactly what the header
    says.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
                raise CheckpointError(
                    f"{path}: its header claims {length} bytes and the file has {size}: truncated "
                    "or not safetensors; download it again"
                )
            if length > MOST_JSON_BYTES:
                raise CheckpointError(
                    f"{path}: its header has {length} bytes; allowed: up to {MOST_JSON_BYTES}, "
                    "some 100,000 tensors; save it in more files"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); check its permissions"
        ) from error
    start = LENGTH_BYTES + length
    header = parse_json(path, text)
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, fields, start) for name, fields in header.items()}
    _check_gapless(path, list(entries.values()), start, size)
    return entries


def view(entry: Entry, file: Array) -> Array:
    """The tensor without a copy; `file` is the whole file as mapped bytes."""
    kind = INTEGERS[entry.dtype] if entry.dtype in INTEGERS else NUMPY[STORED[entry.dtype]]
    return np.asarray(file[entry.begin : entry.end]).view(kind).reshape(entry.shape)


def check_finite(name: str, array: Array, dtype: DType) -> None:
    """Raises CheckpointError where an element is infinite or not a number.

    The bits are compared as integers, positive values as signed and negative ones as unsigned: two
    reductions and no copy.
    """
    infinity, sign = _INFINITY[dtype], 1 << (8 * dtype.bytes - 1)
    bits = array.reshape(-1).view(f"u{dtype.bytes}")
    block = _BLOCK_BYTES // dtype.bytes
    for at in range(0, len(bits), block):
        part = bits[at : at + block]
        if part.view(f"i{dtype.bytes}").max() < infinity and part.max() < (infinity | sign):
            continue
        where = at + int(np.argmax((part & (sign - 1)) >= infinity))
        position = [int(i) for i in np.unravel_index(where, array.shape)]
        what = "infinite" if int(bits[where]) & (sign - 1) == infinity else "not a number"
        raise CheckpointError(
            f"{name} is {what} at {position}: no token could be computed from it; download the "
            "file again"
        )


def write(path: Path, tensors: Mapping[str, Array]) -> None:
    """A file of tensors of the three stored types, and of tables of numbers, in the order given:
    whole, or not there. Raises OutputError.
    """
    # Hugging Face's loader insists on it
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = {NUMPY[dtype]: name for name, dtype in STORED.items()}
    names |= {kind: name for name, kind in INTEGERS.items()}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": names[array.dtype],
            "shape": array.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    head = len(text).to_bytes(LENGTH_BYTES, "little") + text
    files.write(
        {path: chain([head], (np.ascontiguousarray(array).tobytes() for array in tensors.values()))}
    )


def _entry(path: Path, name: str, fields: Any, start: int) -> Entry:
    """One tensor of the header, its byte count checked against its type and shape."""
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        sane = isinstance(dtype, str) and len(shape) <= MOST_DIMENSIONS
        sane = sane and all(
            type(n) is int and 0 <= n <= LARGEST_NUMBER for n in (*shape, begin, end)
        )
    except (TypeError, KeyError, ValueError):
        sane = False
    if not sane:
        raise CheckpointError(
            f"{path}: the header's entry of {shown(name)} is not a dtype, a shape of at most "
            f"{MOST_DIMENSIONS} numbers and two data_offsets, below 2^63 each; download it again"
        )
    if len(name) > LONGEST_NAME:
        raise CheckpointError(
            f"{path}: the tensor {shown(name)} has a name of {len(name)} characters; allowed: up "
            f"to {LONGEST_NAME}"
        )
    if dtype not in _BITS:
        raise CheckpointError(
            f"{path}: {shown(name)} has the unknown dtype {shown(dtype)}; expected "
            f"{', '.join(STORED)}"
        )
    bits = math.prod(shape) * _BITS[dtype]
    if 8 * (end - begin) != bits:
        raise CheckpointError(
            f"{path}: {shown(name)} {list(shape)} of {dtype} needs {bits // 8} bytes, it has "
            f"{end - begin}"
        )
    return Entry(path, name, dtype, shape, start + begin, start + end)


def _check_gapless(path: Path, entries: list[Entry], start: int, size: int) -> None:
    at, before = start, "the header"
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin != at:
            what = "overlaps" if entry.begin < at else "leaves a gap after"
            raise CheckpointError(
                f"{path}: {shown(entry.name)} at byte {entry.begin} {what} {before}, which ends "
                f"at {at}; download it again"
            )
        at, before = entry.end, shown(entry.name)
    if at != size:
        raise CheckpointError(
            f"{path}: its tensors end at byte {at} and the file at {size}: truncated or "
            "overwritten; download it again"
        )
