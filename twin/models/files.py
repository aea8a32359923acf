"""The files of a model's folder: which may be read, how much of them, and their JSON.

A folder may come from anybody. Its files are regular ones inside of it; a symbolic link may also
point into the blobs of the Hugging Face cache that the folder is a snapshot of
(snapshots/REVISION/FILE -> ../../blobs/HASH), and nowhere else.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twin.errors import CheckpointError, TwinError
from twin.text import shown

# 100,000 tensors, three times the most in a published file; hostile JSON of that size takes 1.5 s
# and 0.5 GB
MOST_JSON_BYTES = 16 * 2**20
MOST_JSON_PARTS = 1_000_000  # mappings and lists in it: a tensor has three
LONGEST_INTEGER = 40  # digits; published tokenizers write 10^30 for "no limit"


def find(folder: Path, name: str, refusal: type[TwinError] = CheckpointError) -> Path | None:
    """The path of a file of the folder, None where there is nothing of that name. Raises `refusal`
    where it must not be read.
    """
    path = folder / name
    try:
        path.lstat()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # a name that is too long, or that no file can have
        raise refusal(
            f"{folder}: {shown(name)} cannot be a file ({_reason(error)}); download the folder "
            "again"
        ) from error
    try:
        real, home = path.resolve(strict=True), folder.resolve(strict=True)
        regular = stat.S_ISREG(real.stat().st_mode)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise refusal(
            f"{folder}: {shown(name)} leads nowhere ({_reason(error)}); download it again"
        ) from error
    if not any(real.is_relative_to(place) for place in (home, *_blobs(home))):
        raise refusal(
            f"{folder}: {shown(name)} is a link to {shown(real)}, outside of this folder; copy "
            "that file here if you trust it"
        )
    if not regular:
        raise refusal(f"{folder}: {shown(name)} is not a regular file; download it again")
    return path


def read(path: Path, most: int, refusal: type[TwinError] = CheckpointError) -> bytes:
    """All bytes of a regular file, which may hold `most`."""
    try:
        # A pipe that nobody writes to would hold up open() for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refusal(f"{path}: is not a regular file; give a file")
            content = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise refusal(
            f"{path}: cannot be read ({_reason(error)}); check the path and its permissions"
        ) from error
    if len(content) > most:
        raise refusal(
            f"{path}: is larger than {most} bytes, the most that such a file may have; download "
            "it again"
        )
    return content


def read_json(path: Path, refusal: type[TwinError] = CheckpointError) -> dict[str, Any]:
    """The JSON object in a file."""
    return parse_json(path, read(path, MOST_JSON_BYTES, refusal), refusal)


def parse_json(
    path: Path, text: bytes, refusal: type[TwinError] = CheckpointError
) -> dict[str, Any]:
    """The JSON object in `text`; a corrupt one, a repeated key and numbers without end are refused
    in the name of `path`.
    """
    if text.count(b"{") + text.count(b"[") > MOST_JSON_PARTS:
        raise refusal(
            f"{path}: its JSON has more than {MOST_JSON_PARTS} mappings and lists; download it "
            "again"
        )
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_int=_integer)
    except RecursionError as error:
        raise refusal(
            f"{path}: its JSON is nested too deep to be read; download it again"
        ) from error
    except ValueError as error:
        raise refusal(f"{path}: corrupt JSON ({error}); download it again") from error
    if not isinstance(found, dict):
        raise refusal(
            f"{path}: expected a JSON object, found {type(found).__name__}; download it again"
        )
    return found


def is_there(path: Path, test: Callable[[Path], bool]) -> bool:
    """False, too, for what no path can be: a text that is too long, or has a zero byte."""
    try:
        return test(path)
    except (OSError, ValueError):
        return False


def _blobs(home: Path) -> list[Path]:
    """Where the links of a Hugging Face cache's snapshot lead."""
    return [place.parent / "blobs" for place in home.parents if place.name == "snapshots"]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(again)} appears twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise ValueError(f"an integer has {len(digits)} digits, at most {LONGEST_INTEGER} are read")
    return int(digits)


def _reason(error: Exception) -> str:
    return (
        shown(error.strerror or type(error).__name__)
        if isinstance(error, OSError)
        else type(error).__name__
    )
