"""Predicts how long a prompt takes that is read in passes: a recurrence over the stages of each pass, no events.

Blocks meet after every stage, so all of them follow the slowest and one stands for all. Its loader runs ahead of it by the
ring's slots; what a barrier or a norm takes beyond that the stream loses.
"""

from __future__ import annotations

from dataclasses import dataclass

from twin.errors import PlanError
from twin.hardware.types import BlockUnit, Node
from twin.models.spec import DType
from twin.plan.layout import step_bytes
from twin.plan.prompt import TOKENS, chip_of, pass_stages, pass_weight_bytes, passes
from twin.plan.teams import teams_of
from twin.plan.types import Parts, Plan, Read, Stage, StageKind
from twin.sim.cost import weight_rate

TILE_BYTES_PER_CYCLE = 32  # tensor cores fed from shared memory: weights at 64 B a cycle, then twice as many activations at 128 (judged)


@dataclass(frozen=True, slots=True)
class PromptTime:
    """All but the prompt's last token, in seconds; the last one is an ordinary step."""

    tokens: int
    passes: int
    seconds: float
    floor_s: float  # the weights of all passes over the stream ceiling
    pass_bytes: int  # weights of one pass, all packages together
    waits_s: dict[str, float]  # barriers, norms, fetches and attention; the stream goes on under a part of them

    @property
    def pass_s(self) -> float:
        return self.seconds / self.passes if self.passes else 0.0


def prompt_time(plan: Plan, node: Node, tokens: int) -> PromptTime:
    """Predicted time until the passes of a prompt of `tokens` tokens are over. Raises PlanError for tokens that do not fit."""
    if plan.spec is None:
        raise PlanError(f"{plan.name} is a probe: it reads no prompt")
    if not 1 <= tokens <= plan.options.max_context:
        raise PlanError(f"a prompt of {tokens} tokens: must lie between 1 and max_context={plan.options.max_context}")
    if plan.options.prompt_chunk == 1:
        raise PlanError("prompt_chunk=1 reads prompts by ordinary steps; multiply the step's time, or choose a larger prompt_chunk")
    model = _Passes(plan, node)
    chunk, count = plan.options.prompt_chunk, passes(plan, tokens)
    waits: dict[str, float] = {}
    seconds = 0.0
    for number in range(count):
        first = number * chunk
        seconds += model.run(first, min(chunk, tokens - 1 - first), waits)
    ceiling = node.gpus * node.device.memory.stream_bytes_per_s.value
    size = pass_weight_bytes(plan)
    return PromptTime(tokens, count, seconds, count * size / ceiling, size, waits)


class _Passes:
    """One block's way through the passes; what it finds in the ring stays there from pass to pass."""

    def __init__(self, plan: Plan, node: Node) -> None:
        self.plan, self.node, self.unit = plan, node, node.device.block
        self.stages = tuple(pass_stages(plan))
        resident = plan.blocks * plan.ranks_per_gpu
        chip = chip_of(plan, warps=teams_of(plan).warps, room=step_bytes(plan))
        self.ring = chip.slots * plan.options.slot_bytes if self.unit.loading == "ahead" else 0
        self.cached = chip.activations
        self.stream = min(node.device.memory.stream_bytes_per_s.value / resident, self.unit.load_bytes_per_s.value)
        self.cache = node.device.l2.bytes_per_s.value * node.device.structure.dies.value / resident
        self.ahead = 0.0  # bytes in the ring

    def run(self, first: int, tokens: int, waits: dict[str, float]) -> float:
        now = 0.0
        for stage in self.stages:
            for name, seconds in self._waits(stage, first, tokens).items():
                waits[name] = waits.get(name, 0.0) + seconds
                now += seconds
                self.ahead = min(self.ring, self.ahead + seconds * self.stream)
            if stage.matrix:
                now += self._consume(stage, tokens)
        return now

    def _consume(self, stage: Stage, tokens: int) -> float:
        """Seconds for the largest share of a matrix; what the ring holds already need not be waited for."""
        assert stage.matrix is not None
        size = max(hi - lo for lo, hi in stage.matrix.owned) * stage.matrix.cols * self.plan.options.weight_dtype.bytes
        fetched = self._fetched(stage.matrix.cols, size) / self.cache
        rate = pass_rate(self.unit, self.plan.options.weight_dtype, tokens)
        seconds = max(size / rate, fetched, (size - self.ahead) / self.stream)
        self.ahead = min(self.ring, max(0.0, self.ahead + seconds * self.stream - size))
        return seconds

    def _fetched(self, cols: int, size: int) -> float:
        """Activations that are read again for each row group, because they do not fit the chip."""
        dtype = self.plan.options.weight_dtype
        activations = cols * TOKENS * dtype.bytes
        groups = size / (cols * self.plan.options.tile_rows * dtype.bytes)
        return max(0, activations - (self.cached if dtype is not DType.FP32 else 0)) * groups

    def _waits(self, stage: Stage, first: int, tokens: int) -> dict[str, float]:
        """Seconds in which a block consumes no weights, by cause."""
        unit, plan = self.unit, self.plan
        normed = stage.kind in (StageKind.QKV, StageKind.GATE_UP)
        waits = {"barriers": (1 + normed) * self._barrier_s()}
        if normed:
            elements = plan.shard.hidden * (2 + sum(_parts(plan, read) for read in stage.reads))
            waits["norms"] = -(-tokens // plan.blocks) * elements * unit.element_s.value
        if stage.matrix:
            activations = min(self.cached, stage.matrix.cols * TOKENS * 2)
            waits["fetches"] = activations / self.cache + self.node.device.l2.latency_s.value
        else:
            waits["attention"] = self._attention_s(stage, first, tokens)
        return waits

    def _barrier_s(self) -> float:
        """Arrivals of all blocks queue at one counter of each GPU."""
        handoff, plan = self.node.device.handoff, self.plan
        across = self.node.link.hop_s.value if self.node.link and plan.options.gpus > 1 else 0.0
        arrivals = plan.ranks * plan.blocks * handoff.atomic_s.value
        return handoff.hop_s.value + handoff.cross_die_s.value + arrivals + handoff.poll_s.value / 2 + across + self.unit.stage_s.value

    def _attention_s(self, stage: Stage, first: int, tokens: int) -> float:
        """Units of (kv head, token); each prepares the chunk's keys and values, and scans what came before."""
        plan, unit = self.plan, self.unit
        units = -(-plan.shard.kv_heads * tokens // plan.blocks)
        seen = min(first + tokens, stage.window) if stage.window else first + tokens
        size = 2 * seen * plan.shard.head_dim * plan.kv.dtype.bytes
        prepared = 2 * tokens * plan.shard.head_dim * unit.element_s.value
        return units * (size / unit.kv_bytes_per_s.value + prepared + self.node.device.l2.latency_s.value)


def pass_rate(unit: BlockUnit, dtype: DType, tokens: int) -> float:
    """Bytes of weights per second that one block multiplies with a chunk: on tensor cores, or token by token."""
    if unit.loading == "ahead" and dtype is not DType.FP32:
        return TILE_BYTES_PER_CYCLE * unit.clock_hz.value
    return weight_rate(unit, dtype) / tokens


def _parts(plan: Plan, read: Read) -> int:
    if not plan.values[read.value].pushed or read.parts is Parts.OWN:
        return 1
    return plan.ranks - (read.parts is Parts.OTHERS)
