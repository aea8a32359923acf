"""Runs a code object's kernel on the CPU, instruction by instruction: interpreter.cpp executes what
this module reads.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gfx942.code import Code, Instruction
from twin import toolchain

HERE = Path(__file__).resolve().parent
FLAGS = (
    "-std=c++17",
    "-O1",  # a second of a core less than -O2, and no test is slower
    "-march=native",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-shared",
)
VGPR, SGPR, CONSTANT, SHARED_BASE, NONE = range(5)
NEG, ABS, SEXT = 1, 2, 4
MOST_OPERANDS = 6
NAMED = {
    "vcc": 106,
    "vcc_lo": 106,
    "vcc_hi": 107,
    "m0": 124,
    "exec": 126,
    "exec_lo": 126,
    "exec_hi": 127,
}
SELECTS = {"BYTE_0": 0, "BYTE_1": 1, "BYTE_2": 2, "BYTE_3": 3, "WORD_0": 4, "WORD_1": 5, "DWORD": 6}
DPP = {"row_mirror": 0x140, "row_half_mirror": 0x141, "row_bcast:15": 0x142, "row_bcast:31": 0x143}
PAIRS = {"vcc", "exec"}
OPERAND = re.compile(r"^(-)?(\|)?(sext\()?([^|()]+)\)?(\|)?$")
REGISTER = re.compile(r"^([vs])(?:(\d+)|\[(\d+):(\d+)\])$")
NUMBER = re.compile(r"^-?(0x[0-9a-f]+|\d+)$")
FLOAT = re.compile(r"^-?\d+\.\d+(e[-+]?\d+)?$")
ITEM = re.compile(r"(\w+):(\[[^\]]*\]|\S+)")
FLAGS_OF_CACHES = {"sc0": 1, "sc1": 2, "nt": 4}


class Refused(Exception):
    """An instruction that the interpreter does not know."""


class Fault(Exception):
    """What the kernel did that no kernel may."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    compiler = toolchain.host_compiler()
    sources = [HERE / "interpreter.cpp", HERE / "memory.h"]
    key = toolchain.content_key([toolchain.compiler_version(compiler), *FLAGS], sources)

    def build(folder: Path) -> Path:
        made = folder / "interpreter.so"
        toolchain.run_compiler([compiler, *FLAGS, str(sources[0]), "-o", str(made)])
        return made

    target = toolchain.cached(toolchain.cache_dir() / f"gfx942-{key}.so", build)
    found = ctypes.CDLL(str(target))
    found.gfx942_names.restype = ctypes.c_char_p
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_ulong
    found.gfx942_run.argtypes = [
        pointer,
        number,
        wide,
        number,
        pointer,
        number,
        number,
        pointer,
        number,
        number,
        number,
        pointer,
        number,
        wide,
        wide,
        pointer,
        ctypes.c_char_p,
        number,
    ]
    found.gfx942_run.restype = ctypes.c_long
    return found


@lru_cache(maxsize=1)
def names() -> dict[str, int]:
    return {name: at for at, name in enumerate(library().gfx942_names().decode().split())}


def records(code: Code) -> NDArray[np.int32]:
    """All instructions as the C++ side reads them. Raises Refused."""
    return np.array([_record(one) for one in code.instructions], np.int32)


@lru_cache(maxsize=100_000)  # the same kernels are loaded again and again
def _record(one: Instruction) -> list[int]:
    encoding = re.search(r"_(e32|e64|sdwa|dpp)$", one.name)
    name = one.name[: encoding.start()] if encoding else one.name
    if name not in names():
        raise Refused(
            f"0x{one.at:x} {one.name} {one.operands}: the interpreter does not know {name}"
        )
    try:
        return _encoded(one, name)
    except (ValueError, KeyError) as error:
        raise Refused(f"0x{one.at:x} {one.name} {one.operands}: {error}") from error


def _encoded(one: Instruction, name: str) -> list[int]:
    words, items, flags = _split(one.operands)
    operands, target = [], 0
    waits = {"vmcnt": -1, "lgkmcnt": -1, "expcnt": -1}
    if name == "s_waitcnt":
        for which, count in re.findall(r"(\w+)\((\d+)\)", one.operands):
            if which not in waits:
                raise ValueError(f"waits for {which}")
            waits[which] = int(count)
    elif name == "s_getreg_b32":
        if "hwreg(HW_REG_XCC_ID, 0, 4)" not in one.operands:
            raise ValueError("a hardware register that no test has")
        operands = [_operand(words[0], name, 6)]
    elif name in ("s_nop", "s_sleep", "s_endpgm", "s_barrier"):
        pass
    elif name == "s_branch" or name.startswith("s_cbranch"):
        jump = int(words[0])
        target = one.at + 4 + 4 * (jump - 65536 if jump >= 32768 else jump)
    elif not name.startswith("buffer_"):
        selects = [items.pop(f"src{n}_sel", "DWORD") for n in range(2)]
        for n, word in enumerate(words):
            operands.append(_operand(word, name, SELECTS[selects[n - 1]] if n in (1, 2) else 6))
    dpp = [-1, 15, 15, 0]
    for move, number in DPP.items():
        if move in (*flags, *(f"{k}:{v}" for k, v in items.items())):
            dpp[0] = number
    if "quad_perm" in items:
        dpp[0] = sum(n << 2 * k for k, n in enumerate(_list(items.pop("quad_perm"))))
    if one.name.endswith("_dpp"):
        if dpp[0] < 0:
            raise ValueError("an unknown move between lanes")
        dpp[1:] = [
            int(items.pop(k, d), 0)
            for k, d in (("row_mask", "15"), ("bank_mask", "15"), ("bound_ctrl", "0"))
        ]
        items.pop("row_bcast", None)
    packed = name.startswith("v_pk_") or name == "v_dot2_f32_f16"
    bits = [
        _bits(items.pop(k, d))
        for k, d in (
            ("op_sel", "[]"),
            ("op_sel_hi", "[1,1,1]" if packed else "[]"),
            ("neg_lo", "[]"),
            ("neg_hi", "[]"),
        )
    ]
    offsets = [
        int(items.pop(k, items.pop(other, "0")), 0)
        for k, other in (("offset", "offset0"), ("offset1", ""))
    ]
    destination = SELECTS[items.pop("dst_sel", "DWORD")]
    items.pop("dst_unused", None)
    cache = sum(FLAGS_OF_CACHES.get(flag, 0) for flag in flags)
    unknown = {*items, *(f for f in flags if f not in FLAGS_OF_CACHES and f not in DPP)}
    if unknown and name != "s_getreg_b32" and name != "s_waitcnt":
        raise ValueError(f"the interpreter does not know {', '.join(sorted(unknown))}")
    flat = [number for operand in operands for number in operand]
    flat += [NONE, 0, 0, 0, 6] * (MOST_OPERANDS - len(operands))
    return [
        names()[name],
        one.at,
        one.size,
        target,
        len(operands),
        *offsets,
        cache,
        *dpp,
        *bits,
        waits["vmcnt"],
        waits["lgkmcnt"],
        destination,
        *flat,
    ]


def _split(text: str) -> tuple[list[str], dict[str, str], list[str]]:
    """Operands; what follows them as name:value; flags."""
    words, items, flags = [], {}, []
    depth, part, parts = 0, "", []
    for c in text:
        depth += (c in "[(") - (c in "])")
        if c == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += c
    parts.append(part.strip())
    last = parts.pop().split(" ") if parts[-1] else []
    rest: list[str] = []
    for n, word in enumerate(last):
        (
            parts
            if n == 0 and ":" not in re.sub(r"\[.*\]", "", word) and word not in FLAGS_OF_CACHES
            else rest
        ).append(word)
    words = parts
    for word in rest:
        match = ITEM.fullmatch(word)
        if match and not word.startswith("row_bcast"):
            items[match[1]] = match[2]
        elif word:
            flags.append(word)
    return words, items, flags


def _operand(text: str, name: str, select: int) -> list[int]:
    if text == "off":
        return [NONE, 0, 0, 0, 6]
    if text == "src_shared_base":
        return [SHARED_BASE, 0, 0, 0, 6]
    if FLOAT.match(text):
        if "f16" in name and "cvt" not in name and "mix" not in name:
            raise ValueError(f"{text} as half a word")
        return [CONSTANT, _signed(struct.unpack("<I", struct.pack("<f", float(text)))[0]), 0, 0, 6]
    if NUMBER.match(text):
        value = int(text, 0)
        if value > 0x7FFFFFFF and "64" in name:
            raise ValueError(f"{text} of 64 bits")
        return [CONSTANT, _signed(value), 0, 0, 6]
    match = OPERAND.match(text)
    if not match:
        raise ValueError(f"operand {text}")
    change = (NEG if match[1] else 0) | (ABS if match[2] else 0) | (SEXT if match[3] else 0)
    register = match[4]
    if register in NAMED:
        return [SGPR, NAMED[register], 2 if register in PAIRS else 1, change, select]
    found = REGISTER.match(register)
    if not found:
        raise ValueError(f"operand {text}")
    kind = VGPR if found[1] == "v" else SGPR
    first = int(found[2] or found[3])
    count = 1 if found[2] else int(found[4]) - first + 1
    return [kind, first, count, change, select]


def _signed(value: int) -> int:
    return value - (1 << 32) if value > 0x7FFFFFFF else value


def _list(text: str) -> list[int]:
    return [int(n) for n in text.strip("[]").split(",") if n]


def _bits(text: str) -> int:
    return sum(n << k for k, n in enumerate(_list(text)))


# ---- a launch ------------------------------------------------------------------------------------


@dataclass
class Loaded:
    """A code object in memory."""

    code: Code
    image: NDArray[np.uint8]
    records: NDArray[np.int32]
    reached: NDArray[np.uint32]  # how often by the runs so far, instruction by instruction

    @property
    def base(self) -> int:
        return int(self.image.ctypes.data) // 4096 * 4096 + 4096


def load(code: Code) -> Loaded:
    size = max(s.at + s.size for s in code.segments)
    image, table = np.zeros(size + 8192, np.uint8), records(code)
    made = Loaded(code, image, table, np.zeros(len(table), np.uint32))
    for segment in code.segments:
        at = made.base - made.image.ctypes.data + segment.at
        made.image[at : at + len(segment.content)] = np.frombuffer(segment.content, np.uint8)
    return made


@dataclass(frozen=True)
class Launched:
    """Blocks of one GPU, and where their arguments lie."""

    kernargs: NDArray[np.uint8]
    blocks: int


def run(
    loaded: Loaded,
    launches: Sequence[Launched],
    memory: Sequence[NDArray[Any]],
    *,
    dies: int = 2,
    threads: int = 512,
    seed: int = 1,
    most: int = 10**9,
) -> int:
    """Runs one launch on each GPU, side by side, to the end. Returns how many instructions were
    executed. Raises Fault.

    `memory`: the arrays that the kernel may read and write.
    """
    assert loaded.code.properties == 8, "registers are set up otherwise than this interpreter does"
    drawn = np.random.default_rng(seed)
    places = [
        (g, int(drawn.integers(dies)), b)
        for g, one in enumerate(launches)
        for b in range(one.blocks)
    ]
    table = np.array(places, np.int32)
    arguments = np.array([one.kernargs.ctypes.data for one in launches], np.uint64)
    lent = [loaded.image, *(one.kernargs for one in launches), *memory]
    regions = np.array([(a.ctypes.data, a.nbytes) for a in lent], np.uint64)
    said = ctypes.create_string_buffer(500)
    executed = library().gfx942_run(
        loaded.records.ctypes.data,
        len(loaded.records),
        loaded.base,
        loaded.code.entry,
        arguments.ctypes.data,
        loaded.code.lds_bytes,
        len(places),
        table.ctypes.data,
        len(launches),
        dies,
        threads,
        regions.ctypes.data,
        len(regions),
        seed,
        most,
        loaded.reached.ctypes.data,
        said,
        len(said),
    )
    if executed < 0:
        raise Fault(said.value.decode())
    return int(executed)
