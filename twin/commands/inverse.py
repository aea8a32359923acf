"""`twin inverse`: which changes of a machine reach a speed."""

from __future__ import annotations

import argparse

from twin.commands.arguments import (
    Subparsers,
    add_engine_options,
    add_model,
    add_node,
    command,
)
from twin.commands.fit_for import check_speed
from twin.commands.inputs import point_of
from twin.commands.optimise import BINDING
from twin.commands.output import emit, progress
from twin.commands.project import add_running, running
from twin.report.step import spoken
from twin.report.tables import count, percent, table
from twin.study.inverse import MOST, MOST_VARIED, Found, Machine, factors, inverse, parse_varied
from twin.study.point import Row
from twin.study.whatif import with_steps
from twin.units import format_quantity, unit_of

EXAMPLES = """\
  twin inverse llama-3.2-1b 1xh200 --tokens-per-s 1500 --vary memory.stream,kernel.stage,handoff.hop
  twin inverse llama-3.1-8b 8xh200 --tokens-per-s 1200 --vary link.hop=x8,memory.stream,kernel.stage
  twin inverse laneformer-2b 8xmi300x --tokens-per-s 3000 --vary structure.cus,kernel.stage=x8"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "inverse",
        run,
        usage="MODEL NODE --tokens-per-s N --vary NAMES [options]",
        summary="find the changes of a machine that reach a speed",
        text="Changes the named numbers of the node, one by one and together, until the model is "
        "predicted to reach the\nspeed, and shows the frontier: machines of which none needs as "
        "much of every number as another, the cheapest\nfirst. A change costs its doublings: a "
        "rate twice as high and a time half as long cost 1 each.",
        examples=EXAMPLES,
    )
    add_model(parser)
    add_node(parser)
    parser.add_argument(
        "--tokens-per-s", type=float, required=True, metavar="N", help="of one sequence"
    )
    parser.add_argument(
        "--vary",
        required=True,
        metavar="NAMES",
        help="numbers of the hardware that may change, separated by commas (`twin hardware NODE` "
        f"lists them, at most {MOST_VARIED}); NAME=x8 is a bound, else they become at most "
        f"{MOST:g} times better",
    )
    add_running(parser)
    add_engine_options(parser, without=("gpus",))


def run(args: argparse.Namespace) -> int:
    check_speed(args.tokens_per_s)
    point = with_steps(point_of(args))
    varied = parse_varied(args.vary, point)
    with running(args, progress()) as runner:
        found = inverse(point, varied, args.tokens_per_s, runner)
    data = {
        "model": point.spec().name,
        "node": point.on_node().name,
        "wanted_tokens_per_s": args.tokens_per_s,
        "tokens_per_s": found.base.tokens_per_s,
        "machines": [
            {
                "factors": dict(factors(found, machine)),
                "settings": dict(machine.settings),
                "doublings": machine.doublings,
                "tokens_per_s": machine.row.tokens_per_s,
                "attribution": machine.row.attribution,
            }
            for machine in found.machines
        ],
    }
    emit(args, data, text(args, found))
    return 0


def text(args: argparse.Namespace, found: Found) -> str:
    base, wanted = found.base, args.tokens_per_s
    head = (
        f"{args.model} on {args.node}: {count(base.tokens_per_s)} tokens/s as it is (predicted), "
        f"{count(wanted)} wanted, {wanted / base.tokens_per_s:.3g} times as many"
    )
    if not found.machines[0].settings:
        return f"{head}\n\nnothing has to change; what binds: {binding(base)}"
    rows = [
        (
            f"{machine.doublings:.2f}",
            count(machine.row.tokens_per_s),
            changes(found, machine),
            binding(machine.row),
        )
        for machine in found.machines
    ]
    note = "doublings: of all numbers together; the numbers next to a change are what it ends at"
    names = ("doublings", "tokens/s", "change", "what binds then")
    return f"{head}\n\n{table(names, rows, text_columns=(2, 3))}\n\n{note}"


def changes(found: Found, machine: Machine) -> str:
    values = {path.removeprefix("device."): value for path, value in machine.settings}
    return ", ".join(
        f"{name} x{factor:.3g} ({_quantity(name, float(values[name]))})"
        for name, factor in factors(found, machine).items()
    )


def _quantity(name: str, value: float) -> str:
    unit = unit_of(name.rsplit(".", 1)[-1])
    return format_quantity(value, unit) if unit else f"{value:g}"


def binding(row: Row) -> str:
    """What the step's time is, the largest first."""
    ordered = sorted(row.attribution.items(), key=lambda item: -item[1])[:BINDING]
    return ", ".join(f"{spoken(cause)} {percent(s / row.step_s)}" for cause, s in ordered)
