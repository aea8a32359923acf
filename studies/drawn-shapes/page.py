"""Sets what was predicted of shapes that a seed drew beside what ran, and stages of another seed's
beside a fresh simulation: `python studies/drawn-shapes/page.py`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest, fits_on_file
from studies.common.study_page import write_page
from twin.calibrate import shape_record, store
from twin.calibrate.engine_runs import runs_of
from twin.calibrate.experiment import Experiment
from twin.calibrate.node import calibrated_node
from twin.calibrate.packed import unpacked
from twin.calibrate.validate import compare
from twin.cost.vectors import vector_chunks
from twin.plan.types import StageKind
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
SHAPES, SEED = 24, 95029
NODES = ("1xh200", "1xh100")
CARRIED = HERE / "predictions-h100-by-h200.json"
TRACED = "2026-11-24T031851-shapes-traced"  # seed 77031's, on an H200
KINDS = {"short": "short", "long": "long", "counter": "short, counters", "grid": "short, grid"}
STAGES = ("qkv", "attention", "o_proj", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class Side:
    """The errors of the speeds of one GPU's runs by one fit; whether p10-p90 holds each."""

    label: str
    record: shape_record.Record
    errors: Mapping[str, float]
    held: float | None  # share of the runs


def sides() -> list[Side]:
    found = []
    for name in NODES:
        record = _record(name)
        errors = {run.name: run.error for run in record.runs}
        title = name.removeprefix("1x").upper()
        held = record.measured.share_held
        found.append(Side(f"{title}, its own fit", record, errors, held))
    steps = json.loads(CARRIED.read_text(encoding="utf-8"))["runs_step_s"]
    errors = {run.name: run.measured_s / steps[run.name] - 1 for run in record.runs}
    return [*found, Side("H100, the H200's fit", record, errors, None)]


def _record(name: str) -> shape_record.Record:
    node = calibrated_node(name)
    record = shape_record.read(node, shape_record.folder_of(node, SHAPES, SEED))
    assert not record.left
    assert not record.failed
    return record


def stamp() -> Stamp:
    folders = [shape_record.folder_of(calibrated_node(name), SHAPES, SEED) for name in NODES]
    folders.append(_traced())
    files = (file for one in folders for file in sorted(unpacked(one).iterdir()))
    return Stamp(
        fits_on_file(*NODES),
        files_digest([CARRIED, *files]),
    )


def _traced() -> Path:
    return store.runs_folder(calibrated_node(NODES[0]).name) / TRACED


def main() -> None:
    found = sides()
    names = tuple(dict.fromkeys(run.spec.name for run in found[0].record.runs))
    series = tuple(
        Series(f"{title}, {kind}", tuple(side.errors[f"{name}-{kind}"] for name in names))
        for title, side in zip(("H200", "H100"), found[:2], strict=True)
        for kind in ("short", "long")
    )
    chart = Bars(names, series, "error of the predicted speed (right: the twin is too fast)")
    bodies = {
        "errors": errors_table(found),
        "shapes": shapes_table(found),
        "stages": stages_table(),
    }
    write_page(HERE, stamp(), bodies, chart)
    print(bodies["errors"])


def errors_table(found: Sequence[Side]) -> str:
    """A side a row: all its runs, then the median and the worst error of each kind of run."""
    rows = []
    for side in found:
        errors = list(side.errors.values())
        fast = f"{sum(error > 0 for error in errors)} of {len(errors)}"
        held = None if side.held is None else f"{side.held:.1%}"
        kinds = (
            _summary([error for name, error in side.errors.items() if name.endswith(ending)])
            for ending in KINDS
        )
        rows.append((side.label, _summary(errors), fast, held, *kinds))
    head = ("by", "median, worst", "too fast", "inside p10-p90", *KINDS.values())
    return markdown_table(head, rows)


def _summary(errors: Sequence[float]) -> str:
    return f"{statistics.median(map(abs, errors)):.1%}, {max(errors, key=abs):+.1%}"


def shapes_table(found: Sequence[Side]) -> str:
    """A shape a row: of each side the errors of its four runs."""
    first = {run.spec.name: run for run in reversed(found[0].record.runs)}
    rows = []
    for name, run in sorted(first.items()):
        spec = run.spec
        shape = f"{spec.layers}x{spec.hidden}, {spec.ffn}"
        heads = f"{spec.heads}/{spec.kv_heads}x{spec.head_dim}"
        kind = f"{spec.family} {spec.dtype.value}"
        rows.append((name.partition("-")[2], kind, shape, heads, *(_four(s, name) for s in found)))
    head = ("shape", "family", "layers x hidden, feed-forward", "heads")
    return markdown_table((*head, *(side.label for side in found)), rows, text_columns=4)


def _four(side: Side, name: str) -> str:
    runs = [run.name for run in side.record.runs if run.spec.name == name]
    return " ".join(f"{100 * side.errors[run]:+.1f}" for run in runs)


def stages_table() -> str:
    """How much longer each kind of stage took than a simulation says, microseconds a layer."""
    node = calibrated_node(NODES[0])
    record = store.read_run(_traced())
    found = compare(node, record, lambda message: None)
    missed = {(one.run, one.stage): one.measured_s - one.predicted_s for one in found.stages}
    compared = {run.name for run in found.runs}  # of kernels that are
    runs = {run.name: run for run in runs_of(record, node) if run.name in compared}
    rows = []
    for name, run in runs.items():
        if not name.endswith("short"):
            continue
        both = (name, name.replace("short", "long"))
        cells = (
            " ".join(f"{missed[one, kind] * 1e6 / run.spec.layers:+.2f}" for one in both)
            for kind in STAGES
        )
        rows.append((run.spec.name.partition("-")[2], chunks(run, node.device.name), *cells))
    head = ("shape", "slices of a thread", *STAGES)
    return f"{markdown_table(head, rows)}\n\nFit: {found.fit}; runs: {TRACED}."


def chunks(run: Experiment, device: str) -> int:
    """Column slices of the output projection of which a thread holds elements."""
    plan = run.plan(device)
    matrix = next(stage.matrix for stage in plan.stages if stage.kind is StageKind.O_PROJ)
    assert matrix is not None
    return vector_chunks(matrix)


if __name__ == "__main__":
    main()
