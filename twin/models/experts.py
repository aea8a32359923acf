"""Mixtures of experts that the engine runs: which layouts, how their tensors are called, and their
shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twin.frozen import frozen
from twin.models import linear
from twin.models.feeds import DenseFeed, ExpertFeed, Feed, NoFeed, Scoring, halves_of
from twin.models.layers import Layer
from twin.models.mixers import RECURRENT, CompressedAttention, GroupedAttention, NoMixer

# of each token the experts that it visits, where the router does not choose
CHOSEN = "chosen"
SHARED_GATE = "shared_expert_gate"  # the row whose sigmoid gates the shared experts
SCORINGS = (Scoring.SOFTMAX, Scoring.SIGMOID)  # of a router, for which the kernel has code


def runs(layout: Sequence[Layer]) -> bool:
    """Has the kernel code for these layers? Some have experts, and all that are alike are equal.

    Their attention is grouped. Only windows differ, and the shapes of heads between two kinds of
    layers. Some layers may have recurrent states instead, or short convolutions; some may lack one
    of their halves. Or all attend compressed entries, and some choose experts by a table.
    """
    if compresses(layout):
        chosen = {_by_router(one.feed) for one in layout if isinstance(one.feed, ExpertFeed)}
        whole = all(isinstance(layer.feed, ExpertFeed) for layer in layout)
        return (
            whole and len(chosen) == 1 and all(_feed_runs(feed, compressed=True) for feed in chosen)
        )
    states = {layer.mixer for layer in layout if isinstance(layer.mixer, RECURRENT)}
    others = (*RECURRENT, NoMixer)
    attending = [layer.mixer for layer in layout if not isinstance(layer.mixer, others)]
    mixers = {_plain(mixer) for mixer in attending}
    shapes = {mixer.shape for mixer in attending if isinstance(mixer, GroupedAttention)}
    feeds = {layer.feed for layer in layout if not isinstance(layer.feed, NoFeed)}
    routed = {feed for feed in feeds if isinstance(feed, ExpertFeed)}
    # a kernel has one kind of gate
    gates = {_gate(feed) for feed in feeds if isinstance(feed, ExpertFeed)} | (
        {_PLAIN_GATE} if len(feeds) > len(routed) else set()
    )
    # without experts only where the layers' mixers differ
    differ = len(states) == 1 or len(shapes) == MOST_SHAPES
    counted = len(routed) == 1 or (not routed and differ and len(feeds) == 1)
    gated = {feed.gated for feed in feeds}
    alike = None not in mixers and len(mixers) == len(gates) == len(gated) == 1 and counted
    known = len(states) < 2 and all(map(linear.runs, states))
    several = len(shapes) == 1 or not (states or any(map(_adds, attending)))
    whole = len(shapes) <= MOST_SHAPES and several
    return alike and known and whole and all(map(_feed_runs, feeds))


def compresses(layout: Sequence[Layer]) -> bool:
    """Do all layers attend compressed entries, alike but for how many positions make one?"""
    kinds = [layer.mixer for layer in layout if isinstance(layer.mixer, CompressedAttention)]
    alike = {
        replace(kind, ratio=0, theta=1.0, index_heads=0, index_dim=0, top_k=0) for kind in kinds
    }
    indexed = {(kind.index_heads, kind.index_dim, kind.top_k) for kind in kinds if kind.top_k}
    return len(kinds) == len(layout) > 0 and len(alike) == 1 and len(indexed) < 2


def _by_router(feed: ExpertFeed) -> ExpertFeed:
    """The same as if a router chose; a table needs no biases of the choice."""
    return replace(feed, hashed=False, choice_bias=False)


MOST_SHAPES = 2  # of heads, each with caches of its own


def _adds(mixer: object) -> bool:
    """Has an attention what no family has next to heads of several shapes?"""
    return isinstance(mixer, GroupedAttention) and (
        mixer.sinks or mixer.qkv_bias or mixer.o_bias or mixer.output_gate or mixer.whole_qk_norm
    )


_PLAIN_GATE = (False, None, 1.0, 0.0)


def _gate(feed: ExpertFeed) -> tuple[bool, float | None, float, float]:
    return feed.bias, feed.limit, feed.gain, feed.offset


def experts_of(layout: Sequence[Layer]) -> ExpertFeed | None:
    """The experts of a layout that runs, those that a router chooses before others; None of a
    dense model.
    """
    found = [layer.feed for layer in layout if isinstance(layer.feed, ExpertFeed)]
    return next((feed for feed in found if not feed.hashed), found[0] if found else None)


def _plain(mixer: object) -> GroupedAttention | None:
    """An attention without its window and the shape of its heads; None of one that the kernel has
    no code for.
    """
    if not isinstance(mixer, GroupedAttention):
        return None
    known = GroupedAttention(
        heads=mixer.heads,
        kv_heads=mixer.kv_heads,
        head_dim=mixer.head_dim,
        window=mixer.window,
        qkv_bias=mixer.qkv_bias,
        o_bias=mixer.o_bias,
        qk_norm=mixer.qk_norm,
        whole_qk_norm=mixer.whole_qk_norm,
        value_norm=mixer.value_norm,
        sinks=mixer.sinks,
        values_are_keys=mixer.values_are_keys,
        output_gate=mixer.output_gate,
    )
    # no family has biases, or norms of all heads together, next to gates of the outputs
    gated = mixer.output_gate and (mixer.qkv_bias or mixer.whole_qk_norm)
    # nor values that are keys, or normed, next to any of these
    added = mixer.output_gate or mixer.qkv_bias or mixer.whole_qk_norm
    odd = (mixer.values_are_keys or mixer.value_norm) and added
    if mixer != known or gated or odd:
        return None
    return replace(mixer, window=0, heads=1, kv_heads=1, head_dim=1, values_are_keys=False)


def _feed_runs(feed: DenseFeed | ExpertFeed, *, compressed: bool = False) -> bool:
    """`compressed`: behind compressed attention, where CPUs score and clamp otherwise, too."""
    if isinstance(feed, DenseFeed):
        return feed.limit is None
    known = ExpertFeed(
        experts=feed.experts,
        top_k=feed.top_k,
        width=feed.width,
        scoring=feed.scoring,
        renormalise=feed.renormalise,
        scaling=feed.scaling,
        router_bias=feed.router_bias,
        choice_bias=feed.choice_bias,
        bias=feed.bias,
        limit=feed.limit,
        gain=feed.gain,
        offset=feed.offset,
        gated=feed.gated,
        shared_width=feed.shared_width,
        shared_gate=feed.shared_gate,
        parallel=feed.parallel,
    )
    # shared experts have the plain gate, which may be clamped where routed ones' is: no family
    # gives them another
    clamped = replace(feed, limit=None) if compressed else feed
    shared = not feed.shared_gate if not feed.shared_width else _gate(clamped) == _PLAIN_GATE
    scored = compressed or feed.scoring in SCORINGS
    chooses = scored and 0 < feed.top_k <= feed.experts
    # biases, limits and offsets are of pairs of a gate and of what passes it
    plain = feed.gated or _gate(feed) == _PLAIN_GATE
    return feed == known and shared and chooses and plain


# ---- tensors ------------------------------------------------------------------------------------


@frozen
class Names:
    """How a family's checkpoints call what stands in the place of a dense feed-forward layer."""

    router: str
    experts: str  # then the expert's number
    gate: str  # none of a family whose experts have two matrices
    up: str
    down: str
    shared: str = ""  # of all shared experts together
    shared_gate: str = ""  # the row that gates them
    choice_bias: str = ""  # the whole name of the vector

    def alone(self, feed: ExpertFeed) -> dict[str, str]:
        """Canonical name -> name, of the router and the shared experts."""
        names = {"router": self.router}
        if feed.shared_width:
            names |= {f"shared_{key}": f"{self.shared}.{name}" for key, name in self._matrices()}
        return names | ({SHARED_GATE: self.shared_gate} if feed.shared_gate else {})

    def of(self, expert: int) -> dict[str, str]:
        """Canonical name -> name, of one expert's matrices."""
        return {
            f"experts.{expert}.{leaf}": f"{self.experts}.{expert}.{name}"
            for leaf, name in self._matrices()
        }

    def _matrices(self) -> list[tuple[str, str]]:
        names = {"gate": self.gate, "up": self.up, "down": self.down}
        return [(leaf, name) for leaf, name in names.items() if name]


def expert_of(name: str) -> int | None:
    """Which expert a tensor is of by its canonical name, such as "layers.3.experts.7.up"; None: of
    no single one.
    """
    parts = name.split(".")
    return int(parts[3]) if len(parts) > 4 and parts[2] == "experts" else None


def feed_shape(feed: Feed, hidden: int, name: str) -> tuple[int, ...] | None:
    """Shape of a layer's tensor `name` ("router", "experts.3.gate", ...); None: not of its feed."""
    if isinstance(feed, NoFeed):
        return None
    if isinstance(feed, ExpertFeed):
        if name == "router":
            return (feed.experts, hidden)
        if name == SHARED_GATE:
            return (1, hidden)
        if name in ("router_bias", "choice_bias", "expert_scales"):
            return (feed.experts,)
        if name in ("shared_gate", "shared_up"):
            return (feed.shared_width, hidden)
        if name == "shared_down":
            return (hidden, feed.shared_width)
    leaf = name.rpartition(".")[2]
    if leaf in ("gate_bias", "up_bias"):
        return (feed.width,)
    if leaf == "down_bias":
        return (hidden,)
    if leaf in halves_of(feed):
        return (feed.width, hidden)
    return (hidden, feed.width) if leaf == "down" else None
