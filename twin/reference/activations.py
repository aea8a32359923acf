"""The functions of gates with NumPy, for each member of `Activation`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from twin.models.variant import Activation
from twin.plan.shards import Array


def silu(x: Array, gain: float = 1.0) -> Array:
    """x times the sigmoid of gain * x."""
    # exp of a large negative gate's opposite is infinite and the quotient rightly zero
    with np.errstate(over="ignore"):
        out: Array = x / (1 + np.exp(-gain * x))
    return out.astype(x.dtype, copy=False)


def gelu(x: Array) -> Array:
    """The approximation by tanh."""
    out: Array = (
        x.dtype.type(0.5)
        * x
        * (1 + np.tanh(x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x**3)))
    )
    return out


def relu2(x: Array) -> Array:
    """The square of what is above zero; a NaN passes."""
    out: Array = np.where(x <= 0, x.dtype.type(0), x * x)
    return out


ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    Activation.SILU: silu,
    Activation.GELU: gelu,
    Activation.RELU2: relu2,
}
