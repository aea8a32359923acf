"""An engine's logits against the reference where rounding decides which experts a token uses.

Two experts whose scores differ by less than what rounding does to them may change places. A token
then gets another expert's output, and its logits differ by more than any rounding. The reference
follows such a choice where its own scores are that close, and then the logits must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from twin.models.feeds import ExpertFeed
from twin.plan.shards import Array, Weights
from twin.plan.types import Plan, Stage
from twin.reference.experts import Choice, Experts, chosen_by, weighed
from twin.reference.step import Reference

# of the largest score of a router: closer ones may change places. It is the tolerance of logits,
# for scores are computed like these.
CLOSE = 2e-2
EXPLAINED = 0.5  # a choice is followed where no more of a token's difference is left
MOST_CHOICES = 4  # that are followed for a token


@dataclass(frozen=True, slots=True)
class Followed:
    """A choice that an engine made otherwise than the reference would have."""

    token: int  # position in the sequence
    layer: int
    instead: int  # the expert that the reference would have chosen last
    expert: int
    margin: float  # between the scores of both, of the router's largest one
    before: float  # the token's difference from the reference, relative to the largest logit
    after: float  # the same with the engine's choice


@dataclass(frozen=True, slots=True)
class Agreement:
    """Largest differences from the reference, relative to the largest logit."""

    difference: float
    unfollowed: float  # from a reference that follows no choice
    followed: tuple[Followed, ...] = ()


def agreement(
    plan: Plan,
    weights: Weights,
    tokens: Sequence[int],
    found: Array,
    wanted: Array,
    *,
    beyond: float,
) -> Agreement:
    """Choices are followed for tokens whose difference is larger than `beyond`.

    `found`: [tokens, vocab] of an engine; `wanted`: of the reference that follows none.
    """
    reference = Reference(plan, weights)
    choosing = reference.experts = _Choosing(plan, weights, reference.dtype)
    reference.turn(len(tokens))
    followed: list[Followed] = []
    largest, worst = float(np.abs(wanted).max()), 0.0
    for at, token in enumerate(tokens):
        one = _Token(reference, choosing, token, found[at], largest)
        if one.difference > beyond:
            followed += [replace(choice, token=at) for choice in one.follow()]
        worst = max(worst, one.difference)
    unfollowed = float(np.abs(found - wanted).max()) / largest
    return Agreement(worst, unfollowed, tuple(followed))


class _Token:
    """One token, and how far the reference's step is from the engine's."""

    def __init__(
        self, reference: Reference, choosing: _Choosing, token: int, found: Array, largest: float
    ) -> None:
        self._reference, self._choosing = reference, choosing
        self._token, self._found, self._largest = token, found, largest
        self._mark = reference.mark()
        self.difference = self._step(frozenset())

    def follow(self) -> list[Followed]:
        """The choices that explain the difference, those that explain most first. The reference has
        then made its step with them.
        """
        made: list[Followed] = []
        swapped: frozenset[int] = frozenset()
        while len(made) < MOST_CHOICES:
            close = dict(self._choosing.close)
            tried = [
                replace(one, before=self.difference, after=self._step(swapped | {layer}))
                for layer, one in close.items()
                if layer not in swapped
            ]
            best = min(tried, key=lambda choice: choice.after, default=None)
            if best is not None and best.after <= EXPLAINED * self.difference:
                made.append(best)
                swapped |= {best.layer}
            self.difference = self._step(swapped)
            if best is None or best.layer not in swapped:
                break
        return made

    def _step(self, swapped: frozenset[int]) -> float:
        """The difference with the choices of these layers made otherwise."""
        self._reference.back_to(self._mark)
        self._choosing.begin(swapped)
        logits = self._reference.step(self._token)
        return float(np.abs(logits - self._found).max()) / self._largest


class _Choosing(Experts):
    """Experts that say where a choice was close, and can take the first that was not chosen instead
    of the last that was.
    """

    def begin(self, swapped: frozenset[int]) -> None:
        """A step with the choices of these layers made otherwise."""
        self._swapped = swapped
        self.close: dict[int, Followed] = {}  # by layer

    def _choice(self, kind: ExpertFeed, stage: Stage, logits: Array, bias: Array | None) -> Choice:
        by = chosen_by(kind, logits, bias)
        order = np.argsort(-by, kind="stable")[: kind.top_k + 1]
        if len(order) == kind.top_k:
            return weighed(kind, logits, order)
        last, following = int(order[-2]), int(order[-1])
        margin = float((by[last] - by[following]) / np.abs(by).max())
        if margin < CLOSE:
            self.close[stage.layer] = Followed(0, stage.layer, last, following, margin, 0.0, 0.0)
        if stage.layer in self._swapped:
            order[-2] = following
        return weighed(kind, logits, order[:-1])
