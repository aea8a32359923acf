"""Records of older kernels, one compressed archive a node: calibration/runs/NODE/older.tar.xz.

No fit and no held-out error in force needs them; studies and tests read them as if they were
folders. `python -m twin.calibrate.packed calibration` packs what neither fits nor held-out
errors name.
"""

from __future__ import annotations

import atexit
import io
import re
import shutil
import sys
import tarfile
import tempfile
from functools import lru_cache
from pathlib import Path

from twin.errors import CalibrationError

ARCHIVE = "older.tar.xz"
NAME = re.compile(r"[\w.-]+")
PUBLISHED = "-published"


def unpacked(folder: Path) -> Path:
    """A record's folder; out of the archive beside it where it lies there. Raises CalibrationError
    for an archive that cannot be read.
    """
    archive = folder.parent / ARCHIVE
    if folder.is_dir() or not archive.is_file():
        return folder
    found = _whole(archive) / folder.name
    return found if found.is_dir() else folder


def names(runs: Path) -> list[str]:
    """Of all records of a node's folder, in order."""
    folders = [folder.name for folder in runs.glob("*/")]
    archive = runs / ARCHIVE
    packed = [folder.name for folder in _whole(archive).iterdir()] if archive.is_file() else []
    return sorted({*folders, *packed})


@lru_cache(maxsize=8)
def _whole(archive: Path) -> Path:
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


def pack(runs: Path, chosen: list[str]) -> None:
    """Moves records into the archive; the same records give the same bytes."""
    inside = {name: unpacked(runs / name) for name in names(runs)}
    folders = [runs / name for name in chosen]
    older = sorted(
        [folder for name, folder in inside.items() if not (runs / name).is_dir()] + folders,
        key=lambda folder: folder.name,
    )
    archive = runs / ARCHIVE
    with tarfile.open(archive.with_suffix(".new"), "w:xz", format=tarfile.USTAR_FORMAT) as made:
        for file in (file for folder in older for file in sorted(folder.iterdir())):
            content = file.read_bytes()
            entry = tarfile.TarInfo(f"{file.parent.name}/{file.name}")
            entry.size = len(content)
            made.addfile(entry, io.BytesIO(content))
    archive.with_suffix(".new").replace(archive)
    _whole.cache_clear()
    for folder in folders:
        shutil.rmtree(folder)


def to_pack(calibration: Path, node: str) -> list[str]:
    """Names of a node's measured records that no fit and no held-out error names."""
    named = words_of(calibration, node)
    return [
        folder.name
        for folder in sorted((calibration / "runs" / node).glob("*/"))
        if (folder / "samples.csv").is_file()
        and not folder.name.endswith(PUBLISHED)
        and folder.name not in named
    ]


def words_of(calibration: Path, node: str) -> set[str]:
    """What the fit and the held-out errors of a node name, records among them."""
    files = [calibration / part / f"{node}.yaml" for part in ("fits", "held-out")]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return {word.rstrip(".") for text in texts for word in NAME.findall(text)}


def main() -> None:
    calibration = Path(sys.argv[1])
    for runs in sorted((calibration / "runs").glob("*/")):
        if runs.name != "host" and (chosen := to_pack(calibration, runs.name)):
            pack(runs, chosen)
            print(f"{runs.name}: {len(chosen)} records packed")


if __name__ == "__main__":
    main()
