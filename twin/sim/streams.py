"""What a block streams and scans in a stage: the bytes of each slot and request, and the time that
its consumer takes for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from twin.hardware.types import Device
from twin.kernel.coded import tensor_products
from twin.kernel.experts import of_all_chosen
from twin.kernel.teams import Ahead, taken_ahead, wide_ffn
from twin.plan.settle import as_stored
from twin.plan.types import Execution, HandOffKind, Matrix, Plan, Stage, StageKind, tiles_of
from twin.sim import attend, consume, cost, tiles
from twin.sim.gathers import shares
from twin.sim.routing import Chosen
from twin.units import picoseconds


@dataclass(frozen=True, slots=True)
class Weights:
    """Slots of one stage of one block: consumer time and bytes."""

    costs: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


NOTHING = Weights()


class Streams:
    """Slots and requests of a plan on a device; equal shares of equal matrices are worked out
    once.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        self.plan, self.device = plan, device
        self.known: dict[object, Weights] = {}
        # an option that the engine does not run changes nothing of how warps take experts
        stored = plan.spec is not None and as_stored(plan.spec, plan.options)
        self.by_kernel = stored and any(stage.routed for stage in plan.stages)
        self.wide_ffn = self.by_kernel and device.warps is not None and wide_ffn(plan)
        self.wide: dict[int, Matrix | None] = {}
        self.scans: dict[object, tuple[tuple[int, int], ...]] = {}

    @cached_property
    def taken(self) -> dict[StageKind, Ahead]:
        return taken_ahead(self.plan)

    def weights(self, stage: Stage, block: int, experts: Chosen) -> Weights:
        if not stage.matrices:
            return self._cached(stage, block)
        if wide := self._one_matrix(stage, experts):
            key: object = (self._share(wide, block, experts), wide.beside)
            if key not in self.known:
                kept = stage.kind is StageKind.ROUTED_DOWN and self.wide_ffn
                tiles = tuple(self._tiles(wide, *wide.owned[block], 1, whole_tiles=kept))
                self.known[key] = (
                    Weights(*map(tuple, zip(*tiles, strict=True))) if tiles else NOTHING
                )
            return self.known[key]
        shares = tuple(self._share(matrix, block, experts) for matrix in stage.matrices)
        key = (shares, experts if stage.routed else None, stage.kind is StageKind.STREAM)
        if key not in self.known:
            slots = [
                slot
                for matrix in stage.matrices
                for slot in self._slots(stage, matrix, block, experts)
            ]
            self.known[key] = Weights(
                tuple(ps for ps, _ in slots), tuple(size for _, size in slots)
            )
        return self.known[key]

    def _one_matrix(self, stage: Stage, experts: Chosen) -> Matrix | None:
        """Of experts that our kernel's warps multiply for one token: the chosen ones' rows or
        columns are one matrix to them.
        """
        if self.device.warps is None or stage.routed is None or not self.by_kernel:
            return None
        if experts != (1,) * stage.routed.top_k:
            return None
        if stage.index not in self.wide:
            self.wide[stage.index] = of_all_chosen(self.plan, stage)
        return self.wide[stage.index]

    def _cached(self, stage: Stage, block: int) -> Weights:
        """Keys and values that a block of warps gets through its ring, between the weights of the
        stages around.
        """
        if self.device.warps is None or not stage.items or stage.scan is not None:
            return NOTHING
        sizes = tuple(
            attend.item_kv_bytes(self.plan, stage, item) for item in range(*stage.items[block])
        )
        key = (stage.kind, sizes)
        if key not in self.known:
            slots = [
                slot
                for size in sizes
                for slot in attend.cache_tiles(self.device.warps, self.plan, size)
            ]
            self.known[key] = Weights(
                tuple(ps for _, ps in slots), tuple(size for size, _ in slots)
            )
        return self.known[key]

    def _share(self, matrix: Matrix, block: int, experts: Chosen) -> object:
        """What the slots of a block depend on."""
        share: object = block
        if matrix.owned:
            lo, hi = matrix.owned[block]
            share = hi - lo
        return (
            matrix.rows,
            matrix.cols,
            matrix.unit,
            matrix.tile_rows,
            matrix.tile_cols,
            matrix.format,
            share,
        )

    def _slots(
        self, stage: Stage, matrix: Matrix, block: int, experts: Chosen
    ) -> Iterator[tuple[int, int]]:
        """(consumer time, bytes) of each slot of a block, in stream order."""
        if stage.routed is None:
            joined = stage.kind is not StageKind.STREAM or not self._takes_ahead(stage)
            yield from self._tiles(matrix, *matrix.owned[block], self.plan.tokens, joined=joined)
        elif matrix.owned:
            for tokens in experts:
                yield from self._tiles(matrix, *matrix.owned[block], tokens)
        else:
            for (lo, hi), tokens in shares(matrix, self.plan.blocks, block, experts):
                yield from self._tiles(matrix, matrix.unit * lo, matrix.unit * hi, tokens)

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
        if self.device.warps is None:
            yield from self._by_rows(matrix, first, last, tokens)
            return
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
                known[tile] = self._tile(matrix, *tile, tokens, joined=joined, step_s=step_s)
            ps, size = known[tile]
            ends = right == matrix.cols and (hi == last or (hi - first) % batch_rows == 0)
            yield ps + picoseconds(self.device.warps.tile_s.value) if ends else ps, size

    def _by_rows(
        self, matrix: Matrix, first: int, last: int, tokens: int
    ) -> Iterator[tuple[int, int]]:
        """Where no teams share rows, tiles of one height cost the same: a large matrix has tens of
        thousands.
        """
        high = matrix.tile_rows
        for rows, times in ((high, (last - first) // high), ((last - first) % high, 1)):
            if rows and times:
                row = [
                    self._tile(
                        matrix,
                        rows,
                        right - left,
                        rows if right == matrix.cols else 0,
                        1,
                        tokens,
                        joined=True,
                        step_s=0.0,
                    )
                    for _, (left, right) in tiles_of(matrix, 0, rows)
                ]
                for _ in range(times):
                    yield from row

    def _step_s(self, matrix: Matrix) -> float:
        """Beside experts a loop takes a few of a tile's rows at a time, if threads decode them."""
        coded = matrix.format is not None and matrix.format.coded and not tensor_products(matrix)
        if not coded or not self.by_kernel or self.device.warps is None:
            return 0.0
        return self.device.warps.step_s.value

    def _tile(
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
        size = matrix.format.bytes(rows, cols) if matrix.format else rows * cols * dtype.bytes
        team = tiles.team_work(
            device.warps,
            matrix,
            rows=rows,
            cols=cols,
            groups=groups,
            dtype=dtype,
            joined=joined,
            step_s=step_s,
        )
        tile = consume.Tile(
            matrix.format,
            int(size * team.weights / (rows * cols)),
            int(team.weights),
            finished,
            team.ends_ps,
        )
        return consume.tile_ps(device, dtype, tile, tokens), size

    def scan(self, stage: Stage, block: int) -> tuple[tuple[int, int], ...]:
        """(bytes, consumer time) of each request for cached entries."""
        if not stage.items:
            return ()
        if stage.scan is None:
            return (
                tuple(_kv(self.plan, self.device, stage, block))
                if self.device.warps is None
                else ()
            )
        key = (stage.kind, stage.scan, stage.items[block])
        if key not in self.scans:
            items = range(*stage.items[block])
            self.scans[key] = tuple(
                request
                for item in items
                for request in consume.scan_requests(
                    self.device, self.plan, stage.kind, stage.scan, item
                )
            )
        return self.scans[key]

    def ahead(self, stage: Stage, weights: Weights) -> tuple[int, ...]:
        """What a block of warps has loaded into registers before the inputs are there it has only
        to multiply. That saves the loads of the first round; later ones' are hidden behind the
        products of those before. Nothing is saved where a stage begins with its inputs there: a
        probe's without any, and all behind a full barrier or a kernel's border. Nothing is taken
        where slots are only asked for once the inputs are there.
        """
        if (
            stage.matrix is None
            or self.device.warps is None
            or self.device.block.loading == "on-demand"
        ):
            return ()
        if stage.kind not in self.taken:
            return ()
        waits = (
            self.plan.options.handoff is not HandOffKind.GRID
            and self.plan.options.execution is Execution.RESIDENT
        )
        loaded = (
            tiles.team_loads_ps(self.device, self.plan.options.weight_dtype, stage.matrix)
            if stage.reads and waits
            else 0
        )
        first = tiles.tiles_of_a_round(stage.matrix, self.plan.options.weight_dtype)
        return tuple(
            max(0, ps - loaded) if number < first else ps
            for number, ps in enumerate(weights.costs[: self.taken[stage.kind].tiles(stage.matrix)])
        )

    def taken_ahead_of(self, stage: Stage) -> bool:
        """Does it, or would it: of a plan that the kernel has no code for nobody knows."""
        return self.device.warps is not None and (not self.taken or self._takes_ahead(stage))

    def holds_group(self, stage: Stage) -> bool:
        """Does a stage that norms nothing end later for what its teams hold before its inputs are
        there: a down projection's first row group, or of an output projection weights of several
        column slices?
        """
        if not self._takes_ahead(stage):
            return False
        ahead = self.taken[stage.kind]
        if stage.kind is StageKind.O_PROJ:
            return ahead.several
        return stage.kind is StageKind.DOWN and ahead.whole

    def _takes_ahead(self, stage: Stage) -> bool:
        """Does a block of warps ever take weights of a stage of this kind from the ring before its
        inputs are there?
        """
        return (
            self.device.warps is not None
            and stage.kind in self.taken
            and self.taken[stage.kind].portions > 0
        )


def _kv(plan: Plan, device: Device, stage: Stage, block: int) -> list[tuple[int, int]]:
    items = range(*stage.items[block])
    size = sum(attend.item_kv_bytes(plan, stage, item) for item in items)
    each = device.block.item_s
    fixed = picoseconds(len(items) * each.value) if each else 0
    return [
        (request, attend.kv_cost(device.block, request) + (0 if number else fixed))
        for number, request in enumerate(cost.requests(size, plan.options.slot_bytes))
    ]
