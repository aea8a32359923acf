"""What drafts are worth: rounds of every width, what drafting takes before them, tokens a second.

A round follows the drafting of its tokens, on the same blocks. Prompt lookup is part of a round's
decisions. A layer that drafts (MTP inside a checkpoint, EAGLE-3 next to one) runs once for each
token: its weights are streamed, and blocks meet between its stages.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from twin.cost.acceptance import Acceptance, acceptance_for
from twin.cost.rounds import RoundTime, _Rounds, round_passes, round_time
from twin.cost.terms import weight_rate
from twin.errors import ConfigError, PlanError
from twin.frozen import frozen
from twin.hardware.types import Node
from twin.models.eagle3 import published
from twin.models.spec import DraftHead
from twin.plan.catalogue import StageKind
from twin.plan.ranges import RANGES
from twin.plan.types import Plan
from twin.schedule.passes import Passes
from twin.text import shown

# meetings of a draft of EAGLE-3: behind keys, attention, its output, the feed-forward's two, the LM
# head;
# of verified tokens: behind states, inputs (native/monokernel/draft_head.cuh)
HEAD_MEETINGS, STATE_MEETINGS = 6, 2


class Drafter(Enum):
    """What drafts."""

    LOOKUP = "lookup"  # the prompt and the answer so far
    MTP = "mtp"  # a layer of the checkpoint, like its own, with the model's LM head
    EAGLE3 = "eagle3"  # a head next to the checkpoint


def read_drafter(text: str) -> tuple[Drafter, int]:
    """`lookup:7`, `mtp:2`, `eagle3:5`: (what drafts, tokens at most). Raises ConfigError."""
    kind, _, most = text.partition(":")
    limit = int(RANGES["lookup"][1])
    names = [one.value for one in Drafter]
    if kind not in names or not most.isdecimal() or not 1 <= int(most) <= limit:
        raise ConfigError(
            f"draft={shown(text)}: one of {', '.join(names)}, a colon and how many tokens, 1 to "
            f"{limit}, such as eagle3:5"
        )
    return Drafter(kind), int(most)


@frozen(kw_only=True)
class Drafted:
    """Rounds of one width."""

    drafts: int
    round: RoundTime
    draft_s: float  # of all drafts of a round, before it
    tokens: float  # that a round yields
    step_s: float  # of a step without drafts

    @property
    def seconds(self) -> float:
        """Of a round and its drafts; without drafts, of a step."""
        return self.round.seconds + self.draft_s if self.drafts else self.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def verify_cost(self) -> float:
        """A round in steps."""
        return self.round.seconds / self.step_s

    @property
    def break_even_tokens(self) -> float:
        """Tokens a round that make it as fast as steps."""
        return self.seconds / self.step_s

    @property
    def break_even(self) -> float | None:
        """How often each draft must be accepted for that; None: not even if all are."""
        if not self.drafts or self.break_even_tokens > self.drafts + 1:
            return None
        return acceptance_for(self.break_even_tokens, self.drafts)


def drafted(
    plan: Plan,
    node: Node,
    drafter: Drafter,
    acceptance: Acceptance,
    *,
    step_s: float,
    drafts: int,
) -> Drafted:
    """Rounds with so many drafts. Raises PlanError where there are none."""
    context = min(plan.options.context, plan.options.max_context - drafts - 1)
    tokens = acceptance.tokens(drafts)
    return Drafted(
        drafts=drafts,
        round=round_time(plan, node, context=context, tokens=drafts + 1),
        draft_s=drafting_s(plan, node, drafter, drafts=drafts, accepted=tokens),
        tokens=tokens,
        step_s=step_s,
    )


def drafting_s(plan: Plan, node: Node, drafter: Drafter, *, drafts: int, accepted: float) -> float:
    """Seconds in which the drafts of a round are made, behind one that yielded so many tokens."""
    if drafter is Drafter.LOOKUP or not drafts:
        return 0.0
    made = round_passes(plan)
    if drafter is Drafter.EAGLE3:
        assert plan.spec is not None
        return _Head(made, node, 0.5).drafts_s(
            plan.spec.draft_head or published(plan.spec), drafts, accepted
        )
    return _layer_s(made, node, drafts, accepted)


def _layer_s(made: Passes, node: Node, drafts: int, accepted: float) -> float:
    """A layer like the model's last one with attention, and its LM head; before it two states made
    one.
    """
    attention = [one.stage for one in made.rounds if one.stage.kind is StageKind.ATTENTION]
    if not attention:
        raise PlanError(f"{made.plan.name}: no layer of it has attention, so none drafts like it")
    layer, head = attention[-1].layer, made.rounds[-1]
    own = tuple(one for one in made.rounds if one.stage.layer == layer and one is not head)
    context = min(made.plan.options.context, made.plan.options.max_context - 1)

    def once(tokens: int) -> float:
        model = _Head(replace(made, rounds=(*own, head)), node, 0.5)
        return model.round_s(context, tokens, {}) + model.joined_s()

    # the first draft follows all tokens that count
    return once(max(1, round(accepted))) + (drafts - 1) * once(1)


class _Head(_Rounds):
    """One block's way through drafts."""

    def joined_s(self) -> float:
        """An embedding and a hidden state made one."""
        return self._streamed_s(2 * self.plan.shard.hidden**2, 2)

    def drafts_s(self, head: DraftHead, drafts: int, accepted: float) -> float:
        """Of EAGLE-3: of the tokens that count only keys and values, but for the last one's."""
        each = self._streamed_s(head.weights(without=("fc",)), HEAD_MEETINGS)
        states = self._streamed_s(head.hidden * 3 * head.hidden, STATE_MEETINGS)
        context = min(self.plan.options.context, self.plan.options.max_context)
        seen = 4 * 2 * head.kv_size * context / self.plan.blocks  # FP32
        return states + drafts * (each + seen / self.cache)

    def _streamed_s(self, weights: int, meetings: int) -> float:
        dtype = self.plan.options.weight_dtype
        size, rate = weights * dtype.bytes / self.plan.blocks, self.stream
        if not self.tensor_cores:
            rate = min(rate, weight_rate(self.kernel, dtype))
        return size / rate + meetings * (self._barrier_s() + 2 * self.latency)
