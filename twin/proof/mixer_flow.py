"""What the stages of a layer's mixer must be and read, derived from the model alone; one function a
kind of mixer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

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
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.options import LatentCache
from twin.plan.types import Stage, Value
from twin.proof.layer_walk import LayerWalk, nth, scan_of
from twin.proof.stored import PLAIN
from twin.proof.walk import Need, Wrong, partials_of

STATE_WORD = 4  # bytes of an element of a recurrent state
CHANNEL_ROWS = 3  # b, c and x: a block has all three of a channel, and its history
LOAD_WORDS = 4  # 16 bytes
LATENT_PARTS = (
    "q_a",
    "kv",
    "compress_kv",
    "compress_gate",
    "index_kv",
    "index_gate",
    "index_heads",
)


def mixed(layer: LayerWalk, kind: Mixer, reads: list[Need]) -> Value:
    match kind:
        case GroupedAttention():
            return _grouped(layer, kind, reads)
        case LatentAttention():
            return _latent(layer, kind, reads)
        case DeltaNet() | Mamba2():
            return _recurrent(layer, kind, reads)
        case ShortConvolution():
            return _convolution(layer, kind, reads)
        case CompressedAttention():
            return _compressed(layer, kind, reads)
        case NoMixer():
            raise AssertionError(f"layer {layer.index} mixes nothing")


def _grouped(layer: LayerWalk, kind: GroupedAttention, reads: list[Need]) -> Value:
    heads, cached, dim = (
        layer.share(kind.heads),
        max(1, kind.kv_heads // layer.ranks),
        kind.head_dim,
    )
    q, kv, gate = heads * dim, cached * dim, heads * dim * kind.output_gate
    # the engine has no rows for values that are the keys
    kvs = kv if kind.values_are_keys and layer.plan.attentions else 2 * kv
    _same_heads(layer, kind, StageKind.QKV)
    qkv = layer.rows(StageKind.QKV, reads, [(q + kvs + gate, "q")])
    partials = (
        _cached(layer, kind, qkv, heads, cached)
        if layer.plan.attention
        else _scanned(layer, kind, qkv, heads, cached)
    )
    gated = [Need(qkv, layer.every((q + kvs, q + kvs + gate)))] if gate else []
    _same_heads(layer, kind, StageKind.O_PROJ)
    return layer.rows(
        StageKind.O_PROJ, [layer.all(partials), *gated], [(layer.walk.spec.hidden, "o")], cols=q
    )


def _same_heads(layer: LayerWalk, kind: GroupedAttention, next_kind: StageKind) -> None:
    """Is the next stage said to have the heads of the layer's kind?"""
    plan = layer.plan
    if not plan.attentions:
        return
    stage = layer.walk.peek(next_kind, layer.index)
    own = plan.attentions[stage.heads] if 0 <= stage.heads < len(plan.attentions) else None
    wanted = (layer.share(kind.heads), max(1, kind.kv_heads // layer.ranks), kind.head_dim)
    has = own and (own.heads, own.kv_heads, own.head_dim)
    if own is None or has != wanted or own.values_are_keys != kind.values_are_keys:
        layer.walk.say(stage, f"has heads {stage.heads}, {own}; the layer's are {wanted}")


def _cached(layer: LayerWalk, kind: GroupedAttention, qkv: Value, heads: int, cached: int) -> Value:
    """The kernel's own: items of `Plan.attention`, whose partials begin with whole loads of
    four words.
    """
    stage = layer.walk.peek(StageKind.ATTENTION, layer.index)
    _same_heads(layer, kind, StageKind.ATTENTION)
    if stage.window != kind.window:
        layer.walk.say(stage, f"window {stage.window}, the model has {kind.window}")
    own = layer.plan.attentions[min(stage.heads, len(layer.plan.attentions) - 1)]
    splits = own.window_splits if kind.window else own.splits
    shared = kind.values_are_keys
    vectors = _item_vectors(stage.items, splits, heads, cached, kind.head_dim, shared)
    needs = [Need(qkv, vectors)]
    if kind.whole_qk_norm:  # their sums of squares
        normed = (0, (heads + cached) * kind.head_dim)
        needs.append(Need(qkv, tuple((normed,) if lo < hi else () for lo, hi in stage.items)))
    width = -(-partials_of(layer.plan, heads // cached, kind.head_dim) // 4) * 4
    return layer.attention(stage, needs, width, items=cached * splits)


def _scanned(
    layer: LayerWalk, kind: GroupedAttention, qkv: Value, heads: int, cached: int
) -> Value:
    """A cache of the layer's own."""
    dim, group = kind.head_dim, heads // cached
    q, kv = heads * dim, cached * dim
    stage = layer.scans(
        StageKind.ATTENTION,
        heads=cached,
        group=group,
        entries=kind.positions(layer.options.context),
    )
    layer.entry_bytes(stage, 2 * dim * layer.options.kv_dtype.bytes)

    def of(item: int) -> Iterable[Span]:
        head = item // scan_of(stage).splits % cached
        return (
            (head * group * dim, (head + 1) * group * dim),
            (q + head * dim, q + (head + 1) * dim),
            (q + kv + head * dim, q + kv + (head + 1) * dim),
        )

    return layer.attention(
        stage, [layer.of_items(stage, qkv, of)], partials_of(layer.plan, group, dim)
    )


def _latent(layer: LayerWalk, kind: LatentAttention, reads: list[Need]) -> Value:
    heads, query = layer.share(kind.heads), kind.nope_dim + kind.rope_dim
    # ranks divide the positions, so each needs the queries of all
    split = layer.options.latent_cache is LatentCache.SPLIT
    if split and not (kind.q_rank and layer.sharded):
        raise Wrong("the plan", "a latent cache is split, but ranks share neither rows nor queries")
    if kind.q_rank:
        first, second = layer.common(kind.q_rank), layer.common(kind.latent_dim)
        latent = layer.rows(
            StageKind.LATENT, reads, [(first, "q_a"), (second, "kv_a")], common=True
        )
        queries = layer.rows(
            StageKind.QUERY,
            [layer.some(latent, (0, first))],
            [(heads * query, "q_b")],
            common=split,
        )
        newest, start = (first, first + second), 0
    else:
        latent = layer.rows(
            StageKind.LATENT, reads, [(kind.latent_dim, "kv_a"), (heads * query, "q")]
        )
        queries, newest, start = latent, (0, kind.latent_dim), kind.latent_dim
    plain = [(start + h * query, start + h * query + kind.nope_dim) for h in range(heads)]
    turned = [(lo + kind.nope_dim, lo + query) for lo, _ in plain]
    if split:  # whole ones: what of a push nobody reads never arrives, as far as anyone knows
        turned = [(0, queries.elements)]
    absorbed = layer.rows(
        StageKind.ABSORB,
        lambda rows: [Need(queries, layer.per_block(rows, kind.kv_rank, plain))],
        [(heads * kind.kv_rank, "k_up")],
        common=split,
    )
    attending, holders = (kind.heads, layer.ranks) if split else (heads, 1)
    stage = layer.scans(
        StageKind.ATTENTION,
        heads=1,
        group=attending,
        entries=-(-kind.positions(layer.options.context) // holders),
    )
    layer.entry_bytes(stage, kind.latent_dim * layer.options.kv_dtype.bytes)
    needs = [layer.of_items(stage, absorbed, lambda item: [(0, absorbed.elements)])]
    if latent is queries:
        needs.append(layer.of_items(stage, latent, lambda item: [newest, *turned]))
    else:
        needs += [
            layer.of_items(stage, queries, lambda item: turned),
            layer.of_items(stage, latent, lambda item: [newest]),
        ]
    partials = layer.attention(stage, needs, partials_of(layer.plan, attending, kind.kv_rank))
    if split:
        partials = _of_all_positions(layer, stage, partials, heads, kind.kv_rank)
    carried = layer.head_out(
        stage, partials, "v_up", heads, heads * kind.value_dim, kind.kv_rank, merged=split
    )
    return layer.rows(
        StageKind.O_PROJ,
        [layer.all(carried)],
        [(layer.walk.spec.hidden, "o")],
        cols=heads * kind.value_dim,
    )


def _of_all_positions(
    layer: LayerWalk, stage: Stage, partials: Value, heads: int, dim: int
) -> Value:
    """One item's words of a rank's heads from all items of its positions, made for every rank."""
    scan, one = scan_of(stage), partials_of(layer.plan, 1, dim)
    made = layer.walk.peek(StageKind.MERGE, layer.index)
    owned = layer.plan.values[made.publishes or 0].owned
    outputs = one - partials_of(layer.plan, 1, 0)
    spans = _merging(owned, scan.splits, layer.ranks, heads, one, outputs)
    value = layer.walk.take(
        StageKind.MERGE,
        layer.index,
        [Need(partials, spans)],
        elements=scan.sequences * heads * one,
    )
    return layer.gathered(value, common=True)


@lru_cache(maxsize=64)
def _merging(
    owned: tuple[Span, ...], splits: int, ranks: int, heads: int, one: int, outputs: int
) -> tuple[tuple[Span, ...], ...]:
    """Of each block the words of a sequence's items that it merges: those of its elements, of all
    ranks' heads side by side, and these heads' maxima and sums behind their `outputs` words.
    """
    found = []
    for lo, hi in owned:
        needed: set[Span] = set()
        for head in range(lo // one, -(-hi // one)) if lo < hi else ():
            sequence, within = divmod(head, heads)
            mine = (max(lo - head * one, 0), min(hi - head * one, one))
            for item in range(sequence * splits, (sequence + 1) * splits):
                first = (item * heads + within) * one
                needed |= {
                    (ranks * (first + a), ranks * (first + b)) for a, b in (mine, (outputs, one))
                }
        found.append(_disjoint(needed))
    return tuple(found)


def _disjoint(spans: Iterable[Span]) -> tuple[Span, ...]:
    made: list[Span] = []
    for lo, hi in sorted(spans):
        if made and lo <= made[-1][1]:
            made[-1] = made[-1][0], max(hi, made[-1][1])
        else:
            made.append((lo, hi))
    return tuple(made)


def _compressed(layer: LayerWalk, kind: CompressedAttention, reads: list[Need]) -> Value:
    heads, groups, dim = layer.share(kind.heads), layer.share(kind.o_groups), kind.head_dim
    parts = [
        (layer.common(w.rows), name)
        for name, w in layer.weights.items()
        if w.cols == layer.walk.spec.hidden and name in LATENT_PARTS
    ]
    first, others = _stored_otherwise(layer, parts)
    latent = layer.rows(StageKind.LATENT, reads, _as_one(layer, first), common=True)
    made = latent
    if others:
        made = layer.rows(StageKind.COMPRESS, [], _as_one(layer, others))
    low = layer.common(kind.q_rank)
    keys = sum(rows for rows, name in parts if name.startswith("index"))
    index_heads, divided = _index_heads(layer, kind)
    index_elements = index_heads * kind.index_dim
    projected = [(heads * dim, "q_b"), *([(index_elements, "index_q")] if index_elements else [])]
    normed = [layer.some(latent, (0, low))]
    queries = layer.rows(StageKind.QUERY, normed, _as_one(layer, projected))
    end = made.elements - keys
    # the engine's plans serve every context
    reach = layer.options.max_context if layer.plan.attentions else layer.options.context
    entries = kind.entries(reach) if kind.top_k else 0
    entries = layer.common(entries) if divided else entries
    scores = (
        _scores(layer, index_heads, entries, kind.key_bytes, (queries, heads * dim), (made, end))
        if entries
        else None
    )
    stage = layer.scans(
        StageKind.ATTENTION, heads=1, group=heads, entries=kind.positions(layer.options.context)
    )
    layer.entry_bytes(stage, kind.entry_bytes)
    if layer.plan.attentions and scan_of(stage).splits != layer.plan.attentions[0].splits:
        layer.walk.say(
            stage,
            f"deals entries to {scan_of(stage).splits} splits, the kernel to "
            f"{layer.plan.attentions[0].splits}",
        )
    if scan_of(stage).chosen != bool(scores):
        layer.walk.say(
            stage,
            f"its entries are {'' if scores else 'not '}chosen by scores of an earlier stage",
        )
    mine, last = ((0, heads * dim), end) if scores else ((0, queries.elements), made.elements)
    needs = [layer.of_items(stage, queries, lambda item: [mine])]
    if others:
        needs.append(layer.of_items(stage, latent, lambda item: [(low, latent.elements)]))
    needs.append(layer.of_items(stage, made, lambda item: [(0 if others else low, last)]))
    if scores is not None:
        own = layer.of_items(
            stage, scores, lambda item: [nth(item // scan_of(stage).splits, entries)]
        )
        needs.append(replace(own, sequences=None))
    partials = layer.attention(stage, needs, partials_of(layer.plan, heads, dim))
    out = layer.head_out(stage, partials, "o_a", groups, groups * kind.o_rank, dim)
    return layer.rows(
        StageKind.O_PROJ,
        [layer.all(out)],
        [(layer.walk.spec.hidden, "o")],
        cols=groups * kind.o_rank,
    )


def _stored_otherwise(
    layer: LayerWalk, parts: list[tuple[int, str]]
) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """An engine's stage multiplies one format: those stored as the first one is, and the others."""
    if not layer.plan.attentions or not layer.walk.spec.stored:
        return parts, []
    plain = {name: layer.weights[name].format.name in PLAIN for _, name in parts}
    names = {name: "" if plain[name] else layer.weights[name].format.name for name in plain}
    first = [part for part in parts if names[part[1]] == names[parts[0][1]]]
    return first, [part for part in parts if part not in first]


def _as_one(layer: LayerWalk, parts: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """An engine's stage has one matrix of all rows; its weights are stored alike."""
    if not layer.plan.attentions:
        return parts
    return [(sum(rows for rows, _ in parts), parts[0][1])]


def _index_heads(layer: LayerWalk, kind: CompressedAttention) -> tuple[int, bool]:
    """(index heads of a rank, whether ranks divide the entries instead): both compute the same
    scores.
    """
    if not kind.top_k:
        return 0, False
    stage = layer.walk.peek(StageKind.QUERY, layer.index)
    scored = kind.index_heads * kind.index_dim
    whole = len(stage.matrices) == 2 and stage.matrices[1].rows == scored
    if layer.plan.attentions:
        return kind.index_heads, False  # whose ranks share nothing of it
    divided = whole and layer.sharded
    return (kind.index_heads if divided else layer.common(kind.index_heads)), divided


def _scores(
    layer: LayerWalk,
    heads: int,
    entries: int,
    key_bytes: int,
    queried: tuple[Value, int],
    kept: tuple[Value, int],
) -> Value:
    """`queried` and `kept`: values, and from which element on they hold queries and keys."""
    (queries, first), (latent, keys) = queried, kept
    stage = layer.scans(StageKind.INDEX, heads=1, group=heads, entries=entries)
    layer.entry_bytes(stage, key_bytes)
    needs = [
        layer.of_items(stage, queries, lambda item: [(first, queries.elements)]),
        layer.of_items(stage, latent, lambda item: [(keys, latent.elements)]),
    ]
    value = layer.walk.take(
        StageKind.INDEX, layer.index, needs, elements=layer.options.batch * entries
    )
    scan = scan_of(stage)
    edges = [
        s * entries + min(entries, split * scan.page)
        for s in range(scan.sequences)
        for split in range(scan.splits)
    ]
    edges.append(scan.sequences * entries)
    if value.owned != tuple((edges[lo], edges[hi]) for lo, hi in stage.items):
        layer.walk.say(stage, "blocks do not publish the scores of the entries that they scan")
    return layer.gathered(value, common=True)


def _recurrent(layer: LayerWalk, kind: DeltaNet | Mamba2, reads: list[Need]) -> Value:
    keys, values = layer.share(kind.key_heads), layer.share(kind.value_heads)
    k, v = keys * kind.key_dim, values * kind.value_dim
    if isinstance(kind, DeltaNet):
        made, steering, first = _delta_made(layer, reads, 2 * (k + v), 2 * values)
    else:  # B, C and x, their gates, a time step of each head: one matrix
        made = layer.rows(StageKind.DELTA_IN, reads, [(2 * (k + v) + values, "state_in")])
        steering, first = made, 2 * (k + v)
    stage = layer.scans(StageKind.DELTA, heads=values, group=1, entries=kind.value_dim)
    layer.entry_bytes(stage, kind.key_dim * STATE_WORD)
    rows = _delta_rows(layer, stage, kind)
    splits = scan_of(stage).splits

    def projected(item: int) -> list[Span]:
        head, split = divmod(item % (values * splits), splits)
        key = head * keys // values * kind.key_dim
        value = 2 * k + head * kind.value_dim + split * rows
        return [
            (key, key + kind.key_dim),
            (k + key, k + key + kind.key_dim),
            (value, value + rows),
            (v + value, v + value + rows),
        ]

    def steered(item: int) -> list[Span]:
        strength = first + item % (values * splits) // splits
        steps = [nth(strength, 1)]  # of DeltaNet a write strength, and the step
        return [*steps, nth(strength + values, 1)] if isinstance(kind, DeltaNet) else steps

    if steering is made:
        needs = [layer.of_items(stage, made, lambda item: projected(item) + steered(item))]
    else:
        needs = [
            layer.of_items(stage, made, projected),
            layer.of_items(stage, steering, steered),
        ]
    # the sum of an item's outputs' squares stands next to them, in a load of its own
    out = layer.attention(stage, needs, rows + LOAD_WORDS)
    return layer.rows(StageKind.O_PROJ, [layer.all(out)], [(layer.walk.spec.hidden, "o")], cols=v)


def _convolution(layer: LayerWalk, kind: ShortConvolution, reads: list[Need]) -> Value:
    """The history of a channel is its block's alone: nobody but who publishes the channel needs it,
    and that is who owns all three rows.
    """
    channels = layer.share(kind.channels)
    made = layer.rows(StageKind.CONV_IN, reads, [(channels, "conv_in")], unit=CHANNEL_ROWS)
    wide = [(layer.walk.spec.hidden, "o")]
    return layer.rows(StageKind.O_PROJ, [layer.all(made)], wide, cols=channels)


def _delta_made(
    layer: LayerWalk, reads: list[Need], rows: int, gates: int
) -> tuple[Value, Value, int]:
    """(projections, what steers the states, its first element). The engine's stages have one matrix
    each: that of both where both are stored in the plan's own type.
    """
    if layer.plan.attention is None:
        made = layer.rows(StageKind.DELTA_IN, reads, [(rows, "qkvz"), (gates, "ba")])
        return made, made, rows
    names = [layer.weights[name].format.name for name in ("qkvz", "ba")]
    if layer.walk.spec.stored is None or all(name in PLAIN for name in names):
        made = layer.rows(StageKind.DELTA_IN, reads, [(rows + gates, "qkvz")])
        return made, made, rows
    made = layer.rows(StageKind.DELTA_IN, reads, [(rows, "qkvz")])
    return made, layer.rows(StageKind.DELTA_GATES, [], [(gates, "ba")]), 0


def _delta_rows(layer: LayerWalk, stage: Stage, kind: DeltaNet | Mamba2) -> int:
    """Columns of an item's state. A block keeps its items' states and histories, in FP32."""
    scan = scan_of(stage)
    rows = kind.value_dim // scan.splits
    if rows * scan.splits != kind.value_dim or scan.page != rows:
        layer.walk.say(
            stage, f"{scan.splits} items of {scan.page} columns, a head has {kind.value_dim}"
        )
    if scan.dim != kind.key_dim:
        layer.walk.say(stage, f"states of {scan.dim} rows, the model's have {kind.key_dim}")
    if scan.splits > 1 and rows % LOAD_WORDS:
        layer.walk.say(stage, f"items of {rows} columns, no whole loads of {LOAD_WORDS} words")
    seen = 2 * kind.key_dim + rows
    words = scan.items * (kind.key_dim * rows + (kind.conv - 1) * seen)
    if scan.held_bytes < words * STATE_WORD:
        layer.walk.say(
            stage,
            f"holds {scan.held_bytes} bytes of states and histories, which take "
            f"{words * STATE_WORD}",
        )
    return rows


@lru_cache(maxsize=1024)
def _item_vectors(
    items: tuple[Span, ...], splits: int, heads: int, cached: int, size: int, shared: bool
) -> tuple[tuple[Span, ...], ...]:
    """q of the query heads, k and v of the cached heads that each block's items touch, each a
    vector of `size` elements. `shared`: k is v, too.
    """
    group, found = heads // cached, []
    for span in items:
        order = sorted({item // splits for item in range(*span)})
        vectors = [head * group + i for head in order for i in range(group)]
        vectors += [heads + head for head in order]
        vectors += [] if shared else [heads + cached + head for head in order]
        found.append(tuple(nth(vector, size) for vector in vectors))
    return tuple(found)
