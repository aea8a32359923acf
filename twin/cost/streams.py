"""What a block streams and scans in a stage: the bytes of each slot and request, and the time that
its consumer takes for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from twin.cost import formats
from twin.cost.gathers import shares
from twin.cost.routing import Chosen
from twin.frozen import frozen
from twin.hardware.types import Device
from twin.plan.attention import Scan
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix, tiles_of
from twin.plan.types import Stage
from twin.schedule.scores import by_own_rows
from twin.schedule.types import Schedule


@frozen
class Weights:
    """Slots of one stage of one block: consumer time and bytes."""

    costs: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


NOTHING = Weights()


class Streams(ABC):
    """Slots and requests of a schedule; equal shares of equal matrices are worked out once."""

    def __init__(self, schedule: Schedule, device: Device) -> None:
        self.schedule, self.plan, self.device = schedule, schedule.plan, device
        self.known: dict[object, Weights] = {}
        self.scans: dict[object, tuple[tuple[int, int], ...]] = {}

    def weights(self, stage: Stage, block: int, experts: Chosen) -> Weights:
        if not stage.matrices or by_own_rows(self.plan, stage):
            return NOTHING
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
            joined = stage.kind is not StageKind.STREAM or not self.prefetches(stage)
            yield from self._tiles(matrix, *matrix.owned[block], self.plan.tokens, joined=joined)
        elif matrix.owned:
            for tokens in experts:
                yield from self._tiles(matrix, *matrix.owned[block], tokens)
        else:
            for (lo, hi), tokens in shares(matrix, self.plan.blocks, block, experts):
                yield from self._tiles(matrix, matrix.unit * lo, matrix.unit * hi, tokens)

    def _tiles(
        self, matrix: Matrix, first: int, last: int, tokens: int, *, joined: bool = True
    ) -> Iterator[tuple[int, int]]:
        """Tiles of one height cost the same: a large matrix has tens of thousands. `joined`: as
        `team_work` takes it, of warps.
        """
        high = matrix.tile_rows
        for rows, times in ((high, (last - first) // high), ((last - first) % high, 1)):
            if rows and times:
                row = [
                    self._tile(matrix, rows, right - left, ends=right == matrix.cols, tokens=tokens)
                    for _, (left, right) in tiles_of(matrix, 0, rows)
                ]
                for _ in range(times):
                    yield from row

    def _tile(
        self, matrix: Matrix, rows: int, cols: int, *, ends: bool, tokens: int
    ) -> tuple[int, int]:
        size, finished = self.plan.stored_bytes(matrix, rows, cols), rows if ends else 0
        tile = formats.Tile(
            matrix.format, size, rows * cols, finished, self._gates_ps(matrix, finished)
        )
        return formats.tile_ps(self.device, self.plan.options.weight_dtype, tile, tokens), size

    def _gates_ps(self, matrix: Matrix, finished: int) -> int:
        """Of the gates behind so many rows."""
        return 0

    def scan(self, stage: Stage, block: int) -> tuple[tuple[int, int], ...]:
        """(bytes, consumer time) of each request for cached entries."""
        if not stage.items:
            return ()
        if stage.scan is None:
            return self._kv(stage, block)
        key = (stage.kind, stage.scan, stage.items[block])
        if key not in self.scans:
            self.scans[key] = tuple(
                request
                for item in range(*stage.items[block])
                for request in self._entries(stage.kind, stage.scan, item)
            )
        return self.scans[key]

    @abstractmethod
    def _entries(self, kind: StageKind, scan: Scan, item: int) -> Iterator[tuple[int, int]]:
        """(bytes, consumer time) of the requests in which a block looks at an item's entries."""

    def _queries(self, scan: Scan) -> int:
        """Query heads that look at an entry."""
        return scan.group * (self.plan.options.draft + 1)

    @abstractmethod
    def _kv(self, stage: Stage, block: int) -> tuple[tuple[int, int], ...]:
        """Keys and values of the kernel's attention, where they come past the ring."""

    def ahead(self, stage: Stage, weights: Weights) -> tuple[int, ...]:
        """What is left of the time of slots that are loaded before a stage's inputs are there."""
        return ()

    def group(self, stage: Stage) -> int:
        """Slots that one row group of all teams takes of what is prefetched."""
        return 1

    def prefetches(self, stage: Stage) -> bool:
        """Does a block ever take weights of a stage of this kind from its ring before the stage's
        inputs are there?
        """
        return False
