"""`twin validate`: predicted against measured for engine runs that no number was fitted to."""

from __future__ import annotations

import argparse
from pathlib import Path

from twin.calibrate.validate import Validation, validate_host
from twin.commands.arguments import Subparsers, command
from twin.commands.output import done, emit, progress, say, warn_if_busy
from twin.errors import CalibrationError
from twin.hardware.load import load_device
from twin.report.pages import validation_page
from twin.report.tables import count, percent, table

EXAMPLES = """\
  twin validate host
  twin validate host --report out/validation.html"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "validate", run, usage="DEVICE [--report FILE] [--json]", summary="compare predicted and measured engine runs",
        text="The twin predicts each run first, then the engine runs it: other shapes, block counts and mixtures than any probe.",
        examples=EXAMPLES,
    )  # fmt: skip
    parser.add_argument("device", metavar="DEVICE", help="a device that `twin calibrate` has fitted")
    parser.add_argument("--report", metavar="FILE", type=Path, help="also write a self-contained HTML page")


def run(args: argparse.Namespace) -> int:
    device = load_device(args.device)
    if device.isa != "host":
        raise CalibrationError(f"{device.name}: its engine runs need that GPU, and here they are built for host; use `twin validate host`")
    warn_if_busy()
    try:
        validation = validate_host(progress())
    finally:
        done()
    emit(args, validation.to_json(), text(validation))
    if args.report:
        say(f"report: {validation_page(validation).write(args.report)}")
    return 0


def text(validation: Validation) -> str:
    rows = []
    for r in validation.runs:
        speeds = (count(r.predicted_tokens_per_s), count(r.measured_tokens_per_s))
        rows.append((r.name, r.blocks, *speeds, percent(r.error, signed=True), percent(r.spread)))
    head = ("run", "blocks", "predicted tokens/s", "measured tokens/s", "error", "measured spread")
    foot = f"median error {percent(validation.median_abs_error)}, worst {percent(validation.worst_abs_error)}; fit: {validation.fit}"
    return f"{table(head, rows)}\n\n{foot}"
