"""What a dense family does otherwise than Llama. Each field is a constant of the kernel that is
compiled for a model of the family.
"""

from __future__ import annotations

from enum import Enum

from twin.frozen import frozen


class Activation(Enum):
    """What a gate passes through before it meets its up row, or an up row that no gate meets: a
    member's name is the kernel's, its values are the names in configurations, the first by which it
    is known here. What it computes: `activated` in native/platform/family.h,
    twin/reference/activations.py.
    """

    SILU = "silu", "swish"
    GELU = "gelu_pytorch_tanh"
    RELU2 = "relu2"

    def __new__(cls, *names: str) -> Activation:
        one = object.__new__(cls)
        one._value_, one.names = names[0], names
        return one

    names: tuple[str, ...]

    @property
    def polynomial(self) -> bool:
        """Does it evaluate one before its exponential, which a prompt pass takes time for?"""
        return self is Activation.GELU


class Norms(Enum):
    """Where a layer norms: what its two modules read, what they add to the residual, or both."""

    BEFORE = "before"
    AROUND = "around"
    AFTER = "after"

    @property
    def before(self) -> bool:
        return self is not Norms.AFTER

    @property
    def after(self) -> bool:
        return self is not Norms.BEFORE


@frozen(kw_only=True)
class Variant:
    """As it stands, Llama."""

    activation: Activation = Activation.SILU
    norms: Norms = Norms.BEFORE
    whole_qk_norm: bool = False  # q and k are normed over all heads together, not head by head
    norms_turned: bool = False  # each head of q and k is normed after its rotation
    embedding: float = 1.0  # factor of a token's embedding
    residual: float = 1.0  # factor of what a module adds to the residual
    layer_scalar: bool = False  # a learned factor of the whole residual at the end of each layer
    score: float | None = None  # factor of query times key; None: 1 / sqrt(head_dim)
    logit: float = 1.0  # factor of the logits; it is folded into the final norm's weights
    score_cap: float | None = None  # cap * tanh(score / cap)
    logit_cap: float | None = None  # cap * tanh(logit / cap)


LLAMA = Variant()
