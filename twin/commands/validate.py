"""`twin validate`: predicted against measured for engine runs that no number was fitted to."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twin.calibrate import store
from twin.calibrate.engine_runs import measure_held_out
from twin.calibrate.experiment import Experiment
from twin.calibrate.held_out import held_out
from twin.calibrate.node import fits_of
from twin.calibrate.recipe import recipe_of
from twin.calibrate.recorded import recorded
from twin.commands import validate_all, validate_published, validate_shapes
from twin.commands.arguments import (
    Subparsers,
    add_measuring,
    command,
    file_to_write,
    measured_folder,
)
from twin.commands.calibrate import kept, measured_json, measured_text
from twin.commands.output import done, emit, progress, say
from twin.errors import CalibrationError, ConfigError
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.report.tables import count, percent, table
from twin.units import format_quantity

if TYPE_CHECKING:
    from twin.calibrate.validate import Validation

NAME = "engine"
EXAMPLES = """\
  twin validate host
  twin validate host --report out/validation.html
  twin validate 1xh200 --measure-only --out runs       run the engine; copy the folder to the fit:
  twin validate 1xh200 --from runs
  twin validate 1xmi300x --from calibration/runs/mi300x/2026-11-23T145500-published
  twin validate 1xh200 --shapes 24 --seed 7            predict shapes nobody chose, then run them
  twin validate 1xh200 --shapes 12 --seed 7 --kind experts
  twin validate 2xh100                                 several GPUs: eight runs
  twin validate 2xh100 --shapes 8 --seed 7             and shapes that divide over them
  twin validate --all                                  errors of all of them, as they are on file"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "validate",
        run,
        usage="[NODE | --all] [--measure-only --out FOLDER | --from FOLDER] [--again FOLDER] "
        "[--shapes N --seed S [--kind KIND]] [--report FILE] [--json]",
        summary="compare predicted and measured engine runs",
        text="Runs the engine and lets the twin predict each run from the probes' fit alone: "
        "other shapes, block counts and mixtures\n"
        "than any probe. Where runs were traced, each kind of stage is compared too.",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "node",
        metavar="NODE",
        nargs="?",
        help="a node whose devices `twin calibrate` has fitted: host, h200, 1xh200 or 2xh100",
    )
    validate_all.add(parser)
    parser.add_argument(
        "--again",
        metavar="FOLDER",
        type=Path,
        help="measure the runs of this record once more, by the options in its meta.yaml",
    )
    parser.add_argument(
        "--report", metavar="FILE", type=file_to_write, help="also write a self-contained HTML page"
    )
    validate_shapes.add(parser)
    add_measuring(parser)


def run(args: argparse.Namespace) -> int:
    if validate_all.chosen(args):
        return validate_all.run(args)
    if args.shapes is None and validate_published.chosen(args.measured):
        return validate_published.run(args)
    node = load_node(args.node)
    if validate_shapes.chosen(args):
        return validate_shapes.run(args, node)
    folder = measured_folder(args)
    if args.again and args.measured:
        raise ConfigError("--again measures and --from does not: give one of them")
    runs = repeated(args.again, node) if args.again else None
    recipe_of(node.device)  # refuses a device that has none
    if not args.measured and runs is None:
        held_out(node)  # refuses a node that has none
    if args.measure_only:
        made = measure(node, folder, runs)
        emit(args, measured_json(made), measured_text(made))
        return 0
    if not fits_of(node):  # before minutes of measuring
        raise CalibrationError(
            f"no fit of {node.name}: run `twin calibrate 1x{node.device.name}` first"
        )
    measured = (
        measure(node, None, runs) if folder is None else store.adopt_run(folder, node.name, NAME)
    )
    validation = predict(node, measured)
    if args.report:
        from twin.report.pages import validation_page  # plotly: only for a report

        say(f"report: {validation_page(validation, measured.meta).write(args.report)}")
    emit(args, validation.to_json(), text(validation))
    return 0


def repeated(folder: Path, node: Node) -> list[Experiment]:
    """The runs of a record, to be measured again. Raises CalibrationError for one that does not say
    what they were.
    """
    record = store.read_run(folder)
    found = recorded(folder, record.meta)
    if found is None:
        raise CalibrationError(
            f"{folder}: its meta.yaml holds names of runs only; `twin validate {node.name}` "
            "measures today's"
        )
    return found


def measure(node: Node, folder: Path | None, runs: Sequence[Experiment] | None = None) -> store.Run:
    """Run the engine, with progress on stderr; the samples lie in `folder`, else among the device's
    runs.
    """
    return kept(node, folder, NAME, lambda show, keep: measure_held_out(node, show, keep, runs))


def predict(node: Node, measured: store.Run) -> Validation:
    from twin.calibrate.known_error import keep as keep_error

    # neither above: a computer that only measures needs no simulator
    from twin.calibrate.validate import compare

    try:
        found = compare(node, measured, progress())
    finally:
        done()
    keep_error(node, found, measured)
    return found


def text(validation: Validation) -> str:
    rows = []
    for r in validation.runs:
        speeds = (count(r.predicted_tokens_per_s), count(r.measured_tokens_per_s))
        rows.append(
            (r.name, r.options.blocks, *speeds, percent(r.error, signed=True), percent(r.spread))
        )
    head = ("run", "blocks", "predicted tokens/s", "measured tokens/s", "error", "measured spread")
    parts = [table(head, rows)]
    if validation.stages:
        parts.append(stages_text(validation))
    parts += [f"{name} was not run: {said.splitlines()[0]}" for name, said in validation.failed]
    parts.append(
        f"median error {percent(validation.median)}, worst "
        f"{percent(abs(validation.worst))}; fit: {validation.fit}"
    )
    return "\n\n".join(parts)


def stages_text(validation: Validation) -> str:
    """Traced runs: a step's time by kind of stage; next to it what the blocks did, on average."""
    rows = [
        (
            f"{s.run} {s.stage}",
            *(format_quantity(t, "s") for t in (s.predicted_s, s.measured_s)),
            percent(s.error, signed=True),
            *(format_quantity(t, "s") for t in (s.wait_s, s.work_s)),
        )
        for s in validation.stages
    ]
    return table(
        ("traced stage", "predicted", "measured", "error", "measured wait", "measured work"), rows
    )
