"""Rounds with drafts timed: as many tokens count as the caller says, whatever the model says."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from twin.engine.generation import Drafting, Generation
from twin.engine.session import Session
from twin.errors import ConfigError, EngineError

WARM = 2  # first rounds, and first steps, that no time counts of


@dataclass(frozen=True, slots=True)
class Rounds:
    """What repeats of one request took."""

    samples: tuple[float, ...]  # tokens per second of each
    tokens_per_round: float
    round_s: float  # median of all repeats' rounds
    step_s: float  # median, of a request without drafts
    drafts: int


def check_accepted(accepted: float, drafts: int) -> None:
    """Raises ConfigError for tokens that no round of so many drafts has."""
    if not 1 <= accepted <= drafts + 1:
        raise ConfigError(
            f"--force-acceptance {accepted:g}: tokens of a round with {drafts} drafts, from 1 to "
            f"{drafts + 1}"
        )


def time_rounds(
    engine: Session,
    prompt: list[int],
    *,
    tokens: int,
    repeats: int,
    accepted: float,
    show: Callable[[str], None],
) -> Rounds:
    """After one repeat to warm up. Raises EngineError where repeats disagree, ConfigError for too
    few tokens.
    """
    drafts = engine.plan.options.lookup
    check_accepted(accepted, drafts)
    steps = engine.generate(prompt, max_tokens=tokens, drafting=Drafting(0))
    forced = Drafting(accepted=accepted)
    first = engine.generate(prompt, max_tokens=tokens, drafting=forced)
    made: list[Generation] = []
    for repeat in range(repeats):
        show(f"repeat {repeat + 1}/{repeats}")
        made.append(engine.generate(prompt, max_tokens=tokens, drafting=forced))
        if made[-1].stop_reason == "cancelled":
            raise KeyboardInterrupt
        if made[-1].tokens != first.tokens:
            raise EngineError(
                f"repeat {repeat + 1} gave other tokens than the first: the engine is not "
                "deterministic here, report this plan"
            )
    # behind the prompt, and with all drafts: the last round may have fewer
    rounds = [one for each in made for one in each.round_ns[WARM:-1]]
    if not rounds:
        raise ConfigError(
            f"--tokens {tokens}: too few for {WARM + 2} rounds of {accepted:g} tokens; give more"
        )
    return Rounds(
        tuple(one.tokens_per_s for one in made),
        statistics.mean(one.tokens_per_round for one in made),
        float(statistics.median(rounds)) / 1e9,
        float(statistics.median(steps.step_ns[WARM:])) / 1e9,
        drafts,
    )
