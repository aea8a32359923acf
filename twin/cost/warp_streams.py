"""What a block of warps streams and scans in a stage."""

from __future__ import annotations

from collections.abc import Iterator

from twin.cost import attention, formats, terms, tiles
from twin.cost.routing import Chosen
from twin.cost.streams import NOTHING, Streams, Weights
from twin.hardware.kernel import WarpKernel
from twin.hardware.types import Device
from twin.plan.attention import Scan
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix, always_all, routed_share, tiles_of
from twin.plan.settle import as_stored
from twin.plan.types import Stage
from twin.schedule.block import TEAM_WARPS, WARP
from twin.schedule.chosen import of_all_chosen, side_by_side
from twin.schedule.products import tensor_products
from twin.schedule.scores import by_own_rows
from twin.schedule.splits import TENSOR_POSITIONS
from twin.schedule.types import BlockOfWarps
from twin.units import picoseconds


class WarpStreams(Streams):
    """Slots and requests of a schedule whose blocks are of warps."""

    def __init__(self, schedule: BlockOfWarps, device: Device, kernel: WarpKernel) -> None:
        super().__init__(schedule, device)
        self.kernel, self.warps, plan = kernel, schedule.warps, schedule.plan
        # an option that the engine does not run changes nothing of how warps take experts
        stored = plan.spec is not None and as_stored(plan.spec, plan.options, plan.limits)
        self.by_kernel = stored and any(stage.routed for stage in plan.stages)
        self.ffn_in_memory = self.by_kernel and self.warps.ffn.in_memory
        self.wide: dict[int, Matrix | None] = {}

    def weights(self, stage: Stage, block: int, experts: Chosen) -> Weights:
        if by_own_rows(self.plan, stage):  # its columns come past the ring, before they are used
            return NOTHING
        if not stage.matrices:
            return self._cached(stage, block)
        if stage.routed and not (always_all(stage.routed) and self.plan.tokens == 1):
            return self._of_several(stage, block, experts)
        if wide := self._one_matrix(stage):
            key: object = (self._share(wide, block, experts), wide.joined)
            if key not in self.known:
                kept = stage.kind is StageKind.ROUTED_DOWN and self.ffn_in_memory
                tiles = tuple(self._tiles(wide, *wide.owned[block], 1, whole_tiles=kept))
                self.known[key] = (
                    Weights(*map(tuple, zip(*tiles, strict=True))) if tiles else NOTHING
                )
            return self.known[key]
        return super().weights(stage, block, experts)

    def _one_matrix(self, stage: Stage) -> Matrix | None:
        """Of experts that warps multiply for one token: the chosen ones' rows or columns are one
        matrix to them, as to our kernel's.
        """
        if stage.routed is None:
            return None
        if stage.index not in self.wide:
            self.wide[stage.index] = of_all_chosen(self.plan, stage)
        return self.wide[stage.index]

    def _of_several(self, stage: Stage, block: int, experts: Chosen) -> Weights:
        """Of experts that several tokens choose, or of which a rank holds some: all their rows one
        below the other, and columns of as many side by side as one token chooses. Tokens that did
        not choose an expert bring it zeros, so tensor cores make the products of all of them at
        once.
        """
        (matrix,), routed = stage.matrices, stage.routed
        assert routed is not None
        tokens, top_k = max(experts, default=1), routed.top_k
        if matrix.owned:
            key: object = (self._share(matrix, block, experts), len(experts), tokens)
            spans = [(*matrix.owned[block], self._one_matrix(stage))] * (len(experts) // top_k)
            if rest := len(experts) % top_k:
                spans.append((*matrix.owned[block], side_by_side(matrix, rest)))
        else:
            width = matrix.rows // matrix.unit
            share = routed_share(width * len(experts), self.plan.blocks, block, matrix.share_step)
            lo, hi = (matrix.unit * end for end in share)
            key = (self._share(matrix, hi - lo, experts), hi - lo, tokens)
            spans = [(lo, hi, matrix)]
        if key not in self.known:
            kept = stage.kind is StageKind.ROUTED_DOWN and self.ffn_in_memory
            slots = [
                slot
                for lo, hi, wide in spans
                if wide
                for slot in self._tiles(wide, lo, hi, tokens, whole_tiles=kept)
            ]
            self.known[key] = Weights(*map(tuple, zip(*slots, strict=True))) if slots else NOTHING
        return self.known[key]

    def _cached(self, stage: Stage, block: int) -> Weights:
        """Keys and values that a block of warps gets through its ring, between the weights of the
        stages around.
        """
        if not stage.items or stage.scan is not None:
            return NOTHING
        sizes = tuple(
            attention.item_kv_bytes(self.plan, stage, item) for item in range(*stage.items[block])
        )
        key = (stage.kind, stage.heads, sizes)
        if key not in self.known:
            own, scan = self.plan.attention_of(stage), self.schedule.scans[stage.heads]
            slots = [
                slot
                for size in sizes
                for slot in attention.cache_tiles(self.kernel, self.plan, own, scan, size)
            ]
            self.known[key] = Weights(
                tuple(ps for _, ps in slots), tuple(size for size, _ in slots)
            )
        return self.known[key]

    def _tiles(
        self,
        matrix: Matrix,
        first: int,
        last: int,
        tokens: int,
        *,
        joined: bool = True,
        whole_tiles: bool = False,
    ) -> Iterator[tuple[int, int]]:
        known: dict[tuple[int, int, int, int], tuple[int, int]] = {}
        batch_rows = matrix.batch_rows
        at_once = tiles.teams_at_once(matrix, self.plan.options.weight_dtype)
        for (lo, hi), (left, right) in tiles_of(matrix, first, last):
            begun = lo - (lo - first) % batch_rows
            groups = -(-(min(last, begun + batch_rows) - begun) // matrix.tile_rows)
            number = (lo - begun) // matrix.tile_rows
            together = min(at_once, groups - number // at_once * at_once)
            tile = (hi - lo, right - left, hi - lo if right == matrix.cols else 0, together)
            if tile not in known:
                step_s = 0.0 if whole_tiles else self._step_s(matrix)
                known[tile] = self._team_tile(matrix, *tile, tokens, joined=joined, step_s=step_s)
            ps, size = known[tile]
            ends = right == matrix.cols and (hi == last or (hi - first) % batch_rows == 0)
            yield ps + picoseconds(self.kernel.tile_s.value) if ends else ps, size

    def _step_s(self, matrix: Matrix) -> float:
        """Of experts a loop takes a few of a tile's rows at a time, if threads decode them."""
        coded = matrix.format is not None and matrix.format.coded and not tensor_products(matrix)
        return self.kernel.step_s.value if coded and self.by_kernel else 0.0

    def _team_tile(
        self,
        matrix: Matrix,
        rows: int,
        cols: int,
        finished: int,
        groups: int,
        tokens: int,
        *,
        joined: bool,
        step_s: float,
    ) -> tuple[int, int]:
        device, dtype = self.device, self.plan.options.weight_dtype
        size = self.plan.stored_bytes(matrix, rows, cols)
        team = tiles.team_work(
            self.kernel,
            matrix,
            rows=rows,
            cols=cols,
            groups=groups,
            dtype=dtype,
            joined=joined,
            step_s=step_s,
        )
        tile = formats.Tile(
            matrix.format,
            int(size * team.weights / (rows * cols)),
            int(team.weights),
            finished,
            team.ends_ps,
        )
        return formats.tile_ps(device, dtype, tile, tokens), size

    def ahead(self, stage: Stage, weights: Weights) -> tuple[int, ...]:
        """What a block of warps has loaded into registers before the inputs are there it has only
        to multiply. That saves the loads of the first round; later ones' are hidden behind the
        products of those before. Nothing is saved where a stage begins with its inputs there: a
        probe's without any, and all behind a full barrier or a kernel's border. Nothing is taken
        where slots are only requested once the inputs are there.
        """
        if stage.matrix is None or self.device.block.loading == "on-demand":
            return ()
        prefetch = self.schedule.prefetch(stage)
        if prefetch is None:
            return ()
        waits = not self.plan.options.handoff.meets and self.plan.options.resident
        loaded = (
            tiles.team_loads_ps(
                self.device, self.kernel, self.plan.options.weight_dtype, stage.matrix
            )
            if stage.reads and waits
            else 0
        )
        first = tiles.tiles_of_a_round(stage.matrix, self.plan.options.weight_dtype)
        return tuple(
            max(0, ps - loaded) if number < first else ps
            for number, ps in enumerate(weights.costs[: prefetch.tiles(stage.matrix)])
        )

    def group(self, stage: Stage) -> int:
        prefetch = self.schedule.prefetch(stage)
        return prefetch.group if prefetch else 1

    def may_prefetch(self, stage: Stage) -> bool:
        return not self.warps.prefetch or self.prefetches(stage)

    def holds_group(self, stage: Stage) -> bool:
        prefetch = self.schedule.prefetch(stage)
        if prefetch is None or not self.prefetches(stage):
            return False
        if stage.kind is StageKind.O_PROJ:
            return prefetch.several
        return stage.kind is StageKind.DOWN and prefetch.whole

    def prefetches(self, stage: Stage) -> bool:
        prefetch = self.schedule.prefetch(stage)
        return prefetch is not None and prefetch.portions > 0

    def _kv(self, stage: Stage, block: int) -> tuple[tuple[int, int], ...]:
        """They come through the ring: `_cached`."""
        return ()

    def _entries(self, kind: StageKind, scan: Scan, item: int) -> Iterator[tuple[int, int]]:
        size, queries = scan.item_bytes(item), self._queries(scan)
        if kind is StageKind.DELTA:
            # all of it is on its way before the inputs are there, and stays in the threads'
            # registers
            yield size, queries * picoseconds(self._state_s(scan, size))
        else:
            yield from self._rounds(scan, size, queries)

    def _state_s(self, scan: Scan, size: int) -> float:
        """A block's work for an item of a recurrent state and one token."""
        elements = (size - scan.extra_bytes) // terms.FP32_BYTES
        each = -(-elements // (TEAM_WARPS * WARP))
        return self.kernel.state_s.value + each * self.kernel.state_element_s.value

    def _rounds(self, scan: Scan, size: int, queries: int) -> Iterator[tuple[int, int]]:
        """Rounds of a block's threads as our attention takes them. More query heads, and wider
        entries, are multiplied by tensor cores: each warp takes a unit of entries in turn, with
        TENSOR_TOKENS query heads at once. That is twice the products of a unit of our attention,
        whose time was probed; no kernel of ours multiplies such entries.
        """
        kernel = self.kernel
        fixed = picoseconds(kernel.item_s.value)
        if attention.by_tensor_cores(scan, queries):
            at_once = TENSOR_POSITIONS * TEAM_WARPS
            sets = -(-queries // formats.TENSOR_TOKENS)
            turn_s = attention.turn_s(kernel, 2 * scan.dim) * sets
        else:
            at_once = attention.entries_at_once(scan.dim, queries, self.plan.options.kv_dtype)
            turn_s = kernel.round_s.value
        for number, request in enumerate(terms.requests(size, scan.entry_bytes * at_once)):
            yield request, picoseconds(turn_s) + (0 if number else fixed)
