"""The compilers of this computer, and a cache of what they made: same sources, flags and compiler, same file."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from twin.data import data_dir
from twin.errors import ToolchainError

CANDIDATES = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread")
SANITIZERS = ("address,undefined", "thread")
KEPT_ERROR_LINES = 30


def cache_dir() -> Path:
    """Where compiled engines are kept between runs; safe to delete."""
    root = os.environ.get("XDG_CACHE_HOME")
    base = Path(root) if root and Path(root).is_absolute() else Path.home() / ".cache"
    return base / "monotwin"


def host_compiler() -> str:
    """The C++ compiler: CXX if set, else the first of c++, g++, clang++."""
    named = os.environ.get("CXX")
    for candidate in (named,) if named else CANDIDATES:
        found = shutil.which(candidate)
        if found:
            return found
    missing = f"CXX={named}" if named else " or ".join(CANDIDATES)
    raise ToolchainError(f"no C++ compiler ({missing} not found): install one (Debian: apt-get install g++), or name it in CXX")


def native_sources() -> list[Path]:
    """All native sources that a kernel may include, in a fixed order."""
    root = data_dir("native")
    return sorted(p for folder in ("monokernel", "platform") for p in (root / folder).iterdir() if p.suffix != ".md")


def build_host(header: str, *, sanitize: str | None = None, extra: Sequence[str] = ()) -> Path:
    """The shared library of the host engine for a generated header, compiled unless the cache has it."""
    if sanitize is not None and sanitize not in SANITIZERS:
        raise ToolchainError(f"sanitize={sanitize!r}: expected one of {', '.join(SANITIZERS)}")
    compiler = host_compiler()
    flags = [*FLAGS, *_native_flag(compiler), *extra]
    if sanitize:
        flags += [f"-fsanitize={sanitize}", "-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
    key = content_key([compiler_version(compiler), *flags, header], native_sources())
    target = cache_dir() / f"host-{key}.so"
    if target.exists():
        return target

    def compile_into(folder: Path) -> Path:
        (folder / "plan.h").write_text(header, encoding="utf-8")
        output = folder / "engine.so"
        run_compiler([compiler, *flags, f"-I{folder}", str(data_dir("native") / "platform" / "host_main.cpp"), "-o", str(output)])
        return output

    return cached(target, compile_into)


def cached(target: Path, make: object) -> Path:
    """Make a file or folder in a temporary one beside `target`, then rename it: a reader never sees half of it.

    Where another process was faster, what it made stays: a folder that is not empty cannot be replaced.
    """
    assert callable(make)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made: Path = make(Path(folder))
            try:
                made.replace(target)
            except OSError:
                if not target.is_dir():
                    raise
    except OSError as error:
        raise ToolchainError(f"{target.parent}: cannot be written ({error.strerror}); set XDG_CACHE_HOME to a folder that can") from error
    return target


def content_key(texts: Iterable[str], files: Iterable[Path]) -> str:
    """A short hash of texts and of the names and contents of files."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


@lru_cache(maxsize=8)
def compiler_version(compiler: str) -> str:
    """What the compiler says about itself; `-march=native` also makes the CPU part of it."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return version + _cpu_flags()


def run_compiler(command: Sequence[str]) -> str:
    """Run a compiler and return what it said; a failure becomes a ToolchainError with its first lines."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode:
        lines = "\n".join(said.splitlines()[:KEPT_ERROR_LINES])
        raise ToolchainError(f"{command[0]} failed with exit code {done.returncode}; report this with its output:\n{lines}")
    return said


def _native_flag(compiler: str) -> list[str]:
    """-march=native where the compiler knows it (x86), else -mcpu=native (ARM)."""
    for flag in ("-march=native", "-mcpu=native"):
        if _accepts(compiler, flag):
            return [flag]
    return []


@lru_cache(maxsize=8)
def _accepts(compiler: str, flag: str) -> bool:
    done = subprocess.run([compiler, flag, "-x", "c++", "-E", os.devnull], capture_output=True, check=False)
    return done.returncode == 0


def _cpu_flags() -> str:
    """The instruction sets of this CPU: a home folder may be shared by different computers."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
