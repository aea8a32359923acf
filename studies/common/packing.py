"""Packs records that neither fits nor held-out errors name into their node's archive:
`python -m studies.common.packing calibration`.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import tarfile
from pathlib import Path

from twin.calibrate.packed import ARCHIVE, names, unpacked, whole

NAME = re.compile(r"[\w.-]+")
PUBLISHED = "-published"


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
    whole.cache_clear()
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
    parts = (f"fits/{node}.*", f"held-out/{node}.yaml", f"kernels/[0-9a-f]*/{node}.yaml")
    files = (file for part in parts for file in sorted(calibration.glob(part)))
    texts = [file.read_text(encoding="utf-8") for file in files]
    return {word.rstrip(".") for text in texts for word in NAME.findall(text)}


def main() -> None:
    calibration = Path(sys.argv[1])
    for runs in sorted((calibration / "runs").glob("*/")):
        if runs.name != "host" and (chosen := to_pack(calibration, runs.name)):
            pack(runs, chosen)
            print(f"{runs.name}: {len(chosen)} records packed")


if __name__ == "__main__":
    main()
