"""`twin trace`: recorded steps of the engine next to simulated steps of the same plan."""

from __future__ import annotations

import argparse
from pathlib import Path

from twin.calibrate.node import calibrated_node
from twin.commands.arguments import Subparsers, add_node, command, file_to_write, whole
from twin.commands.output import emit, say
from twin.files import write
from twin.report.recording import load
from twin.report.side_by_side import side_by_side, text, to_json
from twin.report.step import traced_blocks

STEPS = 2
EXAMPLES = """\
  twin trace out/llama-3.2-1b.npz 1xh200
  twin trace out/llama-3.2-1b.npz 1xh200 --out out/llama-3.2-1b.json"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "trace",
        run,
        usage="RECORDING NODE [options]",
        summary="compare recorded steps of the engine with simulated ones",
        text="Simulates the plan that was recorded, and sets each kind of stage next to its "
        "measurement.\nstudies/h200-traces records steps on a GPU; neither a model nor "
        "options have to be repeated here.",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "recording", metavar="RECORDING", type=Path, help="an .npz file that a traced run left"
    )
    add_node(parser)
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=file_to_write,
        help="write both sides as one trace for ui.perfetto.dev",
    )
    parser.add_argument(
        "--steps",
        type=whole,
        default=STEPS,
        metavar="N",
        help="consecutive steps in that trace (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    recording = load(args.recording)
    result = side_by_side(
        recording,
        calibrated_node(args.node),
        shown=traced_blocks(recording.plan.options.blocks),
        steps=args.steps,
    )
    if args.out:
        write({args.out: result.trace.to_json()})
        say(f"trace: {args.out} (open it in ui.perfetto.dev)")
    emit(args, to_json(result), text(result))
    return 0
