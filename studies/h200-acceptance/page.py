"""Writes this study's page from the summary on record: `python studies/h200-acceptance/page.py`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from studies.common.blocks import Stamp, table_of
from studies.common.inputs import NO_FIT, files_digest
from studies.common.study_page import write_page
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
SUMMARY = HERE / "summary.json"
COMMIT = "31eab63e"  # of the kernel that the summary is of
ORDERED = "ordered by an mbarrier that the tool does not follow"
LOOKED_UP = "reads whose line only the line table has"


def stamp() -> Stamp:
    return Stamp(NO_FIT, files_digest([SUMMARY]))


def main() -> None:
    parts: dict[str, Any] = json.loads(SUMMARY.read_text(encoding="utf-8"))["parts"]
    columns = {
        "part": "{r[0]}",
        "shows": "{r[1][shows]}",
        "result": "{r[1][result]}",
        "facts": lambda row: "; ".join(FACTS[row[0]](row[1]["facts"])),
        "seconds": "{r[1][seconds]}",
    }
    table = table_of(parts.items(), columns, texts=4)
    took = {
        f"{model}, {window}": facts["us_per_token"]
        for model, windows in parts["repeats"]["facts"].items()
        for window, facts in windows.items()
    }
    ends = (tuple(map(end, took.values())) for end in (statistics.median, min, max))
    series = (Series("median of five runs", *ends),)
    chart = Bars(tuple(took), series, "us a token, five runs of 1,000 tokens")
    said = f"{table}\n\nKernel: {COMMIT}; the facts are those of summary.json."
    write_page(HERE, stamp(), {"parts": said}, chart)


def repeats(facts: dict[str, Any]) -> Iterator[str]:
    for model, windows in facts.items():
        found = ", ".join(
            f"{statistics.median(one['us_per_token']):,.0f} us ({window})"
            for window, one in windows.items()
        )
        yield f"{model}: {found}, the same bits"


def soak(facts: dict[str, Any]) -> Iterator[str]:
    for model, one in facts.items():
        yield f"{model}: {one['tokens']:,} tokens in {one['runs']} runs"


def sanitizer(facts: dict[str, Any]) -> Iterator[str]:
    race = facts["racecheck"]
    yield f"{facts['plans']} plans, the same tokens as without"
    yield f"memcheck and synccheck: {facts['memcheck']['summary']}, {facts['synccheck']['summary']}"
    reports = race["summary"].split(":")[1].split("hazards")[0].strip()
    yield (
        f"racecheck: {reports} reports, {race[ORDERED]} pairs, all a bulk copy and a read of its "
        f"slot ({race[LOOKED_UP]} looked up)"
    )


FACTS = {
    "repeats": repeats,
    "soak": soak,
    "cancel": lambda facts: [f"{facts['tokens']:,} tokens, the first {facts['compared']} compared"],
    "requests": lambda facts: [f"{len(facts)} wrong requests, one clear error each"],
    "broken": lambda facts: [
        f"{len(facts)} plans, each named by the proof and ended after 1 s by the watchdog"
    ],
    "sanitizer": sanitizer,
}


if __name__ == "__main__":
    main()
