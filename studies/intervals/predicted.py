"""Predictions that were committed before their runs, with these: drawn shapes, and what studies
predicted of things that had never run.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twin.calibrate import shape_record, store
from twin.calibrate.engine_runs import runs_of
from twin.calibrate.experiment import Experiment
from twin.calibrate.seen import Seen, features_of
from twin.files import MOST_RECORD_BYTES, read_json
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.models.spec import ModelSpec

STUDIES = Path(__file__).resolve().parents[1]
sys.path += [str(STUDIES / name) for name in ("few-bits", "many-gpus")]
import few_bits  # noqa: E402  of another study
import many_gpus  # noqa: E402

NODES = ("1xh100-sxm", "1xh200-sxm", "2xh100-sxm", "2xh200-sxm", "4xh200-sxm")
# Of studies: when it was predicted and when it had run, by their commits.
FEW_BITS = (
    ("h200", "2026-11-23T16:38", "2026-11-23T18:24"),
    ("h100", "2026-11-23T16:38", "2026-11-25T22:15"),
)
LATER = "2026-11-25T23:35", "2026-11-26T01:39"  # Mixtral-8x7B and Qwen3-Coder-Next on an H200
MANY_GPUS = (
    ("predictions", "2xh100-sxm", "2026-11-24T05:55", "2026-11-25T13:13"),
    ("predictions", "2xh200-sxm", "2026-11-24T05:55", "2026-11-26T04:41"),
    ("predictions", "4xh200-sxm", "2026-11-24T05:55", "2026-11-26T08:25"),
    ("predictions-by-two-gpus", "2xh200-sxm", "2026-11-25T14:07", "2026-11-26T04:41"),
    ("predictions-by-two-gpus", "4xh200-sxm", "2026-11-25T14:07", "2026-11-26T08:25"),
    ("predictions-by-two-h200", "4xh200-sxm", "2026-11-26T06:26", "2026-11-26T08:25"),
)
HYBRIDS = "2026-11-29T00:00", "2026-11-29T10:53"
CARRIED = "2026-11-22T23:18", "2026-11-24T03:22"  # an H100 by an H200's fit
CARRIED_SHAPES = "2026-11-24T04:37", "2026-11-24T05:00"
DRAWN = "drawn"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Its run, and the interval that was written with it, over the predicted speed."""

    run: Seen
    hidden: int
    before: tuple[float, float] | None
    predicted: str  # when
    ran: str
    source: str  # DRAWN or a study


def predictions() -> list[Prediction]:
    """In the order in which they were made."""
    found = [*_drawn(), *_few_bits(), *_many_gpus(), *_hybrids(), *_carried_over()]
    return sorted(found, key=lambda one: one.predicted)


def _drawn() -> Iterator[Prediction]:
    for name in NODES:
        node = load_node(name)
        for folder in sorted(store.runs_folder(name).glob("shapes-*")):
            record = shape_record.read(node, folder)
            for run in record.measured.runs:
                ends = (run.p10, run.p90) if run.p10 and run.p90 else None
                yield _of_run(
                    node, folder.name, run, run.predicted_tokens_per_s, ends, record.date, DRAWN
                )


def _of_run(
    node: Node,
    record: str,
    run: Experiment,
    speed: float,
    ends: tuple[float, float] | None,
    date: str,
    source: str,
    ran: str = "",
) -> Prediction:
    about = features_of(node, run.spec, run.options)
    error = speed / run.measured_tokens_per_s - 1
    seen = Seen(record, run.name, error, 1 / speed / run.spec.layers, about)
    over = (ends[0] / speed, ends[1] / speed) if ends else None
    # a seed's runs follow within the hour
    return Prediction(seen, run.spec.hidden, over, date, ran or date, source)


def _few_bits() -> Iterator[Prediction]:
    said = _json("few-bits/predictions.json")
    for device, *when in FEW_BITS:
        node, ran = f"1x{device}-sxm", _json(f"few-bits/measured-{device}-sxm.json")["rows"]
        for name, prompts in ran.items():
            for prompt, one in said["rows"].get(name, {}).get(node, {}).items():
                if prompt in prompts:
                    at = int(prompt) + few_bits.TOKENS // 2
                    dates = LATER if name in said["later"] else when
                    speed = prompts[prompt]["tokens_per_s"]
                    yield _of_row("few-bits", node, few_bits.spec_of(name), at, one, speed, dates)


def _many_gpus() -> Iterator[Prediction]:
    rows = {row.name: row for row in many_gpus.ROWS}
    for file, node, *when in MANY_GPUS:
        ran = _json(f"many-gpus/measured-{node}.json")["row"]
        for name, nodes in _json(f"many-gpus/{file}.json")["rows"].items():
            speed = ran.get(name, {}).get("tokens_per_s")
            if speed and node in nodes:
                spec = many_gpus.spec_of(rows[name])
                at = rows[name].context
                yield _of_row("many-gpus", node, spec, at, nodes[node], speed, when)


def _hybrids() -> Iterator[Prediction]:
    with (STUDIES / "hybrids" / "rows.csv").open(encoding="utf-8", newline="") as table:
        for row in csv.DictReader(table):
            if not row["step_us"]:  # not run yet
                continue
            said = {level: float(row[level]) for level in ("p10", "p90")}
            said["p50"] = float(row["predicted"])
            spec, at = load_model(row["model"]), int(row["after"]) + few_bits.TOKENS // 2
            speed = 1e6 / float(row["step_us"])
            yield _of_row("hybrids", "1xh200-sxm", spec, at, said, speed, HYBRIDS)


def _carried_over() -> Iterator[Prediction]:
    node = load_node("1xh100-sxm")
    runs = store.runs_folder(node.name)
    record = store.read_run(runs / "2026-11-24T032254-engine")
    fixed = runs_of(record, node)
    said = _json("h100-carried-over/predictions.json")["runs_step_s"]
    drawn = shape_record.read(node, runs / "shapes-24-seed-95029").measured.runs
    guessed = _json("drawn-shapes/predictions-h100-by-h200.json")["runs_step_s"]
    for some, steps, (date, ran), source in (
        (fixed, said, CARRIED, "h100-carried-over"),
        (drawn, guessed, CARRIED_SHAPES, "drawn-shapes"),
    ):
        for run in some:
            if run.name in steps and run.samples:
                speed = 1 / steps[run.name]
                yield _of_run(node, source, run, speed, None, date, source, ran)


def _of_row(
    study: str, name: str, spec: ModelSpec, at: int, said: Any, measured: float, when: Any
) -> Prediction:
    """`said`: p10, p50 and p90 of the speed; `at`: positions."""
    speed, (predicted, ran) = said["p50"], when
    about = features_of(load_node(name), spec, {"context": at})
    seen = Seen(
        f"{study} {name} {predicted}",
        f"{spec.name} {at}",
        speed / measured - 1,
        1 / speed / spec.layers,
        about,
        public=True,
    )
    ends = said["p10"] / speed, said["p90"] / speed
    return Prediction(seen, spec.hidden, ends, predicted, ran, study)


def _json(name: str) -> Any:
    return read_json(STUDIES / name, MOST_RECORD_BYTES)
