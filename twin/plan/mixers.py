"""The stages of a layer's mixer on one rank: attention in its kinds, and gated DeltaNet.

Heads are sharded over the ranks; what all heads share (latents, one key-value head, an indexer)
every rank computes and keeps itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from twin.models.mixers import (
    CompressedAttention,
    DeltaNet,
    GroupedAttention,
    LatentAttention,
    Mixer,
)
from twin.models.weight import Weight
from twin.plan.builder import Builder, Piece
from twin.plan.residuals import common_rows, pushes_common, stored, vector
from twin.plan.spans import kv_share, scatter, share, spread
from twin.plan.types import (
    ITEM_WORDS,
    Attention,
    Parts,
    Read,
    Scan,
    Span,
    StageKind,
    Value,
    partial_words,
)

# From this many on ranks divide an indexer's entries, below it its heads. In the twin,
# DeepSeek-V4-Flash on eight H200: at 128 positions (32 entries) dividing heads is 7 us a layer
# faster, at 131,072 (32,768 entries) 76 us slower; the two meet near 12,000 positions.
DIVIDED_ENTRIES = 3072
ENTRIES_PER_SPLIT = 128  # as measured for keys and values (POSITIONS_PER_SPLIT)

Weights = dict[str, Weight]


def mixer(b: Builder, layer: int, kind: Mixer, reads: list[Read]) -> Value:
    """The layer's mixer from its norm to its output projection, whose partial sums it returns."""
    weights = {w.name: w for w in b.spec.layer_weights(layer)}
    match kind:
        case GroupedAttention():
            return _grouped(b, layer, kind, weights, reads)
        case LatentAttention():
            return _latent(b, layer, kind, weights, reads)
        case DeltaNet():
            return _delta(b, layer, kind, weights, reads)
        case CompressedAttention():
            return _compressed(b, layer, kind, weights, reads)


# ---- attention with grouped queries --------------------------------------------------------------


def _grouped(
    b: Builder, layer: int, kind: GroupedAttention, weights: Weights, reads: list[Read]
) -> Value:
    heads, dim = share(b.spec.name, b.ranks, "attention heads", kind.heads), kind.head_dim
    kv_heads = kv_share(b.spec.name, b.ranks, kind.kv_heads)
    q, kv, gate = heads * dim, kv_heads * dim, heads * dim if kind.output_gate else 0
    qkv = b.rows(
        StageKind.QKV,
        layer,
        [Piece(q + 2 * kv + gate, b.shard.hidden, stored(b, weights["q"]))],
        reads=reads,
        vector=vector(b),
        operations=("add_norm", "qkv_proj", "rope_append"),
    )
    if b.attention:
        partials = _attend_cache(b, layer, b.attention, qkv, kind)
    else:
        partials = _attend_scan(b, layer, kind, qkv, heads=heads, kv_heads=kv_heads)
    gated = [b.span(qkv, q + 2 * kv, q + 2 * kv + gate)] if gate else []
    # in the last layer the proof needs what blocks say that scan: nothing follows that would
    last = layer + 1 == b.spec.layers
    scanned = scanned_first(b.attention, kind.window, b.blocks) if b.attention and not last else ()
    reads = [b.whole(partials), *gated]
    return _out(b, layer, weights["o"], reads, q, vector=q + gate, beside=scanned)


def _attend_cache(
    b: Builder, layer: int, own: Attention, qkv: Value, kind: GroupedAttention
) -> Value:
    """As the kernel does it: a block reads the heads of its items, side by side, and publishes
    partial outputs in whole loads.
    """
    items, splits = scatter(own.items_of(kind.window), b.blocks), own.splits_of(kind.window)
    width = partial_words(own.group, own.head_dim, b.options.kv_dtype)
    reads = [Read(qkv.id, Parts.OWN, _spans_of_heads(own, splits, items))]
    if kind.whole_qk_norm:
        normed = (0, (own.heads + own.kv_heads) * own.head_dim)
        reads.append(
            Read(qkv.id, Parts.OWN, tuple((normed,) if lo < hi else () for lo, hi in items))
        )
    return _attend(b, layer, items, reads, width + -width % ITEM_WORDS, window=kind.window)


@lru_cache(maxsize=64)
def scanned_first(own: Attention, window: int, blocks: int) -> tuple[Span, ...]:
    """Of each block its items, if a short context fills one of them: (i, i) of the others."""
    splits = own.splits_of(window)
    filled = own.together if own.first_pages else splits
    return tuple(
        (lo, hi) if any(item % splits < filled for item in range(lo, hi)) else (lo, lo)
        for lo, hi in scatter(own.items_of(window), blocks)
    )


@lru_cache(maxsize=256)  # layers that are alike share them
def _spans_of_heads(
    own: Attention, splits: int, items: tuple[Span, ...]
) -> tuple[tuple[Span, ...], ...]:
    return tuple(_head_spans(own, splits, span) for span in items)


def _head_spans(own: Attention, splits: int, items: Span) -> tuple[Span, ...]:
    """The elements of q, k and v that a block's items use, one span per vector, merged over
    neighbouring heads.
    """
    if items[0] == items[1]:
        return ()
    first, last, one = items[0] // splits, (items[1] - 1) // splits + 1, own.head_dim
    k, v = own.heads * one, (own.heads + own.kv_heads) * one
    return (
        (first * own.group * one, last * own.group * one),
        (k + first * one, k + last * one),
        (v + first * one, v + last * one),
    )


def _attend_scan(
    b: Builder, layer: int, kind: GroupedAttention, qkv: Value, *, heads: int, kv_heads: int
) -> Value:
    """A cache of the layer's own."""
    dim, group = kind.head_dim, heads // kv_heads
    q, kv = heads * dim, kv_heads * dim
    scan = _scan(
        b,
        kind,
        heads=kv_heads,
        group=group,
        entry_bytes=2 * dim * b.options.kv_dtype.bytes,
        dim=dim,
        share=kind.kv_heads / kv_heads,
    )
    items = scatter(scan.items, b.blocks)
    # (where its heads start, elements of one's share)
    vectors = ((0, group * dim), (q, dim), (q + kv, dim))

    def used(item: int) -> list[Span]:
        head = item // scan.splits % scan.heads
        return [(start + head * size, start + (head + 1) * size) for start, size in vectors]

    return _attend_items(b, layer, scan, items, [_seen(scan, items, qkv, used)], dim)


# ---- latent attention ----------------------------------------------------------------------------


def _latent(
    b: Builder, layer: int, kind: LatentAttention, weights: Weights, reads: list[Read]
) -> Value:
    heads, query = (
        share(b.spec.name, b.ranks, "attention heads", kind.heads),
        kind.nope_dim + kind.rope_dim,
    )
    pushed = pushes_common(b) and kind.q_rank > 0  # a rank's own queries are nobody else's
    names = [name for name in ("q_a", "kv_a") if name in weights]
    rows = [common_rows(b, weights[name].rows) if pushed else weights[name].rows for name in names]
    pieces = [
        Piece(count, weights[name].cols, stored(b, weights[name]))
        for name, count in zip(names, rows, strict=True)
    ]
    if not kind.q_rank:
        pieces.append(Piece(heads * query, weights["q"].cols, stored(b, weights["q"])))
    latent = b.rows(
        StageKind.LATENT,
        layer,
        pieces,
        reads=reads,
        vector=vector(b),
        operations=("add_norm", "latent_proj", "norm_rope_append"),
        pushed=pushed,
    )
    queries, first = latent, kind.latent_dim  # where the queries are, and from which element on
    if kind.q_rank:
        queries, first = _query(b, layer, [(weights["q_b"], heads * query)], latent, rows[0]), 0
    absorbed = _absorb(b, layer, kind, weights["k_up"], queries, first, heads)
    scan = _scan(
        b,
        kind,
        heads=1,
        group=heads,
        entry_bytes=kind.latent_dim * b.options.kv_dtype.bytes,
        dim=kind.latent_dim,
        share=1,
    )
    items = scatter(scan.items, b.blocks)
    rotated = [
        (first + head * query + kind.nope_dim, first + (head + 1) * query) for head in range(heads)
    ]
    newest = (sum(rows) - rows[-1], sum(rows))
    used: dict[int, list[Span]] = {absorbed.id: [(0, absorbed.elements)]}
    for value, spans in ((queries, rotated), (latent, [newest])):
        used.setdefault(value.id, []).extend(spans)
    seen = [_seen(scan, items, b.values[value], _alike(spans)) for value, spans in used.items()]
    partials = _attend_items(b, layer, scan, items, seen, kind.kv_rank)
    carried = _head_out(b, layer, weights["v_up"], partials, scan, kind.kv_rank, heads)
    return _out(b, layer, weights["o"], [b.whole(carried)], heads * kind.value_dim)


def _absorb(
    b: Builder,
    layer: int,
    kind: LatentAttention,
    weight: Weight,
    queries: Value,
    first: int,
    heads: int,
) -> Value:
    """[heads][kv_rank]: each head's part without rotation, times its own [kv_rank, nope_dim]."""
    query, outputs = kind.nope_dim + kind.rope_dim, heads * kind.kv_rank
    spans = tuple(
        tuple(
            (first + head * query, first + head * query + kind.nope_dim)
            for head in _parts(span, kind.kv_rank)
        )
        for span in spread(outputs, b.blocks, b.shift)
    )
    return b.rows(
        StageKind.ABSORB,
        layer,
        [Piece(outputs, kind.nope_dim, stored(b, weight))],
        reads=[Read(queries.id, Parts.OWN, spans)],
        vector=0,
        operations=("absorb_q",),
    )


# ---- DeepSeek-V4's attention ---------------------------------------------------------------------


def _compressed(
    b: Builder, layer: int, kind: CompressedAttention, weights: Weights, reads: list[Read]
) -> Value:
    heads, dim = share(b.spec.name, b.ranks, "attention heads", kind.heads), kind.head_dim
    groups = share(b.spec.name, b.ranks, "output groups", kind.o_groups)
    names = ("q_a", "kv", "compress_kv", "compress_gate", "index_kv", "index_gate", "index_heads")
    first = [weights[name] for name in names if name in weights]
    latent = b.rows(
        StageKind.LATENT,
        layer,
        [Piece(common_rows(b, w.rows), w.cols, stored(b, w)) for w in first],
        reads=reads,
        vector=vector(b),
        operations=(
            "add_norm",
            "latent_proj",
            "norm_rope_append",
            *(("compress",) if kind.ratio else ()),
        ),
        pushed=pushes_common(b),
    )
    ends = {
        w.name: sum(common_rows(b, x.rows) for x in first[: at + 1]) for at, w in enumerate(first)
    }
    # from here on the indexer's elements
    indexed = ends["compress_gate"] if kind.top_k else latent.elements
    projected = [(weights["q_b"], heads * dim)] + [
        (w, w.rows if _divides_entries(b, kind) else common_rows(b, w.rows))
        for w in (weights.get("index_q"),)
        if w
    ]
    queries = _query(b, layer, projected, latent, ends["q_a"])
    scores = None
    if kind.top_k and kind.entries(b.options.context):
        scores = _index(
            b,
            layer,
            kind,
            (queries, (heads * dim, queries.elements)),
            (latent, (indexed, latent.elements)),
        )
    scan = _scan(
        b,
        kind,
        heads=1,
        group=heads,
        entry_bytes=kind.entry_bytes,
        dim=dim,
        share=1,
        pending=kind.pending_bytes,
        chosen=scores is not None,
    )
    items = scatter(scan.items, b.blocks)
    # without entries to choose from, all is only kept
    mine = (0, heads * dim if scores else queries.elements)
    kept = (ends["q_a"], indexed if scores else latent.elements)
    seen = [
        _seen(scan, items, queries, lambda item: [mine]),
        _seen(scan, items, latent, lambda item: [kept]),
    ]
    if scores is not None:
        each = scores.elements // b.options.batch
        seen.append(
            _seen(
                scan,
                items,
                scores,
                lambda item: [(item // scan.splits * each, (item // scan.splits + 1) * each)],
                of_one=True,
            )
        )
    partials = _attend_items(b, layer, scan, items, seen, dim)
    grouped = _head_out(b, layer, weights["o_a"], partials, scan, dim, groups)
    return _out(b, layer, weights["o_b"], [b.whole(grouped)], groups * kind.o_rank)


def _index(
    b: Builder,
    layer: int,
    kind: CompressedAttention,
    queries: tuple[Value, Span],
    keys: tuple[Value, Span],
) -> Value:
    """[sequences][entries] scores: every index head against every compressed key, weighed and
    added.

    Ranks that share divide the heads, whose sums readers add, or where entries are many the
    entries.
    """
    entries, heads, sequences = kind.entries(b.options.context), kind.index_heads, b.options.batch
    if _divides_entries(b, kind):
        entries = common_rows(b, entries)
    else:
        heads = common_rows(b, heads)
    splits = max(1, min(b.blocks // sequences, -(-entries // ENTRIES_PER_SPLIT)))
    page = -(-entries // splits)
    splits = -(-entries // page)
    scan = Scan(
        sequences=sequences,
        heads=1,
        group=heads,
        entries=entries,
        entry_bytes=kind.key_bytes,
        dim=kind.index_dim,
        splits=splits,
        page=page,
        held_bytes=0,
    )
    items = scatter(scan.items, b.blocks)
    edges = [
        sequence * entries + split * page
        for sequence in range(sequences)
        for split in range(splits)
    ] + [sequences * entries]
    owned = tuple((edges[lo], edges[hi]) for lo, hi in items)
    value = b.value(
        "index",
        layer,
        len(b.stages),
        elements=edges[-1],
        pushed=pushes_common(b),
        owned=owned,
        words=b.options.draft + 1,
    )
    seen = [_seen(scan, items, used, _alike([span])) for used, span in (queries, keys)]
    b.stage(
        StageKind.INDEX,
        layer,
        reads=seen,
        publishes=value.id,
        vector=0,
        operations=("index_score", "top_k"),
        items=items,
        scan=scan,
    )
    return b.collected(value)


def _divides_entries(b: Builder, kind: CompressedAttention) -> bool:
    return pushes_common(b) and kind.entries(b.options.max_context) >= DIVIDED_ENTRIES


# ---- gated DeltaNet ------------------------------------------------------------------------------


def _delta(b: Builder, layer: int, kind: DeltaNet, weights: Weights, reads: list[Read]) -> Value:
    """On a rank: [queries][keys][values][output gate][write strength][decay], heads inside each.

    An item publishes its part of a head's output, gated and scaled, and the sum of its squares
    before that: the norm over the head is applied where all its items are read.
    """
    keys, values = (
        share(b.spec.name, b.ranks, "key heads", kind.key_heads),
        share(b.spec.name, b.ranks, "value heads", kind.value_heads),
    )
    k, v = keys * kind.key_dim, values * kind.value_dim
    made, gates, first = _delta_in(b, layer, weights, reads, (2 * k + 2 * v, 2 * values))
    scan = _state(b, kind, values)
    items, rows = scatter(scan.items, b.blocks), scan.page
    per_key = values // keys

    def head_of(item: int) -> int:
        return item % (scan.heads * scan.splits) // scan.splits

    def used(item: int) -> list[Span]:
        head, split = head_of(item), item % scan.splits
        key, value = head // per_key * kind.key_dim, head * kind.value_dim + split * rows
        return [
            (key, key + kind.key_dim),
            (k + key, k + key + kind.key_dim),
            (2 * k + value, 2 * k + value + rows),
            (2 * k + v + value, 2 * k + v + value + rows),
        ]

    def steered(item: int) -> list[Span]:
        at = first + head_of(item)
        return [(at, at + 1), (at + values, at + values + 1)]

    if gates is made:
        seen = [_seen(scan, items, made, lambda item: used(item) + steered(item))]
    else:
        seen = [_seen(scan, items, made, used), _seen(scan, items, gates, steered)]
    width = rows + ITEM_WORDS
    owned = tuple((lo * width, hi * width) for lo, hi in items)
    out = b.value(
        "delta",
        layer,
        len(b.stages),
        elements=scan.items * width,
        pushed=False,
        owned=owned,
        words=b.options.draft + 1,
    )
    b.stage(
        StageKind.DELTA,
        layer,
        reads=seen,
        publishes=out.id,
        vector=0,
        operations=("conv", "delta_rule", "gated_norm"),
        items=items,
        scan=scan,
    )
    return _out(b, layer, weights["o"], [b.whole(out)], v, vector=v)


def _delta_in(
    b: Builder, layer: int, weights: Weights, reads: list[Read], rows: tuple[int, int]
) -> tuple[Value, Value, int]:
    """(projections, the value with write strengths and decays, their first element there). To the
    kernel a stage has one matrix: of two formats it makes two stages.
    """
    pieces = [
        Piece(count, weights[name].cols, stored(b, weights[name]))
        for name, count in zip(("qkvz", "ba"), rows, strict=True)
    ]
    alike = pieces[0].format is None and pieces[1].format is None
    if b.attention and alike:
        pieces = [Piece(sum(rows), pieces[0].cols)]
    apart = pieces.pop() if b.attention and not alike else None
    made = b.rows(
        StageKind.DELTA_IN,
        layer,
        pieces,
        reads=reads,
        vector=vector(b),
        operations=("add_norm", "qkvz_proj", "ba_proj"),
    )
    if apart is None:
        return made, made, rows[0]
    gates = b.rows(
        StageKind.DELTA_GATES,
        layer,
        [apart],
        reads=(),
        vector=b.shard.hidden,
        operations=(),
    )
    return made, gates, 0


def _state(b: Builder, kind: DeltaNet, heads: int) -> Scan:
    """The recurrent state of `heads` value heads, cut along the value dimension into items of whole
    loads. Beside its state an item keeps the convolution's history of the channels that it uses.
    """
    sequences = b.options.batch
    most = max(1, b.blocks // (heads * sequences))
    cuts = (d for d in range(1, min(most, kind.value_dim) + 1) if kind.value_dim % d == 0)
    splits = max(d for d in cuts if d == 1 or kind.value_dim // d % ITEM_WORDS == 0)
    rows = kind.value_dim // splits
    state, channel = 4 * kind.key_dim * rows, 4 * (2 * kind.key_dim + rows)
    history = (kind.conv - 1) * channel
    return Scan(
        sequences=sequences,
        heads=heads,
        group=1,
        entries=kind.value_dim,
        entry_bytes=4 * kind.key_dim,
        dim=kind.key_dim,
        splits=splits,
        page=rows,
        held_bytes=sequences * heads * splits * (state + history),
        extra_bytes=history,
        written_bytes=state + channel,
    )


# ---- pieces --------------------------------------------------------------------------------------


def _scan(
    b: Builder,
    kind: GroupedAttention | LatentAttention | CompressedAttention,
    *,
    heads: int,
    group: int,
    entry_bytes: int,
    dim: int,
    share: float,
    pending: int = 0,
    chosen: bool = False,
) -> Scan:
    """The cache of a softmax attention on one rank, which holds 1 / `share` of it. `pending`: bytes
    read beside the entries.
    """
    options, page = b.options, b.options.kv_page
    capacity = kind.positions(options.max_context)
    wanted = min(-(-capacity // ENTRIES_PER_SPLIT), -(-capacity // page))
    windowed = isinstance(kind, GroupedAttention) and kind.window
    given = (options.window_splits if windowed else None) or options.attention_splits
    splits = given or max(1, min(b.blocks // (heads * options.batch), wanted))
    items = options.batch * heads * splits
    element = b.options.kv_dtype.bytes
    written = kind.traffic(options.context, element).written_bytes * options.tokens / share
    return Scan(
        sequences=options.batch,
        heads=heads,
        group=group,
        entries=kind.positions(options.context),
        entry_bytes=entry_bytes,
        dim=dim,
        splits=splits,
        page=page,
        held_bytes=round(options.batch * kind.held_bytes(options.max_context, element) / share),
        extra_bytes=round(options.batch * pending / items),
        written_bytes=round(written / items),
        chosen=chosen,
    )


def _alike(spans: list[Span]) -> Callable[[int], list[Span]]:
    """For `_seen`: every item uses the same."""
    return lambda item: spans


def _seen(
    scan: Scan,
    items: tuple[Span, ...],
    value: Value,
    used: Callable[[int], list[Span]],
    *,
    of_one: bool = False,
) -> Read:
    """What the items of each block read of `value`; `used(item)` gives the spans of one item.
    `of_one`: an element is of one sequence.
    """
    per_sequence = scan.heads * scan.splits
    sequences = tuple(
        (hi - 1) // per_sequence - lo // per_sequence + 1 if lo < hi else 0 for lo, hi in items
    )
    spans = tuple(
        _merged(span for item in range(lo, hi) for span in used(item)) for lo, hi in items
    )
    return Read(
        value.id,
        Parts.ALL if value.pushed else Parts.OWN,
        spans,
        sequences=None if of_one else sequences,
    )


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Ascending, disjoint."""
    made: list[Span] = []
    for lo, hi in sorted(set(spans)):
        if made and lo <= made[-1][1]:
            made[-1] = (made[-1][0], max(hi, made[-1][1]))
        else:
            made.append((lo, hi))
    return tuple(made)


def _query(
    b: Builder, layer: int, weights: list[tuple[Weight, int]], latent: Value, rank: int
) -> Value:
    """Queries (rows of each weight on this rank) from the compressed ones, the first `rank`
    elements of `latent`.
    """
    return b.rows(
        StageKind.QUERY,
        layer,
        [Piece(rows, w.cols, stored(b, w)) for w, rows in weights],
        reads=[b.span(latent, 0, rank)],
        vector=b.options.tokens * rank,
        operations=("q_norm", "q_proj", "rope"),
    )


def _attend_items(
    b: Builder, layer: int, scan: Scan, items: tuple[Span, ...], reads: list[Read], dim: int
) -> Value:
    """Of each item: outputs of the group's query heads, running maxima, sums of exponentials."""
    return _attend(
        b, layer, items, reads, partial_words(scan.group, dim, b.options.kv_dtype), scan=scan
    )


def _attend(
    b: Builder,
    layer: int,
    items: tuple[Span, ...],
    reads: list[Read],
    width: int,
    *,
    scan: Scan | None = None,
    window: int = 0,
) -> Value:
    """A stage that publishes `width` words of each item."""
    owned = tuple((lo * width, hi * width) for lo, hi in items)
    value = b.value(
        "attention",
        layer,
        len(b.stages),
        elements=owned[-1][1],
        pushed=False,
        owned=owned,
        words=b.options.draft + 1,
    )
    b.stage(
        StageKind.ATTENTION,
        layer,
        reads=reads,
        publishes=value.id,
        vector=0,
        operations=("attention", "combine"),
        items=items,
        scan=scan,
        window=window,
    )
    return value


def _head_out(
    b: Builder, layer: int, weight: Weight, partials: Value, scan: Scan, dim: int, groups: int
) -> Value:
    """Combine the splits of all heads of a group (a head, or several side by side) and carry them
    through the group's own matrix.
    """
    outputs, heads = weight.rows // weight.groups * groups, scan.group // groups
    width, one = (partial_words(count, dim, b.options.kv_dtype) for count in (scan.group, heads))
    spans = tuple(
        _merged(
            (item * width + group * one, item * width + (group + 1) * one)
            for item in range(scan.items)
            for group in _parts(span, outputs // groups)
        )
        for span in spread(outputs, b.blocks, b.shift)
    )
    return b.rows(
        StageKind.HEAD_OUT,
        layer,
        [Piece(outputs, weight.cols, stored(b, weight))],
        reads=[Read(partials.id, Parts.OWN, spans)],
        vector=b.options.tokens * heads * dim,
        operations=("head_out",),
    )


def _out(
    b: Builder,
    layer: int,
    weight: Weight,
    reads: list[Read],
    cols: int,
    *,
    vector: int = 0,
    beside: tuple[Span, ...] = (),
) -> Value:
    """The output projection's rows over this rank's columns. `beside`: items of the blocks that
    scan before it.
    """
    return b.rows(
        StageKind.O_PROJ,
        layer,
        [Piece(b.shard.hidden, cols, stored(b, weight))],
        reads=reads,
        vector=b.options.tokens * vector,
        operations=("o_proj",),
        beside=beside,
    )


def _parts(span: Span, size: int) -> range:
    """The equal parts of `size` elements that a span touches."""
    return range(span[0] // size, -(-span[1] // size)) if span[0] < span[1] else range(0)
