"""What works cost a core, or a block that does one thing at a time."""

from __future__ import annotations

from collections.abc import Iterator

from twin.cost import attention, formats, terms
from twin.cost.costs import Costs
from twin.cost.gathers import Gathered, Gathers
from twin.cost.streams import Streams
from twin.hardware.kernel import CoreKernel
from twin.hardware.types import Device
from twin.plan.attention import Scan
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix
from twin.plan.types import Read, Stage
from twin.schedule.types import Schedule
from twin.units import picoseconds


class CoreCosts(Costs):
    def __init__(self, schedule: Schedule, device: Device, kernel: CoreKernel) -> None:
        super().__init__(
            CoreGathers(schedule, device), CoreStreams(schedule, device, kernel), device
        )
        self.kernel = kernel

    def fixed_ps(self, stage: Stage, block: int, resets: int) -> int:
        kernel, element = self.kernel, self.kernel.element_s.value
        cost = terms.stage_cost(
            self.published(stage, block) * element,
            resets * (element / kernel.reset_elements.value),
            stage.vector_elements * element,
            kernel.stage_s.value,
        )
        return cost.ps + self._merged_ps(stage)

    def _merged_ps(self, stage: Stage) -> int:
        """In which a core adds up attention's splits."""
        each = self.kernel.merged_s
        if each is None:
            return 0
        splits = max((self.gathers.splits(stage, read) for read in stage.reads), default=0)
        return self.plan.tokens * picoseconds(stage.vector_elements * splits * each.value)


class CoreGathers(Gathers):
    """A core adds up what it reads; the bytes themselves also pass the die's pipes."""

    def _gathered(self, stage: Stage, read: Read, words: int) -> Gathered:
        return Gathered(words, picoseconds(words * self.device.kernel.element_s.value))


class CoreStreams(Streams):
    def __init__(self, schedule: Schedule, device: Device, kernel: CoreKernel) -> None:
        super().__init__(schedule, device)
        self.kernel = kernel

    def _gates_ps(self, matrix: Matrix, finished: int) -> int:
        gate = self.kernel.gate_s if matrix.unit == 2 else None
        return picoseconds(finished // 2 * gate.value) if gate else 0

    def _entries(self, kind: StageKind, scan: Scan, item: int) -> Iterator[tuple[int, int]]:
        passes = int(self.kernel.state_passes.value) if kind is StageKind.DELTA else 1
        turns = passes * -(-self._queries(scan) // formats.TENSOR_TOKENS)
        for request in terms.requests(scan.item_bytes(item), self.plan.options.slot_bytes):
            yield request, turns * attention.kv_ps(self.kernel, request, self.plan.options.kv_dtype)

    def _kv(self, stage: Stage, block: int) -> tuple[tuple[int, int], ...]:
        plan, kernel, items = self.plan, self.kernel, range(*stage.items[block])
        size = sum(attention.item_kv_bytes(plan, stage, item) for item in items)
        fixed = picoseconds(len(items) * kernel.item_s.value) if kernel.item_s else 0
        return tuple(
            (
                request,
                attention.kv_ps(kernel, request, plan.options.kv_dtype) + (0 if number else fixed),
            )
            for number, request in enumerate(terms.requests(size, plan.options.slot_bytes))
        )
