"""`twin surrogate`: the speeds of very many machines, from a few hundred simulated ones."""

from __future__ import annotations

import argparse
import resource
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from twin.commands.arguments import (
    Subparsers,
    add_engine_options,
    add_model,
    add_node,
    command,
    file_to_write,
    whole,
)
from twin.commands.inputs import point_of
from twin.commands.output import emit, progress
from twin.commands.project import add_running, running
from twin.errors import ConfigError
from twin.report.tables import count, facts, percent, table
from twin.study.inverse import MOST, MOST_VARIED, Varied, parse_varied
from twin.study.surrogate import WITHIN, Checked, Floats, Sizes, Surrogate, surrogate
from twin.study.whatif import with_steps

POINTS, MOST_POINTS = 1_000_000, 100_000_000
TRAINED, BOUNDED, CHECKED = 256, 64, 32
FEWEST, MOST_TRAINED = 24, 2000
PARTS = 4  # of a number's range, in which the share that does not hold is counted
EXAMPLES = """\
  twin surrogate llama-3.1-8b 1xh200 --vary memory.stream,kernel.stage,handoff.hop
  twin surrogate gpt-oss-120b 8xh200 --vary memory.stream=x8,link.hop --to speeds.parquet"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "surrogate",
        run,
        usage="MODEL NODE --vary NAMES [options]",
        summary="predict a million machines by a checked surrogate of the twin",
        text="Simulates a few hundred machines between the node as it is and the bounds of the "
        "named numbers, fits a\nGaussian process to them, and evaluates that at very many "
        "machines. Every speed has a bound on how far the\nsimulator may be from it; machines "
        f"whose bound exceeds {percent(WITHIN)} are counted as not held. Speeds and bounds are\n"
        "checked by machines that were simulated whole and that the fit never saw.",
        examples=EXAMPLES,
    )
    add_model(parser)
    add_node(parser)
    parser.add_argument(
        "--vary",
        required=True,
        metavar="NAMES",
        help="numbers of the hardware that change, separated by commas (`twin hardware NODE` lists "
        f"them, at most {MOST_VARIED}); NAME=x8 is a bound, else they become at most {MOST:g} "
        "times better",
    )
    for name, default, text in (
        ("--points", POINTS, "machines to predict"),
        ("--trained", TRAINED, "machines to simulate for the fit"),
        ("--bounded", BOUNDED, "machines to simulate for the bounds"),
        ("--checked", CHECKED, "machines to simulate whole, for the check"),
        ("--seed", 1, "of all draws"),
    ):
        parser.add_argument(
            name, type=whole, default=default, metavar="N", help=f"{text} (default %(default)s)"
        )
    parser.add_argument(
        "--to",
        type=file_to_write,
        metavar="FILE",
        help="a Parquet file of all machines: the factor of each number, tokens/s, bound",
    )
    add_running(parser)
    add_engine_options(parser, without=("gpus",))


@dataclass
class Tally:
    """What is counted of the machines that the surrogate predicts."""

    varied: tuple[Varied, ...]
    machines: int = 0
    held: int = 0
    speeds: list[Floats] = field(default_factory=list)  # a sample
    parts: Floats = field(init=False)  # [2, numbers, PARTS] machines, and those not held

    def __post_init__(self) -> None:
        self.parts = np.zeros((2, len(self.varied), PARTS))

    def add(self, machines: Floats, speeds: Floats, bounds: Floats) -> None:
        open_ = bounds > WITHIN
        self.machines += len(speeds)
        self.held += int(np.sum(~open_))
        self.speeds.append(speeds[:: max(1, len(speeds) // 1000)])
        for at, one in enumerate(self.varied):
            part = np.minimum((machines[:, at] / one.limit * PARTS).astype(int), PARTS - 1)
            self.parts[0, at] += np.bincount(part, minlength=PARTS)
            self.parts[1, at] += np.bincount(part[open_], minlength=PARTS)

    def quantiles(self) -> tuple[float, float, float]:
        found = np.quantile(np.concatenate(self.speeds), (0.1, 0.5, 0.9))
        return float(found[0]), float(found[1]), float(found[2])

    def not_held(self) -> list[list[float]]:
        """Of each number, the share of each part of its range, as it is first."""
        all_, open_ = self.parts
        return [
            [float(o / a) if a else 0.0 for a, o in zip(*pair, strict=True)]
            for pair in zip(all_, open_, strict=True)
        ]


def run(args: argparse.Namespace) -> int:
    for name, least, most in (
        ("points", 1, MOST_POINTS),
        ("trained", FEWEST, MOST_TRAINED),
        ("bounded", FEWEST, MOST_TRAINED),
        ("checked", 1, MOST_TRAINED),
    ):
        if not least <= getattr(args, name) <= most:
            raise ConfigError(f"--{name} {getattr(args, name):,}: from {least} to {most:,}")
    point = with_steps(point_of(args))
    varied = parse_varied(args.vary, point)
    before = _core_s()
    sizes = Sizes(args.trained, args.bounded, args.checked)
    with running(args, progress()) as runner:
        made, checked = surrogate(point, varied, sizes, args.seed, runner)
        simulated = runner.computed
    tally, after = Tally(varied), _core_s()
    parts = []
    for machines, speeds, bounds in made.drawn(args.points, args.seed):
        tally.add(machines, speeds, bounds)
        if args.to:
            parts.append(np.column_stack((machines, speeds, bounds)))
    if args.to:
        _write(args.to, made, np.vstack(parts))
    spent = {"simulating_core_s": after - before, "predicting_core_s": _core_s() - after}
    emit(args, _data(args, tally, checked, simulated, spent), text(args, tally, checked, spent))
    return 0


def _core_s() -> float:
    """Of this process and its finished workers."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _write(file: Path, made: Surrogate, rows: Floats) -> None:
    from twin.study import parquet  # Arrow takes half a second to load

    columns = {
        one.path.removeprefix("device."): 2.0 ** (-by if one.lower else by)
        for one, by in zip(made.varied, rows.T, strict=False)
    }
    parquet.write_columns(columns | {"tokens_per_s": rows[:, -2], "bound": rows[:, -1]}, file)


def _data(
    args: argparse.Namespace,
    tally: Tally,
    checked: list[Checked],
    simulated: int,
    spent: dict[str, float],
) -> dict[str, Any]:
    low, middle, high = tally.quantiles()
    return {
        "model": args.model,
        "node": args.node,
        "machines": tally.machines,
        "simulated": simulated,
        "held_share": tally.held / tally.machines,
        "within": WITHIN,
        "tokens_per_s": {"p10": low, "p50": middle, "p90": high},
        "not_held": {
            one.path: shares for one, shares in zip(tally.varied, tally.not_held(), strict=True)
        },
        "checked": [
            {
                "doublings": list(one.change),
                "simulated": one.simulated,
                "surrogate": one.guessed,
                "error": one.error,
                "bound": one.bound,
            }
            for one in checked
        ],
        **spent,
    }


def text(
    args: argparse.Namespace, tally: Tally, checked: list[Checked], spent: dict[str, float]
) -> str:
    errors = [abs(one.error) for one in checked]
    held = [one for one in checked if one.bound <= WITHIN]
    low, middle, high = tally.quantiles()
    rows = [
        ("machines", f"{tally.machines:,}"),
        ("tokens/s", f"{count(low)} to {count(high)} (p10, p90), median {count(middle)}"),
        (
            "held",
            f"{percent(tally.held / tally.machines)}: their bound is within {percent(WITHIN)}",
        ),
        (
            "checked",
            f"{len(checked)} machines simulated whole: off by {median(errors):.2%} (median), "
            f"{max(errors):.2%} (worst); {sum(one <= WITHIN for one in errors)} within "
            f"{percent(WITHIN)}",
        ),
        (
            "of those held",
            f"{sum(abs(one.error) <= WITHIN for one in held)} of {len(held)} within "
            f"{percent(WITHIN)}",
        ),
        (
            "time",
            f"{spent['simulating_core_s']:.0f} core-seconds to simulate and fit, "
            f"{spent['predicting_core_s']:.0f} to predict",
        ),
    ]
    parts = [f"{100 * at // PARTS} to {100 * (at + 1) // PARTS} %" for at in range(PARTS)]
    shares = [
        (one.path.removeprefix("device."), *map(percent, some))
        for one, some in zip(tally.varied, tally.not_held(), strict=True)
    ]
    head = f"{args.model} on {args.node}: a surrogate of the twin"
    where = "not held, by how far a number is on its way from as it is to its bound:"
    return "\n\n".join(
        [head, facts(rows), where, table(("number", *parts), shares, text_columns=(0,))]
    )
