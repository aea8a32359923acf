"""Sets published all-reduces over NVLink beside the twin's law of a push:
`python studies/published-all-reduces/page.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import digest, files_digest, fits_on_file
from studies.common.study_page import write_page
from twin.calibrate import store
from twin.calibrate.published import Figure
from twin.calibrate.published_plans import compared
from twin.hardware.override import numbers
from twin.report.tables import percent
from twin.study.hardware import node_on_file
from twin.study.outcome import Lines, Series

HERE = Path(__file__).resolve().parent
RECORD = store.runs_folder("h200-sxm") / "2026-11-23T145500-published-all-reduces"
SHOWN = "8K"  # of the figure and of the table's times
GPUS = (2, 4, 8)
NODES = tuple(f"{gpus}x{device}" for gpus in GPUS for device in ("h200-sxm", "h100-sxm", "b200"))


def stamp() -> Stamp:
    known = [
        f"{name} {path} {number.value!r}"
        for name in NODES
        for path, number in sorted(numbers(node_on_file(name)).items())
    ]
    inputs = [files_digest([RECORD / "meta.yaml"]), *known]
    return Stamp(fits_on_file(*NODES), digest(one.encode() for one in inputs))


def main() -> None:
    found = compared(store.read_run(RECORD), lambda said: None)
    bodies = {"libraries": libraries(found), "others": others(found)}
    write_page(HERE, stamp(), bodies, chart(found))
    print(libraries(found))


def in_graphs(found: Sequence[Figure]) -> dict[str, dict[int, list[Figure]]]:
    """By library and number of GPUs, one figure a size."""
    kept: dict[str, dict[int, list[Figure]]] = {}
    for one in found:
        library, dash, _ = one.name.partition("-gpus-")
        if dash and one.publication == "AIC-ALLREDUCE":
            name, _, gpus = library.rpartition("-")
            kept.setdefault(name, {}).setdefault(int(gpus), []).append(one)
    return kept


def libraries(found: Sequence[Figure]) -> str:
    rows = []
    for name, by_gpus in in_graphs(found).items():
        for gpus, sizes in by_gpus.items():
            shown = next(one for one in sizes if one.name.endswith(f"-{SHOWN}"))
            errors = [percent(one.error, signed=True) for one in sizes]
            row = (name, gpus, shown.shown(), f"{shown.predicted:.2f}", *errors)
            rows.append(row)
    head = ("library", "GPUs", "8 KB, published", "predicted, us", "error at 2 KB", "8", "16")
    return f"{markdown_table(head, rows)}\n\nRecord: {RECORD.name}. Fit: {fits_on_file('2xh200')}."


def others(found: Sequence[Figure]) -> str:
    listed = [
        one for sizes in in_graphs(found).values() for group in sizes.values() for one in group
    ]
    rows = [
        (
            one.configuration,
            one.publication,
            one.shown(),
            f"{one.predicted:.3g}",
            percent(one.error, signed=True),
        )
        for one in found
        if one not in listed
    ]
    head = ("what", "published by", "published", "predicted", "error of the speed")
    return f"{markdown_table(head, rows, text_columns=2)}\n\nRecord: {RECORD.name}."


def chart(found: Sequence[Figure]) -> Lines:
    by_library = in_graphs(found)

    def middle(sizes: list[Figure]) -> float:
        return statistics.median(one.middle_s for one in sizes) * 1e6

    published = [
        Series(name, tuple(middle(by_gpus[gpus]) for gpus in GPUS), marks=True)
        for name, by_gpus in by_library.items()
    ]
    law = next(iter(by_library.values()))
    predicted = Series(
        "predicted",
        tuple(statistics.median(one.predicted for one in law[gpus]) for gpus in GPUS),
    )
    return Lines(
        tuple(map(float, GPUS)), (predicted, *published), "H200", "us an all-reduce in a graph"
    )


if __name__ == "__main__":
    main()
