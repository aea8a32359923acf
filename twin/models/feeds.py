"""Feed-forward layers: dense, and mixtures of experts; gated, or of two matrices."""

from __future__ import annotations

from enum import Enum

from twin.frozen import frozen
from twin.models.formats import Formats, Role
from twin.models.weight import Weight


class Scoring(Enum):
    """How a router turns its logits into weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrtsoftplus"


@frozen(kw_only=True)
class DenseFeed:
    """SwiGLU over the whole width; without a gate the activation of what up makes."""

    width: int
    limit: float | None = None  # gate and up are clamped to it before they meet
    gated: bool = True

    def weights(self, hidden: int, formats: Formats) -> tuple[Weight, ...]:
        return _matrices("", Role.DENSE, self.width, hidden, formats, gated=self.gated)

    def vectors(self, hidden: int) -> int:
        return 0

    def active_vectors(self, hidden: int) -> int:
        return 0


@frozen(kw_only=True)
class ExpertFeed:
    """A mixture of experts: a router picks top_k of `experts` for each token; shared experts see
    every token.
    """

    experts: int
    top_k: int
    width: int  # of one routed expert
    shared_width: int = 0  # of all shared experts together; 0: none
    scoring: Scoring = Scoring.SOFTMAX
    renormalise: bool = True  # the chosen weights are scaled to sum 1
    scaling: float = 1.0  # then multiplied by this
    groups: int = 1  # experts are first chosen by group:
    top_groups: int = 1  # only the best of them compete
    # experts follow from the token's number: known before the step begins; the router still weighs
    # them
    hashed: bool = False
    router_bias: bool = False  # one number an expert
    # the same, added to the scores by which experts are chosen, not to those that weigh them
    choice_bias: bool = False
    bias: bool = False  # biases in the experts
    shared_gate: bool = False  # sigmoid of one row times the shared experts' output
    limit: float | None = None  # gate and up are clamped to it before they meet
    gain: float = 1.0  # of a gate within its sigmoid
    offset: float = 0.0  # is added to what passes the gate
    gated: bool = True  # experts have a gate's matrix, else two matrices
    # the shared experts are a dense MLP next to the routed ones (Gemma 4): of both and of the
    # router the input is normed by weights of their own, of both the output; the router's weights
    # are multiplied by a number of each expert
    parallel: bool = False

    def weights(self, hidden: int, formats: Formats) -> tuple[Weight, ...]:
        """router; shared_gate, shared_up, shared_down (and the row that gates them); gate, up, down
        of all routed experts.
        """
        router: tuple[Weight, ...] = (
            Weight("router", Role.ROUTER, self.experts, hidden, formats.of(Role.ROUTER)),
        )
        if self.shared_gate:
            router += (
                Weight("shared_expert_gate", Role.ROUTER, 1, hidden, formats.of(Role.ROUTER)),
            )
        gated = self.gated
        shared = (
            _matrices("shared_", Role.SHARED, self.shared_width, hidden, formats, gated=gated)
            if self.shared_width
            else ()
        )
        numbers = (self.experts, self.top_k)
        return (
            *router,
            *shared,
            *_matrices("", Role.EXPERT, self.width, hidden, formats, *numbers, gated=gated),
        )

    def vectors(self, hidden: int) -> int:
        return self._router_vectors(hidden) + self.experts * self._expert_vectors(hidden)

    def active_vectors(self, hidden: int) -> int:
        """Those that one token uses."""
        return self._router_vectors(hidden) + self.top_k * self._expert_vectors(hidden)

    def _router_vectors(self, hidden: int) -> int:
        """With the norms that stand next to a dense layer's: of the router and the experts, of what
        both halves make.
        """
        biases = self.experts if self.router_bias or self.choice_bias else 0
        return biases + (4 * hidden + self.experts if self.parallel else 0)

    def _expert_vectors(self, hidden: int) -> int:
        return 2 * self.width + hidden if self.bias else 0


@frozen
class NoFeed:
    """Of a layer that is a mixer alone."""

    def weights(self, hidden: int, formats: Formats) -> tuple[Weight, ...]:
        return ()

    def vectors(self, hidden: int) -> int:
        return 0

    def active_vectors(self, hidden: int) -> int:
        return 0


Feed = DenseFeed | ExpertFeed | NoFeed


def halves_of(feed: DenseFeed | ExpertFeed) -> tuple[str, ...]:
    """The matrices whose rows make what the down projection multiplies."""
    return ("gate", "up") if feed.gated else ("up",)


def _matrices(
    prefix: str,
    role: Role,
    width: int,
    hidden: int,
    formats: Formats,
    experts: int = 1,
    active: int = 1,
    *,
    gated: bool,
) -> tuple[Weight, ...]:
    shapes = (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width))
    form = formats.of(role)
    return tuple(
        Weight(prefix + name, role, rows, cols, form, 1, experts, active)
        for name, rows, cols in shapes[not gated :]
    )
