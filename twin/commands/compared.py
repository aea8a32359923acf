"""Our engine next to ordinary ones, as `twin simulate` shows it; price and power of a GPU."""

from __future__ import annotations

import argparse

from twin.batching.prices import Rates, rates_of
from twin.calibrate.known_error import KnownError
from twin.commands.output import one_line
from twin.cost.prompt import PromptTime, prompt_time
from twin.errors import PlanError
from twin.hardware.types import Node
from twin.plan.types import Plan
from twin.report.tables import count, table
from twin.sim.run import Result
from twin.study.case import Case
from twin.study.compared import Comparison, checked, compared
from twin.units import format_quantity

SHORT = 160  # characters of why an engine is not in the table
PROMPT = 512  # tokens of the prompt whose time is shown where nobody names another


def add_rates(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--usd-per-hour",
        type=float,
        metavar="USD",
        help="price of one GPU, instead of the one on file (hwmodels/prices.yaml)",
    )
    parser.add_argument(
        "--watts",
        type=float,
        metavar="W",
        help="power of one GPU at work, without its host, instead of the one on file",
    )


def rates(args: argparse.Namespace, node: Node) -> Rates:
    return rates_of(node, args.usd_per_hour, args.watts)


def comparison(
    case: Case,
    plan: Plan,
    result: Result,
    found: Rates,
    prompt: PromptTime | None,
    known: KnownError | None,
) -> Comparison:
    assert plan.spec is not None
    return compared(
        plan.spec,
        case.node,
        plan.options.context,
        result.tokens_per_s,
        found,
        sequences=result.sequences,
        interval=known.interval(result.tokens_per_s) if known else None,
        prompt_s=prompt.seconds if prompt else None,
        others="weight_dtype" not in case.chosen,
    )


def usual_prompt(plan: Plan, node: Node) -> PromptTime | None:
    """Of PROMPT tokens, where the formulas hold: on NVIDIA GPUs that read them in passes."""
    if not node.device.teams:
        return None
    try:
        return prompt_time(plan, node, min(PROMPT, plan.options.max_context))
    except PlanError:
        return None


def text(found: Comparison, prompt: PromptTime | None, sequences: int) -> str:
    """The table and what it rests on."""
    head = ("engine", "tokens/s", "p10 .. p90", "prompt", "kWh/M tokens", "USD/M tokens")
    rows = [
        (
            row.engine,
            count(row.tokens_per_s),
            "" if row.low is None or row.high is None else f"{count(row.low)} .. {count(row.high)}",
            "" if row.prompt_s is None else format_quantity(row.prompt_s, "s"),
            "" if row.kwh_per_million is None else f"{row.kwh_per_million:.3g}",
            "" if row.usd_per_million is None else f"{row.usd_per_million:.3g}",
        )
        for row in found.rows
    ]
    said = "one request at a time" if sequences == 1 else f"{sequences} requests together"
    title = f"{said}{f', prompt of {prompt.tokens} tokens' if prompt else ''}  (predicted)"
    return "\n".join([title, table(head, rows), *rests_on(found)])


def rests_on(found: Comparison) -> list[str]:
    """Price, power, and how wrong the other engines' predictions were."""
    cents, watts, host = (
        found.rates.cents_per_hour,
        found.rates.busy_w,
        found.rates.host_w,
    )
    lines = [
        f"price: {cents.value / 100:g} USD an hour and GPU ({cents.kind.value}, {cents.source})"
        if cents
        else "no price on file: give one with --usd-per-hour",
        f"power: {watts.value:g} W a GPU ({watts.kind.value}, {watts.source}) and {host.value:g} W "
        f"of its host ({host.kind.value})"
        if watts
        else "no power on file: give it with --watts",
    ]
    if len(found.rows) > 1:
        lines.append(checked())
    return [*lines, *(one_line(reason, SHORT) for reason in found.missing)]
