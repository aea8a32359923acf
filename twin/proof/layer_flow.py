"""What the stages of a model's layers must be and read, derived from the model alone.

Shares no code with the builder. Sizes are those of one rank; a stage's reads are compared exactly,
its spans must hold what is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from twin.models.feeds import DenseFeed, ExpertFeed, Feed
from twin.models.mixers import (
    CompressedAttention,
    DeltaNet,
    GroupedAttention,
    LatentAttention,
    Mixer,
)
from twin.plan.types import (
    Common,
    Matrix,
    Parts,
    Residual,
    Routed,
    Scan,
    Span,
    Stage,
    StageKind,
    Value,
)
from twin.proof.stored import DECODED, PLAIN, streams
from twin.proof.walk import Need, Walk, Wrong, partials_of, whole

Rows = list[tuple[int, str]]  # (outputs of a rank, the matrix that makes them)
STATE_WORD = 4  # bytes of an element of a recurrent state


def layers(walk: Walk) -> list[Need]:
    """Takes the stages of all layers; what the head reads."""
    residual: list[Need] = []
    mixed: list[Value] = []
    fed: list[Value] = []
    for index in range(walk.spec.layers):
        taken, layer = _Layer(walk, index), walk.spec.layer(index)
        mixed.append(taken.mixer(layer.mixer, taken.entered("attn_hyper", residual)))
        fed.append(taken.feed(layer.feed, taken.entered("ffn_hyper", taken.landed(mixed))))
        residual = taken.landed(fed)
    return _Layer(walk, -1).entered("head_hyper", residual)


class _Layer:
    """Takes one layer's stages."""

    def __init__(self, walk: Walk, index: int) -> None:
        self.walk, self.plan, self.index = walk, walk.plan, index
        self.ranks, self.options = walk.plan.ranks, walk.plan.options
        weights = walk.spec.end_weights() if index < 0 else walk.spec.layer_weights(index)
        self.weights = {w.name: w for w in weights}
        self.sharded = self.options.common is Common.SHARDED and self.ranks > 1
        self.pushed: set[int] = set()  # values of which every rank has computed a share for all

    # ---- the residual ----------------------------------------------------------------------------

    def landed(self, modules: list[Value]) -> list[Need]:
        """The newest module's partial sums, added by every block, or by the block that owns the
        element and then read by all.
        """
        if self.options.residual is not Residual.SLICED:
            return self.walk.residual(modules)
        hyper = self.walk.spec.hyper
        residuals = hyper.residuals if hyper else 1
        stage = self.walk.peek(StageKind.REDUCE, self.index)
        summed = self.plan.values[stage.publishes] if stage.publishes is not None else None
        mine = (
            tuple(
                ((lo // residuals, -(-hi // residuals)),) if lo < hi else ()
                for lo, hi in summed.owned
            )
            if summed
            else ()
        )
        need = replace(self.walk.all(modules[-1], residual=True), spans=mine)
        return [
            self.all(
                self.walk.take(
                    StageKind.REDUCE, self.index, [need], elements=residuals * self.walk.spec.hidden
                )
            )
        ]

    def entered(self, name: str, residual: list[Need]) -> list[Need]:
        """What a module's first stage reads."""
        hyper = self.walk.spec.hyper
        if hyper is None:
            return residual
        rows = self.weights[name].rows * hyper.residuals
        return [
            self.all(
                self.rows(
                    StageKind.HYPER,
                    residual,
                    [(self.common(rows), name)],
                    cols=self.walk.spec.hidden,
                    common=True,
                )
            )
        ]

    # ---- mixers ----------------------------------------------------------------------------------

    def mixer(self, kind: Mixer, reads: list[Need]) -> Value:
        match kind:
            case GroupedAttention():
                return self._grouped(kind, reads)
            case LatentAttention():
                return self._latent(kind, reads)
            case DeltaNet():
                return self._delta(kind, reads)
            case CompressedAttention():
                return self._compressed(kind, reads)

    def _grouped(self, kind: GroupedAttention, reads: list[Need]) -> Value:
        heads, cached, dim = (
            self.share(kind.heads),
            max(1, kind.kv_heads // self.ranks),
            kind.head_dim,
        )
        q, kv, gate = heads * dim, cached * dim, heads * dim * kind.output_gate
        qkv = self.rows(StageKind.QKV, reads, [(q + 2 * kv + gate, "q")])
        partials = (
            self._cached(kind, qkv, heads, cached)
            if self.plan.attention
            else self._scanned(kind, qkv, heads, cached)
        )
        gated = [Need(qkv, self.every((q + 2 * kv, q + 2 * kv + gate)))] if gate else []
        return self.rows(
            StageKind.O_PROJ, [self.all(partials), *gated], [(self.walk.spec.hidden, "o")], cols=q
        )

    def _cached(self, kind: GroupedAttention, qkv: Value, heads: int, cached: int) -> Value:
        """The kernel's own: items of `Plan.attention`, whose partials begin with whole loads of
        four words.
        """
        stage = self.walk.peek(StageKind.ATTENTION, self.index)
        if stage.window != kind.window:
            self.walk.say(stage, f"window {stage.window}, the model has {kind.window}")
        splits = self.plan.kernel_attention().splits
        needs = [Need(qkv, _item_vectors(stage.items, splits, heads, cached, kind.head_dim))]
        if kind.whole_qk_norm:  # their sums of squares
            normed = (0, (heads + cached) * kind.head_dim)
            needs.append(Need(qkv, tuple((normed,) if lo < hi else () for lo, hi in stage.items)))
        width = -(-partials_of(self.plan, heads // cached, kind.head_dim) // 4) * 4
        return self.attention(stage, needs, width, items=cached * splits)

    def _scanned(self, kind: GroupedAttention, qkv: Value, heads: int, cached: int) -> Value:
        """A cache of the layer's own."""
        dim, group = kind.head_dim, heads // cached
        q, kv = heads * dim, cached * dim
        stage = self.scans(
            StageKind.ATTENTION,
            heads=cached,
            group=group,
            entries=kind.positions(self.options.context),
        )
        self.entry_bytes(stage, 2 * dim * self.options.kv_dtype.bytes)

        def of(item: int) -> Iterable[Span]:
            head = item // _scan(stage).splits % cached
            return (
                (head * group * dim, (head + 1) * group * dim),
                (q + head * dim, q + (head + 1) * dim),
                (q + kv + head * dim, q + kv + (head + 1) * dim),
            )

        return self.attention(
            stage, [self.of_items(stage, qkv, of)], partials_of(self.plan, group, dim)
        )

    def _latent(self, kind: LatentAttention, reads: list[Need]) -> Value:
        heads, query = self.share(kind.heads), kind.nope_dim + kind.rope_dim
        if kind.q_rank:
            first, second = self.common(kind.q_rank), self.common(kind.latent_dim)
            latent = self.rows(
                StageKind.LATENT, reads, [(first, "q_a"), (second, "kv_a")], common=True
            )
            queries = self.rows(
                StageKind.QUERY, [self.some(latent, (0, first))], [(heads * query, "q_b")]
            )
            newest, start = (first, first + second), 0
        else:
            latent = self.rows(
                StageKind.LATENT, reads, [(kind.latent_dim, "kv_a"), (heads * query, "q")]
            )
            queries, newest, start = latent, (0, kind.latent_dim), kind.latent_dim
        plain = [(start + h * query, start + h * query + kind.nope_dim) for h in range(heads)]
        turned = [(lo + kind.nope_dim, lo + query) for lo, _ in plain]
        absorbed = self.rows(
            StageKind.ABSORB,
            lambda rows: [Need(queries, self.per_block(rows, kind.kv_rank, plain))],
            [(heads * kind.kv_rank, "k_up")],
        )
        stage = self.scans(
            StageKind.ATTENTION, heads=1, group=heads, entries=kind.positions(self.options.context)
        )
        self.entry_bytes(stage, kind.latent_dim * self.options.kv_dtype.bytes)
        needs = [self.of_items(stage, absorbed, lambda item: [(0, absorbed.elements)])]
        if latent is queries:
            needs.append(self.of_items(stage, latent, lambda item: [newest, *turned]))
        else:
            needs += [
                self.of_items(stage, queries, lambda item: turned),
                self.of_items(stage, latent, lambda item: [newest]),
            ]
        partials = self.attention(stage, needs, partials_of(self.plan, heads, kind.kv_rank))
        carried = self.head_out(
            stage, partials, "v_up", heads, heads * kind.value_dim, kind.kv_rank
        )
        return self.rows(
            StageKind.O_PROJ,
            [self.all(carried)],
            [(self.walk.spec.hidden, "o")],
            cols=heads * kind.value_dim,
        )

    def _compressed(self, kind: CompressedAttention, reads: list[Need]) -> Value:
        heads, groups, dim = self.share(kind.heads), self.share(kind.o_groups), kind.head_dim
        parts = [
            (self.common(w.rows), name)
            for name, w in self.weights.items()
            if w.cols == self.walk.spec.hidden and name in LATENT_PARTS
        ]
        latent = self.rows(StageKind.LATENT, reads, parts, common=True)
        low = self.common(kind.q_rank)
        keys = sum(rows for rows, name in parts if name.startswith("index"))
        heads_asked, divided = self._index_heads(kind)
        asked = heads_asked * kind.index_dim
        projected = [(heads * dim, "q_b"), *([(asked, "index_q")] if asked else [])]
        queries = self.rows(StageKind.QUERY, [self.some(latent, (0, low))], projected)
        end = latent.elements - keys
        entries = kind.entries(self.options.context) if kind.top_k else 0
        entries = self.common(entries) if divided else entries
        scores = (
            self._scores(
                heads_asked, entries, kind.key_bytes, (queries, heads * dim), (latent, end)
            )
            if entries
            else None
        )
        stage = self.scans(
            StageKind.ATTENTION, heads=1, group=heads, entries=kind.positions(self.options.context)
        )
        self.entry_bytes(stage, kind.entry_bytes)
        if _scan(stage).chosen != bool(scores):
            self.walk.say(
                stage,
                f"its entries are {'' if scores else 'not '}chosen by scores of an earlier stage",
            )
        mine, kept = (
            ((0, heads * dim), (low, end))
            if scores
            else ((0, queries.elements), (low, latent.elements))
        )
        needs = [
            self.of_items(stage, queries, lambda item: [mine]),
            self.of_items(stage, latent, lambda item: [kept]),
        ]
        if scores is not None:
            own = self.of_items(
                stage, scores, lambda item: [_nth(item // _scan(stage).splits, entries)]
            )
            needs.append(replace(own, sequences=None))
        partials = self.attention(stage, needs, partials_of(self.plan, heads, dim))
        out = self.head_out(stage, partials, "o_a", groups, groups * kind.o_rank, dim)
        return self.rows(
            StageKind.O_PROJ,
            [self.all(out)],
            [(self.walk.spec.hidden, "o_b")],
            cols=groups * kind.o_rank,
        )

    def _index_heads(self, kind: CompressedAttention) -> tuple[int, bool]:
        """(index heads of a rank, whether ranks divide the entries instead): both compute the same
        scores.
        """
        if not kind.top_k:
            return 0, False
        stage = self.walk.peek(StageKind.QUERY, self.index)
        whole = (
            len(stage.matrices) == 2 and stage.matrices[1].rows == kind.index_heads * kind.index_dim
        )
        divided = whole and self.sharded
        return (kind.index_heads if divided else self.common(kind.index_heads)), divided

    def _scores(
        self,
        heads: int,
        entries: int,
        key_bytes: int,
        asked: tuple[Value, int],
        kept: tuple[Value, int],
    ) -> Value:
        """`asked` and `kept`: values, and from which element on they hold queries and keys."""
        (queries, first), (latent, keys) = asked, kept
        stage = self.scans(StageKind.INDEX, heads=1, group=heads, entries=entries)
        self.entry_bytes(stage, key_bytes)
        needs = [
            self.of_items(stage, queries, lambda item: [(first, queries.elements)]),
            self.of_items(stage, latent, lambda item: [(keys, latent.elements)]),
        ]
        value = self.walk.take(
            StageKind.INDEX, self.index, needs, elements=self.options.batch * entries
        )
        scan = _scan(stage)
        edges = [
            s * entries + min(entries, split * scan.page)
            for s in range(scan.sequences)
            for split in range(scan.splits)
        ]
        edges.append(scan.sequences * entries)
        if value.owned != tuple((edges[lo], edges[hi]) for lo, hi in stage.items):
            self.walk.say(stage, "blocks do not publish the scores of the entries that they scan")
        return self.gathered(value, common=True)

    def _delta(self, kind: DeltaNet, reads: list[Need]) -> Value:
        keys, values = self.share(kind.key_heads), self.share(kind.value_heads)
        k, v = keys * kind.key_dim, values * kind.value_dim
        made = self.rows(StageKind.DELTA_IN, reads, [(2 * k + 2 * v, "qkvz"), (2 * values, "ba")])
        stage = self.scans(StageKind.DELTA, heads=values, group=1, entries=kind.value_dim)
        self.entry_bytes(stage, kind.key_dim * STATE_WORD)
        rows = kind.value_dim // _scan(stage).splits

        def of(item: int) -> Iterable[Span]:
            head, split = divmod(item % (values * _scan(stage).splits), _scan(stage).splits)
            key = head * keys // values * kind.key_dim
            value = 2 * k + head * kind.value_dim + split * rows
            strength = 2 * (k + v) + head
            return [
                (key, key + kind.key_dim),
                (k + key, k + key + kind.key_dim),
                (value, value + rows),
                _nth(strength, 1),
                _nth(strength + values, 1),
            ]

        out = self.attention(stage, [self.of_items(stage, made, of)], rows)
        gate = Need(made, self.every((2 * k + v, 2 * k + 2 * v)))
        return self.rows(
            StageKind.O_PROJ, [self.all(out), gate], [(self.walk.spec.hidden, "o")], cols=v
        )

    # ---- feed-forward ----------------------------------------------------------------------------

    def feed(self, kind: Feed, reads: list[Need]) -> Value:
        if isinstance(kind, ExpertFeed) and kind.experts and kind.top_k:
            return self._experts(kind, reads)
        width, prefix = (
            (kind.width, "") if isinstance(kind, DenseFeed) else (kind.shared_width, "shared_")
        )
        ffn = self.share(width)
        act = self.rows(StageKind.GATE_UP, reads, [(ffn, f"{prefix}up")], unit=2)
        return self.rows(
            StageKind.DOWN, [self.all(act)], [(self.walk.spec.hidden, f"{prefix}down")], cols=ffn
        )

    def _experts(self, kind: ExpertFeed, reads: list[Need]) -> Value:
        walk, hidden = self.walk, self.walk.spec.hidden
        scored = [
            (self.common(kind.experts), "router"),
            *([(self.common(1), "shared_expert_gate")] if kind.shared_gate else []),
        ]
        logits = self.rows(StageKind.ROUTER, reads, scored, common=True)
        act = (
            self.rows(
                StageKind.SHARED_UP, [], [(self.share(kind.shared_width), "shared_up")], unit=2
            )
            if kind.shared_width
            else None
        )
        route = walk.peek(StageKind.ROUTE, self.index)
        walk.take(StageKind.ROUTE, self.index, [self.all(logits)], elements=None)
        kept = None
        if act is not None:
            kept = walk.peek(StageKind.SHARED_DOWN, self.index)
            if not kept.kept:
                walk.say(kept, "throws the shared experts' sums away")
            walk.take(
                StageKind.SHARED_DOWN,
                self.index,
                [self.all(act)],
                elements=None,
                matrix=[(hidden, act.elements, 1)],
            )
        known = 0 if kind.hashed else route.index
        up = walk.peek(StageKind.ROUTED_UP, self.index)
        width = self.slice(kind.width, up.matrix.pack if up.matrix else 0)
        self._chosen(up, kind, known)
        wanted = self._shares_of_chosen(kind, width, up.matrix)
        value = walk.take(
            StageKind.ROUTED_UP,
            self.index,
            [],
            elements=wanted[-1][1],
            matrix=[(2 * width, hidden, 2)],
        )
        if value.owned != wanted:
            walk.say(
                up,
                "blocks do not publish their shares of the chosen experts' rows in block order, "
                f"{wanted[0]} the first",
            )
        down = walk.peek(StageKind.ROUTED_DOWN, self.index)
        self._chosen(down, kind, known)
        if kept is not None and [m.owned for m in kept.matrices] != [
            m.owned for m in down.matrices
        ]:
            walk.say(down, "blocks do not own the rows whose sums they kept")
        return self.rows(StageKind.ROUTED_DOWN, [self.all(value)], [(hidden, "down")], cols=width)

    def _shares_of_chosen(
        self, kind: ExpertFeed, width: int, matrix: Matrix | None
    ) -> tuple[Span, ...]:
        """One token on a rank with all experts always multiplies top_k of them: the stacked rows
        themselves, divided evenly and in order, in whole tiles of a plan with few-bit weights.
        Otherwise a block's elements follow each other whatever the draw, with room for the largest.
        """
        blocks, options = self.plan.blocks, self.options
        held = kind.experts // options.expert_ranks
        rows = min(held, options.tokens * kind.top_k) * width
        if options.tokens == 1 and options.expert_ranks == 1:
            whole = matrix.tile_rows // 2 if matrix is not None and matrix.pack else 1
            ends = [rows // whole * at // blocks * whole for at in range(blocks + 1)]
            return tuple(pairwise(ends))
        most = -(-rows // blocks)
        return tuple((at * most, (at + 1) * most) for at in range(blocks))

    def _chosen(self, stage: Stage, kind: ExpertFeed, known: int) -> None:
        """A routed stage's weights may be fetched behind the stage at which the routing is known,
        not before.
        """
        held = kind.experts // self.options.expert_ranks
        routed = Routed(held, min(held, self.options.tokens * kind.top_k), kind.experts, kind.top_k)
        if stage.routed != routed:
            self.walk.say(stage, f"its experts are {stage.routed}, the model has {routed}")
        if stage.gate is None or stage.gate < known:
            self.walk.say(
                stage, f"fetches experts behind stage {stage.gate}; they are known behind {known}"
            )

    # ---- pieces ----------------------------------------------------------------------------------

    def share(self, count: int) -> int:
        if count % self.ranks:
            raise Wrong(
                "the plan", f"{count} heads or columns of layer {self.index} on {self.ranks} ranks"
            )
        return count // self.ranks

    def common(self, rows: int) -> int:
        """Rows of one rank of what all ranks need."""
        return -(-rows // self.ranks) if self.sharded else rows

    def slice(self, width: int, pack: int) -> int:
        """Columns of an expert on a rank: whole groups of scales; beside few-bit weights whole
        loads of `pack` columns, and on several ranks whole blocks of each format.
        """
        ranks = self.ranks // self.options.expert_ranks
        form = self.weights["down"].format
        high, wide = form.block
        grain = max(8, wide) if ranks > 1 and high == 1 else 8
        if pack:
            blocks = [DECODED[form.name][1] or pack for form in self.walk.spec.coded]
            grain = max([pack, *blocks]) if ranks > 1 else pack
        return grain * -(-width // (grain * ranks))

    def rows(
        self,
        kind: StageKind,
        reads: list[Need] | Callable[[tuple[Span, ...]], list[Need]],
        parts: Rows,
        *,
        cols: int = 0,
        unit: int = 1,
        common: bool = False,
    ) -> Value:
        """A stage of matrices whose outputs follow each other. `reads`: needs, or what gives them
        for the blocks' output spans.
        """
        stage = self.walk.peek(kind, self.index)
        outputs = sum(rows for rows, _ in parts)
        published = self.plan.values[stage.publishes].owned if stage.publishes is not None else ()
        needs = reads(published) if callable(reads) else reads
        shapes = [(unit * rows, cols or self.weights[name].cols, unit) for rows, name in parts]
        value = self.walk.take(kind, self.index, needs, elements=outputs, matrix=shapes)
        first = 0
        for matrix, (rows, name) in zip(stage.matrices, parts, strict=True):
            stored = self.weights[name].format if self.walk.spec.stored else None
            own = self.plan.attention is not None  # the engine runs the plan
            if own and stored is not None and stored.name in PLAIN:
                stored = None
            if not (streams(matrix, stored) if own else matrix.format == stored):
                self.walk.say(stage, f"{name} is stored as {stored}, not {matrix.format}")
            owned = _rows_of(value.owned, first, first + rows, unit)
            if matrix.owned != owned:
                block = next(
                    b
                    for b, (its, mine) in enumerate(zip(matrix.owned, owned, strict=True))
                    if its != mine
                )
                has = (
                    f"rows {matrix.owned[block]} of {name} but publishes elements "
                    f"{value.owned[block]}"
                )
                self.walk.say(stage, f"block {block} owns {has}, {unit} rows each")
            first += rows
        return self.gathered(value, common=common)

    def gathered(self, value: Value, *, common: bool) -> Value:
        """With a library collective a stage of its own gathers what other ranks need."""
        if common and self.sharded:
            value = self.walk.gathered(value)
            self.pushed.add(value.id)
            return value
        return (
            self.walk.gathered(value) if self.plan.stages[value.stage].kind in CROSSING else value
        )

    def all(self, value: Value) -> Need:
        if value.id in self.pushed:
            return Need(value, whole(self.plan, value.elements), Parts.ALL)
        return self.walk.all(value)

    def some(self, value: Value, span: Span) -> Need:
        """`span` of a value that all ranks need alike, of every rank's part if they share it."""
        return replace(self.all(value), spans=self.every(span))

    def every(self, *spans: Span) -> tuple[tuple[Span, ...], ...]:
        return (spans,) * self.plan.blocks

    def per_block(
        self, owned: tuple[Span, ...], size: int, spans: list[Span]
    ) -> tuple[tuple[Span, ...], ...]:
        """Of each block the spans of the heads whose `size` outputs it owns."""
        return tuple(
            tuple(
                spans[at]
                for at in range(len(spans))
                if lo < (at + 1) * size and at * size < hi and lo < hi
            )
            for lo, hi in owned
        )

    def scans(self, kind: StageKind, *, heads: int, group: int, entries: int) -> Stage:
        """The next stage, with the cache that it must scan."""
        stage = self.walk.peek(kind, self.index)
        scan = stage.scan
        if scan is None:
            raise Wrong(stage.name, "scans no cache")
        has = (scan.sequences, scan.heads, scan.group, scan.entries)
        wanted = (self.options.batch, heads, group, entries)
        if has != wanted:
            self.walk.say(
                stage,
                f"scans (sequences, heads, query heads each, entries) {has}, the model has "
                f"{wanted}",
            )
        return stage

    def entry_bytes(self, stage: Stage, size: int) -> None:
        if _scan(stage).entry_bytes != size:
            self.walk.say(
                stage, f"entries of {_scan(stage).entry_bytes} bytes, the model's have {size}"
            )

    def of_items(self, stage: Stage, value: Value, of: Callable[[int], Iterable[Span]]) -> Need:
        """What each block's items use of a value, and of how many sequences."""
        scan = _scan(stage)
        each = scan.heads * scan.splits
        spans = tuple(
            tuple(sorted({span for item in range(*items) for span in of(item)}))
            for items in stage.items
        )
        sequences = tuple(len({item // each for item in range(*items)}) for items in stage.items)
        parts = Parts.ALL if value.id in self.pushed else Parts.OWN
        return Need(value, spans, parts, sequences=sequences)

    def attention(
        self, stage: Stage, needs: list[Need], width: int, *, items: int | None = None
    ) -> Value:
        """The stage that scans: its items' results, `width` elements each."""
        items = _scan(stage).items if items is None else items
        value = self.walk.take(stage.kind, self.index, needs, elements=items * width)
        if value.owned != tuple((lo * width, hi * width) for lo, hi in stage.items):
            self.walk.say(
                stage, f"blocks do not publish the results of their items, {width} elements each"
            )
        return value

    def head_out(
        self, stage: Stage, partials: Value, name: str, groups: int, outputs: int, dim: int
    ) -> Value:
        """Combined splits through a matrix for each group of heads."""
        scan = _scan(stage)
        width = partials_of(self.plan, scan.group, dim)
        part = width // groups

        def needs(owned: tuple[Span, ...]) -> list[Need]:
            mine = self.per_block(
                owned,
                outputs // groups,
                [(group * part, (group + 1) * part) for group in range(groups)],
            )
            spans = tuple(
                tuple(
                    (item * width + lo, item * width + hi)
                    for item in range(scan.items)
                    for lo, hi in block
                )
                for block in mine
            )
            return [Need(partials, spans)]

        return self.rows(StageKind.HEAD_OUT, needs, [(outputs, name)])


CROSSING = (StageKind.O_PROJ, StageKind.DOWN, StageKind.ROUTED_DOWN)
LATENT_PARTS = (
    "q_a",
    "kv",
    "compress_kv",
    "compress_gate",
    "index_kv",
    "index_gate",
    "index_heads",
)


@lru_cache(maxsize=1024)
def _rows_of(owned: tuple[Span, ...], first: int, last: int, unit: int) -> tuple[Span, ...]:
    """The blocks' rows of a matrix that makes the elements first..last-1, `unit` rows each."""
    return tuple(
        (unit * (min(max(lo, first), last) - first), unit * (min(max(hi, first), last) - first))
        for lo, hi in owned
    )


@lru_cache(maxsize=1024)
def _item_vectors(
    items: tuple[Span, ...], splits: int, heads: int, cached: int, size: int
) -> tuple[tuple[Span, ...], ...]:
    """q of the query heads, k and v of the cached heads that each block's items touch, each a
    vector of `size` elements.
    """
    group, found = heads // cached, []
    for span in items:
        order = sorted({item // splits for item in range(*span)})
        vectors = [head * group + i for head in order for i in range(group)]
        vectors += [heads + head for head in order] + [heads + cached + head for head in order]
        found.append(tuple(_nth(vector, size) for vector in vectors))
    return tuple(found)


def _scan(stage: Stage) -> Scan:
    assert stage.scan is not None
    return stage.scan


def _nth(index: int, size: int) -> Span:
    return index * size, (index + 1) * size
