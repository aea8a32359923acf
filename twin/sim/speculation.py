"""Speculative decoding: what a step that verifies drafted tokens is worth."""

from __future__ import annotations

from twin.cost.acceptance import Acceptance, check_curve
from twin.errors import PlanError
from twin.frozen import frozen
from twin.plan.types import Plan


@frozen(kw_only=True)
class Speculation:
    """A draft model proposes tokens one after the other, each accepted with the same probability if
    those before it were.

    The draft and the step that verifies it follow each other; they share the devices.
    """

    acceptance: float  # of one drafted token, 0 to 1, where no curve is named
    # one step of the draft model (of a draft head trained with the model: its share of a step)
    draft_step_s: float
    curve: str = ""  # of hwmodels/acceptance.yaml

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise PlanError(f"acceptance={self.acceptance}: a probability lies between 0 and 1")
        if not self.draft_step_s >= 0:
            raise PlanError(f"draft_step_s={self.draft_step_s}: a time is at least 0 s")
        if self.curve:
            check_curve(self.curve)

    def tokens(self, draft: int) -> float:
        """What a step of `draft` drafted tokens yields on average, with the token that the model
        adds.
        """
        accepted = Acceptance(name=self.curve) if self.curve else Acceptance(self.acceptance)
        return accepted.tokens(draft)


def gain(plan: Plan, speculation: Speculation | None) -> tuple[float, float]:
    """(tokens a step yields a sequence, seconds of drafting before it). Raises PlanError if a plan
    drafts and nothing says how well.
    """
    draft = plan.options.draft
    if speculation is None:
        if draft:
            raise PlanError(
                f"draft={draft}: say how often drafted tokens are accepted and what the draft "
                "costs, or use draft=0"
            )
        return 1.0, 0.0
    if not draft:
        raise PlanError(
            "the plan drafts no tokens (draft=0): choose a draft length, or leave acceptance and "
            "draft cost away"
        )
    return speculation.tokens(draft), draft * speculation.draft_step_s
