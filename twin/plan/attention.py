"""Caches that a stage reads, and the attention that the kernel has code for."""

from __future__ import annotations

from typing import NamedTuple

from twin.frozen import frozen
from twin.models.spec import DType

PARTIAL_EXTRA = 2  # a softmax partial carries its maximum and its sum next to head_dim values
ITEM_WORDS = 4  # what a dense layer's attention item publishes is padded to so many words, 16 bytes


@frozen(kw_only=True)
class Scan:
    """Cached entries that a stage reads, as items [sequence][cached head][split]; item // splits is
    (sequence, head).

    Entry e of a head belongs to split e // page % splits. A recurrent state is a cache of constant
    size whose entries are all written.
    """

    sequences: int
    heads: int  # cached heads of a rank
    group: int  # query heads of a rank that attend one cached head
    entries: int  # read at options.context
    entry_bytes: int
    dim: int  # elements of an entry that one query head multiplies
    splits: int
    page: int  # entries
    held_bytes: int  # memory of a rank for all its sequences, at options.max_context
    extra_bytes: int = 0  # read besides the entries, of each item
    # of each item: its state; the entries that attention adds are spread over the items
    written_bytes: int = 0
    # which entries follows from the stage's reads: they cannot be requested before
    chosen: bool = False

    @property
    def items(self) -> int:
        return self.sequences * self.heads * self.splits

    def item_bytes(self, item: int) -> int:
        """Bytes that one item reads."""
        split = item % self.splits
        pages = -(-self.entries // self.page)
        whole = len(range(split, pages, self.splits)) * self.page
        short = (
            pages * self.page - self.entries if pages and (pages - 1) % self.splits == split else 0
        )
        return (whole - short) * self.entry_bytes + self.extra_bytes


class Turn(NamedTuple):
    """Splits of a KV head that take pages in turn."""

    first: int
    splits: int
    page: int  # from which on


@frozen(kw_only=True)
class Attention:
    """The attention that the kernel has code for, alike in all layers of a kind but for windows: a
    rank's heads and its paged cache.

    A page of a KV head, `Options.kv_page` positions, belongs to one split, so a block reads only
    what it wrote. The first `together` splits take pages in turn until each has `first_pages`, then
    the next ones do; when all have, all take pages in turn. So few splits hold a short context. The
    engine takes plans whose layers with a window have as many splits as the others.
    """

    heads: int
    kv_heads: int
    head_dim: int
    # the values are the keys before norm and rotation; a schedule's id has it in the rows of QKV
    values_are_keys: bool = False
    kv_replicas: int  # ranks that share one KV head
    splits: int  # of each KV head
    item_positions: int  # capacity of one (kv head, split), a whole number of pages
    window_splits: int  # the same two of layers with a window
    window_positions: int
    together: int  # splits, the last ones may be fewer
    first_pages: int  # of a split; 0: all splits take pages in turn from the first on

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def head_rows(self) -> int:
        """Rows of q, k and v that make its heads."""
        return (self.heads + (1 if self.values_are_keys else 2) * self.kv_heads) * self.head_dim

    @property
    def items(self) -> int:
        """Pairs (kv head, split)."""
        return self.kv_heads * self.splits

    def splits_of(self, window: int) -> int:
        """Of each KV head in a layer with this window, 0 for none."""
        return self.window_splits if window else self.splits

    def items_of(self, window: int) -> int:
        """Pairs (kv head, split) of such a layer."""
        return self.kv_heads * self.splits_of(window)

    def positions_of(self, window: int) -> int:
        """Capacity of one of them."""
        return self.window_positions if window else self.item_positions

    def turn(self, page: int, window: int = 0) -> Turn:
        """The splits of such a layer that take the page and its neighbours."""
        splits = self.splits_of(window)
        if page >= splits * self.first_pages:
            return Turn(0, splits, 0)
        first = page // (self.together * self.first_pages) * self.together
        return Turn(first, min(self.together, splits - first), first * self.first_pages)

    def pages_below(self, page: int, split: int, window: int = 0) -> int:
        """Pages below `page` that a split holds."""
        turn = self.turn(page, window)
        if split < turn.first:
            return self.first_pages
        if split >= turn.first + turn.splits:
            return 0
        return max(0, -(-(page - turn.page - split + turn.first) // turn.splits))

    def splits_below(self, page: int, window: int = 0) -> int:
        """Splits, the first ones, that hold pages below `page`."""
        turn = self.turn(page, window)
        return turn.first + min(turn.splits, page - turn.page)

    def position_bytes(self, dtype: DType) -> int:
        """A cached position of one KV head, key and value."""
        return 2 * self.head_dim * dtype.bytes


def partial_words(heads: int, dim: int, dtype: DType) -> int:
    """32-bit words of the partial outputs of `heads` heads of `dim` elements, and of their maxima
    and sums: outputs of a cache of 16 bits or less go two to a word (Outputs in attention.cuh).
    """
    outputs = heads * dim
    return -(-outputs // word_outputs(dtype)) + heads * PARTIAL_EXTRA


def word_outputs(dtype: DType) -> int:
    """Of a partial output by a cache of this type, in a word."""
    return 1 if dtype is DType.FP32 else 2
