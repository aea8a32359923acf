"""`twin optimise`: the best plan of a model on a node."""

from __future__ import annotations

import argparse

from twin.commands.arguments import (
    Subparsers,
    add_engine_options,
    add_model,
    add_node,
    command,
    whole,
)
from twin.commands.best import engine_text, gain_text, tried_json
from twin.commands.inputs import point_of
from twin.commands.output import emit, progress, say
from twin.commands.project import add_running, running
from twin.commands.simulate import floors, headline
from twin.commands.whatif import Ends, between
from twin.errors import ConfigError
from twin.models.load import load_model
from twin.report.step import ordered_causes, spoken
from twin.report.tables import count, facts, percent, table
from twin.sim.run import Result
from twin.study.optimise import Found, found_by, search
from twin.study.point import Point
from twin.study.whatif import simulated
from twin.text import shown
from twin.units import format_quantity

SHOWN, MOST_SHOWN = 6, 1000
BINDING = 4  # causes
EXAMPLES = """\
  twin optimise llama-3.1-8b 8xh200
  twin optimise gpt-oss-120b 8xh200 --context 8192
  twin optimise llama-3.1-70b 8xmi300x --formats fp8-128x128,int4-g32
  twin optimise qwen3-30b-a3b 4xh200 --residual replicated --all-gpus"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "optimise",
        run,
        usage="MODEL NODE [options]",
        summary="find the plan that is predicted to be fastest",
        text="Searches the GPUs used, what every rank computes alike (common), where the residual "
        "lies, groups of experts,\nsplits of the cache and, with --formats, stored formats. A "
        "number of GPUs whose bytes alone take longer than\nthe best step is left out; the rest is "
        "coordinate descent by a few layers, the closest plans by all of them.\nOptions that are "
        "given stay. Marked plans are simulated only: our engine has no code for them.",
        examples=EXAMPLES,
    )
    add_model(parser)
    add_node(parser)
    parser.add_argument(
        "--formats",
        metavar="NAMES",
        default="",
        help="stored formats to try besides the model's own, separated by commas, such as "
        "fp8-128x128,int4-g32; each may change what the model answers",
    )
    parser.add_argument(
        "--all-gpus", action="store_true", help="use all GPUs of the node, never fewer"
    )
    parser.add_argument(
        "--top",
        type=whole,
        metavar="N",
        default=SHOWN,
        help="plans to show (default %(default)s)",
    )
    add_running(parser)
    add_engine_options(parser, without=("gpus",))


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.top <= MOST_SHOWN:
        raise ConfigError(f"--top {shown(args.top)}: from 1 to {MOST_SHOWN}")
    point, formats = point_of(args), formats_of(args)
    with running(args, progress()) as runner:
        found = found_by(search(point, formats=formats, gpus=not args.all_gpus), runner, "plans")
        best = found.best.way.of(point)
        result = simulated(best)
        ends = between(best, result.tokens_per_s, runner)
    say(f"{found.simulated} plans, {runner.computed} simulations computed, {runner.found} found")
    data = {
        "model": best.spec().name,
        "node": point.on_node().name,
        "plan": tried_json(found.best),
        **headline(result),
        "interval": ends,
        "standard": next((tried_json(t) for t in [found.of(found.standard)] if t), None),
        "plans": [tried_json(one) for one in found.ranking],
        "left_out": list(found.left_out),
    }
    emit(args, data, text(args, best, found, result, ends))
    return 0


def formats_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Raises ConfigError for a format that does not exist or is given twice."""
    names = [name.strip() for name in args.formats.split(",")] if args.formats else []
    for at, name in enumerate(names):
        if not name:
            raise ConfigError(f"--formats {shown(args.formats)}: a name is empty; remove a comma")
        if name in names[:at]:
            raise ConfigError(f"--formats {shown(args.formats)}: {name} is given twice; remove one")
        load_model(f"{str(args.model).partition('@')[0]}@{name}")
    return tuple(names)


def text(args: argparse.Namespace, best: Point, found: Found, result: Result, ends: Ends) -> str:
    numbers = [
        ("plan", str(found.best.way)),
        ("", engine_text(found.best) + gain_text(found)),
        ("tokens/s", f"{count(result.tokens_per_s)}  (predicted)"),
        *([("interval", f"{count(ends[0])} .. {count(ends[1])} tokens/s")] if ends else []),
        ("step", format_quantity(result.step_s, "s")),
        ("binds", binding(result)),
        *floors(result),
    ]
    rows = [
        (
            str(one.way),
            count(result.tokens_per_step / (one.step_s + result.draft_s)),
            percent(found.best.step_s / one.step_s - 1, signed=True),
            "all" if one.whole else "few",
            "simulator" if one.only_simulated else "engine",
        )
        for one in found.ranking[: args.top]
    ]
    head = f"{best.spec().name} on {args.node}: the best of {found.simulated} plans"
    body = table(("plan", "tokens/s", "", "layers", "runs on"), rows, text_columns=(0, 3, 4))
    more = len(found.ranking) - len(rows)
    notes = [f"{more} more plans: --top {len(found.ranking)}"] if more > 0 else []
    notes += [f"not simulated: {said}" for said in found.left_out]
    return "\n\n".join([head, facts(numbers), body, *(["\n".join(notes)] if notes else [])])


def binding(result: Result) -> str:
    """What the step's time is, the largest first."""
    return ", ".join(
        f"{spoken(cause)} {percent(seconds / result.step_s)}"
        for cause, seconds in ordered_causes(result)[:BINDING]
        if seconds
    )
