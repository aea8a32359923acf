"""The GGUF file format: its header, checked in full before any tensor is touched.

A file is a magic word, a version, two counts, that many pairs of a key and a typed value, that many
tensors (name, shape innermost first, type, offset), then the tensors' data, each on a border of
`general.alignment` bytes. Source: the format's description in the ggml repository (docs/gguf.md).
The header is read here and not by the `gguf` package, whose reader trusts every length that a file
claims and needs seconds for the words of a tokenizer.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twin.errors import CheckpointError
from twin.frozen import frozen
from twin.models.files import is_there
from twin.text import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_HEADER_BYTES = 64 * 2**20  # of keys, values and names: three times the largest published
MOST_PAIRS = 4096
MOST_TENSORS = 100_000  # as many as in a safetensors header
MOST_ELEMENTS = 2**22  # of an array: four times the merges of the largest published vocabulary
LONGEST_KEY = 512  # bytes of a key or of a tensor's name
MOST_DIMENSIONS = 4  # of a tensor, by the format
LARGEST_ALIGNMENT = 2**16
DOWNLOAD = "download it again"

_STRING, _ARRAY = 8, 9
_SCALARS = {  # type of a value -> how it lies in the file
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
KINDS: dict[int, tuple[str, int, int]] = {  # a tensor's type: name, elements and bytes of a block
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


@frozen
class GgufTensor:
    """Where a tensor lies, and how it is stored."""

    name: str
    kind: int  # a key of KINDS
    shape: tuple[int, ...]  # outermost first, as NumPy has it
    begin: int  # in the file
    bytes: int


@frozen
class GgufFile:
    """A checked header."""

    path: Path
    size: int
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]

    def floats(self, name: str) -> tuple[float, ...] | None:
        """A small FP32 tensor's elements, None where there is none of that name."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if KINDS[tensor.kind][0] != "F32" or tensor.bytes > MOST_HEADER_BYTES:
            kind = KINDS[tensor.kind][0]
            raise CheckpointError(
                f"{self.path}: {shown(name)} is stored as {kind}; expected F32, small; {DOWNLOAD}"
            )
        with self.path.open("rb") as file:
            file.seek(tensor.begin)
            return tuple(np.frombuffer(file.read(tensor.bytes), "<f4").tolist())


def is_gguf(path: Path) -> bool:
    """Is this a file in GGUF, by its first bytes or its ending?"""
    if not is_there(path, Path.is_file):
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GgufFile:
    """A file's header. Raises CheckpointError unless it and all tensors lie in the file."""
    try:
        about = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(about.st_mode):
        raise CheckpointError(f"{shown(path)}: is not a regular file; give a GGUF file")
    return _read(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=2)  # the model, its words and its weights are read one after another
def _read(path: Path, size: int, changed_ns: int) -> GgufFile:
    try:
        with path.open("rb") as file:
            if size < len(MAGIC) or file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(
                    f"{shown(path)}: does not begin with {MAGIC.decode()}: no GGUF file; {DOWNLOAD}"
                )
            if os.fstat(file.fileno()).st_size != size:
                raise CheckpointError(f"{shown(path)}: is being written; wait until it is whole")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(path, data, size).read()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    why = error.strerror or type(error).__name__
    return CheckpointError(f"{shown(path)}: cannot be read ({why}); check its permissions")


class _Header:
    """A place in a header that is being read. No length is believed before it is compared."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.at = path, data, len(MAGIC)
        self.end = min(size, MOST_HEADER_BYTES)
        self.size = size

    def read(self) -> GgufFile:
        (version,) = self._unpack("<I", "its version")
        if version not in VERSIONS:
            big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "it is stored big end first" if big else f"it has version {version}"
            raise self._refusal(f"{what}; read are versions 2 and 3, little end first; convert it")
        tensors, pairs = self._unpack("<QQ", "its counts")
        if pairs > MOST_PAIRS or tensors > MOST_TENSORS:
            limit = f"allowed: up to {MOST_PAIRS} and {MOST_TENSORS}"
            raise self._refusal(
                f"it claims {pairs} values and {tensors} tensors; {limit}; {DOWNLOAD}"
            )
        metadata: dict[str, object] = {}
        for _ in range(pairs):
            key = self._name("a key")
            if key in metadata:
                raise self._refusal(f"the key {shown(key)} appears twice; {DOWNLOAD}")
            metadata[key] = self._value(key)
        raw = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= LARGEST_ALIGNMENT:
            raise self._refusal(
                f"general.alignment is {shown(alignment)}; allowed: 1 to {LARGEST_ALIGNMENT}"
            )
        start = -(-self.at // alignment) * alignment
        return GgufFile(self.path, self.size, metadata, self._placed(raw, start))

    def _placed(self, raw: list[GgufTensor], start: int) -> dict[str, GgufTensor]:
        """Tensors with offsets in the file, none of them beyond its end or within another."""
        out: dict[str, GgufTensor] = {}
        at, before = start, "the header"
        for tensor in sorted(raw, key=lambda t: (t.begin, t.bytes)):
            begin = start + tensor.begin
            if begin < at:
                raise self._refusal(f"{shown(tensor.name)} overlaps {before}; {DOWNLOAD}")
            at, before = begin + tensor.bytes, shown(tensor.name)
            if at > self.size:
                raise self._refusal(
                    f"{before} ends at byte {at} and the file at {self.size}: truncated; {DOWNLOAD}"
                )
            if tensor.name in out:
                raise self._refusal(f"the tensor {before} appears twice; {DOWNLOAD}")
            out[tensor.name] = GgufTensor(
                tensor.name, tensor.kind, tensor.shape, begin, tensor.bytes
            )
        return out

    def _tensor(self) -> GgufTensor:
        """One tensor; its `begin` is what the header says, from the data's beginning."""
        name = self._name("a tensor's name")
        (dimensions,) = self._unpack("<I", "a shape")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            count = f"{dimensions} dimensions; allowed: 1 to {MOST_DIMENSIONS}"
            raise self._refusal(f"{shown(name)} has {count}; {DOWNLOAD}")
        shape = self._unpack(f"<{dimensions}Q", "a shape")[::-1]
        kind, begin = self._unpack("<IQ", "a tensor's type")
        if kind not in KINDS:
            raise self._refusal(
                f"{shown(name)} has type {kind}, which is unknown; convert it to Q8_0 or F16"
            )
        title, block, block_bytes = KINDS[kind]
        if shape[-1] % block:
            limit = f"{title} allows multiples of {block}"
            raise self._refusal(
                f"{shown(name)} has rows of {shape[-1]} elements; {limit}; {DOWNLOAD}"
            )
        return GgufTensor(name, kind, shape, begin, math.prod(shape) // block * block_bytes)

    def _value(self, key: str) -> object:
        (kind,) = self._unpack("<I", f"the type of {shown(key)}")
        if kind == _STRING:
            return self._text(key)
        if kind != _ARRAY:
            return self._numbers(key, kind, 1)[0].item()
        kind, count = self._unpack("<IQ", f"the length of {shown(key)}")
        if count > MOST_ELEMENTS:
            limit = f"{count} elements; allowed: up to {MOST_ELEMENTS}"
            raise self._refusal(f"{shown(key)} has {limit}; {DOWNLOAD}")
        if kind == _STRING:
            return [self._text(key) for _ in range(count)]
        return self._numbers(key, kind, count).tolist()

    def _numbers(self, key: str, kind: int, count: int) -> npt.NDArray[np.generic]:
        if kind not in _SCALARS:
            raise self._refusal(f"{shown(key)} has a value of the unknown type {kind}; {DOWNLOAD}")
        form = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(form.itemsize * count, shown(key)), form)

    def _name(self, what: str) -> str:
        text = self._text(what, LONGEST_KEY)
        if not text:
            raise self._refusal(f"{what} is empty; {DOWNLOAD}")
        return text

    def _text(self, what: str, longest: int = MOST_HEADER_BYTES) -> str:
        (length,) = self._unpack("<Q", what)
        if length > longest:
            raise self._refusal(
                f"{shown(what)} has {length} bytes; allowed: up to {longest}; {DOWNLOAD}"
            )
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._refusal(f"{shown(what)} is no text in UTF-8; {DOWNLOAD}") from error

    def _unpack(self, form: str, what: str) -> tuple[int, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form), what))

    def _take(self, count: int, what: str) -> bytes:
        begin, self.at = self.at, self.at + count
        if self.at > self.end:
            why = (
                f"its header is longer than {MOST_HEADER_BYTES} bytes, the most that is read"
                if self.end < self.size
                else f"it ends within its header, at {what}: truncated"
            )
            raise self._refusal(f"{why}; {DOWNLOAD}")
        return self.data[begin : self.at]

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(f"{shown(self.path)}: {what}")
