"""The kernels on record next to one another: `python studies/h200-history/page.py` writes the
tables and the figure of README.md.
"""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import NO_FIT, files_digest
from studies.common.study_page import write_page
from twin.calibrate import store
from twin.calibrate.packed import names, unpacked
from twin.study.outcome import Lines, Series

HERE = Path(__file__).resolve().parent
DEVICE, PROMPTS = "h200-sxm", HERE / "prompts.csv"
RUNS = {  # a column: the first of these held-out runs that a record has is its number
    "Llama-3.2-1B": ("llama-1b",),
    "Llama-3.2-1B, 4k": ("llama-1b-4k",),
    "Laneformer-2B": ("laneformer-2b-staggered", "laneformer-2b-reduced", "laneformer-2b"),
    "Qwen3-8B, 1k": ("qwen3-8b-1k",),
    "Qwen2-0.5B": ("qwen2-0.5b",),
    "Qwen2.5-1.5B, 1k": ("qwen2.5-1.5b-1k",),
}
PASSES = ("16", "32", "64")


def records() -> list[Path]:
    runs = store.runs_folder(DEVICE)
    return [unpacked(runs / name) for name in names(runs) if name.endswith("-engine")]


def stamp() -> Stamp:
    return Stamp(NO_FIT, files_digest([PROMPTS, *(one / store.SAMPLES for one in records())]))


def main() -> None:
    runs = [store.read_run(record) for record in records()]
    commits = [str(run.meta["commit"])[:7] for run in runs]
    columns = {name: [_us(run.samples, ran) for run in runs] for name, ran in RUNS.items()}
    rows = [
        (commit, run.id, *("" if us is None else f"{us:,.0f}" for us in found))
        for commit, run, *found in zip(commits, runs, *columns.values(), strict=True)
    ]
    kernels = markdown_table(("kernel", "record", *RUNS), rows, text_columns=2)
    series = []
    for name, found in columns.items():
        first = next(us for us in found if us is not None)
        series.append(Series(name, tuple(us and us / first for us in found)))
    axes = "kernel", "time of a token, of the first on record"
    chart = Lines(tuple(commits), tuple(series), *axes)
    write_page(HERE, stamp(), {"kernels": kernels, "prompts": prompts()}, chart)


def prompts() -> str:
    """Milliseconds of 512 tokens, by tokens a pass."""
    with PROMPTS.open(newline="", encoding="utf-8") as file:
        found = {(row["model"], row["tokens_a_pass"]): row for row in csv.DictReader(file)}
    rows = [
        (model, *(f"{float(found[model, one]['prompt_ms']):.1f}" for one in PASSES))
        for model in dict.fromkeys(model for model, _ in found)
    ]
    return markdown_table(("512 tokens, ms", *(f"{one} a pass" for one in PASSES)), rows)


def _us(samples: store.Samples, ran: tuple[str, ...]) -> float | None:
    name = next((one for one in ran if one in samples), None)
    return None if name is None else statistics.median(samples[name]) * 1e6


if __name__ == "__main__":
    main()
