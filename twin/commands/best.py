"""Which plan a command takes: the best one where the user names none, and how it says so."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from twin.commands.inputs import point_of
from twin.commands.output import done, progress
from twin.report.tables import percent
from twin.sim.speculation import Speculation
from twin.study.case import Case
from twin.study.options import Plain

if TYPE_CHECKING:
    from twin.study.optimise import Found, Tried

BEST, FIXED = "best", "fixed"


def add_plan(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--plan", choices=(BEST, FIXED), help=text)


def best_case(
    args: argparse.Namespace, case: Case, speculation: Speculation | None
) -> tuple[Case, Found | None]:
    """The case by the best plan, where that is looked for; else as it is."""
    if case.node.gpus == 1 or args.plan == FIXED or case.chosen.get("delay") is not None:
        return case, None
    # slow to load, and one GPU needs none of it
    from twin.study.optimise import found_by, search, searched
    from twin.study.runner import Runner
    from twin.study.store import Store, default_folder

    point = point_of(args)
    if args.plan is None and not searched(point):
        return case, None
    conditions: dict[str, Plain] = {"routing": args.routing, "seed": args.seed}
    if speculation is not None:
        conditions["acceptance"] = speculation.acceptance
        if speculation.curve:
            conditions["curve"] = speculation.curve
        conditions["draft_step_s"] = speculation.draft_step_s
    point = point.with_options(**conditions)
    try:
        runner = Runner.local(Store(default_folder()), progress())
        found = found_by(search(point), runner, f"plans of {case.spec.name} on {case.node.name}")
    finally:
        done()
    return found.best.way.of(point).case(), found


def plan_fact(found: Found | None) -> str:
    """Which plan was taken, in a line."""
    if found is None:
        return "default options, but for those given"
    best = found.best
    return f"the best of {found.simulated}: {best.way}; {engine_text(best)}{gain_text(found)}"


def engine_text(tried: Tried) -> str:
    """May our engine run it?"""
    why = tried.only_simulated
    return f"in the simulator only: {why}" if why else "the engine runs it"


def gain_text(found: Found) -> str:
    """How much faster than the standard plan, where that is another one."""
    standard = found.of(found.standard)
    if standard is None or standard == found.best:
        return ""
    gain = standard.step_s / found.best.step_s - 1
    return f"; {percent(gain, signed=True)} against default options"


def plan_json(found: Found | None) -> dict[str, Any]:
    """The same for programs."""
    if found is None:
        return {"taken": FIXED}
    standard = found.of(found.standard)
    return {
        "taken": BEST,
        **tried_json(found.best),
        "simulated": found.simulated,
        "standard_step_s": standard.step_s if standard else None,
    }


def tried_json(tried: Tried) -> dict[str, Any]:
    return {
        "gpus": tried.way.gpus,
        "format": tried.way.format or None,
        "options": dict(tried.way.options),
        "step_s": tried.step_s,
        "all_layers": tried.whole,
        "only_simulated": tried.only_simulated or None,
    }
