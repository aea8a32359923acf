"""The next token from logits: the reference that the kernel's sampler must match.

Temperature, then min-p and top-k, then top-p on the probabilities that these left, renormalised, as
vLLM does. Hugging Face does the same but for min-p, which comes last there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.errors import ConfigError, EngineError
from twin.models.bounds import FP32_LARGEST, FP32_SMALLEST, whole
from twin.text import shown

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, splitmix64's increment
MASK = 2**64 - 1
DRAW_BITS = 24  # what an FP32 holds exactly
LARGEST_TOP_K = 2**31 - 1  # a 32-bit integer in the kernel
# the likeliest of 2^24 tokens has more: smaller ones select no other tokens
SMALLEST_TOP_P = 2.0**-64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a user may choose about the next token; the default is greedy."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # most probable tokens kept, 0 keeps all
    top_p: float = 1.0  # probability that the kept tokens must reach
    seed: int = 0
    min_p: float = 0.0  # of the likeliest token's probability: less likely ones are not drawn

    def __post_init__(self) -> None:
        limits = (
            f"0 (greedy), or from {FP32_SMALLEST:.3g} to {FP32_LARGEST:.3g}, the numbers that FP32 "
            "holds in full"
        )
        if not _real(self.temperature) or (
            self.temperature != 0 and not FP32_SMALLEST <= self.temperature <= FP32_LARGEST
        ):
            raise ConfigError(
                f"temperature={shown(self.temperature)}: must be finite and at least 0: {limits}; "
                "choose 0.7, for example"
            )
        if not whole(self.top_k) or not 0 <= self.top_k <= LARGEST_TOP_K:
            raise ConfigError(
                f"top_k={shown(self.top_k)}: must be a whole number, at least 0 (keeps every "
                "token) and at most 2^31 - 1"
            )
        if not _real(self.top_p) or not SMALLEST_TOP_P <= self.top_p <= 1:
            limits = f"above 0 (from {SMALLEST_TOP_P:.3g}) and at most 1 (1 keeps every token)"
            raise ConfigError(
                f"top_p={shown(self.top_p)}: must lie {limits}; for the likeliest token alone use "
                "temperature 0"
            )
        if not _real(self.min_p) or not 0 <= self.min_p <= 1:
            raise ConfigError(
                f"min_p={shown(self.min_p)}: must be at least 0 (keeps every token) and at most 1 "
                "(keeps the likeliest)"
            )
        if not whole(self.seed) or not 0 <= self.seed <= MASK:
            raise ConfigError(
                f"seed={shown(self.seed)}: must be a whole number between 0 and 2**64 - 1"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def margin(self) -> float:
        """How far below the best logit those lie that `min_p` keeps."""
        return math.inf if self.min_p == 0 else -self.temperature * math.log(self.min_p)


def _real(value: object) -> bool:
    return isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool)


def sample(logits: NDArray[Any], params: SamplingParams, step: int) -> int:
    """The token of generated position `step` (0, 1, ...) from logits [vocab].

    Greedy ties go to the lower index. Raises EngineError when no token has a finite logit or one is
    NaN.
    """
    logits = np.asarray(logits, np.float32)
    best = int(np.argmax(logits))  # the first NaN, if there is one
    if not np.isfinite(logits[best]):
        raise EngineError(
            f"step {step}: the largest logit is {logits[best]}, no token can be chosen; check the "
            "weights"
        )
    if params.greedy:
        return best
    probabilities = _softmax(logits, params.temperature)
    kept = np.where(_kept(logits, probabilities, params), probabilities, np.float32(0))
    cumulative = np.cumsum(kept, dtype=np.float64)
    return int(
        np.searchsorted(cumulative, uniform(params.seed, step) * cumulative[-1], side="right")
    )


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on (seed, step) alone, a multiple of 2**-24."""
    return (_splitmix64(seed ^ (step * GOLDEN & MASK)) >> (64 - DRAW_BITS)) / (1 << DRAW_BITS)


def _splitmix64(state: int) -> int:
    z = (state + GOLDEN) & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def _softmax(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
    # The maximum is taken off first: logits / temperature alone overflows at small temperatures.
    # What still overflows goes to minus infinity, whose probability is the right one: zero.
    with np.errstate(over="ignore"):
        scaled: NDArray[np.float32] = np.exp((logits - logits.max()) / np.float32(temperature))
    return scaled * np.float32(1 / scaled.sum(dtype=np.float64))


def _kept(
    logits: NDArray[np.float32], probabilities: NDArray[np.float32], params: SamplingParams
) -> NDArray[np.bool_]:
    """[vocab] tokens that survive min-p, top-k and top-p; among equal logits the lower index ranks
    first.
    """
    count = len(logits)
    with np.errstate(over="ignore"):
        lowest = np.float32(np.float64(logits.max()) - params.margin)
    if params.top_p == 1 and (params.top_k == 0 or params.top_k >= count):
        found: NDArray[np.bool_] = logits >= lowest
        return found
    order = np.argsort(-logits, kind="stable")[: params.top_k or count]
    order = order[logits[order] >= lowest]
    if params.top_p < 1:
        cumulative = np.cumsum(probabilities[order], dtype=np.float64)
        # the crossing one included
        order = order[
            : int(np.searchsorted(cumulative, params.top_p * cumulative[-1], side="left")) + 1
        ]
    kept = np.zeros(count, np.bool_)
    kept[order] = True
    return kept
