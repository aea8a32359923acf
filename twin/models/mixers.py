"""How a layer mixes tokens: softmax attention in its published kinds, gated DeltaNet, Mamba-2, and
gated short convolutions. Sizes are those of the whole model.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from twin.frozen import frozen
from twin.models.formats import Formats, Role
from twin.models.weight import Traffic, Weight

STATE_BYTES = 4  # a recurrent state is kept in FP32


class HeadShape(NamedTuple):
    """The heads of grouped attention in one kind of layers."""

    heads: int
    kv_heads: int
    head_dim: int
    values_are_keys: bool


@frozen(kw_only=True)
class GroupedAttention:
    """Softmax attention with grouped queries: one key and one value head for heads / kv_heads query
    heads.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0  # attended positions including the newest; 0: all
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False  # over all heads together
    value_norm: bool = False  # each value head is normed as well, without weights
    sinks: bool = False  # one learned logit a head joins the softmax's sum
    # no matrix v: values are the keys before norm and rotation; the cache still holds both
    values_are_keys: bool = False
    output_gate: bool = False  # sigmoid(gate) * output, the gate projected with q

    @property
    def shape(self) -> HeadShape:
        """What layers have in common whose heads are alike."""
        return HeadShape(self.heads, self.kv_heads, self.head_dim, self.values_are_keys)

    def positions(self, context: int) -> int:
        """Cached positions that a step reads."""
        return min(context, self.window) if self.window else context

    def weights(self, hidden: int, formats: Formats) -> tuple[Weight, ...]:
        """q (with the gate's rows, if any), k, v (unless the keys serve), o."""
        q, kv, form = (
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            formats.of(Role.ATTENTION),
        )
        shapes = (
            ("q", q * (2 if self.output_gate else 1), hidden),
            ("k", kv, hidden),
            ("v", kv, hidden),
            ("o", hidden, q),
        )
        names = {"q", "k", "o"} if self.values_are_keys else {"q", "k", "v", "o"}
        return tuple(
            Weight(name, Role.ATTENTION, rows, cols, form)
            for name, rows, cols in shapes
            if name in names
        )

    def vectors(self, hidden: int) -> int:
        """Biases, norm scales over a head and sinks: resident, never streamed."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = (q + 2 * kv if self.qkv_bias else 0) + (hidden if self.o_bias else 0)
        normed = (q + kv if self.whole_qk_norm else 2 * self.head_dim) if self.qk_norm else 0
        return biases + normed + (self.heads if self.sinks else 0)

    def traffic(self, context: int, element_bytes: float) -> Traffic:
        """Keys and values of `context` cached positions read, those of one written."""
        return Traffic(
            self._bytes(self.positions(context), element_bytes), self._bytes(1, element_bytes)
        )

    def held_bytes(self, context: int, element_bytes: float) -> int:
        """Memory that the cache of one sequence needs."""
        return self._bytes(self.positions(context), element_bytes)

    def _bytes(self, positions: int, element_bytes: float) -> int:
        return round(2 * self.kv_heads * self.head_dim * positions * element_bytes)


@frozen(kw_only=True)
class LatentAttention:
    """Multi-head latent attention in the absorbed form that decode uses.

    Cached per position: one latent (kv_rank) and one rotated key (rope_dim), shared by all heads. A
    head's query is carried into the latent space (k_up), attends there, and its latent output is
    carried back (v_up); keys and values are never built. Scores have kv_rank + rope_dim terms,
    outputs kv_rank, for every head.
    """

    heads: int
    q_rank: int  # 0: queries are projected directly
    kv_rank: int
    nope_dim: int  # elements of a query head without rotation
    rope_dim: int
    value_dim: int

    window: int = 0

    @property
    def latent_dim(self) -> int:
        """Elements cached per position."""
        return self.kv_rank + self.rope_dim

    def positions(self, context: int) -> int:
        return context

    def weights(self, hidden: int, formats: Formats) -> tuple[Weight, ...]:
        """In order of use: q_a, kv_a (from the residual), q_b, k_up (before attention), v_up, o
        (after). k_up and v_up: kv_b in two.
        """
        query = self.heads * (self.nope_dim + self.rope_dim)
        down = [("q_a", self.q_rank, hidden, 1)] if self.q_rank else []
        shapes = [
            *down,
            ("kv_a", self.latent_dim, hidden, 1),
            ("q_b" if self.q_rank else "q", query, self.q_rank or hidden, 1),
            ("k_up", self.heads * self.kv_rank, self.nope_dim, self.heads),
            ("v_up", self.heads * self.value_dim, self.kv_rank, self.heads),
            ("o", hidden, self.heads * self.value_dim, 1),
        ]
        form = formats.of(Role.ATTENTION)
        return tuple(
            Weight(name, Role.ATTENTION, rows, cols, form, groups)
            for name, rows, cols, groups in shapes
        )

    def vectors(self, hidden: int) -> int:
        """Norm scales over the two latents."""
        return self.q_rank + self.kv_rank

    def traffic(self, context: int, element_bytes: float) -> Traffic:
        """The latents of `context` positions read once for all heads, one written."""
        return Traffic(
            round(context * self.latent_dim * element_bytes), round(self.latent_dim * element_bytes)
        )

    def held_bytes(self, context: int, element_bytes: float) -> int:
        return round(context * self.latent_dim * element_bytes)


@frozen(kw_only=True)
class Recurrence:
    """A matrix-valued state per value head that every step reads, updates and writes, whatever the
    context.

    q, k and v pass a causal depthwise convolution over `conv` positions; value_heads / key_heads
    value heads share a key head.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv: int

    @property
    def channels(self) -> int:
        """Convolved channels: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """The recurrent state: key_dim x value_dim a value head."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def per_key(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    def positions(self, context: int) -> int:
        return 0

    def traffic(self, context: int, element_bytes: float) -> Traffic:
        """The whole state is read and written; of the convolution's history conv - 1 positions are
        read and one is written.
        """
        state = self.state_elements * STATE_BYTES
        channel = round(self.channels * element_bytes)
        return Traffic(state + (self.conv - 1) * channel, state + channel)

    def held_bytes(self, context: int, element_bytes: float) -> int:
        return self.state_elements * STATE_BYTES + round(
            self.channels * (self.conv - 1) * element_bytes
        )


@frozen(kw_only=True)
class DeltaNet(Recurrence):
    """Gated DeltaNet: a head's outputs are normed, then gated."""

    # stored as qkv, z, b, a (all queries, all keys, ...) instead of qkvz and ba (by key head)
    split: bool = False

    window: int = 0

    @property
    def steering(self) -> int:
        """Rows of a value head that steer its state: write strength and decay."""
        return 2

    @property
    def normed(self) -> int:
        """Outputs that one norm is over: those of a head."""
        return self.value_dim

    def weights(self, hidden: int, formats: Formats) -> tuple[Weight, ...]:
        """qkvz (queries, keys, values, output gate), ba (write strength and decay, one each a value
        head), o.
        """
        values, form = self.value_heads * self.value_dim, formats.of(Role.ATTENTION)
        return (
            Weight("qkvz", Role.ATTENTION, self.channels + values, hidden, form),
            Weight("ba", Role.SMALL, 2 * self.value_heads, hidden, formats.of(Role.SMALL)),
            Weight("o", Role.ATTENTION, hidden, values, form),
        )

    def vectors(self, hidden: int) -> int:
        """The convolution's taps, decay and time-step bias of each value head, the output norm."""
        return self.channels * self.conv + 2 * self.value_heads + self.value_dim


@frozen(kw_only=True)
class Mamba2(Recurrence):
    """Mamba-2: C is the query, B the key and x the value of a head. Its state decays by the time
    step, takes the step times x in and is read by C; x is added once more, by a factor of the head.

    Outputs are gated, then normed: those of all heads that share B and C together.
    """

    conv_bias: bool = True
    least_step: float = 0.0  # time steps are clamped to these, behind their softplus
    most_step: float | None = None

    window: int = 0

    @property
    def steering(self) -> int:
        """Rows of a head that steer its state: the time step."""
        return 1

    @property
    def normed(self) -> int:
        """Outputs that one norm is over: those of the heads that share a key."""
        return self.per_key * self.value_dim

    def weights(self, hidden: int, formats: Formats) -> tuple[Weight, ...]:
        """state_in (output gates, x, B, C, time steps), o."""
        values, form = self.value_heads * self.value_dim, formats.of(Role.ATTENTION)
        rows = values + self.channels + self.value_heads
        return (
            Weight("state_in", Role.ATTENTION, rows, hidden, form),
            Weight("o", Role.ATTENTION, hidden, values, form),
        )

    def vectors(self, hidden: int) -> int:
        """The convolution's taps and biases; decay, time-step bias and factor of x of each head;
        the output norm.
        """
        taps = self.channels * (self.conv + self.conv_bias)
        return taps + 3 * self.value_heads + self.value_heads * self.value_dim


@frozen(kw_only=True)
class ShortConvolution:
    """A gated short convolution: one projection makes b, c and x of every channel; a causal
    depthwise convolution over `conv` positions takes b * x, and c * its output goes to the output
    projection.
    """

    channels: int
    conv: int

    window: int = 0

    def positions(self, context: int) -> int:
        return 0

    def weights(self, hidden: int, formats: Formats) -> tuple[Weight, ...]:
        """conv_in (all b, all c, all x), o."""
        form = formats.of(Role.ATTENTION)
        return (
            Weight("conv_in", Role.ATTENTION, 3 * self.channels, hidden, form),
            Weight("o", Role.ATTENTION, hidden, self.channels, form),
        )

    def vectors(self, hidden: int) -> int:
        """The convolution's taps."""
        return self.channels * self.conv

    @property
    def history_bytes(self) -> int:
        """Of b * x at conv - 1 positions, in FP32."""
        return (self.conv - 1) * self.channels * STATE_BYTES

    def traffic(self, context: int, element_bytes: float) -> Traffic:
        """The whole history is read, and one position of it is written."""
        return Traffic(self.history_bytes, self.channels * STATE_BYTES)

    def held_bytes(self, context: int, element_bytes: float) -> int:
        return self.history_bytes


@frozen(kw_only=True)
class CompressedAttention:
    """DeepSeek-V4: one shared key-value head, a sliding window, and compressed entries of what lies
    before.

    ratio 0: the window alone. ratio r: every r positions become one entry. With top_k (CSA) an
    indexer scores all entries by small keys and picks top_k of them; without (HCA) all are
    attended. Keys and values are the same numbers: an entry is head_dim elements.
    """

    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int  # of each group
    window: int
    ratio: int = 0
    theta: float = 10000.0  # of this layer's rotation
    index_heads: int = 0
    index_dim: int = 0
    top_k: int = 0  # 0: no indexer, all entries are attended

    @property
    def shape(self) -> HeadShape:
        """What all of a model's layers have in common."""
        return HeadShape(self.heads, 1, self.head_dim, False)

    @property
    def overlap(self) -> int:
        """Windows that one entry mixes: two where an indexer picks entries, else one."""
        return 2 if self.top_k else 1

    def entries(self, context: int) -> int:
        """Compressed entries that exist at `context` positions."""
        return context // self.ratio if self.ratio else 0

    def attended_entries(self, context: int) -> int:
        return min(self.entries(context), self.top_k) if self.top_k else self.entries(context)

    def positions(self, context: int) -> int:
        """Entries of head_dim elements that a step attends: window and compressed."""
        return min(context, self.window) + self.attended_entries(context)

    def weights(self, hidden: int, formats: Formats) -> tuple[Weight, ...]:
        """In order of use: q_a, kv, compressor and indexer keys (from the residual); q_b, index_q
        (from q_a's output); o_a, o_b.
        """
        queries, form = self.heads * self.head_dim, formats.of(Role.ATTENTION)
        first = [
            ("q_a", Role.ATTENTION, self.q_rank, hidden),
            ("kv", Role.ATTENTION, self.head_dim, hidden),
        ]
        second = [("q_b", Role.ATTENTION, queries, self.q_rank)]
        if self.ratio:
            width = self.overlap * self.head_dim
            first += [
                ("compress_kv", Role.COMPRESS, width, hidden),
                ("compress_gate", Role.COMPRESS, width, hidden),
            ]
        if self.top_k:
            width = self.overlap * self.index_dim
            first += [
                ("index_kv", Role.COMPRESS, width, hidden),
                ("index_gate", Role.COMPRESS, width, hidden),
            ]
            first += [("index_heads", Role.SMALL, self.index_heads, hidden)]
            second += [("index_q", Role.INDEX, self.index_heads * self.index_dim, self.q_rank)]
        before = tuple(
            Weight(name, role, rows, cols, formats.of(role))
            for name, role, rows, cols in first + second
        )
        latent = self.o_groups * self.o_rank
        o_a = Weight("o_a", Role.ATTENTION, latent, queries // self.o_groups, form, self.o_groups)
        return (*before, o_a, Weight("o", Role.ATTENTION, hidden, latent, form))

    def vectors(self, hidden: int) -> int:
        """Norm scales, sinks, and the position biases of the compressors."""
        return sum(math.prod(shape) for shape in self.vector_shapes().values())

    def vector_shapes(self) -> dict[str, tuple[int, ...]]:
        """The same by canonical name; a position bias is [ratio, overlap * dim]."""
        found: dict[str, tuple[int, ...]] = {
            "q_a_norm": (self.q_rank,),
            "kv_norm": (self.head_dim,),
            "sinks": (self.heads,),
        }
        for name, dim, there in (
            ("compress", self.head_dim, self.ratio),
            ("index", self.index_dim, self.top_k),
        ):
            if there:
                found[f"{name}_norm"] = (dim,)
                found[f"{name}_bias"] = (self.ratio, self.overlap * dim)
        return found

    def traffic(self, context: int, element_bytes: float) -> Traffic:
        """Window, attended entries and every indexer key are read; one position is written. The
        caches have a format of their own.

        The compressors keep values and gates (FP32) of the positions that no entry holds yet: each
        step writes one position's, and every ratio-th step reads those of `overlap` windows and
        writes an entry. Such steps are spread evenly here.
        """
        keys = self.entries(context) * self.key_bytes
        appended = (self.entry_bytes + self.key_bytes) / self.ratio if self.ratio else 0.0
        pending = self.pending_bytes
        return Traffic(
            self.positions(context) * self.entry_bytes + keys + pending,
            self.entry_bytes + round(appended) + pending,
        )

    def held_bytes(self, context: int, element_bytes: float) -> int:
        window, entries = (
            min(context, self.window) * self.entry_bytes,
            self.entries(context) * (self.entry_bytes + self.key_bytes),
        )
        return window + entries + self.overlap * self.ratio * self.pending_bytes

    @property
    def entry_bytes(self) -> int:
        """A cached entry: FP8 with an E8M0 scale for 64 elements (padded to 8 bytes), its rotated
        elements BF16 (FlashMLA's row: 584 B).
        """
        plain = self.head_dim - self.rope_dim
        return plain + 2 * self.rope_dim + 8 * -(-plain // (64 * 8))

    @property
    def key_bytes(self) -> int:
        """An indexer key in MXFP4."""
        return self.index_dim // 2 + self.index_dim // 32

    @property
    def pending_bytes(self) -> int:
        """What the compressors keep of one position in FP32: values and gates, of both halves where
        windows overlap.
        """
        return (
            2 * self.overlap * (self.head_dim + self.index_dim) * STATE_BYTES if self.ratio else 0
        )


@frozen
class NoMixer:
    """Of a layer that is a feed-forward layer alone."""

    window: int = 0

    def positions(self, context: int) -> int:
        return 0

    def weights(self, hidden: int, formats: Formats) -> tuple[Weight, ...]:
        return ()

    def vectors(self, hidden: int) -> int:
        return 0

    def traffic(self, context: int, element_bytes: float) -> Traffic:
        return Traffic(0, 0)

    def held_bytes(self, context: int, element_bytes: float) -> int:
        return 0


Mixer = (
    GroupedAttention
    | LatentAttention
    | DeltaNet
    | Mamba2
    | ShortConvolution
    | CompressedAttention
    | NoMixer
)
Recurring = DeltaNet | Mamba2
RECURRENT = (Recurrence, ShortConvolution)  # without a cache: a state of one size is carried on
