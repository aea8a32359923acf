"""What a code object for AMD GPUs says of its kernel's arguments: a runtime copies them by that."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

METADATA = 32  # type of the note, of the owner AMDGPU
NOTES = 4  # PT_NOTE
HEADER_BYTES, PROGRAM_BYTES = 64, 56


def arguments(image: bytes) -> tuple[tuple[int, int], ...]:
    """(offset, bytes) of each argument of the only kernel, without those that the compiler adds."""
    found = [one for note in _notes(image) for one in note["amdhsa.kernels"][0][".args"]]
    shown = (one for one in found if not one[".value_kind"].startswith("hidden_"))
    return tuple((one[".offset"], one[".size"]) for one in shown)


def pretended(wanted: Sequence[tuple[int, int]]) -> bytes:
    """A code object that says no more than this."""

    def number(value: int) -> bytes:
        return b"\xcd" + struct.pack(">H", value)

    def text(value: str) -> bytes:
        return bytes([0xA0 | len(value)]) + value.encode()

    args = b"".join(
        b"\x83"
        + text(".offset")
        + number(at)
        + text(".size")
        + number(size)
        + text(".value_kind")
        + text("by_value")
        for at, size in wanted
    )
    kernel = b"\x81" + text(".args") + bytes([0x90 | len(wanted)]) + args
    content = b"\x81" + text("amdhsa.kernels") + b"\x91" + kernel
    note = struct.pack("<III", 7, len(content), METADATA) + b"AMDGPU\0\0" + content
    at = HEADER_BYTES + PROGRAM_BYTES
    program = struct.pack("<IIQQQQQQ", NOTES, 4, at, at, at, len(note), len(note), 4)
    header = bytearray(HEADER_BYTES)
    struct.pack_into("<QQ", header, 32, HEADER_BYTES, at + len(note))  # no sections behind it
    struct.pack_into("<HH", header, 54, PROGRAM_BYTES, 1)
    return bytes(header) + program + note


def _notes(image: bytes) -> Iterator[dict[str, Any]]:
    (headers,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    for n in range(count):
        kind, _, at, _, _, held, _ = struct.unpack_from("<IIQQQQQ", image, headers + n * size)
        end = at + held if kind == NOTES else 0
        while at < end:
            owner, content, what = struct.unpack_from("<III", image, at)
            first = at + 12 + (owner + 3) // 4 * 4
            if what == METADATA:
                yield _unpacked(image, first)[0]
            at = first + (content + 3) // 4 * 4


def _unpacked(data: bytes, at: int) -> tuple[Any, int]:
    """A value of MessagePack, and where the next one begins."""
    code = data[at]
    at += 1
    if code <= 0x7F:
        return code, at
    if code in (0xC2, 0xC3):
        return code == 0xC3, at
    if 0xCC <= code <= 0xCF:
        width = 1 << (code - 0xCC)
        return int.from_bytes(data[at : at + width], "big"), at + width
    count, at = _length(data, code, at)
    if code <= 0x8F or code in (0xDE, 0xDF):
        made, values = {}, 2 * count
    elif code <= 0x9F or code in (0xDC, 0xDD):
        made, values = [], count
    else:
        return data[at : at + count].decode(), at + count
    listed = []
    for _ in range(values):
        value, at = _unpacked(data, at)
        listed.append(value)
    if isinstance(made, dict):
        return dict(zip(listed[::2], listed[1::2], strict=True)), at
    return listed, at


def _length(data: bytes, code: int, at: int) -> tuple[int, int]:
    """Of a map, an array or a text, and where its content begins."""
    if code <= 0x9F:
        return code & 0x0F, at
    if code <= 0xBF:
        return code & 0x1F, at
    width = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}[code]
    return int.from_bytes(data[at : at + width], "big"), at + width
