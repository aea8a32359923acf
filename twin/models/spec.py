"""What the plan needs to know about a model, independent of the family it came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from twin.frozen import frozen
from twin.models import experts, linear
from twin.models.feeds import DenseFeed, ExpertFeed, NoFeed, halves_of
from twin.models.formats import (
    DECODED,
    DECODED_AS,
    PLAIN,
    WHOLE_ROW,
    Format,
    Formats,
    Role,
    decoded,
    format_named,
)
from twin.models.layers import HyperConnections, Layer
from twin.models.mixers import (
    CompressedAttention,
    DeltaNet,
    GroupedAttention,
    HeadShape,
    LatentAttention,
    Mamba2,
    NoMixer,
    Recurring,
    ShortConvolution,
)
from twin.models.variant import LLAMA, Variant
from twin.models.weight import Traffic, Weight, total

_WORDS = {
    ExpertFeed: "experts",
    LatentAttention: "latent attention",
    DeltaNet: "gated DeltaNet",
    Mamba2: "Mamba-2",
    ShortConvolution: "short convolutions",
    CompressedAttention: "compressed attention",
}


RUN = (*PLAIN, *DECODED)  # formats that the engine runs


class DType(Enum):
    """Storage types of weights and caches. The engine computes and exchanges in FP32."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    FP8 = "fp8"  # of caches alone: E4M3, times a scale

    @property
    def bytes(self) -> int:
        return _BYTES[self._value_]


_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp8": 1}  # a name is hashed once, a member each time
WEIGHT_TYPES = (DType.FP16, DType.BF16, DType.FP32)


class CacheScales(NamedTuple):
    """Of a layer's cached keys and values, which are stored divided by them: one number for all KV
    heads, or one each.
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]


class RopeStyle(Enum):
    """HALF rotates element i with i + head_dim/2 (Hugging Face); INTERLEAVED rotates 2i with
    2i+1.
    """

    HALF = "half"
    INTERLEAVED = "interleaved"


class LaneHead(Enum):
    """How lanes end: MEAN of normed lanes, norm of their SUM, or each lane its own VOCABULARY
    slice.
    """

    MEAN = "replicate"
    SUM = "pre_norm_lane_agg"
    VOCABULARY = "vocab_parallel"


@frozen
class RopeScaling:
    """Llama 3's frequency scaling; `linear` uses `factor` alone.

    `yarn` divides slow pairs by `factor`, keeps fast ones and blends those between, by their turns
    within original_context; it multiplies the rotated elements by `magnitude`.

    `longrope` divides each pair's frequency by its own number, `short` up to original_context
    positions and else `long`, and multiplies the rotated elements by `factor`.
    """

    kind: str  # "llama3", "linear", "longrope" or "yarn"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    fast_turns: float = 32.0  # yarn: from this many on pairs are kept,
    slow_turns: float = 1.0  # up to this many divided;
    truncate: bool = True  # the ends of the blend are whole pairs
    magnitude: float = 1.0


@frozen
class Rope:
    theta: float
    style: RopeStyle = RopeStyle.HALF
    scaling: RopeScaling | None = None
    rotated: int | None = None  # the first elements of a head; None: all
    # the first pairs of a head that turn, by the frequencies of all its pairs; None: all
    pairs: int | None = None


@frozen
class Lanes:
    """Delayed tensor parallelism: `count` residuals, others' partials land `delay` layers later."""

    count: int
    delay: int  # layers; 0 is ordinary tensor parallelism
    head: LaneHead = LaneHead.MEAN
    # True: the first `delay` layers reduce at once; False: own part times sqrt(count)
    early_exchange: bool = False


@frozen(kw_only=True)
class DraftHead:
    """A layer of EAGLE-3 that drafts for a model: twin/models/eagle3.py."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int  # of drafts
    norm_eps: float
    rope: Rope
    # the model's layers whose input, its residual, is kept: three, from early to late
    taken: tuple[int, ...]
    own_table: bool = False  # has it embeddings of its own?

    @property
    def input(self) -> int:
        """Columns of queries, keys and values: an embedding and a hidden state."""
        return 2 * self.hidden

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) by name, in the order in which a draft needs them."""
        return {
            "fc": (self.hidden, len(self.taken) * self.hidden),
            "qkv": (self.q_size + 2 * self.kv_size, self.input),
            "o": (self.hidden, self.q_size),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
            "head": (self.vocab, self.hidden),
        }

    def weights(self, *, without: tuple[str, ...] = ()) -> int:
        """Of all matrices but some."""
        return sum(
            rows * cols for name, (rows, cols) in self.matrices.items() if name not in without
        )


@frozen
class ModelSpec:
    """A decoder: RMSNorm, gated feed-forward and rotary grouped-query attention, as in Llama but
    for `variant`, unless `layout` says what each layer is.

    For a model with a layout, the fields of the dense shape (heads, kv_heads, head_dim, ffn,
    windows, qkv_bias, qk_norm) are for display: its softmax attention, and the width of an expert.
    `layer(i)` is what a plan must be built from.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int  # most positions the checkpoint was trained for
    norm_eps: float
    rope: Rope
    windows: tuple[int, ...]  # per layer: attended positions including the newest, 0 for all
    tied: bool = False  # LM head shares the embedding table
    qkv_bias: bool = False
    # RMSNorm on q and k before RoPE, over head_dim unless `whole_qk_norm` says over all heads
    qk_norm: bool = False
    dtype: DType = DType.BF16
    lanes: Lanes | None = None
    layout: tuple[Layer, ...] = ()  # per layer; empty: the dense shape in every layer
    stored: Formats | None = None  # None: every matrix in `dtype`
    hyper: HyperConnections | None = None
    variant: Variant = LLAMA
    # per layer, None: without positions; empty: `rope` in every layer
    ropes: tuple[Rope | None, ...] = ()
    # what its configuration has keys and values cached in; None: `dtype`
    cached: DType | None = None
    # [layers] of caches of 8 bits, as its checkpoint holds them; empty: all are 1
    cache_scales: tuple[CacheScales, ...] = ()
    draft_head: DraftHead | None = None  # what drafts; None: prompt lookup, where somebody drafts

    @property
    def rotations(self) -> tuple[Rope | None, ...]:
        """The distinct rotary embeddings of the layers."""
        return tuple(dict.fromkeys(self.ropes)) or (self.rope,)

    def rotation(self, layer: int) -> int:
        """Which of `rotations` a layer uses."""
        return self.rotations.index(self.ropes[layer]) if self.ropes else 0

    @property
    def head_shapes(self) -> tuple[HeadShape, ...]:
        """The distinct shapes of heads of grouped attention, in the order of their first layers."""
        return tuple(dict.fromkeys(self._head_shapes()))

    def _head_shapes(self) -> Iterator[HeadShape]:
        if not self.layout:
            yield HeadShape(self.heads, self.kv_heads, self.head_dim, False)
        for layer in self.layout:
            if isinstance(layer.mixer, GroupedAttention | CompressedAttention):
                yield layer.mixer.shape

    def rotated_dim(self, rotation: int) -> int:
        """Elements of the heads that one of `rotations` turns."""
        if not self.layout or not self.ropes:
            return self.head_dim
        mixer = self.layout[self.ropes.index(self.rotations[rotation])].mixer
        if isinstance(mixer, CompressedAttention):
            return mixer.rope_dim
        return mixer.head_dim if isinstance(mixer, GroupedAttention) else self.head_dim

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def formats(self) -> Formats:
        """The stored format of each kind of matrix."""
        return self.stored or Formats(format_named(self.dtype.value))

    def layer(self, index: int) -> Layer:
        """What layer `index` is made of."""
        if self.layout:
            return self.layout[index]
        attention = GroupedAttention(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            window=self.windows[index],
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            whole_qk_norm=self.qk_norm and self.variant.whole_qk_norm,
        )
        return Layer(attention, DenseFeed(width=self.ffn))

    def layer_weights(self, index: int) -> tuple[Weight, ...]:
        """Every matrix of a layer in order of use: hyper-connection and mixer, hyper-connection and
        feed-forward.
        """
        layer, formats = self.layer(index), self.formats
        hyper = self.hyper.weights(self.hidden, formats) if self.hyper else ()
        found = (
            *hyper[:1],
            *layer.mixer.weights(self.hidden, formats),
            *hyper[1:],
            *layer.feed.weights(self.hidden, formats),
        )
        if not formats.layers:
            return found
        return tuple(replace(w, format=formats.in_layer(index, w.name) or w.format) for w in found)

    @property
    def shared_like_routed(self) -> int:
        """Shared experts that are routed ones but for every token's visit: of their width, and
        stored like them in all layers. 0: none, or others.
        """
        feed = self.experts
        if feed is None or not feed.shared_width or feed.shared_width % feed.width:
            return 0
        if feed.parallel:  # of other inputs, and normed alone
            return 0
        own = self.formats.layers  # else layers with experts are alike
        routed = [i for i in range(self.layers) if isinstance(self.layer(i).feed, ExpertFeed)]
        for layer in routed if own else routed[:1]:
            form = {weight.name: weight.format for weight in self.layer_weights(layer)}
            halves = (*halves_of(feed), "down")
            if any(form[half] != form[f"shared_{half}"] for half in halves):
                return 0
            # one's rows and columns are cut out of those of all
            sides = {side for half in halves for side in form[half].block} - {0, WHOLE_ROW}
            if feed.shared_width > feed.width and any(feed.width % side for side in sides):
                return 0
        return feed.shared_width // feed.width

    def end_weights(self) -> tuple[Weight, ...]:
        """What follows the last layer: the collapse of hyper-connections, the LM head."""
        head = Weight("lm_head", Role.HEAD, self.vocab, self.hidden, self.formats.of(Role.HEAD))
        return (self.hyper.head(self.hidden, self.formats), head) if self.hyper else (head,)

    def weights(self) -> Iterator[Weight]:
        """Every matrix that a step multiplies, in order of use."""
        for index in range(self.layers):
            yield from self.layer_weights(index)
        yield from self.end_weights()

    @property
    def vector_parameters(self) -> int:
        """Norm scales, biases and the like: resident, never streamed."""
        own = sum(
            layer.mixer.vectors(self.hidden) + layer.feed.vectors(self.hidden)
            for layer in self._each()
        )
        hyper = (
            self.layers * self.hyper.layer_vectors + self.hyper.head_vectors if self.hyper else 0
        )
        norms = self.variant.norms.before + self.variant.norms.after  # of half a layer
        halves = sum(
            2 - isinstance(layer.mixer, NoMixer) - isinstance(layer.feed, NoFeed)
            for layer in self._each()
        )
        return own + (norms * halves + 1) * self.hidden + hyper

    @property
    def parameters(self) -> int:
        """All parameters of the decoder."""
        table = 0 if self.tied else self.vocab * self.hidden
        return table + total(self.weights(), "parameters") + self.vector_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, without the embedding table (where the LM head has a
        table of its own).
        """
        idle = sum(
            layer.feed.vectors(self.hidden) - layer.feed.active_vectors(self.hidden)
            for layer in self._each()
        )
        return self.streamed_parameters + self.vector_parameters - idle

    @property
    def streamed_parameters(self) -> int:
        """Matrix weights that a step of one token must read: every layer's (of experts the chosen
        ones) and the LM head.
        """
        return total(self.weights(), "active_parameters")

    @property
    def streamed_bytes(self) -> int:
        """Their bytes as stored, scales included."""
        return _streamed_bytes(self)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all matrices as stored: what the memory of a node must hold, without vectors and
        caches.
        """
        return _stored_bytes(self)

    def kv_bytes(self, context: int, dtype: DType) -> int:
        """Bytes of caches and states that one step at `context` cached positions reads, over all
        layers.
        """
        return sum(layer.mixer.traffic(context, dtype.bytes).read_bytes for layer in self._each())

    def traffic(self, context: int, element_bytes: float) -> Traffic:
        """Bytes of caches and states that one step of one sequence moves, over all layers."""
        moved = [layer.mixer.traffic(context, element_bytes) for layer in self._each()]
        return Traffic(sum(t.read_bytes for t in moved), sum(t.written_bytes for t in moved))

    def held_bytes(self, context: int, element_bytes: float) -> int:
        """Memory for the caches and states of one sequence."""
        return sum(layer.mixer.held_bytes(context, element_bytes) for layer in self._each())

    def runnable_reason(self) -> str | None:
        """Why the engine cannot run this model (it can still be planned and simulated); None: it
        can.
        """
        if self._layered_runs() if self.layout else self._formats_run():
            return None
        what = f"{self.name} ({', '.join(self.features()) or 'layers that are not alike'})"
        return (
            f"{what} can be planned and simulated only; the engine runs dense models, and experts "
            "behind grouped attention, gated DeltaNet, Mamba-2 or short convolutions, in "
            f"{', '.join(RUN)}"
        )

    def _formats_run(self) -> bool:
        # nobody publishes others with exponents
        run = {*RUN, *(DECODED_AS if self.hyper else ())}
        return all(form.name in run for form in self._formats())

    def _layered_runs(self) -> bool:
        if (self.hyper is not None) != experts.compresses(self.layout):
            return False
        return self._formats_run() and experts.runs(self.layout)

    @property
    def o_bias(self) -> bool:
        """Of a model that the engine runs: has the output projection biases?"""
        return self._of_attention("o_bias")

    @property
    def sinks(self) -> bool:
        """The same: has each head a learned logit that joins its softmax's sum?"""
        return self._of_attention("sinks")

    def _of_attention(self, what: str) -> bool:
        return bool(getattr(linear.attention_of(self.layout), what, False))

    @property
    def whole_qk_norm(self) -> bool:
        """Are q and k normed over all heads together, not head by head?"""
        return self.variant.whole_qk_norm or self._of_attention("whole_qk_norm")

    @property
    def value_norm(self) -> bool:
        """The same: is each value head normed, as queries and keys are, but without weights?"""
        return self._of_attention("value_norm")

    @property
    def output_gate(self) -> bool:
        """The same: are the outputs of attention gated?"""
        return self._of_attention("output_gate")

    @property
    def recurrence(self) -> Recurring | None:
        """The recurrent states of a model that the engine runs; None of one without."""
        return linear.recurrence_of(self.layout)

    @property
    def convolution(self) -> ShortConvolution | None:
        """The short convolution of a model that the engine runs; None of one without."""
        return linear.convolution_of(self.layout)

    @property
    def recurs(self) -> bool:
        """Does a layer carry a state from token to token, which is no cache?"""
        return self.recurrence is not None or self.convolution is not None

    @property
    def gated(self) -> bool:
        """The same: have feed-forward layers and experts gates?"""
        feeds = (layer.feed for layer in self.layout)
        return all(isinstance(feed, NoFeed) or feed.gated for feed in feeds)

    @property
    def experts(self) -> ExpertFeed | None:
        """The routed experts of a model that the engine runs; None where it is dense."""
        return experts.experts_of(self.layout)

    def features(self) -> tuple[str, ...]:
        """What distinguishes this model from a dense one, in words."""
        kinds = dict.fromkeys(
            type(part) for layer in self.layout for part in (layer.feed, layer.mixer)
        )
        found = [_WORDS[kind] for kind in kinds if kind in _WORDS]
        dense = any(getattr(layer.feed, "parallel", False) for layer in self.layout)
        found += ["experts next to a dense MLP: enable_moe_block"] if dense else []
        corrected = self.experts is not None and self.experts.choice_bias
        found += ["biases of the choice of experts"] if corrected else []
        found += ["hyper-connections"] if self.hyper else []
        names = dict.fromkeys(w.format.name for w in self.weights()) if self.stored else {}
        return (*found, *(n for n in names if n not in {d.value for d in WEIGHT_TYPES}))

    @property
    def coded(self) -> tuple[Format, ...]:
        """The formats of its matrices that the engine decodes."""
        found = map(decoded, self._formats())
        return tuple(dict.fromkeys(form for form in found if form))

    def _formats(self) -> tuple[Format, ...]:
        return (
            tuple(dict.fromkeys(weight.format for weight in self.weights())) if self.stored else ()
        )

    def _each(self) -> Iterator[Layer]:
        return (self.layer(index) for index in range(self.layers))


# A plan's options are tried with the bytes of the same model hundreds of times.


@lru_cache(maxsize=64)
def _streamed_bytes(spec: ModelSpec) -> int:
    return total(spec.weights(), "step_bytes")


@lru_cache(maxsize=64)
def _stored_bytes(spec: ModelSpec) -> int:
    table = 0 if spec.tied else spec.formats.of(Role.EMBED).bytes(spec.vocab, spec.hidden)
    return table + total(spec.weights(), "stored_bytes")
