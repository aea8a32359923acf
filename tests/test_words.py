"""The text speaks the field's language: words.csv maps this project's former dialect to it."""

from __future__ import annotations

import csv
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAP = Path(__file__).with_name("words.csv")
TEXT = {".py", ".md", ".yaml", ".toml", ".html", ".js", ".css"}
LEFT = (
    "calibration/",  # records say what they said when they were made
    # whose names are still to be changed: those that C++ shares with Python, and their tests
    *("native/", "tests/", "twin/cost/", "twin/kernel/", "twin/plan/", "twin/proof/"),
    *("twin/schedule/", "twin/engine/cuda.py", "twin/engine/hip_build.py", "twin/engine/host.py"),
    # sources of numbers, and a page that quotes them: results are stamped with their digests
    *("hwmodels/devices/", "hwmodels/machines/", "studies/next-gen/results/"),
)
NAMES = re.compile(r"`[\w/.]*`")  # of files and of code


def test_no_text_uses_the_former_dialect() -> None:
    words = {row["dialect"]: row["field"] for row in csv.DictReader(MAP.open())}
    # parts of a name count, parts of a word do not
    dialect = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(words)})(?![a-z])", re.IGNORECASE)
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = [
        f"{name}:{number}: {match[0]}"
        for name in files
        if Path(name).suffix in TEXT and not name.startswith(LEFT)
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        for match in dialect.finditer(NAMES.sub("", line))
    ]
    assert not found, f"{len(found)} words; {MAP.name} has the field's:\n" + "\n".join(found[:40])
