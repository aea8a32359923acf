"""The compilers of this computer, and a cache of what they made: same sources, flags and compiler,
same file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from stat import S_IMODE, S_ISREG

from twin.data import data_dir
from twin.errors import ToolchainError
from twin.text import shown

CANDIDATES = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-shared",
    "-pthread",
)
SANITIZERS = ("address,undefined", "thread")
KEPT_ERROR_LINES = 30
MAKING = ".making-"  # begins the names of folders in which something is compiled
ABANDONED_S = 3600.0  # no compiler takes so long
OTHERS_WRITE = 0o022  # permission bits: of the group, of everybody
SEAL = b"\nsha256 of all before: "


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
    raise ToolchainError(
        f"no C++ compiler ({missing} not found): install one (Debian: apt-get install g++), or "
        "name it in CXX"
    )


def native_sources() -> list[Path]:
    """All native sources that a kernel may include, in a fixed order."""
    root = data_dir("native")
    return sorted(
        p
        for folder in ("monokernel", "platform")
        for p in (root / folder).iterdir()
        if p.suffix != ".md"
    )


def build_host(header: str, *, sanitize: str | None = None, extra: Sequence[str] = ()) -> Path:
    """The shared library of the host engine for a generated header, compiled unless the cache has
    it.
    """
    if sanitize is not None and sanitize not in SANITIZERS:
        raise ToolchainError(f"sanitize={sanitize!r}: expected one of {', '.join(SANITIZERS)}")
    compiler = host_compiler()
    flags = [*FLAGS, *_native_flag(compiler), *extra]
    if sanitize:
        flags += [
            f"-fsanitize={sanitize}",
            "-g1",  # lines; with variables it takes half as long again
            "-O0",  # a third of the time
            "-fno-omit-frame-pointer",
            "-fno-sanitize-recover=all",
        ]
    key = content_key([compiler_version(compiler), *flags, header], native_sources())
    target = cache_dir() / f"host-{key}.so"

    def compile_into(folder: Path) -> Path:
        (folder / "plan.h").write_text(header, encoding="utf-8")
        output = folder / "engine.so"
        run_compiler(
            [
                compiler,
                *flags,
                f"-I{folder}",
                str(data_dir("native") / "platform" / "host_main.cpp"),
                "-o",
                str(output),
            ]
        )
        return output

    return cached(target, compile_into)


def cached(target: Path, make: Callable[[Path], Path]) -> Path:
    """The file at `target`, made unless it is there: whole, this user's own, and as it was made.

    `make` gets a temporary folder next to it and returns a file in there, which is sealed with its
    digest and renamed: a reader never sees half of it, and of several processes that make it at
    once each gets a whole one. Raises ToolchainError.
    """
    folder = own_folder(target.parent)
    if unsealed(target) is not None:
        return target
    try:
        _remove_abandoned(folder)
        with tempfile.TemporaryDirectory(prefix=MAKING, dir=folder) as work:
            made = make(Path(work))
            _seal(made)
            made.replace(target)
    except OSError as error:
        raise ToolchainError(
            f"{shown(folder)}: cannot be written ({error.strerror}); set XDG_CACHE_HOME to a "
            "folder that can"
        ) from error
    return target


def own_folder(folder: Path) -> Path:
    """`folder`, made if it is missing, in which nobody but this user can put code that we then run.
    Raises ToolchainError.
    """
    advice = "set XDG_CACHE_HOME to a folder of your own"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid != os.geteuid():
            raise ToolchainError(
                f"{shown(folder)} belongs to user {about.st_uid}, whose code would be run: {advice}"
            )
        if about.st_mode & OTHERS_WRITE:
            folder.chmod(S_IMODE(about.st_mode) & ~OTHERS_WRITE)
    except OSError as error:
        raise ToolchainError(
            f"{shown(folder)}: cannot be written ({error.strerror}); {advice}"
        ) from error
    return folder


def unsealed(target: Path) -> bytes | None:
    """What was cached, without its seal; None where it is missing, damaged, or could have been
    written by somebody else.
    """
    try:
        with target.open("rb") as file:
            about = os.fstat(file.fileno())
            if (
                not S_ISREG(about.st_mode)
                or about.st_uid != os.geteuid()
                or about.st_mode & OTHERS_WRITE
            ):
                return None
            content, seal, digest = file.read().rpartition(SEAL)
    except OSError:
        return None
    return content if seal and digest == _digest(content) else None


def _seal(made: Path) -> None:
    """Behind a shared library's last section, where no loader looks."""
    content = made.read_bytes()
    made.chmod(S_IMODE(made.stat().st_mode) & ~OTHERS_WRITE)
    with made.open("ab") as file:
        file.write(SEAL + _digest(content))


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _remove_abandoned(folder: Path) -> None:
    """Temporary folders whose compilers were killed; those of running ones are younger."""
    for place in folder.iterdir():
        if (
            place.name.startswith((MAKING, "tmp"))
            and place.is_dir()
            and time.time() - place.stat().st_mtime > ABANDONED_S
        ):
            shutil.rmtree(place, ignore_errors=True)


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
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    return version + _cpu_flags()


def run_compiler(command: Sequence[str]) -> str:
    """Run a compiler and return what it said; a failure becomes a ToolchainError with the lines
    from its first error on, before which there may be many warnings.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode:
        found = said.splitlines()
        first = next((at for at, line in enumerate(found) if "error" in line.lower()), 0)
        lines = "\n".join(found[first : first + KEPT_ERROR_LINES])
        raise ToolchainError(
            f"{command[0]} failed with exit code {done.returncode}; report this with its output:\n"
            f"{lines}"
        )
    return said


def _native_flag(compiler: str) -> list[str]:
    """-march=native where the compiler knows it (x86), else -mcpu=native (ARM)."""
    for flag in ("-march=native", "-mcpu=native"):
        if _accepts(compiler, flag):
            return [flag]
    return []


@lru_cache(maxsize=8)
def _accepts(compiler: str, flag: str) -> bool:
    done = subprocess.run(
        [compiler, flag, "-x", "c++", "-E", os.devnull], capture_output=True, check=False
    )
    return done.returncode == 0


def _cpu_flags() -> str:
    """The instruction sets of this CPU: a home folder may be shared by different computers."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
