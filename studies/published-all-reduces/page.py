"""Sets published all-reduces over NVLink next to the twin's law of a push:
`python studies/published-all-reduces/page.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table, table_of
from studies.common.inputs import files_digest, fits_on_file, numbers_digest
from studies.common.study_page import write_page
from twin.calibrate import store
from twin.calibrate.published import Figure
from twin.calibrate.published_plans import compared
from twin.study.outcome import Lines, Series

HERE = Path(__file__).resolve().parent
RECORD = store.runs_folder("h200-sxm") / "2026-11-23T145500-published-all-reduces"
SHOWN = "8K"  # of the figure and of the table's times
GPUS = (2, 4, 8)
NODES = tuple(f"{gpus}x{device}" for gpus in GPUS for device in ("h200-sxm", "h100-sxm", "b200"))
COLUMNS = {
    "what": "{r.configuration}",
    "published by": "{r.publication}",
    "published": lambda one: one.shown(),
    "predicted": "{r.predicted:.3g}",
    "error of the speed": "{r.error:+.1%}",
}


def stamp() -> Stamp:
    inputs = numbers_digest(NODES, files_digest([RECORD / "meta.yaml"]))
    return Stamp(fits_on_file(*NODES), inputs)


def main() -> None:
    found = compared(store.read_run(RECORD), lambda said: None)
    by_library = in_graphs(found)
    listed = [one for by_gpus in by_library.values() for some in by_gpus.values() for one in some]
    others = table_of([one for one in found if one not in listed], COLUMNS, texts=2)
    bodies = {"libraries": libraries(by_library), "others": f"{others}\n\nRecord: {RECORD.name}."}
    write_page(HERE, stamp(), bodies, chart(by_library))
    print(bodies["libraries"])


Libraries = dict[str, dict[int, list[Figure]]]


def in_graphs(found: Sequence[Figure]) -> Libraries:
    """By library and number of GPUs, one figure a size."""
    kept: Libraries = {}
    for one in found:
        library, dash, _ = one.name.partition("-gpus-")
        if dash and one.publication == "AIC-ALLREDUCE":
            name, _, gpus = library.rpartition("-")
            kept.setdefault(name, {}).setdefault(int(gpus), []).append(one)
    return kept


def libraries(found: Libraries) -> str:
    rows = []
    for name, by_gpus in found.items():
        for gpus, sizes in by_gpus.items():
            shown = next(one for one in sizes if one.name.endswith(f"-{SHOWN}"))
            errors = (f"{one.error:+.1%}" for one in sizes)
            rows.append((name, gpus, shown.shown(), f"{shown.predicted:.2f}", *errors))
    head = ("library", "GPUs", "8 KB, published", "predicted, us", "error at 2 KB", "8", "16")
    return f"{markdown_table(head, rows)}\n\nRecord: {RECORD.name}. Fit: {fits_on_file('2xh200')}."


def chart(found: Libraries) -> Lines:
    published = [
        Series(
            name,
            tuple(1e6 * statistics.median(one.middle_s for one in by_gpus[n]) for n in GPUS),
            marks=True,
        )
        for name, by_gpus in found.items()
    ]
    law = next(iter(found.values()))
    stated = tuple(statistics.median(one.predicted for one in law[gpus]) for gpus in GPUS)
    series = (Series("predicted", stated), *published)
    return Lines(tuple(map(float, GPUS)), series, "H200", "us an all-reduce in a graph")


if __name__ == "__main__":
    main()
