"""A decoder layer as data, and what surrounds its residual."""

from __future__ import annotations

from twin.frozen import frozen
from twin.models.feeds import Feed
from twin.models.formats import Formats, Role
from twin.models.mixers import Mixer
from twin.models.weight import Weight

# the mixing matrices of a layer, and the one that collapses the residuals before the final norm
LAYER_HYPER, HEAD_HYPER = ("attn_hyper", "ffn_hyper"), "head_hyper"
HYPER_ENDS = ("base", "scale")  # of the names of what goes with such a matrix


@frozen(kw_only=True)
class HyperConnections:
    """Manifold-constrained hyper-connections: `residuals` vectors, mixed before and after every
    module.

    Before a module the residuals, side by side and normed, meet one matrix [mixes, residuals *
    hidden]. Its outputs say how they collapse to one input, how the module's output is spread over
    them, and how they mix (made doubly stochastic by `iterations` rounds).
    """

    residuals: int
    iterations: int
    eps: float = 1e-6  # is added to a collapse's factors, and to what the rounds divide by

    @property
    def mixes(self) -> int:
        """Outputs of the mixing matrix."""
        return (2 + self.residuals) * self.residuals

    def weights(self, hidden: int, formats: Formats) -> tuple[Weight, ...]:
        """Of one layer: before the attention, before the feed-forward layer."""
        form, cols = formats.of(Role.HYPER), self.residuals * hidden
        return tuple(Weight(name, Role.HYPER, self.mixes, cols, form) for name in LAYER_HYPER)

    def head(self, hidden: int, formats: Formats) -> Weight:
        """The matrix that collapses the residuals before the final norm."""
        return Weight(
            HEAD_HYPER,
            Role.HYPER,
            self.residuals,
            self.residuals * hidden,
            formats.of(Role.HYPER),
        )

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """By canonical name below a layer or the model: the matrices; what is added to their
        outputs; what multiplies these before, one number each for those that collapse, spread and
        mix.
        """
        found: dict[str, tuple[int, ...]] = {}
        for name in (*LAYER_HYPER, HEAD_HYPER):
            rows, kinds = (self.residuals, 1) if name == HEAD_HYPER else (self.mixes, 3)
            found[name] = (rows, self.residuals * hidden)
            found |= {
                f"{name}_{end}": (n,) for end, n in zip(HYPER_ENDS, (rows, kinds), strict=True)
            }
        return found

    @property
    def layer_vectors(self) -> int:
        return 2 * (self.mixes + 3)

    @property
    def head_vectors(self) -> int:
        return self.residuals + 1


@frozen
class Layer:
    """One decoder layer: residual += mixer(norm(residual)); residual += feed(norm(residual)). Of
    some one half is missing.
    """

    mixer: Mixer
    feed: Feed
