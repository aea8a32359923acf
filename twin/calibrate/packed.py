"""Records of older kernels, one compressed archive a node: calibration/runs/NODE/older.tar.xz.

No fit and no held-out error in force needs them; studies and tests read them as if they were
folders. `python -m studies.common.packing calibration` packs more of them.
"""

from __future__ import annotations

import atexit
import shutil
import tarfile
import tempfile
from functools import lru_cache
from pathlib import Path

from twin.errors import CalibrationError

ARCHIVE = "older.tar.xz"


def unpacked(folder: Path) -> Path:
    """A record's folder; out of the archive next to it where it lies there. Raises CalibrationError
    for an archive that cannot be read.
    """
    archive = folder.parent / ARCHIVE
    if folder.is_dir() or not archive.is_file():
        return folder
    found = whole(archive) / folder.name
    return found if found.is_dir() else folder


def names(runs: Path) -> list[str]:
    """Of all records of a node's folder, in order."""
    folders = [folder.name for folder in runs.glob("*/")]
    archive = runs / ARCHIVE
    packed = [folder.name for folder in whole(archive).iterdir()] if archive.is_file() else []
    return sorted({*folders, *packed})


@lru_cache(maxsize=8)
def whole(archive: Path) -> Path:
    """All its records, in a folder that ends with this process."""
    made = Path(tempfile.mkdtemp(prefix="monotwin-records-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    try:
        with tarfile.open(archive, "r:xz") as files:
            files.extractall(made, filter="data")
    except (OSError, tarfile.TarError, EOFError) as error:
        raise CalibrationError(
            f"{archive}: is damaged ({error}); take it from the repository again"
        ) from error
    return made
