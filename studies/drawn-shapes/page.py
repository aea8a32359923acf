"""Sets what was predicted of shapes that a seed drew next to what ran, and stages of another seed's
next to a fresh simulation: `python studies/drawn-shapes/page.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest, fits_on_file
from studies.common.study_page import errors_chart, write_page
from twin.calibrate import shape_record, store
from twin.calibrate.experiment import Errors, Experiment
from twin.calibrate.node import calibrated_node
from twin.calibrate.packed import unpacked
from twin.calibrate.validate import compare
from twin.cost.vectors import vector_chunks
from twin.plan.catalogue import StageKind

HERE = Path(__file__).resolve().parent
SHAPES, SEED = 24, 95029
NODES = ("1xh200", "1xh100")
CARRIED = HERE / "predictions-h100-by-h200.json"
TRACED = "2026-11-24T031851-shapes-traced"  # seed 77031's, on an H200
KINDS = {"short": "short", "long": "long", "counter": "short, counters", "grid": "short, grid"}
STAGES = ("qkv", "attention", "o_proj", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class Side(Errors):
    """The errors of the speeds of one GPU's runs by one fit; which p10-p90 holds."""

    label: str
    runs: tuple[Experiment, ...]
    errors: Mapping[str, float]
    inside: tuple[bool, ...] = ()

    @property
    def every(self) -> Sequence[float]:
        return list(self.errors.values())

    @property
    def held(self) -> Sequence[bool]:
        return self.inside

    def of(self, ending: str) -> Side:
        """Runs of one kind."""
        some = {name: error for name, error in self.errors.items() if name.endswith(ending)}
        return Side(self.label, self.runs, some)

    def row(self) -> tuple[str | None, ...]:
        fast = f"{sum(error > 0 for error in self.every)} of {len(self.every)}"
        held = None if self.share_held is None else f"{self.share_held:.1%}"
        return (self.label, str(self), fast, held, *(str(self.of(ending)) for ending in KINDS))


def sides() -> list[Side]:
    found = []
    for name in NODES:
        node = calibrated_node(name)
        record = shape_record.read(node, shape_record.folder_of(node, SHAPES, SEED))
        assert not record.left
        assert not record.failed
        runs, title = record.runs, name.removeprefix("1x").upper()
        errors = {run.name: run.error for run in runs}
        found.append(Side(f"{title}, its own fit", runs, errors, tuple(record.measured.held)))
    steps = json.loads(CARRIED.read_text(encoding="utf-8"))["runs_step_s"]
    errors = {run.name: run.measured_s / steps[run.name] - 1 for run in runs}
    return [*found, Side("H100, the H200's fit", runs, errors)]


def traced() -> Path:
    return store.runs_folder(calibrated_node(NODES[0]).name) / TRACED


def stamp() -> Stamp:
    folders = [shape_record.folder_of(calibrated_node(name), SHAPES, SEED) for name in NODES]
    files = (file for one in (*folders, traced()) for file in sorted(unpacked(one).iterdir()))
    return Stamp(fits_on_file(*NODES), files_digest([CARRIED, *files]))


def main() -> None:
    found = sides()
    names = list(dict.fromkeys(run.spec.name for run in found[0].runs))
    errors = {
        f"{title}, {kind}": [side.errors[f"{name}-{kind}"] for name in names]
        for title, side in zip(("H200", "H100"), found[:2], strict=True)
        for kind in ("short", "long")
    }
    head = ("by", "median, worst", "too fast", "inside p10-p90", *KINDS.values())
    bodies = {
        "errors": markdown_table(head, [side.row() for side in found]),
        "shapes": shapes_table(found),
        "stages": stages_table(),
    }
    write_page(HERE, stamp(), bodies, errors_chart(names, errors))
    print(bodies["errors"])


def shapes_table(found: Sequence[Side]) -> str:
    """A shape a row: of each side the errors of its four runs."""
    rows = []
    for name, spec in sorted({run.spec.name: run.spec for run in found[0].runs}.items()):
        shape = f"{spec.layers}x{spec.hidden}, {spec.ffn}"
        heads = f"{spec.heads}/{spec.kv_heads}x{spec.head_dim}"
        kind = f"{spec.family} {spec.dtype.value}"
        four = (
            " ".join(
                f"{100 * side.errors[run.name]:+.1f}" for run in side.runs if run.spec.name == name
            )
            for side in found
        )
        rows.append((name.partition("-")[2], kind, shape, heads, *four))
    head = ("shape", "family", "layers x hidden, feed-forward", "heads")
    return markdown_table((*head, *(side.label for side in found)), rows, text_columns=4)


def stages_table() -> str:
    """How much longer each kind of stage took than a simulation says, microseconds a layer."""
    node = calibrated_node(NODES[0])
    found = compare(node, store.read_run(traced()), lambda message: None)
    missed = {(one.run, one.stage): one.measured_s - one.predicted_s for one in found.stages}
    rows = []
    for run in found.runs:
        if not run.name.endswith("short"):
            continue
        both = (run.name, run.name.replace("short", "long"))
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
