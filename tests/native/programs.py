"""C++ programs of tests: the same sources, flags and compiler, the same program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from twin import toolchain


def built(source: Path, flags: Sequence[str], *, included: Iterable[Path] = ()) -> Path:
    """`source` compiled, unless the cache has it; it may include native sources, and those
    `included`.
    """
    compiler = toolchain.host_compiler()
    sources = [*toolchain.native_sources(), *sorted(included), source]
    key = toolchain.content_key([toolchain.compiler_version(compiler), *flags], sources)

    def compiled(folder: Path) -> Path:
        program = folder / source.stem
        toolchain.run_compiler([compiler, *flags, str(source), "-o", str(program)])
        return program

    return toolchain.cached(toolchain.cache_dir() / f"test-{source.stem}-{key}", compiled)
