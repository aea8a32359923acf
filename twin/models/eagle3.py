"""EAGLE-3: a layer that drafts tokens from three hidden states of the model that it is trained for.

A token's input is the embedding of it and the hidden state behind the token before, both normed and
side by side: queries, keys and values have twice the columns. Behind a token that the model has
verified the hidden state is `fc` of three of the model's residuals; behind a drafted one, the
layer's own output before its last norm. The LM head knows `vocab` tokens; `d2t` says by how much
the model's number of each is larger.
"""

from __future__ import annotations

from twin.errors import ConfigError
from twin.frozen import frozen
from twin.models.feeds import DenseFeed
from twin.models.spec import ModelSpec, Rope

HIDDEN_STATES = 3
PUBLISHED_VOCAB = 32_000  # of the heads that are published for larger vocabularies
EXPERTS_FFN = 6  # of published heads for models with experts: times `hidden`


@frozen(kw_only=True)
class DraftHead:
    """The shape of a head."""

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
    normed_input: bool = True  # is the hidden state normed before the layer?

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
            "fc": (self.hidden, HIDDEN_STATES * self.hidden),
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


def taken_layers(layers: int) -> tuple[int, ...]:
    """Whose inputs published heads are trained on: an early, the middle and a late layer."""
    if layers < HIDDEN_STATES + 1:
        raise ConfigError(f"{layers} layers: EAGLE-3 takes hidden states of at least 4")
    return tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 1)}))


def published(spec: ModelSpec) -> DraftHead:
    """The shape that heads for such models are published in: Llama's layer, of the model's width,
    heads and feed-forward; 32,000 tokens of larger vocabularies.
    """
    dense = isinstance(spec.layer(spec.layers - 1).feed, DenseFeed)
    return DraftHead(
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        ffn=spec.ffn if dense else EXPERTS_FFN * spec.hidden,
        vocab=min(spec.vocab, PUBLISHED_VOCAB),
        norm_eps=spec.norm_eps,
        rope=spec.rope,
        taken=taken_layers(spec.layers),
    )
