"""The twin next to `twin run`: did the engine run at the rate that the twin predicts?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twin.calibrate.known_error import known_error
from twin.engine.generation import Generation
from twin.errors import TwinError
from twin.hardware.types import Node
from twin.plan.types import Plan
from twin.report.tables import count


def predicted_for(
    plan: Plan, node: Node, chosen: Mapping[str, Any], prompt: int, made: Generation
) -> dict[str, Any] | None:
    """What the twin says of the positions that a run went through; None where it has no interval:
    no fit with held-out runs, too few tokens for a rate, or tokens of passes that verified drafts.

    `prompt`: tokens before the generated ones.
    """
    if known_error(node) is None or plan.spec is None or len(made.round_ns):
        return None
    try:
        from twin.server.expected import FEWEST, expect

        if len(made.tokens) <= FEWEST:
            return None
        found = expect(plan.spec, node, plan, chosen)
    except (TwinError, ImportError):  # the run has succeeded, whatever can be said of its speed
        return None
    predicted = found.rate(prompt + len(made.tokens) / 2)
    parted = found.parted(made.tokens_per_s, predicted)
    if parted is None:
        return None
    assert found.low is not None
    assert found.high is not None
    return {
        "tokens_per_s": predicted,
        "interval": [predicted * found.low, predicted * found.high],
        "parted": parted,
    }


def alarm(said: Mapping[str, Any], made: Generation) -> str:
    """A line for people, where measured and predicted rate part."""
    low, high = said["interval"]
    slow = made.tokens_per_s < low
    reason = (
        "a throttled clock or a busy neighbour looks like that"
        if slow
        else "the fit on file may be of another machine or an older kernel"
    )
    return (
        f"alarm: {count(made.tokens_per_s)} tokens/s (measured), the twin expects {count(low)} to "
        f"{count(high)} there: {reason}"
    )
