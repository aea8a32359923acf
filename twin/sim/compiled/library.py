"""Builds native/simulator with this computer's C++ compiler, once, and calls it."""

from __future__ import annotations

import ctypes
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from twin.data import data_dir
from twin.errors import ToolchainError
from twin.sim.compiled.state import State, header
from twin.toolchain import (
    cache_dir,
    cached,
    compiler_version,
    content_key,
    host_compiler,
    own_folder,
    run_compiler,
)

FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared")


def run(state: State) -> None:
    """Raises ToolchainError where there is no compiler."""
    table = (ctypes.c_void_p * len(state))(*(array.ctypes.data for array in state))
    load().simulate(table)


@lru_cache(maxsize=1)
def load() -> Any:
    """Its code, loaded, so that its file may go: where no cache can be written, every process
    builds its own (1.3 s). Raises ToolchainError where there is no compiler.
    """
    with tempfile.TemporaryDirectory() as instead:
        library = ctypes.CDLL(str(build(Path(instead))))
    library.simulate.argtypes = [ctypes.c_void_p]
    library.simulate.restype = None
    return library


def build(instead: Path) -> Path:
    """The shared library for the present sources and compiler: from the cache, or made there, or
    else in `instead`.
    """
    kept = target()
    return cached(kept if _usable(kept.parent) else instead / kept.name, _compile_into)


def target() -> Path:
    """Where the library is kept; another one for other sources, flags, layouts and compilers."""
    key = content_key(
        [compiler_version(host_compiler()), *FLAGS, header()], sorted(_sources().iterdir())
    )
    return cache_dir() / f"simulator-{key}.so"


def _sources() -> Path:
    return data_dir("native") / "simulator"


def _usable(folder: Path) -> bool:
    """Can this user write there, and nobody else?"""
    try:
        return os.access(own_folder(folder), os.W_OK)
    except ToolchainError:
        return False


def _compile_into(work: Path) -> Path:
    (work / "layout.h").write_text(header(), encoding="utf-8")
    output = work / "simulator.so"
    run_compiler(
        [host_compiler(), *FLAGS, f"-I{work}", str(_sources() / "main.cpp"), "-o", str(output)]
    )
    return output
