"""`twin whatif`: change anything about the engine or the hardware and see what it buys."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace

from twin.calibrate.known_error import first_error, known_error
from twin.commands.arguments import (
    Subparsers,
    add_engine_options,
    add_model,
    add_node,
    command,
    file_to_write,
    option_value,
    whole,
)
from twin.commands.inputs import point_of
from twin.commands.output import emit, progress, say, underway
from twin.commands.project import add_running, running
from twin.commands.simulate import headline
from twin.errors import ConfigError
from twin.report import outcome as report
from twin.report import pages
from twin.report.step import spoken
from twin.report.tables import count, percent, table
from twin.sim.run import Result
from twin.study import heat, interval
from twin.study.depth import repeating, times
from twin.study.grid import NODE
from twin.study.interval import Draws
from twin.study.kinds import Study
from twin.study.point import Point
from twin.study.projection import REFUSE, Projection
from twin.study.runner import Runner
from twin.study.sensitivity import STEP, Effect, sensitivity
from twin.study.whatif import (
    changed,
    parse_axes,
    parse_changes,
    simulated,
    sweep,
    with_steps,
)
from twin.units import format_quantity, unit_of

SHOWN = 20
DRAWS = 8
EXAMPLES = """\
  twin whatif laneformer-2b 8xmi300x --set handoff=grid
  twin whatif laneformer-2b 8xh200 --set link.hop=x0.5 --set memory.stream="5 TB/s"
  twin whatif llama-3.1-8b 8xh200 --set gpus=4 --set ring-slots=6
  twin whatif laneformer-2b 8xh200 --sensitivity --report out/sensitivity.html
  twin whatif qwen3-8b 1xh200 --set drafter=eagle3 --set curve=qwen3-8b-eagle3 --sweep draft=0..7
  twin whatif llama-3.2-1b 1xmi300x --sweep clock=x1,x0.6 --sweep context=128,4096 --draws 16"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "whatif",
        run,
        usage="MODEL NODE --set NAME=VALUE [options]",
        summary="change options or hardware, see the effect",
        text="Simulates the baseline and the changed case. A name is an engine option (blocks, "
        "handoff, context ...) or the dotted path\n"
        "of a hardware number (`twin hardware NODE` lists them; the unit may be left out). A "
        "value is a quantity with its\n"
        "unit, or a change of the present one: x1.5, +10%. `clock` changes all that a "
        "block's clock drives, such as a power\n"
        "cap does. Swept, every combination of the values is a row.",
        examples=EXAMPLES,
    )
    add_model(parser)
    add_node(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="changes",
        help="one change; may be repeated",
    )
    parser.add_argument(
        "--sensitivity", action="store_true", help="also raise each number by 10%% alone"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        dest="sweeps",
        help="several values, separated by commas, or whole numbers as 0..7; may be repeated",
    )
    parser.add_argument(
        "--draws",
        metavar="N",
        type=whole,
        help="draws of the hardware's numbers, for the interval of each row on a node without "
        f"held-out runs; 0 for none (default {DRAWS})",
    )
    parser.add_argument(
        "--ladder",
        action="store_true",
        help="also show the steps from launches one by one to the whole monokernel",
    )
    parser.add_argument(
        "--report", metavar="FILE", type=file_to_write, help="write a self-contained HTML page"
    )
    add_running(parser)
    add_engine_options(parser, without=("gpus",))


def run(args: argparse.Namespace) -> int:
    wide = bool(args.sweeps or args.draws is not None or args.ladder)
    if not args.changes and not args.sensitivity and not wide:
        raise ConfigError(
            "nothing to change: give --set name=value, --sweep name=values, --draws N, --ladder "
            "or --sensitivity"
        )
    base = point_of(args)
    changes = parse_changes(args.changes, base.on_node(), option_value)
    other = changed(base, changes)
    return _sweep(args, other) if wide else _compare(args, base, other)


def _sweep(args: argparse.Namespace, point: Point) -> int:
    """Every combination of the swept values; without any, the one case with its interval or
    ladder.
    """
    axes = parse_axes(args.sweeps, point.on_node(), option_value)
    draws = drawn_of(args, point)
    grid = sweep(point, axes)
    look = ((grid.models[0].label, point.node),) if args.ladder or args.sensitivity else ()
    question = Projection(grid, axes[-1].name if axes else NODE, draws, None, (), look, (), REFUSE)
    said = ", ".join(args.changes + args.sweeps) or "as it is"
    study = Study(
        "whatif",
        "projection",
        f"{grid.models[0].label} on {point.node}",
        f"What if: {said}?",
        "",
        question,
    )
    with running(args, progress()) as runner:
        answer = question.run(runner)
        mapped = heat.part(grid, runner.rows([cell.point for cell in grid.cells()]))
    if mapped is not None:
        answer = replace(answer, parts=(answer.parts[0], mapped, *answer.parts[1:]))
    if args.report:
        say(f"report: {report.page(study, answer).write(args.report)}")
    emit(args, report.to_json(study, answer), report.text(study, answer))
    return 0


def drawn_of(args: argparse.Namespace, point: Point) -> Draws | None:
    """Draws of a row's numbers: of a deep model, by default, of a few layers."""
    if args.draws is None:
        depths = repeating(point.spec())
        return Draws(DRAWS, 1, (depths.shallow, depths.deep) if depths else ())
    if args.draws and not interval.FEWEST <= args.draws <= interval.MOST:
        raise ConfigError(f"--draws {args.draws}: 0, or from {interval.FEWEST} to {interval.MOST}")
    return Draws(args.draws, 1) if args.draws else None


def _compare(args: argparse.Namespace, base: Point, other: Point) -> int:
    """Baseline and change side by side, cause by cause."""
    with underway(f"simulating {args.model} on {args.node}"):
        base, other = with_steps(base), with_steps(other)
        before = simulated(base)
        case = other.case()
        after = simulated(other) if args.changes else before
    effects: list[Effect] = []
    if args.sensitivity:
        with running(args, progress()) as runner:
            effects = sensitivity(other, runner)
    with running(args, progress()) as runner:
        ends = [
            between(one, result.tokens_per_s, runner)
            for one, result in ((base, before), (other, after))
        ]
    data = {
        "baseline": headline(before) | {"interval": ends[0]},
        "changed": headline(after) | {"interval": ends[1]},
        "changes": args.changes,
        "effect": after.tokens_per_s / before.tokens_per_s - 1,
        "sensitivity": [asdict(effect) | {"assumed": effect.assumed} for effect in effects],
    }
    shown = (
        [comparison(args.changes, before, after, ends)]
        if args.changes
        else [f"{count(before.tokens_per_s)} tokens/s (predicted)"]
    )
    if args.report:
        extra = (
            [
                pages.engines(
                    {"baseline": before, ", ".join(args.changes): after}, "Baseline and change"
                )
            ]
            if args.changes
            else []
        )
        extra += [pages.sensitivity(effects, STEP)] if effects else []
        effect = after.tokens_per_s / before.tokens_per_s - 1
        cards = (
            [
                (
                    percent(effect, signed=True),
                    f"against {count(before.tokens_per_s)} tokens/s of the baseline",
                )
            ]
            if args.changes
            else []
        )
        page = pages.simulation_page(
            case.plan(), case.node, after, *extra, what_if=", ".join(args.changes), cards=cards
        )
        say(f"report: {page.write(args.report)}")
    emit(args, data, "\n\n".join(shown + ([effects_text(effects)] if effects else [])))
    return 0


Ends = tuple[float, float] | None


def between(point: Point, speed: float, runner: Runner) -> Ends:
    """p10 and p90 about a predicted speed: from held-out runs of the node's device, else from a few
    draws of its numbers; what was set is meant exactly. None where nothing can be drawn.
    """
    known = known_error(point.on_node(), point.spec(), point.chosen())
    if known is not None:
        return known.interval(speed)
    depths = repeating(point.spec())
    varied = [
        point.with_settings(*one) for one in interval.settings(point.on_node(), Draws(DRAWS, 1))
    ]
    base, *drawn = times([point, *varied], runner, depths, f"draws of {point.node}")
    if base.problem or any(one.problem for one in drawn):
        return None
    new = first_error(point.on_node(), point.spec(), point.chosen())
    return interval.about(speed, [speed * base.step_s / one.step_s for one in drawn], new)


def comparison(
    changes: Sequence[str], before: Result, after: Result, ends: Sequence[Ends] = ()
) -> str:
    """Baseline and change side by side, cause by cause."""
    speeds = before.tokens_per_s, after.tokens_per_s
    rows = [
        ("tokens/s (predicted)", *map(count, speeds), _effect(*speeds)),
        *(
            [
                (
                    "p10 .. p90",
                    *("" if e is None else f"{count(e[0])} .. {count(e[1])}" for e in ends),
                    "",
                )
            ]
            if any(ends)
            else []
        ),
        (
            "us a step",
            f"{before.step_s * 1e6:.1f}",
            f"{after.step_s * 1e6:.1f}",
            _effect(before.step_s, after.step_s),
        ),
        ("stream fraction", percent(before.stream_fraction), percent(after.stream_fraction), ""),
    ]
    for cause, seconds in before.attribution.items():
        then = after.attribution[cause]
        if seconds or then:
            rows.append(
                (
                    f"us of {spoken(cause)}",
                    f"{seconds * 1e6:.1f}",
                    f"{then * 1e6:.1f}",
                    _effect(seconds, then),
                )
            )
    return f"what if {', '.join(changes)}\n\n{table(('', 'baseline', 'changed', 'effect'), rows)}"


def effects_text(effects: Sequence[Effect]) -> str:
    """The strongest effects, and how many numbers hardly matter."""
    shown = [e for e in effects if e.tokens_per_s is None or abs(e.effect) >= 5e-4][:SHOWN]
    rows = []
    for e in shown:
        effect = "not possible" if e.problem else percent(e.effect, signed=True)
        rows.append((e.label, e.kind, _value(e.name, e.before), _value(e.name, e.after), effect))
    head = ("number changed by 10%", "kind", "from", "to", "tokens/s")
    return (
        f"{table(head, rows, text_columns=2)}\n\n"
        f"{len(effects) - len(shown)} others change less than 0.05%"
    )


def _effect(before: float, after: float) -> str:
    return percent(after / before - 1, signed=True) if before else "new"


def _value(name: str, value: float) -> str:
    return format_quantity(value, unit_of(name.rsplit(".", 1)[-1]))
