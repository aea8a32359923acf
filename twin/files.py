"""Files that users name: looked at before the work, read within a bound, written whole or not at
all.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE
from typing import Any
from uuid import uuid4

from twin.errors import ConfigError, OutputError
from twin.text import shown

TEMPORARY = ".twin-"  # begins the name of what is being written, next to the file that it becomes
LONGEST_NAME = 255  # bytes of a name in a folder, where the file system does not say
MOST_JSON_PARTS = 1_000_000
MOST_RECORD_BYTES = 16 * 2**20  # of a file of results; the longest of ours has 150 kB
LONGEST_STEM = 200  # characters of a name that we make a file name of
_STEM = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*\Z")


# ---- before the work -----------------------------------------------------------------------------


def check_file(path: Path) -> Path:
    """`path`, where a file can be written: a new one, or over an ordinary one. Parents may be
    missing. Raises OutputError.
    """
    standing = _standing(path)
    if standing == path:
        if path.is_dir():
            raise OutputError(f"{shown(path)} is a folder: name a file")
        if not path.is_file():
            raise OutputError(
                f"{shown(path)} is no ordinary file: name another one, devices and pipes are not "
                "written to"
            )
        standing = path.resolve().parent
    return _writable(path, standing)


def check_folder(path: Path) -> Path:
    """`path`, a folder in which files can be written; it may be missing. Raises OutputError."""
    return _writable(path, _standing(path))


def new_folder(parent: Path, stamp: str, name: str) -> Path:
    """An empty folder STAMP-NAME in `parent`; where another program made it in the same second,
    STAMP-2-NAME and so on. Raises OSError.
    """
    for number in itertools.count(1):
        folder = parent / (f"{stamp}-{name}" if number == 1 else f"{stamp}-{number}-{name}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


def expanded(path: Path) -> Path:
    """With the home folder of a leading ~; as it is where there is none, which reading refuses."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def resolved(path: Path) -> Path:
    """The path without links; as it is where they lead in a circle, which reading refuses."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # RuntimeError: Python before 3.13
        return path.absolute()


def _standing(path: Path) -> Path:
    """`path` itself, or the nearest of its parents that is there. Raises OutputError for names that
    cannot be.
    """
    try:
        for place in (path, *path.parents):
            if place.is_symlink() or place.exists():
                return place
    except (OSError, ValueError) as error:
        raise _refused(path, error) from error
    return Path(".")


def _writable(path: Path, standing: Path) -> Path:
    """Tries it: permissions alone do not tell of read-only and full disks, and they never refuse
    root.
    """
    try:
        if not standing.is_dir():
            raise OutputError(f"{shown(path)}: {shown(standing)} is no folder; name a place in one")
        longest = os.pathconf(standing, "PC_NAME_MAX") if hasattr(os, "pathconf") else LONGEST_NAME
        for name in path.parts:
            if len(os.fsencode(name)) > longest:
                raise OutputError(
                    f"{shown(path)}: a name of {len(os.fsencode(name))} bytes; at most {longest}, "
                    "choose a shorter one"
                )
        with tempfile.TemporaryFile(dir=standing, prefix=TEMPORARY) as probe:
            probe.write(b"\0")
    except (OSError, ValueError) as error:
        raise _refused(path, error) from error
    return path


def _refused(path: Path, error: Exception) -> OutputError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return OutputError(
        f"{shown(path)}: cannot be written ({why}); make room, or name another place"
    )


# ---- names ---------------------------------------------------------------------------------------


def check_stems(names: Collection[str]) -> None:
    """Names that become files of one folder: each is one plain name, and no two are the same on any
    file system. Raises OutputError.

    Small ASCII letters, so that names that differ do so where capitals and accents do not count.
    """
    seen: set[str] = set()
    for name in names:
        if not _STEM.match(name):
            raise OutputError(
                f"{shown(name)} cannot be a file's name: use letters a to z, digits, '-', '_', "
                "and dots between them"
            )
        if len(name) > LONGEST_STEM:
            raise OutputError(
                f"{shown(name)} is a file's name of {len(name)} characters: at most {LONGEST_STEM}"
            )
        if name in seen:
            raise OutputError(
                f"{shown(name)} would name two files: choose another name for one of them"
            )
        seen.add(name)


# ---- writing -------------------------------------------------------------------------------------


def write(contents: Mapping[Path, str | Iterable[bytes]]) -> None:
    """Files with their parents: all are written next to their places, then renamed. Raises
    OutputError; then nothing of them is there.

    A file is a text, or bytes piece by piece. What UTF-8 cannot hold (undecodable bytes of a path)
    is escaped.
    """
    made: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            path = path.resolve() if path.is_symlink() else path
            path.parent.mkdir(parents=True, exist_ok=True)
            made[path] = path.parent / f"{TEMPORARY}{uuid4().hex}"
            _write(
                made[path],
                [content.encode("utf-8", "backslashreplace")]
                if isinstance(content, str)
                else content,
                path,
            )
        for path, temporary in made.items():
            temporary.replace(path)
    except OSError as error:
        raise _refused(next(reversed(made), next(iter(contents))), error) from error
    finally:
        for temporary in made.values():
            temporary.unlink(missing_ok=True)


def _write(temporary: Path, pieces: Iterable[bytes], place: Path) -> None:
    """On disk before it gets its name: after a crash there is the old file or the new one."""
    with temporary.open("xb") as file:
        if place.exists():
            os.fchmod(file.fileno(), S_IMODE(place.stat().st_mode))
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


# ---- reading -------------------------------------------------------------------------------------


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as comma-separated values, a line each."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue()


def read_json(path: Path, most_bytes: int) -> Any:
    """What a JSON file of at most `most_bytes` says. Raises ConfigError, also for numbers without
    end and for more than MOST_JSON_PARTS lists and mappings, which cost far more than their bytes.
    """
    text = read_text(path, most_bytes)
    parts = text.count("{") + text.count("[")
    if parts > MOST_JSON_PARTS:
        raise ConfigError(
            f"{shown(path)}: {parts:,} lists and mappings, at most {MOST_JSON_PARTS:,} are read; "
            "give a shorter file"
        )
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{shown(path)}: JSON nested too deeply; write it flatter") from error
    except ValueError as error:
        raise ConfigError(
            f"{shown(path)}: no JSON ({shown(str(error), 100)}); check the path"
        ) from error


def read_text(path: Path, most_bytes: int) -> str:
    """A text file of at most `most_bytes`; more is not read, so a device without end is refused as
    well. Raises ConfigError.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{shown(path)}: cannot be read ({why}); check the path") from error
    if len(data) > most_bytes:
        raise ConfigError(f"{shown(path)}: more than {most_bytes:,} bytes; give a shorter file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{shown(path)}: cannot be read as text (byte {error.start} is not UTF-8); save it as "
            "UTF-8"
        ) from error
