"""`twin whatif`: change anything about the engine or the hardware and see what it buys."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from twin.commands.arguments import Subparsers, add_engine_options, add_model, add_node, command, option_value
from twin.commands.inputs import case_of
from twin.commands.output import done, emit, progress, say
from twin.commands.simulate import headline
from twin.errors import ConfigError
from twin.report import pages
from twin.report.figures import spoken
from twin.report.tables import count, percent, table
from twin.sim.run import Result
from twin.study.whatif import STEP, Effect, changed, parse_changes, sensitivity
from twin.units import format_quantity, unit_of

SHOWN = 20
EXAMPLES = """\
  twin whatif laneformer-2b 8xmi300x --set handoff=grid
  twin whatif laneformer-2b 8xh200 --set link.hop=x0.5 --set memory.stream="5 TB/s"
  twin whatif llama-3.1-8b 8xh200 --set gpus=4 --set ring-slots=6
  twin whatif laneformer-2b 8xh200 --sensitivity --report out/sensitivity.html"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "whatif", run, usage="MODEL NODE --set NAME=VALUE [options]", summary="change options or hardware, see the effect",
        text="Simulates the baseline and the changed case. A name is an engine option (blocks, handoff, context ...) or the dotted path\n"
        "of a hardware number (`twin hardware NODE` lists them; the unit may be left out). A value is a quantity with its\n"
        "unit, or a change of the present one: x1.5, +10%.", examples=EXAMPLES,
    )  # fmt: skip
    add_model(parser)
    add_node(parser)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="changes", help="one change; may be repeated")
    parser.add_argument("--sensitivity", action="store_true", help="also raise each number by 10%% alone: minutes for large nodes")
    parser.add_argument("--report", metavar="FILE", type=Path, help="write a self-contained HTML page")
    add_engine_options(parser, without=("gpus",))


def run(args: argparse.Namespace) -> int:
    if not args.changes and not args.sensitivity:
        raise ConfigError("nothing to change: give --set name=value, or --sensitivity")
    base = case_of(args)
    changes = parse_changes(args.changes, base.node, option_value)
    other = changed(base, changes)
    before = base.simulate()
    after = other.simulate() if changes else before
    effects: list[Effect] = []
    if args.sensitivity:
        show = progress()
        effects = sensitivity(other, after.tokens_per_s, show)
        done()
    data = {
        "baseline": headline(before),
        "changed": headline(after),
        "changes": args.changes,
        "effect": after.tokens_per_s / before.tokens_per_s - 1,
        "sensitivity": [asdict(effect) | {"assumed": effect.assumed} for effect in effects],
    }
    shown = [comparison(args.changes, before, after)] if changes else [f"{count(before.tokens_per_s)} tokens/s (predicted)"]
    emit(args, data, "\n\n".join(shown + ([effects_text(effects)] if effects else [])))
    if args.report:
        extra = [pages.engines({"baseline": before, ", ".join(args.changes): after}, "Baseline and change")] if changes else []
        extra += [pages.sensitivity(effects, STEP)] if effects else []
        say(f"report: {pages.simulation_page(other.plan(), other.node, after, *extra).write(args.report)}")
    return 0


def comparison(changes: Sequence[str], before: Result, after: Result) -> str:
    """Baseline and change side by side, cause by cause."""
    speeds = before.tokens_per_s, after.tokens_per_s
    rows = [
        ("tokens/s (predicted)", *map(count, speeds), _effect(*speeds)),
        ("us a step", f"{before.step_s * 1e6:.1f}", f"{after.step_s * 1e6:.1f}", _effect(before.step_s, after.step_s)),
        ("stream fraction", percent(before.stream_fraction), percent(after.stream_fraction), ""),
    ]
    for cause, seconds in before.attribution.items():
        then = after.attribution[cause]
        if seconds or then:
            rows.append((f"us of {spoken(cause)}", f"{seconds * 1e6:.1f}", f"{then * 1e6:.1f}", _effect(seconds, then)))
    return f"what if {', '.join(changes)}\n\n{table(('', 'baseline', 'changed', 'effect'), rows)}"


def effects_text(effects: Sequence[Effect]) -> str:
    """The strongest effects, and how many numbers hardly matter."""
    shown = [e for e in effects if e.tokens_per_s is None or abs(e.effect) >= 5e-4][:SHOWN]
    rows = []
    for e in shown:
        effect = "not possible" if e.problem else percent(e.effect, signed=True)
        rows.append((e.label, e.kind, _value(e.name, e.before), _value(e.name, e.after), effect))
    head = ("number changed by 10%", "kind", "from", "to", "tokens/s")
    return f"{table(head, rows, text_columns=2)}\n\n{len(effects) - len(shown)} others change less than 0.05%"


def _effect(before: float, after: float) -> str:
    return percent(after / before - 1, signed=True) if before else "new"


def _value(name: str, value: float) -> str:
    return format_quantity(value, unit_of(name.rsplit(".", 1)[-1]))
