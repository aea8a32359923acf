"""Writes this study's page from the summary on record: `python studies/h200-acceptance/page.py`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import NO_FIT, files_digest
from studies.common.study_page import write_page
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
SUMMARY = HERE / "summary.json"
COMMIT = "31eab63e"  # of the kernel that the summary is of


def stamp() -> Stamp:
    return Stamp(NO_FIT, files_digest([SUMMARY]))


def main() -> None:
    parts: dict[str, Any] = json.loads(SUMMARY.read_text(encoding="utf-8"))["parts"]
    head = ("part", "shows", "result", "facts", "seconds")
    rows = [
        (
            name,
            part["shows"],
            part["result"],
            "; ".join(FACTS[name](part["facts"])),
            part["seconds"],
        )
        for name, part in parts.items()
    ]
    table = markdown_table(head, rows, text_columns=4)
    took = [
        (f"{model}, {window}", us)
        for model, windows in parts["repeats"]["facts"].items()
        for window, us in times(windows)
    ]
    chart = Bars(
        tuple(name for name, _ in took),
        (
            Series(
                "median of five runs",
                tuple(statistics.median(us) for _, us in took),
                tuple(map(min, (us for _, us in took))),
                tuple(map(max, (us for _, us in took))),
            ),
        ),
        "us a token, five runs of 1,000 tokens",
    )
    write_page(
        HERE,
        stamp(),
        {"parts": f"{table}\n\nKernel: {COMMIT}; the facts are those of summary.json."},
        chart,
    )


def times(windows: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    for window, facts in windows.items():
        yield window, facts["us_per_token"]


def repeats(facts: dict[str, Any]) -> Iterator[str]:
    for model, windows in facts.items():
        found = ", ".join(
            f"{statistics.median(us):,.0f} us ({window})" for window, us in times(windows)
        )
        yield f"{model}: {found}, the same bits"


def soak(facts: dict[str, Any]) -> Iterator[str]:
    for model, one in facts.items():
        yield f"{model}: {one['tokens']:,} tokens in {one['runs']} runs"


def sanitizer(facts: dict[str, Any]) -> Iterator[str]:
    race = facts["racecheck"]
    pairs, looked = (
        race[key]
        for key in (
            "ordered by an mbarrier that the tool does not follow",
            "reads whose line only the line table has",
        )
    )
    yield f"{facts['plans']} plans, the same tokens as without"
    yield f"memcheck and synccheck: {facts['memcheck']['summary']}, {facts['synccheck']['summary']}"
    reports = race["summary"].split(":")[1].split("hazards")[0].strip()
    yield (
        f"racecheck: {reports} reports, {pairs} pairs, all a bulk copy and a read of its slot "
        f"({looked} looked up)"
    )


FACTS = {
    "repeats": repeats,
    "soak": soak,
    "cancel": lambda facts: iter(
        [f"{facts['tokens']:,} tokens, the first {facts['compared']} compared"]
    ),
    "requests": lambda facts: iter([f"{len(facts)} wrong requests, one clear error each"]),
    "broken": lambda facts: iter(
        [f"{len(facts)} plans, each named by the proof and ended after 1 s by the watchdog"]
    ),
    "sanitizer": sanitizer,
}


if __name__ == "__main__":
    main()
