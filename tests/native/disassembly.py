"""A compiled kernel's instructions, their control bits and who may follow whom, by nvdisasm.

NVIDIA documents no control bits; Jia et al. describe those of compute capability 7.0 and later:
Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking (arXiv 1804.06826), section 2.1.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from twin import toolchain

LINE = re.compile(
    r"\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;\s+/\* 0x[0-9a-f]{16} "
    r"\*/$"
)
SECOND = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/$")
SIZE = 16  # bytes of an instruction
CONTROL = 41  # the lowest control bit of an instruction's second word
NONE = 7  # of six scoreboards
JUMP = re.compile(r"`\(([^)]+)\)|(\.L_x_\d+)")
UNKNOWN = ("JMP", "JMX", "BRXU", "CALL.ABS", "RET.ABS", "RPCMOV")  # jumps to where no label says


@dataclass(frozen=True, slots=True)
class Instruction:
    at: int  # bytes from the kernel's start
    guard: str  # "@!P0"; empty: every thread executes it
    name: str  # with its modifiers
    operands: str
    result: int  # scoreboards, as bits: held until its result is there
    read: int  # held until it has read its operands; a fence: until it is done
    waits: int  # it is not issued while one of these is held, whatever its guard says


@dataclass(frozen=True, slots=True)
class Program:
    code: tuple[Instruction, ...]
    # the instructions, by number, that may be executed after each
    next: tuple[tuple[int, ...], ...]


def find_nvdisasm() -> str | None:
    """nvdisasm on the path, else where its wheel (nvidia-cuda-nvdisasm) puts it."""
    wheels = find_spec("nvidia")
    folders = wheels.submodule_search_locations if wheels else None
    return shutil.which("nvdisasm") or next(
        (str(p) for folder in folders or () for p in Path(folder).glob("*/bin/nvdisasm")), None
    )


def disassembled(nvdisasm: str, cubin: bytes) -> Program:
    """Of a kernel that was listed before, the cached listing."""
    tool = Path(nvdisasm).stat()
    key = hashlib.sha256(f"{nvdisasm} {tool.st_size} {tool.st_mtime_ns}".encode() + cubin)

    def listed(folder: Path) -> Path:
        (folder / "kernel.cubin").write_bytes(cubin)
        said = subprocess.run(
            [nvdisasm, "-c", "-hex", str(folder / "kernel.cubin")], capture_output=True, check=True
        ).stdout
        (folder / "listing").write_bytes(zlib.compress(said, 1))
        return folder / "listing"

    kept = toolchain.cached(toolchain.cache_dir() / f"listing-{key.hexdigest()[:24]}", listed)
    content = toolchain.unsealed(kept)
    assert content
    return read(zlib.decompress(content).decode())


def read(listing: str) -> Program:
    """The program of a listing by `nvdisasm -c -hex`. Raises ValueError where it is not
    understood.
    """
    lines = listing.splitlines()
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if first := LINE.match(line):
            second = SECOND.match(following)
            if not second:
                raise ValueError(
                    f"no second word behind {line.strip()!r}: not by nvdisasm -hex, or not of "
                    "compute capability 7.0 or later"
                )
            code.append(_instruction(first, int(second[1], 16) >> CONTROL))
            if code[-1].at != SIZE * (len(code) - 1):
                raise ValueError(f"what stands before {line.strip()!r} is not understood")
        elif line.endswith(":") and not line[0].isspace():
            labels[line[:-1]] = len(code)
    return Program(tuple(code), tuple(_next(code, labels)))


def _instruction(line: re.Match[str], control: int) -> Instruction:
    at, guard, name, operands = line.groups(default="")
    result, read = control >> 5 & 7, control >> 8 & 7
    return Instruction(
        int(at, 16),
        guard,
        name,
        operands,
        (1 << result) & ~(1 << NONE),
        (1 << read) & ~(1 << NONE),
        control >> 11 & 63,
    )


def _next(code: list[Instruction], labels: dict[str, int]) -> list[tuple[int, ...]]:
    """Rather too many than too few: a predicate is never held for known, and a function returns
    behind all of its calls.
    """
    functions = sorted(number for label, number in labels.items() if not label.startswith("."))
    # a function's first instruction -> the instructions behind its calls
    behind: dict[int, list[int]] = {}
    for number, one in enumerate(code):
        if one.name.startswith("CALL"):
            behind.setdefault(_target(one, labels), []).append(number + 1)
    together = {
        labels[b or a]
        for one in code
        if one.name.startswith("BSSY")
        for a, b in JUMP.findall(one.operands)
    }
    found = []
    for number, one in enumerate(code):
        if one.name.startswith(UNKNOWN) or (
            one.name.startswith("BSYNC") and number + 1 not in together
        ):
            raise ValueError(f"{one.name} at {one.at:#x}: nobody knows where it leads")
        falls = [number + 1] if number + 1 < len(code) else []
        if one.name == "EXIT":
            led = []
        elif one.name.startswith("RET"):
            led = behind.get(max((f for f in functions if f <= number), default=-1), [])
        elif one.name.startswith("BSSY"):
            # names where threads go on together: behind their BSYNC, as is made sure of above
            led = []
        else:
            led = [labels[a or b] for a, b in JUMP.findall(one.operands)]
        if one.name.startswith("BRX") and not led:
            raise ValueError(f"{one.name} at {one.at:#x}: nvdisasm names no targets")
        always = not one.guard and (
            one.name in ("EXIT", "BRX") or one.name.startswith(("RET", "CALL")) or _plain(one)
        )
        found.append(tuple({*led, *([] if always else falls)}))
    return found


def _plain(one: Instruction) -> bool:
    """A branch without a predicate among its operands."""
    return one.name == "BRA" and one.operands.startswith("`")


def _target(call: Instruction, labels: dict[str, int]) -> int:
    (label, _), *others = JUMP.findall(call.operands) or [("", "")]
    if not label or others:
        raise ValueError(f"{call.name} at {call.at:#x}: nobody knows where it leads")
    return labels[label]
