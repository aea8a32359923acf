"""The text speaks the field's language: words.csv maps this project's former dialect to it."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAP = Path(__file__).with_name("words.csv")
OWN = (MAP, Path(__file__).resolve())
DATA = ("studies/drawn-shapes/marks-", "studies/few-bits/streamed-")  # records of runs: as written
# two words of a name, of a line, or of two lines of a comment
BETWEEN = r"(?:_|-|\s+(?:(?:#|//|\*|\|)\s+)?)"


def dialect() -> re.Pattern[str]:
    with MAP.open(encoding="utf-8") as file:
        words = "|".join(row["dialect"] for row in csv.DictReader(file))
    # parts of a name count, parts of a word do not
    return re.compile(rf"(?<![a-z])(?:{words.replace(' ', BETWEEN)})(?![a-z])")


def texts() -> Iterator[tuple[str, str]]:
    """All of the tree, in lower case."""
    names = ["git", "ls-files", "-z"]
    listed = subprocess.run(names, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        file = ROOT / name
        if file in OWN or name.startswith(DATA) or not file.is_file():
            continue
        content = file.read_bytes()
        if b"\0" not in content:
            yield name, content.decode("utf-8", errors="replace").lower()


def test_no_text_uses_the_former_dialect() -> None:
    words = dialect()
    found = [
        f"{name}:{1 + text.count(chr(10), 0, match.start())}: {match[0]}"
        for name, text in texts()
        for match in words.finditer(text)
    ]
    assert not found, f"{len(found)} words; {MAP.name} has the field's:\n" + "\n".join(found[:40])


def test_dialect_is_found_in_names_and_over_two_lines_of_a_comment() -> None:
    words = dialect()
    for text in ("twin_apart", "is_told", "tiles taken_ahead", "lies on the\n  // chip", "keepers"):
        assert words.search(text), text
    for text in ("apartment", "asset", "lottery", "blot", "besides", "a pilot", "on the chips"):
        assert not words.search(text), text
