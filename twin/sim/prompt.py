"""Predicts how long a prompt takes that is read in passes: a recurrence over the stages of each pass, no events.

Blocks meet after every stage, so all of them follow the slowest and one stands for all. Its loader runs ahead of it by the
ring's slots; what a barrier or a norm takes beyond that the stream loses.

On tensor cores a block is bound by chains of latencies, not by bytes: all warps share a tile, so a tile costs what one warp's
instructions wait for each other, and every 8 rows end with a barrier and a sum. Loads of numbers that other blocks wrote
cost a second-level cache's latency for each round of them, which grows with the stream's share of the ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass

from twin.errors import PlanError
from twin.hardware.types import BlockUnit, Node, Number
from twin.models.spec import DType
from twin.plan.layout import step_bytes
from twin.plan.prompt import TILE_ROWS, TOKENS, chip_of, pass_stages, pass_weight_bytes, passes
from twin.plan.teams import WARP, teams_of
from twin.plan.types import Matrix, Parts, Plan, Read, Stage, StageKind
from twin.sim.cost import weight_rate

# Cycles of cuda_prompt.cuh: its instructions' latencies, judged, where they wait for each other. Two measured prompts leave 1,260
# a tile of 1,024 columns and 1,390 a round (studies/h200-prompts), which these sums were held against: no independent prediction.
STEP_CYCLES = 240  # 32 columns of a warp: activations and weights, each 30 to 60 behind other warps; two dependent products of 33; indices
TILE_CYCLES = 240  # a tile's mbarrier tried, its slot and phase computed, the warp met, the slot given back
ROUND_CYCLES = 1400  # 8 rows: sums stored, a block barrier, a table look-up, three integer divisions, 16 loads, an exponential, a store
STEP_COLUMNS = 32
STEPS_AT_ONCE = 2  # whose activations are asked for together
SHARED_BYTES_PER_CYCLE = 128
SHARED_TRAFFIC = 5  # times a weight's bytes pass shared memory: copied in, read (lanes share banks two by two), twice as many activations
GATHERED = 8  # neighbouring numbers of a norm that a thread loads at once
PARTS_AT_ONCE = 2  # of a residual read, whose loads are under way together
UTILISATION_ROUNDS = 4  # the load that slows a pass depends on its time; it settles to 0.1 % in as many


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
    count, size = passes(plan, tokens), pass_weight_bytes(plan)
    floor = count * size / (node.gpus * node.device.memory.stream_bytes_per_s.value)
    seconds, waits = _all_passes(plan, node, tokens, 0.0)
    for _ in range(UTILISATION_ROUNDS if count else 0):
        seconds, waits = _all_passes(plan, node, tokens, floor / seconds)
    return PromptTime(tokens, count, seconds, floor, size, waits)


def _all_passes(plan: Plan, node: Node, tokens: int, load: float) -> tuple[float, dict[str, float]]:
    """Seconds, and what is waited for, with the stream taking the share `load` of the ceiling."""
    model = _Passes(plan, node, load)
    chunk = plan.options.prompt_chunk
    waits: dict[str, float] = {}
    seconds = 0.0
    for first in range(0, tokens - 1, chunk):
        seconds += model.run(first, min(chunk, tokens - 1 - first), waits)
    return seconds, waits


class _Passes:
    """One block's way through the passes; what it finds in the ring stays there from pass to pass."""

    def __init__(self, plan: Plan, node: Node, load: float) -> None:
        self.plan, self.node, self.unit = plan, node, node.device.block
        self.latency = _loaded(node.device.l2.latency_s, node.device.l2.loaded_latency_s, load)
        self.hop = _loaded(node.device.handoff.hop_s, node.device.handoff.loaded_hop_s, load)
        self.tensor_cores = self.unit.loading == "ahead" and plan.options.weight_dtype is not DType.FP32
        self.threads = teams_of(plan).warps * WARP
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
        chain = self._chain(stage.matrix) if self.tensor_cores else 0.0
        seconds = max(size / rate, fetched, chain, (size - self.ahead) / self.stream)
        self.ahead = min(self.ring, max(0.0, self.ahead + seconds * self.stream - size))
        return seconds

    def _chain(self, matrix: Matrix) -> float:
        """Seconds that one warp's instructions take after one another, for the block with most rows."""
        owned = max(hi - lo for lo, hi in matrix.owned)
        rounds = sum(-(-min(matrix.tile_rows, owned - row) // TILE_ROWS) for row in range(0, owned, matrix.tile_rows))
        on_chip = self.cached // (2 * TOKENS)  # columns
        cycles, latencies = float(ROUND_CYCLES), 0
        for column in range(0, matrix.cols, matrix.tile_cols):
            cols = min(matrix.tile_cols, matrix.cols - column)
            steps = -(-cols // (STEP_COLUMNS * self.threads // WARP))
            cycles += TILE_CYCLES + steps * STEP_CYCLES
            latencies += -(-steps // STEPS_AT_ONCE) if column + cols > on_chip else 0
        return rounds * (cycles / self.unit.clock_hz.value + latencies * self.latency)

    def _fetched(self, cols: int, size: int) -> float:
        """Activations that are read again for each row group, because they do not fit the chip."""
        dtype = self.plan.options.weight_dtype
        activations = cols * TOKENS * dtype.bytes
        groups = size / (cols * self.plan.options.tile_rows * dtype.bytes)
        return max(0, activations - (self.cached if dtype is not DType.FP32 else 0)) * groups

    def _waits(self, stage: Stage, first: int, tokens: int) -> dict[str, float]:
        """Seconds in which a block consumes no weights, by cause."""
        plan = self.plan
        normed = stage.kind in (StageKind.QKV, StageKind.GATE_UP)
        waits = {"barriers": (1 + normed) * self._barrier_s()}
        if normed:
            waits["norms"] = -(-tokens // plan.blocks) * self._norm_s(stage)
        if stage.matrix:
            activations = min(self.cached, stage.matrix.cols * TOKENS * 2)
            waits["fetches"] = activations / self.cache + self.latency
        else:
            waits["attention"] = self._attention_s(stage, first, tokens)
        return waits

    def _norm_s(self, stage: Stage) -> float:
        """One token: residual and parts, each round of loads waited for before the next; then the residual again, scaled."""
        plan, unit = self.plan, self.unit
        parts = [_parts(plan, read) for read in stage.reads]
        elements = plan.shard.hidden * (2 + sum(parts))
        if not self.tensor_cores:
            return elements * unit.element_s.value
        loads = 2 + sum(-(-count // PARTS_AT_ONCE) for count in parts)
        return -(-plan.shard.hidden // (GATHERED * self.threads)) * loads * self.latency + unit.stage_s.value

    def _barrier_s(self) -> float:
        """Arrivals of all blocks queue at one counter of each GPU."""
        handoff, plan = self.node.device.handoff, self.plan
        across = self.node.link.hop_s.value if self.node.link and plan.options.gpus > 1 else 0.0
        arrivals = plan.ranks * plan.blocks * handoff.atomic_s.value
        return self.hop + handoff.cross_die_s.value + arrivals + handoff.poll_s.value / 2 + across + self.unit.stage_s.value

    def _attention_s(self, stage: Stage, first: int, tokens: int) -> float:
        """Units of (kv head, token); each prepares the chunk's keys and values, and scans what came before."""
        plan, unit = self.plan, self.unit
        units = -(-plan.shard.kv_heads * tokens // plan.blocks)
        seen = min(first + tokens, stage.window) if stage.window else first + tokens
        size = 2 * seen * plan.shard.head_dim * plan.kv.dtype.bytes
        loads = self._loads(tokens) if self.tensor_cores else 1
        warps = self.node.device.warps
        elements = 2 * tokens * plan.shard.head_dim * unit.element_s.value
        prepared = warps.item_s.value + warps.heads_s.value if warps and self.tensor_cores else elements
        return units * (size / unit.kv_bytes_per_s.value + prepared + loads * self.latency)

    def _loads(self, tokens: int) -> int:
        """Rounds of loads before a unit scans: the chunk's keys and values and the unit's queries, then angles; a number a thread each."""
        shard = self.plan.shard
        rows = 2 * tokens + shard.heads // shard.kv_heads
        return sum(-(-count * shard.head_dim // self.threads) for count in (rows, tokens))


def pass_rate(unit: BlockUnit, dtype: DType, tokens: int) -> float:
    """Bytes of weights per second that one block multiplies with a chunk: on tensor cores, or token by token."""
    if unit.loading == "ahead" and dtype is not DType.FP32:
        return SHARED_BYTES_PER_CYCLE / SHARED_TRAFFIC * unit.clock_hz.value
    return weight_rate(unit, dtype) / tokens


def _loaded(idle: Number, behind_stream: Number | None, load: float) -> float:
    """Seconds of something that takes `idle` alone and grows with the stream's share of the ceiling."""
    return idle.value + load * max(0.0, behind_stream.value - idle.value) if behind_stream else idle.value


def _parts(plan: Plan, read: Read) -> int:
    if not plan.values[read.value].pushed or read.parts is Parts.OWN:
        return 1
    return plan.ranks - (read.parts is Parts.OTHERS)
