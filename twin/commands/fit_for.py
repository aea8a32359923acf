"""`twin fit-for`: the nodes that reach a speed with a model."""

from __future__ import annotations

import argparse

from twin.commands.arguments import Subparsers, add_engine_options, add_model, command, whole
from twin.commands.best import BEST, add_plan
from twin.commands.inputs import model_of, options_of
from twin.commands.output import emit, progress, say
from twin.commands.project import add_running, running
from twin.errors import ConfigError
from twin.report.tables import count, table
from twin.study import interval
from twin.study.fit_for import LIKELY, PERHAPS, SURE, Found, fit_for
from twin.study.hardware import node_on_file
from twin.study.point import Point
from twin.text import shown

DRAWS = 8
MOST_SPEED = 1e6
EXAMPLES = """\
  twin fit-for llama-3.1-8b --tokens-per-s 200
  twin fit-for qwen3-8b --tokens-per-s 500 --context 4096 --draws 0
  twin fit-for llama-3.1-8b@fp8 --tokens-per-s 300 --usd-per-hour 2.5
  twin fit-for llama-3.2-1b --tokens-per-s 1500 --node my-gpu.yaml"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "fit-for",
        run,
        usage="MODEL --tokens-per-s N [options]",
        summary="list the nodes that reach a speed, with interval and cost",
        text="Simulates the model on the nodes on file whose floor allows the speed, and shows of "
        "each device\nthe fewest GPUs that reach it. A node reaches it\n"
        f"surely ({SURE}: nine of ten draws do), likely ({LIKELY}: the prediction does) or "
        f"{PERHAPS} (one of ten does).\n"
        "The interval is from held-out runs where a node has a fit, else from draws of its "
        "numbers.",
        examples=EXAMPLES,
    )
    add_model(parser)
    parser.add_argument(
        "--tokens-per-s", type=float, required=True, metavar="N", help="of one sequence"
    )
    parser.add_argument(
        "--draws",
        type=whole,
        default=DRAWS,
        metavar="N",
        help="of the numbers of a node without held-out runs; 0 for no interval "
        "(default %(default)s)",
    )
    add_plan(
        parser,
        "of several GPUs: the best plan of each node, or default options (default: the best one "
        "where default options do not reach the speed)",
    )
    parser.add_argument(
        "--every", action="store_true", help="all nodes, also those with more GPUs than it takes"
    )
    parser.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="FILE",
        help="also a node of your own; may be repeated",
    )
    parser.add_argument(
        "--usd-per-hour", type=float, metavar="USD", help="price of one GPU, of every node"
    )
    add_running(parser)
    add_engine_options(parser, without=("gpus",))


def check_speed(tokens_per_s: float) -> None:
    """Raises ConfigError."""
    if not 0 < tokens_per_s <= MOST_SPEED:
        raise ConfigError(
            f"--tokens-per-s {shown(tokens_per_s)}: above 0 and at most {MOST_SPEED:g}"
        )


def run(args: argparse.Namespace) -> int:
    check_speed(args.tokens_per_s)
    if args.draws and not interval.FEWEST <= args.draws <= interval.MOST:
        raise ConfigError(f"--draws {args.draws}: 0, or from {interval.FEWEST} to {interval.MOST}")
    model, options = model_of(args), options_of(args)
    Point(model, "1xhost", options).spec()  # refused before anything is simulated
    for name in args.node:
        node_on_file(name)
    say(
        "every node that its floor allows: room first, then a few layers on each, then all layers "
        "where it comes close; a deep model takes minutes the first time, and Ctrl-C keeps what is "
        "done"
    )
    with running(args, progress()) as runner:
        found = fit_for(
            model,
            args.tokens_per_s,
            options,
            runner,
            draws=args.draws,
            own=args.node,
            usd_per_hour=args.usd_per_hour,
            every=args.every,
            plans=None if args.plan is None else args.plan == BEST,
        )
    data = {"fits": [fit.json() for fit in found.fits], "missed": found.missed}
    emit(args, data, text(args, found))
    return 0


def text(args: argparse.Namespace, found: Found) -> str:
    missed = ", ".join(f"{n} {why}" for why, n in found.missed.items() if n)
    head = f"{args.model} at {count(args.tokens_per_s)} tokens/s and more (predicted)"
    if not found.fits:
        return f"{head}\n\nno node on file reaches it: {missed}"
    names = (
        "node",
        "reaches it",
        "tokens/s",
        "p10 .. p90",
        "measured",
        "floor",
        "USD/hour",
        "USD/M tokens",
        "kWh/M tokens",
        "interval from",
        "plan",
    )
    rows = [
        (
            fit.node,
            fit.reaches,
            count(fit.tokens_per_s),
            "" if fit.low is None or fit.high is None else f"{count(fit.low)} .. {count(fit.high)}",
            "" if fit.measured is None else count(fit.measured),
            count(fit.floor_tokens_per_s),
            *(
                "" if value is None else f"{value:.3g}"
                for value in (fit.usd_per_hour, fit.usd_per_million, fit.kwh_per_million)
            ),
            fit.rests,
            fit.plan,
        )
        for fit in found.fits
    ]
    note = (
        "measured: a run on record with default options at about these positions "
        "(calibration/measured.csv)\n"
        "prices: hwmodels/prices.yaml, or --usd-per-hour; what has none comes last\n"
        "plan: options that are no defaults; `twin optimise MODEL NODE` says which the engine runs"
    )
    body = table(names, rows, text_columns=(0, 1, 9, 10))
    return f"{head}\n\n{body}\n\nother nodes: {missed or 'none'}\n{note}"
