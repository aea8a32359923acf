"""Which source line each instruction of a compiled kernel comes from: the line table of a cubin,
with what was inlined where.

A cubin is an ELF file. Its section .debug_line is a line-number program of DWARF 2 or 3
(dwarfstd.org, DWARF 3, section 6.2) with one extended opcode of NVIDIA's: it names the table's row
that a function was inlined at, and the function, as an offset into .debug_str. That opcode is not
documented; its meaning was read from what nvcc 13.0 and NVRTC 13.5 write.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import dataclass

from twin.errors import ToolchainError

KERNELS = (".text.twin_kernel", ".text.twin_passes")  # a cubin has one of them
VERSIONS = (2, 3)  # of DWARF: nvcc's, NVRTC's
# standard opcodes that matter
COPY, ADVANCE_PC, ADVANCE_LINE, SET_FILE, CONST_ADD_PC, FIXED_ADVANCE_PC = 1, 2, 3, 4, 8, 9
SET_ADDRESS, INLINED_AT = 2, 144  # extended opcodes that do
NO_BITS = 8  # an ELF section without contents
FUNC = 2  # an ELF symbol of code


@dataclass(frozen=True, slots=True)
class Place:
    file: str  # without its folder
    line: int
    function: str  # mangled; empty: not inlined


@dataclass(frozen=True, slots=True)
class Row:
    at: int  # of the first instruction, in bytes from the kernel's start
    place: Place
    inside: int  # the row that this function was inlined at, counted from one; 0: none


@dataclass(frozen=True, slots=True)
class Called:
    """A function that the kernel calls; its code lies behind the kernel's own."""

    at: int  # bytes from the kernel's start
    end: int
    function: str  # mangled; one of the compiler's own, as a slow division: as it is


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's machine code and where it comes from."""

    code: bytes  # 16 for each instruction
    rows: tuple[Row, ...]  # by address; none without line information
    # the rows know nothing of the compiler's own: places() takes them for what lies before
    called: tuple[Called, ...] = ()

    def places(self, at: int) -> tuple[Place, ...]:
        """Where the instruction at byte `at` comes from, innermost function first; empty where
        nobody knows.
        """
        row = bisect_right(self.rows, at, key=lambda row: row.at) if 0 <= at < len(self.code) else 0
        found = []
        while row:
            found.append(self.rows[row - 1].place)
            if self.rows[row - 1].inside >= row:
                raise ToolchainError(
                    f"line table: row {row} lies inside row {self.rows[row - 1].inside}, which "
                    "comes later"
                )
            row = self.rows[row - 1].inside
        return tuple(found)

    def opcode(self, at: int) -> int:
        """The low twelve bits of the instruction at byte `at`: what it does, without predicate and
        modifiers.
        """
        return int.from_bytes(self.code[at : at + 2], "little") & 0xFFF


def read_kernel(cubin: bytes) -> Kernel:
    """The kernel of a cubin. Raises ToolchainError where it has none, or a line table that is not
    understood.
    """
    sections = _sections(cubin)
    code = next((sections[name] for name in KERNELS if name in sections), None)
    if code is None:
        raise ToolchainError(
            f"the cubin has no section {' or '.join(KERNELS)}, only {', '.join(sections) or 'none'}"
        )
    rows = _rows(sections.get(".debug_line", b""), sections.get(".debug_str", b""))
    return Kernel(code, rows, _called(sections.get(".symtab", b""), sections.get(".strtab", b"")))


def _sections(elf: bytes) -> dict[str, bytes]:
    if elf[:4] != b"\x7fELF":
        raise ToolchainError(f"no cubin: it begins with {elf[:4]!r}")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    text = headers[names][4]
    return {
        _text(elf, text + name)[0]: elf[at : at + length]
        for name, kind, _, _, at, length in headers
        if kind != NO_BITS
    }


def _called(symbols: bytes, names: bytes) -> tuple[Called, ...]:
    """Those of which ptxas makes a symbol `$twin_kernel$_Z...` or `$__internal_0_$__cuda...`."""
    found = []
    for name, info, _, _, at, size in struct.iter_unpack("<IBBHQQ", symbols):
        text = _text(names, name)[0]
        if info & 15 == FUNC and text.startswith("$"):
            found.append(Called(at, at + size, text.rsplit("$", 1)[-1]))
    return tuple(sorted(found, key=lambda one: one.at))


def _rows(program: bytes, names: bytes) -> tuple[Row, ...]:
    if not program:
        return ()
    length, version, header, _, _, base, line_range, opcodes = struct.unpack_from(
        "<IHIBBbBB", program
    )
    if version not in VERSIONS or length != len(program) - 4:
        raise ToolchainError(
            f"line table: version {version}, {length} of {len(program)} bytes; expected one table "
            "of version 2 or 3"
        )
    arguments = program[15 : 15 + opcodes - 1]  # of each standard opcode
    files = _files(program, 15 + len(arguments))
    at, file, line, inside, function = 0, 1, 1, 0, ""
    rows: list[Row] = []
    here = 10 + header
    while here < len(program):
        opcode, here = program[here], here + 1
        if opcode >= opcodes:
            at += (opcode - opcodes) // line_range
            line += base + (opcode - opcodes) % line_range
        elif opcode == 0:
            size, here = _unsigned(program, here)
            if program[here] == SET_ADDRESS:
                at = 0  # of the kernel's section: the address itself is filled in by a relocation
            elif program[here] == INLINED_AT:
                inside, name = _unsigned(program, here + 1)
                function = _text(names, _unsigned(program, name)[0])[0] if inside else ""
            here += size
        elif opcode == ADVANCE_LINE:
            more, here = _signed(program, here)
            line += more
        elif opcode == CONST_ADD_PC:
            at += (255 - opcodes) // line_range
        elif opcode == FIXED_ADVANCE_PC:
            at += int.from_bytes(program[here : here + 2], "little")
            here += 2
        else:
            for _ in range(arguments[opcode - 1]):
                value, here = _unsigned(program, here)
                if opcode == ADVANCE_PC:
                    at += value
                elif opcode == SET_FILE:
                    file = value
        if opcode == COPY or opcode >= opcodes:
            rows.append(Row(at, Place(files[file], line, function), inside))
    return tuple(rows)


def _files(program: bytes, here: int) -> list[str]:
    while program[here]:  # folders
        _, here = _text(program, here)
    files, here = [""], here + 1
    while program[here]:
        name, here = _text(program, here)
        for _ in ("folder", "time", "size"):
            _, here = _unsigned(program, here)
        files.append(name.rsplit("/", 1)[-1])
    return files


def _text(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(0, at)
    return data[at:end].decode(), end + 1


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    """A LEB128 number, and where the next thing begins."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def _signed(data: bytes, at: int) -> tuple[int, int]:
    value, end = _unsigned(data, at)
    bits = 7 * (end - at)
    return value - (1 << bits) if value >> (bits - 1) else value, end
