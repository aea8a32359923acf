"""What drafts of an engine's rounds are worth, for `twin simulate --draft lookup:7`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.commands.arguments import whole
from twin.cost.acceptance import Acceptance, read_acceptance
from twin.cost.drafting import Drafted, Drafter, drafted, read_drafter
from twin.errors import ConfigError, InvalidPlan, PlanError
from twin.frozen import frozen
from twin.models.eagle3 import published
from twin.plan.ranges import RANGES
from twin.plan.shards import Weights
from twin.report.tables import count, facts, percent, table
from twin.study.case import Case
from twin.text import shown
from twin.units import format_quantity

if TYPE_CHECKING:  # a prediction loads no engine
    from twin.engine.opening import Source

Draft = tuple[Drafter, int]


def draft(text: str) -> int | Draft:
    """For `type=`: `lookup:7`, or of a step that verifies drafts how many."""
    try:
        return read_drafter(text) if ":" in text else whole(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


RANDOM = "random"  # instead of a head's folder, next to random weights
USUAL_DRAFTS = 5  # of a head, where nobody says how many


@frozen
class EngineDraft:
    """What drafts, and how many tokens at most; a head's folder, or RANDOM."""

    most: int
    head: str = ""


class _Draft(argparse.Action):
    """`--draft` as the option of a plan, and the head's place."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.option_lookup, namespace.draft_head = values.most, values.head


def add_draft(parser: argparse.ArgumentParser) -> None:
    """`--draft` of commands that run an engine."""
    parser.add_argument(
        "--draft",
        action=_Draft,
        type=engine_draft,
        default=argparse.SUPPRESS,
        metavar="KIND",
        help="lookup:K drafts up to K tokens, 1 to 7, from what followed the last few tokens where "
        "they stood before; eagle3:FOLDER[:K] by an EAGLE-3 head (default "
        f"{USUAL_DRAFTS}); one pass verifies them, and no draft changes an answer",
    )
    parser.set_defaults(draft_head="")


def engine_draft(text: str) -> EngineDraft:
    """For `type=`: `lookup:7`, `eagle3:FOLDER`, `eagle3:FOLDER:3`."""
    kind, _, rest = text.partition(":")
    least, limit = RANGES["lookup"]
    place, _, count = rest.rpartition(":")
    if kind == Drafter.EAGLE3.value and not (place and count.isdecimal()):
        place, count = rest, str(USUAL_DRAFTS)
    known = kind == Drafter.LOOKUP.value and not place
    known = known or (kind == Drafter.EAGLE3.value and bool(place))
    if not known or not count.isdecimal() or not max(1, least) <= int(count) <= limit:
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: lookup:K or eagle3:FOLDER:K drafts up to K tokens, 1 to {limit}"
        )
    return EngineDraft(int(count), place)


def headed(source: Source, head: str) -> Source:
    """The source with the head that `--draft` names. Raises ConfigError, CheckpointError."""
    from twin.engine.draft_head import with_head
    from twin.engine.weights import random_weights

    if not head:
        return source
    if head == RANDOM:
        if source.seed is None:
            raise ConfigError("--draft eagle3:random: a random head needs --random SEED")
        spec = replace(source.spec, draft_head=published(source.spec))
        weights: Weights = random_weights(spec, source.seed, source.weights.dtype)
        return replace(source, spec=weights.spec, weights=weights)
    found = with_head(source.weights, source.spec, Path(head))
    return replace(source, spec=found.spec, weights=found)


@frozen
class Drafts:
    """Rounds of every width up to what was chosen."""

    drafter: Drafter
    acceptance: Acceptance
    widths: tuple[Drafted, ...]  # without drafts first
    refused: str  # why no engine of ours makes these rounds; empty where one does

    @property
    def best(self) -> Drafted:
        return max(self.widths, key=lambda one: one.tokens_per_s)


def check_drafts(drafts: Draft, acceptance: str | None, others: list[str]) -> Acceptance:
    """What the arguments say next to `--draft KIND:K`. Raises ConfigError."""
    if acceptance is None or others:
        raise ConfigError(
            f"--draft {drafts[0].value}:{drafts[1]} needs --acceptance, a number from 0 to 1 or a "
            f"curve's name, and no {shown(' '.join(others) or '--draft-model or --draft-time')}"
        )
    return read_acceptance(acceptance)


def drafts_of(case: Case, drafts: Draft, acceptance: Acceptance, step_s: float) -> Drafts:
    """Of the plan that drafts where the engine has one, else of the plan without. Raises PlanError
    for several sequences.
    """
    drafter, most = drafts
    if case.chosen.get("batch", 1) != 1:
        raise PlanError("a round verifies the drafts of one sequence: use batch=1, or --draft N")
    refused = "no engine of ours drafts by mtp" if drafter is Drafter.MTP else ""
    try:
        spec = case.spec
        if drafter is Drafter.EAGLE3:
            spec = replace(spec, draft_head=published(spec))
        plan = Case(spec, case.node, case.chosen | {"lookup": most}).plan()
    except (PlanError, InvalidPlan) as error:
        plan, refused = case.plan(), str(error)
    widths = (
        drafted(plan, case.node, drafter, acceptance, step_s=step_s, drafts=drafts)
        for drafts in range(most + 1)
    )
    return Drafts(drafter, acceptance, tuple(widths), refused)


def drafts_json(found: Drafts) -> dict[str, Any]:
    return {
        "drafter": found.drafter.value,
        "acceptance": found.acceptance.rate
        if found.acceptance.rate is not None
        else found.acceptance.name,
        "best": found.best.drafts,
        "refused": found.refused or None,
        "widths": [
            {
                "drafts": one.drafts,
                "tokens_per_s": one.tokens_per_s,
                "tokens_per_round": one.tokens,
                "round_s": one.round.seconds,
                "draft_s": one.draft_s,
                "verify_cost": one.verify_cost,
                "meetings": one.round.meetings,
                "break_even_tokens": one.break_even_tokens,
                "break_even_acceptance": one.break_even,
            }
            for one in found.widths
        ],
    }


def drafts_text(found: Drafts) -> str:
    last, best = found.widths[-1], found.best
    gain = percent(best.tokens_per_s / found.widths[0].tokens_per_s - 1, signed=True)
    lines = [
        (
            "with drafts",
            f"{count(last.tokens_per_s)} tokens/s with {last.drafts} by {found.drafter.value}"
            "  (predicted)",
        ),
        (
            "best",
            f"{best.drafts} drafts, {count(best.tokens_per_s)} tokens/s, {gain} against steps"
            if best.drafts
            else "no drafts: steps are faster",
        ),
        ("accepted", str(found.acceptance)),
        *([("engine", found.refused)] if found.refused else []),
    ]
    rows = [
        (
            str(one.drafts),
            count(one.tokens_per_s),
            f"{one.tokens:.2f}",
            format_quantity(one.round.seconds if one.drafts else one.step_s, "s"),
            format_quantity(one.draft_s, "s") if one.draft_s else "",
            f"{one.verify_cost:.2f}" if one.drafts else "",
            _needed(one),
        )
        for one in found.widths
    ]
    head = ("drafts", "tokens/s", "tokens a round", "round", "drafting", "in steps", "break-even")
    return f"{facts(lines)}\n\n{table(head, rows)}"


def _needed(one: Drafted) -> str:
    """Tokens a round, and how often each draft has to be accepted for them."""
    if not one.drafts:
        return ""
    needed = f"{one.break_even_tokens:.2f} tokens"
    return f"{needed}, {percent(one.break_even)} each" if one.break_even is not None else needed
