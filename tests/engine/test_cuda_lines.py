"""The line table of a compiled kernel: as nvdisasm tells it, and one of a few rows, written by
hand.
"""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest

from studies.common.cuda_lines import KERNELS, Called, Kernel, Place, read_kernel
from tests.native.test_device_builds import H200, planned
from tests.native.test_scoreboards import NVDISASM, needs_nvdisasm
from twin.engine.cuda_build import compile_cubin
from twin.errors import ToolchainError

TABLES = b"/native\0\0" + b"ring.cuh\0\x01\0\0kernel.cuh\0\x01\0\0\0"
ROWS = (
    [0, 9, 2, *bytes(8)],  # address 0
    [4, 2, 3, 11, 1],  # kernel.cuh, line 12: a row
    # ring.cuh, inlined in that row, 11 lines back, 144 bytes on: a row
    [4, 1, 0, 3, 144, 1, 6, 3, 0x75, 2, 0x90, 0x01, 1],
    [4, 2, 0, 3, 144, 0, 0, 9, 15, 0, 8],  # kernel.cuh, not inlined, 15 + 17 bytes on
    [255],  # 17 bytes and 2 lines on: a row
    [2, 1, 0, 1, 1],  # the end
)
NAMES = b"later\0release\0"
CODE = bytes.fromhex("8479") + bytes(238)


def table(version: int = 2) -> bytes:
    lengths = bytes([0, 1, 1, 1, 1, 0, 0, 0, 1])
    header = struct.pack("<BBbBB", 1, 1, -5, 14, len(lengths) + 1) + lengths + TABLES
    body = struct.pack("<HI", version, len(header)) + header + b"".join(bytes(row) for row in ROWS)
    return struct.pack("<I", len(body)) + body


def cubin(sections: dict[str, bytes]) -> bytes:
    """An ELF file with these sections."""
    names = b"".join(name.encode() + b"\0" for name in ["", *sections, ".names"])
    headers, body = [bytes(64)], b""
    for name, data in {**sections, ".names": names}.items():
        headers.append(
            struct.pack(
                "<IIQQQQIIQQ",
                names.index(name.encode()),
                1,
                0,
                0,
                64 + len(body),
                len(data),
                0,
                0,
                1,
                0,
            )
        )
        body += data
    start = bytearray(64)
    start[:4] = b"\x7fELF"
    struct.pack_into("<Q", start, 0x28, 64 + len(body))
    struct.pack_into("<HHH", start, 0x3A, 64, len(headers), len(headers) - 1)
    return bytes(start) + body + b"".join(headers)


def kernel(**changed: bytes) -> Kernel:
    return read_kernel(
        cubin(
            {KERNELS[0]: CODE, ".debug_line": table(), ".debug_str": NAMES}
            | {f".{name}": data for name, data in changed.items()}
        )
    )


@pytest.mark.parametrize("version", [2, 3])
def test_an_instruction_is_of_its_innermost_function(version: int) -> None:
    made = kernel(debug_line=table(version))
    outer, inner, last = (
        Place("kernel.cuh", 12, ""),
        Place("ring.cuh", 1, "release"),
        Place("kernel.cuh", 3, ""),
    )
    assert [made.places(at) for at in (0, 128)] == [(outer,)] * 2
    assert [made.places(at) for at in (144, 160, 176)] == [(inner, outer)] * 3
    assert made.places(224) == (last,)
    assert made.places(240) == made.places(-16) == ()
    assert (made.opcode(0), made.opcode(16)) == (0x984, 0)


def test_without_a_table_nothing_is_known() -> None:
    made = read_kernel(cubin({KERNELS[0]: CODE}))
    assert (made.rows, made.places(0)) == ((), ())


def test_functions_that_the_kernel_calls_are_named() -> None:
    names = [
        "",
        "twin_kernel",
        "$twin_kernel$_ZN4twin4downEv",
        "$__internal_0_$__cuda_sm20_rcp_rn_f32_slowpath",
        "STAGES",
    ]
    text = b"".join(name.encode() + b"\0" for name in names)
    symbols = b"".join(
        struct.pack("<IBBHQQ", text.index(name.encode() + b"\0"), kind, 0, 1, at, size)
        for name, kind, at, size in zip(
            names, (0, 0x12, 2, 0x22, 1), (0, 0, 160, 96, 0), (0, 240, 80, 64, 96), strict=True
        )
    )
    slow = Called(96, 160, "__cuda_sm20_rcp_rn_f32_slowpath")
    assert kernel(symtab=symbols, strtab=text).called == (slow, Called(160, 240, "_ZN4twin4downEv"))
    assert kernel().called == ()


def test_what_is_not_understood_is_refused() -> None:
    with pytest.raises(ToolchainError, match="no cubin"):
        read_kernel(b"\x00asm")
    with pytest.raises(ToolchainError, match="no section"):
        read_kernel(cubin({".text.other": CODE}))
    with pytest.raises(ToolchainError, match="version 5"):
        kernel(debug_line=table(5))
    with pytest.raises(ToolchainError, match="expected one table"):
        kernel(debug_line=table() * 2)


@needs_nvdisasm
def test_every_line_is_that_of_nvdisasm(tmp_path: Path) -> None:
    try:
        compiled = compile_cubin(planned("llama-3.2-1b", H200), lines=True).cubin
    except ToolchainError as error:
        pytest.skip(str(error))
    (tmp_path / "kernel.cubin").write_bytes(compiled)
    said = subprocess.run(
        [str(NVDISASM), "-g", "-c", str(tmp_path / "kernel.cubin")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    made, place, compared = read_kernel(compiled), ("", 0), 0
    for line in said.splitlines():
        if mark := re.match(r'\s*//## File "(?:[^"]*/)?([^"]*)", line (\d+)', line):
            place = mark[1], int(mark[2])
        elif instruction := re.match(r"\s+/\*([0-9a-f]{4,})\*/", line):
            first = made.places(int(instruction[1], 16))[0]
            assert (first.file, first.line) == place
            compared += 1
    assert compared == len(made.code) // 16 > 1000
