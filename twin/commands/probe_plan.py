"""`twin probe-plan`: which measurements of a node to make first."""

from __future__ import annotations

import argparse

from twin.commands.arguments import Subparsers, add_engine_options, add_node, command, whole
from twin.commands.inputs import options_of, place_of_node
from twin.commands.output import emit, progress
from twin.commands.project import add_running, running
from twin.errors import ConfigError
from twin.report.tables import percent, table
from twin.study import interval
from twin.study.point import Point
from twin.study.probe_plan import MOST_STEPS, UNSEEN, Found, probe_plan
from twin.study.whatif import with_steps

DRAWS, MOST_DRAWS = 8, 256
MODELS = ("llama-3.1-8b",)
MOST_MODELS = 8
SHOWN_NUMBERS = 4
EXAMPLES = """\
  twin probe-plan 1xmi300x
  twin probe-plan 8xmi300x --model laneformer-2b
  twin probe-plan 1xb200 --model llama-3.1-8b --model qwen3-30b-a3b --context 8192
  twin probe-plan my-gpu.yaml --draws 16"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "probe-plan",
        run,
        usage="NODE [--model MODEL ...] [options]",
        summary="find which measurements shrink the interval most",
        text="Draws the node's uncertain numbers from their ranges, those of each measurement "
        "alone, and orders the measurements\nby what they do to the speed. Then draws the interval "
        "that is left after each. Numbers that are wrong together are\ndrawn together. A "
        "measurement is a group of the probes of `twin calibrate`, or a number that none of them\n"
        "measures. Intervals are from draws here also where held-out runs are on file.",
        examples=EXAMPLES,
    )
    add_node(parser)
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="MODEL",
        help=f"whose predictions count, all alike; may be repeated (default {MODELS[0]})",
    )
    parser.add_argument(
        "--draws", type=whole, default=DRAWS, metavar="N", help="of each (default %(default)s)"
    )
    add_running(parser)
    add_engine_options(parser, without=("gpus",))


def run(args: argparse.Namespace) -> int:
    if not interval.FEWEST <= args.draws <= MOST_DRAWS:
        raise ConfigError(f"--draws {args.draws}: from {interval.FEWEST} to {MOST_DRAWS}")
    models = args.model or list(MODELS)
    if len(models) > MOST_MODELS:
        raise ConfigError(f"{len(models)} models; at most {MOST_MODELS}: leave some out")
    for at, model in enumerate(models):
        if model in models[:at]:
            raise ConfigError(f"--model {model} is given twice; remove one")
    node, options = place_of_node(args.node), options_of(args)
    points = [with_steps(Point(model, node, options)) for model in models]
    with running(args, progress()) as runner:
        found = probe_plan(points, args.draws, runner)
    data = {
        "node": points[0].on_node().name,
        "models": models,
        "draws": args.draws,
        "width": found.width,
        "measurements": [
            {
                "name": step.measurement.name,
                "probed": step.measurement.probed,
                "numbers": list(step.measurement.paths),
                "alone": step.alone,
                "left": step.left,
            }
            for step in found.steps
        ],
        "unseen": list(found.unseen),
    }
    emit(args, data, text(args, models, found))
    return 0


def text(args: argparse.Namespace, models: list[str], found: Found) -> str:
    head = (
        f"{args.node}, predictions of {', '.join(models)}: p10 .. p90 is {percent(found.width)} "
        f"wide ({args.draws} draws)"
    )
    rows = [
        (
            str(at + 1),
            step.measurement.name,
            percent(step.alone),
            "" if step.left is None else percent(step.left),
            "twin calibrate" if step.measurement.probed else "no probe of ours",
            _numbers(step.measurement.paths),
        )
        for at, step in enumerate(found.steps)
    ]
    names = ("", "measure", "alone", "left", "by", "numbers")
    body = table(names, rows, text_columns=(1, 4, 5))
    notes = [
        "alone: width of the interval if only these numbers were uncertain; left: its width once "
        "this and what stands above is known"
    ]
    if len(found.steps) > MOST_STEPS:
        notes.append(f"left is drawn for the first {MOST_STEPS}")
    if found.unseen:
        few = ", ".join(found.unseen[:SHOWN_NUMBERS])
        notes.append(
            f"{len(found.unseen)} others move these predictions by less than {percent(UNSEEN)} "
            f"({few} ...; --json lists them)"
        )
    return "\n\n".join([head, body, "\n".join(notes)])


def _numbers(paths: tuple[str, ...]) -> str:
    short = [path.removeprefix("device.") for path in paths]
    more = len(short) - SHOWN_NUMBERS
    return ", ".join(short[:SHOWN_NUMBERS]) + (f" and {more} more" if more > 0 else "")
