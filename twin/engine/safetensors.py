"""The safetensors file format, checked in full before any tensor is touched.

A file is 8 bytes (header length, little endian), a JSON header {name: {dtype, shape, data_offsets}}, then the
data, gapless. Source: https://huggingface.co/docs/safetensors (format).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from twin.errors import CheckpointError
from twin.models.spec import DType

Array = NDArray[Any]

LENGTH_BYTES = 8
LARGEST_HEADER_BYTES = 100_000_000  # the format's own limit
NUMPY: dict[DType, np.dtype[Any]] = {
    DType.FP16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.FP32: np.dtype(np.float32),
}
STORED = {"F16": DType.FP16, "BF16": DType.BF16, "F32": DType.FP32}
_BITS = re.compile(r"(?:BOOL|[FIUC](\d+)|BF(\d+)|F(8)_\w+)\Z")


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
    """Every tensor of a file. Raises CheckpointError unless the data is exactly what the header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, LARGEST_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: its header claims {length} bytes and the file has {size}: truncated or not safetensors; download it again"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    start = LENGTH_BYTES + length
    header = read_json(path, text)
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, fields, start) for name, fields in header.items()}
    _check_gapless(path, list(entries.values()), start, size)
    return entries


def read_json(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON object in `text`; a corrupt one or a repeated key is refused in the name of `path`."""
    try:
        found = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupt JSON ({error}); download it again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def view(entry: Entry, file: Array) -> Array:
    """The tensor without a copy; `file` is the whole file as mapped bytes."""
    return np.asarray(file[entry.begin : entry.end]).view(NUMPY[STORED[entry.dtype]]).reshape(entry.shape)


def write(path: Path, tensors: Mapping[str, Array]) -> None:
    """A file of tensors of the three stored types, in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # Hugging Face's loader insists on it
    names = {NUMPY[dtype]: name for name, dtype in STORED.items()}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _entry(path: Path, name: str, fields: Any, start: int) -> Entry:
    """One tensor of the header, its byte count checked against its type and shape."""
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        sane = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        sane = False
    if not sane:
        raise CheckpointError(f"{path}: the header's entry of {name!r} is not a dtype, a shape and two data_offsets; download it again")
    bits = _BITS.match(dtype)
    if not bits:
        raise CheckpointError(f"{path}: {name} has the unknown dtype {dtype!r}; expected {', '.join(STORED)}")
    width = next((int(group) for group in bits.groups() if group), 8)
    if 8 * (end - begin) != math.prod(shape) * width:
        raise CheckpointError(f"{path}: {name} {list(shape)} of {dtype} needs {math.prod(shape) * width // 8} bytes, it has {end - begin}")
    return Entry(path, name, dtype, shape, start + begin, start + end)


def _check_gapless(path: Path, entries: list[Entry], start: int, size: int) -> None:
    at, before = start, "the header"
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin != at:
            what = "overlaps" if entry.begin < at else "leaves a gap after"
            raise CheckpointError(f"{path}: {entry.name} at byte {entry.begin} {what} {before}, which ends at {at}; download it again")
        at, before = entry.end, entry.name
    if at != size:
        raise CheckpointError(f"{path}: its tensors end at byte {at} and the file at {size}: truncated or overwritten; download it again")
