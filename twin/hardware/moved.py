"""Where a number stands that files of before 2026-11-29 have in another section: costs of our
kernel's code have one of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from twin.errors import HardwareError
from twin.hardware.kernel import CoreKernel, WarpKernel
from twin.units import stem

_MOVED = {
    "warps.jitter_s": "memory.jitter_s",
    "warps.pair_bytes_per_s": "block.pair_bytes_per_s",
    "warps.quads_s": "kernel.by_fours_s",
    "warps.ahead_s": "kernel.prefetch_s",
    "warps.whole_s": "kernel.quantise_s",
    "launch.state_s": "kernel.border_s",
}
_SECTIONS = ("block", "warps", "codes")  # other numbers of theirs are now `kernel`'s
MOST_NAMED = 6


def moved(path: str) -> str | None:
    """The path that a number has now, with its unit or without; None for one that has not moved."""
    section, _, leaf = path.partition(".")
    for old, now in _MOVED.items():
        if path in (old, _short(old)):
            return now
    kernel = {*WarpKernel.__dataclass_fields__, *CoreKernel.__dataclass_fields__}
    known = leaf in kernel or leaf in map(stem, kernel)
    return f"kernel.{leaf}" if section in _SECTIONS and known else None


def _short(path: str) -> str:
    section, _, leaf = path.partition(".")
    return f"{section}.{stem(leaf)}"


def check_places(data: Mapping[str, Any], file: Path) -> None:
    """Raises HardwareError that names every number of a device file that belongs elsewhere now."""
    refuse(
        (
            f"{section}.{leaf}"
            for section, held in data.items()
            if isinstance(held, Mapping)
            for leaf in held
        ),
        str(file),
        "a section `kernel` of this file, which holds what our kernel costs there",
    )


def refuse(paths: Iterable[str], where: str, home: str) -> None:
    """Raises HardwareError if any of the paths is one of before."""
    found = {path: now for path in paths if (now := moved(path))}
    if not found:
        return
    named = [f"{path} as {now}" for path, now in found.items()][:MOST_NAMED]
    more = f" and {len(found) - len(named)} more" if len(found) > len(named) else ""
    raise HardwareError(
        f"{where}: costs of the kernel are no hardware; they belong in {home}: write "
        f"{', '.join(named)}{more}"
    )
