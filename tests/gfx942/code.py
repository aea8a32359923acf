"""A code object for gfx942: its instructions by llvm-objdump, where its parts lie in memory, what
its kernel asks for.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from twin.engine.hip_build import HipReport, cached_code_object
from twin.errors import ToolchainError
from twin.plan.options import Limits
from twin.plan.types import Plan

LINE = re.compile(r"\t(\S+?)(?:[ \t]+(.*?))?[ \t]*// ([0-9A-F]{12}):((?: [0-9A-F]{8})+)")
OBJDUMP = ("llvm-objdump-19", "llvm-objdump-20", "llvm-objdump-21", "llvm-objdump-22")
MI300X = Limits(
    blocks=304, dies=8, on_chip_bytes=65536, memory_bytes=192 * 10**9, oversubscribe=False
)
DESCRIPTOR = struct.Struct("<III4xq20xIIIHH4x")


@dataclass(frozen=True, slots=True)
class Instruction:
    at: int
    name: str
    operands: str
    size: int


@dataclass(frozen=True, slots=True)
class Segment:
    at: int
    content: bytes
    size: int  # in memory: what the file lacks is zero
    offset: int  # in the file


@dataclass(frozen=True, slots=True)
class Code:
    """Addresses are those of the file; a loader adds its base."""

    instructions: tuple[Instruction, ...]
    segments: tuple[Segment, ...]
    entry: int
    lds_bytes: int
    kernarg_bytes: int
    rsrc: tuple[int, int, int]  # COMPUTE_PGM_RSRC3, 1, 2
    properties: int  # which registers are set up before the kernel's first instruction

    def count(self, pattern: str) -> int:
        """Instructions whose name and operands match."""
        return len(self.matching(pattern))

    def matching(self, pattern: str) -> list[Instruction]:
        return [i for i in self.instructions if re.search(pattern, f"{i.name} {i.operands}")]


@lru_cache(maxsize=16)
def read_code(content: bytes) -> Code:
    """A code object: an ELF file with one kernel, `twin_kernel`."""
    assert content[:6] == b"\x7fELF\x02\x01", "not a 64-bit ELF file"
    phoff, shoff = struct.unpack_from("<QQ", content, 32)
    phsize, phcount, shsize, shcount = struct.unpack_from("<HHHH", content, 54)
    segments = []
    for n in range(phcount):
        kind, _, offset, at, _, filled, size = struct.unpack_from(
            "<IIQQQQQ", content, phoff + n * phsize
        )
        if kind == 1:  # PT_LOAD
            segments.append(Segment(at, content[offset : offset + filled], size, offset))
    descriptor = _symbol(content, shoff, shsize, shcount, b"twin_kernel.kd")
    inside = next(s for s in segments if s.at <= descriptor < s.at + s.size)
    lds, private, kernargs, entry, rsrc3, rsrc1, rsrc2, properties, preload = (
        DESCRIPTOR.unpack_from(inside.content, descriptor - inside.at)
    )
    assert (private, preload) == (0, 0), "the kernel has scratch memory or preloaded arguments"
    return Code(
        tuple(_disassembled(content)),
        tuple(segments),
        descriptor + entry,
        lds,
        kernargs,
        (rsrc3, rsrc1, rsrc2),
        properties,
    )


def patched(content: bytes, one: Instruction, change: Callable[[bytes], bytes]) -> bytes:
    """The code object with other bytes in an instruction's place."""
    segment = next(s for s in read_code(content).segments if s.at <= one.at < s.at + s.size)
    at = segment.offset + one.at - segment.at
    made = change(content[at : at + one.size])
    assert len(made) == one.size
    return content[:at] + made + content[at + one.size :]


def nothing(was: bytes) -> bytes:
    """s_nop 0 as often as fits."""
    return bytes.fromhex("000080bf") * (len(was) // 4)


def narrower(was: bytes) -> bytes:
    """A load or store of system scope with agent scope, one of agent scope with none."""
    word = int.from_bytes(was[:4], "little")
    word &= ~(1 << 16) if word >> 16 & 1 else ~(1 << 25)
    return word.to_bytes(4, "little") + was[4:]


def _symbol(content: bytes, shoff: int, shsize: int, shcount: int, name: bytes) -> int:
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", content, shoff + n * shsize) for n in range(shcount)
    ]
    for section in sections:
        if section[1] != 11:  # SHT_DYNSYM
            continue
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 24):
            label, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", content, at)
            if content[names + label :].startswith(name + b"\0"):
                return int(value)
    raise AssertionError(f"the code object has no symbol {name!r}")


def _disassembled(content: bytes) -> list[Instruction]:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.hsaco"
        file.write_bytes(content)
        command = [objdump(), "-d", "--mcpu=gfx942", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = []
    for line in said.splitlines():
        if line.startswith("\t"):
            match = LINE.match(line)
            assert match, f"llvm-objdump says {line!r}"
            name, operands, at, words = match.groups()
            found.append(
                Instruction(int(at, 16), name, (operands or "").strip(), 4 * len(words.split()))
            )
    return found


def objdump() -> str:
    for candidate in OBJDUMP:
        if shutil.which(candidate):
            return candidate
    pytest.skip("llvm-objdump-19 is not installed (Debian: apt-get install llvm-19)")


@lru_cache(maxsize=16)
def _compiled(plan: Plan) -> HipReport:
    try:
        return cached_code_object(plan, "gfx942")
    except ToolchainError as error:
        if not str(error).startswith("no clang"):
            raise
        pytest.skip(str(error))


def compiled(plan: Plan) -> HipReport:
    """Skips without a compiler that knows gfx942."""
    objdump()
    return _compiled(plan)


@lru_cache(maxsize=16)
def code_of(plan: Plan) -> Code:
    return read_code(compiled(plan).code_object)
