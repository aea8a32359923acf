"""How long the chain of dependent results of a decode step is: what a machine waits for where
reading weights costs next to nothing.
"""

from __future__ import annotations

from typing import assert_never

from twin.models.feeds import DenseFeed, Feed, NoFeed
from twin.models.mixers import (
    CompressedAttention,
    DeltaNet,
    GroupedAttention,
    LatentAttention,
    Mamba2,
    Mixer,
    NoMixer,
    ShortConvolution,
)
from twin.models.spec import ModelSpec

ENDS = 2  # the LM head, the choice of a token


def dependent_steps(spec: ModelSpec) -> int:
    """Matrix products, attentions, state updates and choices on the longest chain from token to
    token; a norm goes with its product.
    """
    hyper = 2 if spec.hyper else 0  # one mixing matrix before each module
    layers = (spec.layer(index) for index in range(spec.layers))
    return (
        sum(mixer_steps(layer.mixer) + feed_steps(layer.feed) + hyper for layer in layers)
        + ENDS
        + (1 if spec.hyper else 0)
    )


def mixer_steps(mixer: Mixer) -> int:
    match mixer:
        case NoMixer():
            return 0
        case GroupedAttention() | DeltaNet() | Mamba2():
            return 3  # projections; attention or state; output projection
        case ShortConvolution():
            return 2  # projections and convolution; output projection
        case LatentAttention():
            # down; up; into the latent; attention; out of the latent; output projection
            return 6 if mixer.q_rank else 5
        case CompressedAttention():
            # down; up; (indexer's choice;) attention; two output projections
            return 5 + (1 if mixer.top_k else 0)
        case _:
            assert_never(mixer)


def feed_steps(feed: Feed) -> int:
    if isinstance(feed, NoFeed):
        return 0
    return 2 if isinstance(feed, DenseFeed) else 3  # (router;) gate and up; down
