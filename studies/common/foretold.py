"""Cells of a study's predictions.json, which is written once and before any run: how they are made
of simulations, and how they are told beside what was measured. Needs no simulator itself.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twin.calibrate import store
from twin.calibrate.known_error import known_error
from twin.errors import ConfigError
from twin.files import MOST_RECORD_BYTES, read_json, write
from twin.hardware.types import Node
from twin.models.spec import ModelSpec
from twin.study.interval import LEVELS, Draws
from twin.study.outcome import Series

FILE = "predictions.json"
DRAWS = Draws(8, 1)  # of the nodes' numbers, for each cell
TOP = 3  # causes that are named
Cell = Mapping[str, Any]
# what pages on goals that were not reached ask: numbers of a node and how they change
WhatIf = Sequence[tuple[str, str]]
QUICK_HOP: WhatIf = [("handoff.loaded_hop_s", "x0.7")]
QUICK_STAGES: WhatIf = [("block.stage_s", "x0.5"), ("warps.vector_s", "x0.5")]


# ---- made ----------------------------------------------------------------------------------------


def write_once(folder: Path, make: Callable[[], Mapping[str, Any]], name: str = FILE) -> None:
    """Behind the commit of `folder`. Raises ConfigError where predictions are there."""
    file = folder / name
    if file.exists():
        raise ConfigError(f"{file} is there: predictions are written once, before the runs")
    commit = commit_of(folder)
    write({file: json.dumps({"commit": commit, **make()}, indent=1) + "\n"})


def add_rows(
    folder: Path, make: Callable[[Container[str]], Mapping[str, Any]], name: str = FILE
) -> None:
    """Rows that the predictions on file lack, of which `make` is told those that are there. Each
    names its batch's commit and fits under "later".
    """
    file = folder / name
    made = read_json(file, MOST_RECORD_BYTES)
    batch = make(made["rows"])
    if batch["rows"]:
        said = {"commit": commit_of(folder), "fits": batch["fits"]}
        made["later"] = made.get("later", {}) | dict.fromkeys(batch["rows"], said)
        made["rows"] |= batch["rows"]
        write({file: json.dumps(made, indent=1) + "\n"})


def commit_of(folder: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def fit_of(device: str) -> str | None:
    """The probing run of the fit that is in force."""
    found = store.read_fit(device)
    return found and found[1].get("run")


def spread(speeds: Iterable[float], node: Node, spec: ModelSpec | None = None) -> dict[str, float]:
    """p10, p50 and p90 of drawn speeds, each divided by the errors that the fit of `node` was seen
    to make on engine runs: of models of the kind of `spec`, else of dense ones.
    """
    known = known_error(node, spec)
    assert known is not None, f"no held-out runs of {node.name} on file"
    seen = [speed / (1 + error) for speed in speeds for error in known.every]
    p10, p50, p90 = (float(level) for level in np.quantile(seen, LEVELS))
    return {"p10": p10, "p50": p50, "p90": p90}


def limits(causes: Mapping[str, float]) -> dict[str, float]:
    """The largest causes of a step, as shares of it."""
    whole = sum(causes.values())
    largest = sorted(causes.items(), key=lambda one: -one[1])[:TOP]
    return {cause: round(share / whole, 3) for cause, share in largest}


# ---- told ----------------------------------------------------------------------------------------


def read_cells(folder: Path) -> dict[str, Any]:
    """The file's rows; none where there is no file."""
    file = folder / FILE
    if not file.is_file():
        return {}
    found: dict[str, Any] = read_json(file, MOST_RECORD_BYTES)["rows"]
    return found


def beside(speed: float | None, cell: Cell) -> tuple[str, str, str]:
    """Measured, predicted with its interval, how far off: empty where there is none."""
    there = "p50" in cell
    return (
        f"{speed:,.0f}" if speed else "not run",
        f"{cell['p50']:,.0f} ({cell['p10']:,.0f}-{cell['p90']:,.0f})" if there else "",
        f"{cell['p50'] / speed - 1:+.1%}" if there and speed else "",
    )


def limits_text(cell: Cell) -> str:
    return ", ".join(
        f"{cause.replace('_', '-')} {share:.0%}" for cause, share in cell["limits"].items()
    )


def series(label: str, cells: Sequence[Cell]) -> Series:
    """The medians of a chart's rows with their intervals; an empty cell has no bar."""
    p50, p10, p90 = (tuple(cell.get(level) for cell in cells) for level in ("p50", "p10", "p90"))
    return Series(label, p50, p10, p90)
