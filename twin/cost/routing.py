"""Which experts the tokens of each step choose: sampled, or after a recorded histogram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twin.errors import PlanError, TwinError
from twin.files import read_json
from twin.plan.catalogue import StageKind
from twin.plan.types import Plan
from twin.text import said, shown

STEPS = 2  # simulated at least: the first one starts with cold caches
DRAWN_STEPS = 9  # where steps differ by their routing
MOST_STEPS = 1000  # of a simulation: they show how steps differ, not more
MOST_EXPONENT = 100.0  # one expert takes all long before
MOST_COUNT = 1e18
MOST_HISTOGRAM_BYTES = 16 << 20  # 256 layers of 512 experts take 2 MB

# of the experts used on a rank, in their order: how many tokens chose each
Chosen = tuple[int, ...]
Draw = tuple[Chosen, ...]  # of the routed layers, in their order


class RoutingKind(Enum):
    UNIFORM = "uniform"
    # expert e of a layer is chosen in proportion to (e + 1) ** -exponent: neighbours are popular
    # together
    ZIPF = "zipf"
    HISTOGRAM = "histogram"  # in proportion to recorded counts


@dataclass(frozen=True)
class Routing:
    """A token's top_k experts are drawn without replacement, independently for each token, layer
    and step.
    """

    kind: RoutingKind = RoutingKind.UNIFORM
    exponent: float = 1.0
    histogram: tuple[tuple[float, ...], ...] = ()  # [layers or 1][experts] counts
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= MOST_EXPONENT:
            raise PlanError(
                f"zipf exponent {self.exponent}: must lie between 0, which is uniform, and "
                f"{MOST_EXPONENT:g}"
            )
        if (self.kind is RoutingKind.HISTOGRAM) != bool(self.histogram):
            raise PlanError(
                "routing=histogram and a histogram belong together: give both, or neither"
            )
        for layer in self.histogram:
            if (
                not layer
                or not all(0 <= count <= MOST_COUNT for count in layer)
                or not sum(layer) > 0
            ):
                raise PlanError(
                    f"a histogram of {len(layer)} experts: counts must lie between 0 and "
                    f"{MOST_COUNT:g}, and one must be positive"
                )

    def __str__(self) -> str:
        detail = f" {self.exponent:g}" if self.kind is RoutingKind.ZIPF else ""
        return f"{self.kind.value}{detail}, seed {self.seed}"

    def weights(self, layer: int, experts: int) -> NDArray[np.float64]:
        """[experts] in proportion to which an expert is chosen first. Raises PlanError for a
        histogram of other experts.
        """
        if self.kind is RoutingKind.UNIFORM:
            return np.ones(experts)
        if self.kind is RoutingKind.ZIPF:
            return np.arange(1, experts + 1, dtype=np.float64) ** -self.exponent
        counts = np.array(self.histogram[layer % len(self.histogram)], np.float64)
        if len(counts) != experts:
            raise PlanError(
                f"the histogram has {len(counts)} experts, layer {layer} has {experts}: record it "
                "with this model"
            )
        return counts


def read_routing(text: str, seed: int) -> Routing:
    """`uniform`, `zipf:EXPONENT`, or a JSON file of counts, [experts] or [layers][experts]. Raises
    PlanError.
    """
    name, _, rest = text.partition(":")
    if name == RoutingKind.UNIFORM.value and not rest:
        return Routing(seed=seed)
    if name == RoutingKind.ZIPF.value:
        try:
            return Routing(RoutingKind.ZIPF, exponent=float(rest), seed=seed)
        except ValueError:
            raise PlanError(f"routing {shown(text)}: give an exponent, such as zipf:1.0") from None
    try:
        counts = read_json(Path(text), MOST_HISTOGRAM_BYTES)
        rows = counts if isinstance(counts[0], list) else [counts]
        histogram = tuple(tuple(float(count) for count in row) for row in rows)
    except (TwinError, ValueError, TypeError, LookupError, OverflowError) as error:
        raise PlanError(
            f"routing {shown(text)}: uniform, zipf:EXPONENT, or a JSON file of counts by expert "
            f"({said(str(error))})"
        ) from None
    return Routing(RoutingKind.HISTOGRAM, histogram=histogram, seed=seed)


def usual_steps(plan: Plan) -> int:
    """How many are simulated where nobody says: a second one, or enough for a median."""
    return DRAWN_STEPS if plan.steps_differ else STEPS


def most_used(ranks: Sequence[Draw]) -> Draw:
    """Of each layer what the rank has that reads the most experts, and of these the one with the
    most tokens.
    """
    layers = zip(*ranks, strict=True)
    return tuple(max(layer, key=lambda used: (len(used), sum(used))) for layer in layers)


@dataclass(frozen=True)
class Draws:
    """The routing of a plan's steps. A step's draw does not depend on how many steps are drawn."""

    plan: Plan
    routing: Routing

    @cached_property
    def layers(self) -> list[int]:
        """Stages that multiply chosen experts first, one a layer."""
        return [stage.index for stage in self.plan.stages if stage.kind is StageKind.ROUTED_UP]

    def step(self, step: int) -> list[Draw]:
        """[ranks]; ranks of one group share a draw."""
        plan = self.plan
        groups = plan.options.expert_ranks
        if not plan.steps_differ:
            return [tuple((1,) * self._top_k(stage) for stage in self.layers)] * plan.ranks
        random = np.random.default_rng((self.routing.seed, step))
        by_group: list[list[Chosen]] = [[] for _ in range(groups)]
        for layer, stage in enumerate(self.layers):
            for group, held in enumerate(np.split(self._counts(random, layer, stage), groups)):
                by_group[group].append(tuple(int(tokens) for tokens in held[held > 0]))
        return [tuple(by_group[rank * groups // plan.ranks]) for rank in range(plan.ranks)]

    def _counts(self, random: np.random.Generator, layer: int, stage: int) -> NDArray[np.int64]:
        """[experts] tokens that chose each. The largest of log(weight) + Gumbel noise are a draw
        without replacement.
        """
        routed = self.plan.stages[stage].routed
        assert routed is not None
        weights = self.routing.weights(layer, routed.total)
        some = np.count_nonzero(weights)
        if some < routed.top_k:
            message = (
                f"the histogram of layer {layer} counts {some} of {routed.total} experts; a token "
                f"chooses {routed.top_k}"
            )
            raise PlanError(f"{message}: record more tokens")
        with np.errstate(divide="ignore"):
            scores = np.log(weights) + random.gumbel(size=(self.plan.tokens, routed.total))
        chosen = np.argpartition(-scores, routed.top_k - 1, axis=1)[:, : routed.top_k]
        return np.bincount(chosen.reshape(-1), minlength=routed.total)

    def _top_k(self, stage: int) -> int:
        routed = self.plan.stages[stage].routed
        assert routed is not None
        return routed.top_k
