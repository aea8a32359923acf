"""Predicts how long a prompt takes that is read in passes: a recurrence over the stages of each
pass, no events.

Blocks meet before every stage, so all of them follow the slowest and one stands for all. What a
barrier, a norm or attention takes the stream loses: that the next weights are requested meanwhile
shows in no measurement.

On tensor cores a block's products take its weights at the stream's rate, or what comes through the
second-level cache at the cache's, weights and activations of every batch of rows, or the steps
between two barriers one after the other: whichever takes longest. Loads of numbers that other
blocks wrote cost a second-level cache's latency for each round of them, which grows with the
stream's share of the ceiling.

What carries states through a pass is derived, not fitted: its bytes at the second-level cache's
rate, or its products at the tensor cores' rate of TF32.
"""

from __future__ import annotations

from twin.cost.attention import multiplied_bytes
from twin.cost.formats import unpacking_s
from twin.cost.terms import weight_rate
from twin.errors import PlanError
from twin.frozen import frozen
from twin.hardware.floor import floor_s
from twin.hardware.kernel import PromptCosts
from twin.hardware.number import Number
from twin.hardware.types import Node
from twin.models.spec import DType
from twin.plan.attention import Attention
from twin.plan.catalogue import ROWS, StageKind
from twin.plan.matrix import Matrix, Routed
from twin.plan.types import Parts, Plan, Read, Stage
from twin.schedule.block import TEAM_WARPS, WARP
from twin.schedule.choose import schedule_of
from twin.schedule.pass_memory import STATE_TOKENS
from twin.schedule.passes import (
    FINDS_NORMED,
    SCAN_POSITIONS,
    SCAN_ROWS,
    STEP_COLUMNS,
    Passes,
    PassStage,
    batch_of,
    batch_rows,
    eight_bits,
    experts_used,
    scan_positions,
    sharing,
)

CONVOLVED_ROUNDS = 10  # of loads that a thread waits for: taps, what is kept, tokens one by one
GATHERED = 8  # neighbouring numbers of a norm that a thread loads at once
PARTS_AT_ONCE = 2  # of a residual read, whose loads are under way together
# numbers that a thread loads at once, and how many such loads of keys, values, queries it has under
# way
COPY_PACK, COPIES = 4, 4
COPIED = COPY_PACK * COPIES
HEADS_AT_ONCE = 4  # of a token, whose loads are under way together
# a router's logits: experts and columns of a warp's step, whose loads are under way together
SCORED_EXPERTS, SCORED_COLUMNS = 4, 512
ENTRIES_AT_ONCE, SUMMED_AT_ONCE, SUMMED_COLUMNS = 8, 4, 8
# products of TF32 that a block's tensor cores make in the time of one FP32 product of its threads:
# 512 and 128 a cycle of a Hopper's SM (derived)
TF32_PRODUCTS = 4
POSITIONS = 4  # of a thread, in a warp's look for one query head without tensor cores
# the load that slows a pass depends on its time; it settles to 0.1 % in as many
UTILISATION_ROUNDS = 4


@frozen
class PromptTime:
    """All but the prompt's last token, in seconds; the last one is an ordinary step."""

    tokens: int
    passes: int
    seconds: float
    floor_s: float  # the weights of all passes at the read ceiling
    pass_bytes: int  # weights of one pass, all packages together
    # barriers, norms, fetches and attention; the stream goes on under a part of them
    waits_s: dict[str, float]

    @property
    def pass_s(self) -> float:
        return self.seconds / self.passes if self.passes else 0.0


def prompt_time(plan: Plan, node: Node, tokens: int) -> PromptTime:
    """Predicted time until the passes of a prompt of `tokens` tokens are over. Raises PlanError for
    tokens that do not fit.
    """
    if plan.spec is None:
        raise PlanError(f"{plan.name} is a probe: it reads no prompt")
    if not 1 <= tokens <= plan.options.max_context:
        raise PlanError(
            f"a prompt of {tokens} tokens: must lie between 1 and "
            f"max_context={plan.options.max_context}"
        )
    made = schedule_of(plan).passes
    if made is None:
        raise PlanError(
            "prompt_chunk=1 reads prompts by ordinary steps; multiply the step's time, or choose "
            "a larger prompt_chunk"
        )
    chunk = made.chunk
    sizes = [
        made.weight_bytes(min(chunk, tokens - 1 - first)) for first in range(0, tokens - 1, chunk)
    ]
    count, size = made.count(tokens), sum(sizes)
    # seconds, at the pipe's rate
    streamed = size / (node.gpus * node.device.memory.stream_bytes_per_s.value)
    seconds, waits = _all_passes(made, node, tokens, 0.0)
    for _ in range(UTILISATION_ROUNDS if count else 0):
        seconds, waits = _all_passes(made, node, tokens, streamed / seconds)
    each = sizes[0] if sizes else made.weight_bytes()
    return PromptTime(tokens, count, seconds, floor_s(node.device, node.gpus, size), each, waits)


def _all_passes(
    made: Passes, node: Node, tokens: int, load: float
) -> tuple[float, dict[str, float]]:
    """Seconds, and what is waited for, with the stream taking the share `load` of the pipe."""
    model, chunk = _Passes(made, node, load), made.chunk
    waits: dict[str, float] = {}
    seconds = 0.0
    for first in range(0, tokens - 1, chunk):
        seconds += model.run(first, min(chunk, tokens - 1 - first), waits)
    return seconds, waits


class _Passes:
    """One block's way through the passes."""

    def __init__(self, made: Passes, node: Node, load: float) -> None:
        plan = made.plan
        self.made, self.plan, self.node = made, plan, node
        self.kernel, self.hz = node.device.kernel, node.device.block.clock_hz.value
        assert plan.spec is not None
        self.variant = plan.spec.variant
        self.whole_qk_norm = plan.spec.whole_qk_norm
        self.latency = _loaded(node.device.l2.latency_s, node.device.l2.loaded_latency_s, load)
        self.hop = _loaded(node.device.handoff.hop_s, node.device.handoff.loaded_hop_s, load)
        narrow = plan.options.weight_dtype is not DType.FP32
        self.tensor_cores = narrow and self.kernel.prompt is not None
        resident = plan.blocks * plan.ranks_per_gpu
        self.stream = min(
            node.device.memory.stream_bytes_per_s.value / resident,
            node.device.block.load_bytes_per_s.value,
        )
        self.held = node.device.l2.capacity_bytes.value * node.device.structure.dies.value
        self.cache = node.device.l2.bytes_per_s.value * node.device.structure.dies.value / resident

    @property
    def prompt(self) -> PromptCosts:
        """What passes on tensor cores cost."""
        assert self.kernel.prompt is not None  # or nothing reads it: `tensor_cores`
        return self.kernel.prompt

    def run(self, first: int, tokens: int, waits: dict[str, float]) -> float:
        now = 0.0
        known: dict[object, float] = {}  # layers are alike
        for one in self.made.stages:
            stage, matrix = one.stage, one.multiplied
            for name, seconds in self._waits(stage, first, tokens).items():
                waits[name] = waits.get(name, 0.0) + seconds
                now += seconds
            if matrix and stage.routed:
                now += self._routed_s(one, matrix, stage.routed, tokens)
            elif matrix:
                shape = (matrix.rows, matrix.cols, matrix.unit, matrix.format, one.rows)
                if shape not in known:
                    known[shape] = self._consume(matrix, one.rows, tokens)
                now += known[shape]
        return now

    def _routed_s(self, one: PassStage, matrix: Matrix, routed: Routed, tokens: int) -> float:
        """Seconds for a block's batches of rows of all experts that some token chooses, one after
        the other. Tokens choose all experts alike.
        """
        used = experts_used(routed, tokens)
        entries = tokens * routed.top_k / used  # of an expert
        chosen = tokens * (routed.top_k - routed.always) / (used - routed.always)
        if not self.tensor_cores:  # entry by entry
            share = used * matrix.rows / self.plan.blocks
            size, weights = self._stored(matrix, share), share * matrix.cols
            if matrix.format is None:
                dtype = self.plan.options.weight_dtype
                rate = weight_rate(self.kernel, dtype)
                return max(size / self.stream, entries * weights * dtype.bytes / rate)
            return max(
                size / self.stream,
                entries * unpacking_s(self.kernel, matrix.format, round(weights)),
            )
        own = max(1, round(used * one.batches / self.plan.blocks + 0.5))  # of a block, at most
        start = self.prompt.start_cycles.value / self.hz + self.latency
        each = self._batch_s(matrix, one.rows, chosen)
        # blocks take batches in turn: some have those that all tokens visit next to others
        long = -(-routed.always * one.batches // self.plan.blocks)
        more = long * (self._batch_s(matrix, one.rows, tokens) - each) if routed.always else 0.0
        return own * (start + each) + more

    def _batch_s(self, matrix: Matrix, rows: int, entries: float) -> float:
        """Seconds for so many rows of an expert. Low-bit weights come towards the block while it
        multiplies the batch before, and are decoded within the second-level cache; those of eight
        bits step by step in shared memory.
        """
        resident = self.plan.blocks * self.plan.ranks_per_gpu
        streamed, decoded = self._stored(matrix, rows) / self.stream, 0.0
        together = 64 if entries <= 64 else 128
        by_steps = self.plan.coded and eight_bits(self.plan)  # decoded in shared memory
        wide, at_once = batch_of(rows, together, batch_rows(self.plan))
        batches = -(-rows // wide) * max(1.0, entries / together)
        steps = batches * -(-matrix.cols // STEP_COLUMNS)
        fetched = steps * 2 * STEP_COLUMNS * (min(wide, rows) + min(entries, together))
        weights = rows * matrix.cols
        if by_steps:
            fetched -= weights
            decoded = weights * self.prompt.decode_cycles.value / self.hz
        elif self.plan.coded:
            decoded = weights * self.prompt.decode_cycles.value / self.hz + self.latency
            made = weights * self.plan.options.weight_dtype.bytes
            fetched += made
            if made * resident > self.held:  # to memory and back
                streamed += 2 * made / self.stream
        turns = steps / at_once * self.prompt.turn_cycles.value / self.hz
        multiplied = max(
            streamed, fetched / (self.prompt.fetched_bytes_per_s.value / resident), decoded + turns
        )
        return multiplied + self._stored_s(rows / matrix.unit * entries)

    def _stored(self, matrix: Matrix, rows: float) -> float:
        """Bytes of so many of an expert's rows."""
        return self.plan.stored_bytes(matrix, matrix.rows, matrix.cols) * rows / matrix.rows

    def _consume(self, matrix: Matrix, rows: int, tokens: float) -> float:
        """Seconds for so many rows of a matrix."""
        dtype, weights = self.plan.options.weight_dtype, rows * matrix.cols
        size = weights * dtype.bytes
        if not self.tensor_cores:
            # token by token
            if matrix.format is None:
                return max(size / self.stream, tokens * size / weight_rate(self.kernel, dtype))
            stored = self.plan.stored_bytes(matrix, rows, matrix.cols)
            return max(
                stored / self.stream, tokens * unpacking_s(self.kernel, matrix.format, weights)
            )
        return self._decode_s(matrix, rows) + self._multiply_s(matrix, rows, int(tokens), size)

    def _decode_s(self, matrix: Matrix, rows: int) -> float:
        """Seconds in which a block writes its rows of low-bit weights in the weight type: reads and
        writes at the stream's rate, or its instructions.
        """
        if not self.plan.coded:
            return 0.0
        weights = rows * matrix.cols
        moved = self.plan.stored_bytes(matrix, rows, matrix.cols)
        moved += weights * self.plan.options.weight_dtype.bytes
        cycles = weights * self.prompt.decode_cycles.value / self.hz
        return max(moved / self.stream, cycles) + self.latency

    def _multiply_s(self, matrix: Matrix, rows: int, tokens: int, size: int) -> float:
        """On tensor cores, `size` bytes of weights in 16 bits."""
        streamed = size / self.stream
        members, tiles, together = sharing(tokens, self.made.chunk, self.plan.blocks)
        wide, at_once = batch_of(rows * members, together)
        batches = tiles * -(-rows * members // wide)
        steps = batches * -(-matrix.cols // STEP_COLUMNS)
        fetched = steps * 2 * STEP_COLUMNS * (min(wide, rows * members) + min(tokens, together))
        resident = self.plan.blocks * self.plan.ranks_per_gpu
        turns = -(-steps // at_once) * self.prompt.turn_cycles.value / self.hz
        made = max(streamed, fetched / (self.prompt.fetched_bytes_per_s.value / resident), turns)
        if matrix.unit == 2 and self.variant.activation.polynomial:
            made += rows // 2 * tokens * self.prompt.gelu_cycles.value / self.hz
        return made + self._stored_s(rows // matrix.unit * tokens)

    def _stored_s(self, elements: float) -> float:
        """Seconds in which a block stores what it has made; it makes nothing meanwhile."""
        return elements * self.prompt.stored_cycles.value / self.hz

    def _waits(self, stage: Stage, first: int, tokens: int) -> dict[str, float]:
        """Seconds in which a block consumes no weights, by cause."""
        plan = self.plan
        own = -(-tokens // plan.blocks)  # tokens of a block
        if stage.kind is StageKind.ROUTE:
            return {"choices": self._sort_s(stage, tokens)}
        if stage.kind is StageKind.ROUTER:
            return {
                "barriers": self._barrier_s(),
                "norms": self._norm_s(stage, own),
                "choices": self._score_s(stage, own),
            }
        if stage.routed:
            down = stage.kind is StageKind.ROUTED_DOWN
            return {
                "barriers": (1 + down) * self._barrier_s(),
                "sums": self._sum_s(stage.routed, own) if down else 0.0,
            }
        if stage.kind is StageKind.DELTA:
            return {"barriers": 3 * self._barrier_s(), "states": self._states_s(stage, tokens)}
        normed = bool(ROWS[stage.kind].norm) and stage.kind not in FINDS_NORMED
        waits = {"barriers": (1 + normed) * self._barrier_s()}
        if normed:
            waits["norms"] = self._norm_s(stage, own)
        if stage.matrix:
            start = self.prompt.start_cycles.value / self.hz if self.tensor_cores else 0.0
            # the rest comes while the first products are made
            waits["starts"] = start + self.latency
            if stage.kind is StageKind.CONV_IN:
                waits["barriers"] += self._barrier_s()
                waits["states"] = self._convolve_s(stage.matrix, tokens)
        else:
            waits["attention"] = self._attention_s(stage, first, tokens)
        return waits

    def _norm_s(self, stage: Stage, tokens: int) -> float:
        """A block's tokens: residual and parts, each round of loads waited for before the next;
        then the residual again, scaled.
        """
        plan = self.plan
        parts = [_parts(plan, read) for read in stage.reads]
        elements = plan.shard.hidden * (2 + sum(parts)) * tokens
        if not self.tensor_cores:
            return elements * self.kernel.element_s.value
        together = min(tokens, TEAM_WARPS)
        rounds = -(-tokens // together) * -(
            -plan.shard.hidden // (GATHERED * WARP * (TEAM_WARPS // together))
        )
        read = sum(-(-count // PARTS_AT_ONCE) for count in parts)
        # residual, parts, the residual again; before that parts which are normed, and their weights
        loads = 2 + read + (read + 1) * self.variant.norms.after
        return (
            max(rounds * loads * self.latency, 4 * elements / self.cache)
            + self.kernel.stage_s.value
        )

    def _convolve_s(self, matrix: Matrix, tokens: int) -> float:
        """A block's share of the rows of all channels, and of what becomes of them."""
        elements = matrix.rows * tokens / self.plan.blocks
        if not self.tensor_cores:
            return elements * self.kernel.element_s.value
        return max(5 * elements / self.cache, CONVOLVED_ROUNDS * self.latency)

    def _states_s(self, stage: Stage, tokens: int) -> float:
        """Recurrent states of a block: what tokens write solved for, states carried on, outputs
        normed; cuda_delta.cuh.
        """
        plan, scan = self.plan, stage.scan
        assert plan.spec is not None
        kind = plan.spec.recurrence
        assert kind is not None
        assert scan is not None
        items = -(-scan.items // plan.blocks)
        keys, columns, values = kind.key_dim, scan.page, kind.value_dim
        outputs = scan.heads * values * tokens / plan.blocks
        if not self.tensor_cores:  # two products and an update of a state for each token
            return (3 * items * tokens * keys * columns + outputs) * self.kernel.element_s.value
        chunk = min(tokens, STATE_TOKENS)
        chunks, rate = (
            -(-tokens // STATE_TOKENS),
            TF32_PRODUCTS * self.prompt.block_multiply_adds.value,
        )
        rounds = -(-chunks * (scan.heads // kind.per_key) // plan.blocks)
        solved = STATE_TOKENS**2 * (keys + kind.per_key * (values + keys) * 5 / 8)
        carried = STATE_TOKENS * columns * (3 * keys + STATE_TOKENS / 2)
        moved = 4 * chunk * (4 * keys + kind.per_key * (2 * values + keys + STATE_TOKENS / 2))
        brought = 4 * chunk * (3 * keys + STATE_TOKENS + 2 * columns)
        latencies = (2 + kind.per_key) * self.latency
        return (
            rounds * (latencies + max(moved / self.cache, solved / rate / self.hz))
            + items
            * chunks
            * (2 * self.latency + max(brought / self.cache, carried / rate / self.hz))
            + 2 * self.latency
            + 10 * outputs / self.cache
        )

    def _score_s(self, stage: Stage, tokens: int) -> float:
        """A router's logits of a block's tokens, one of each warp together, in FP32."""
        experts = self._routed_of(stage).total
        hidden = self.plan.shard.hidden
        if not self.tensor_cores:
            return tokens * experts * hidden * self.kernel.element_s.value
        together = min(tokens, TEAM_WARPS)
        rounds = -(-tokens // together) * -(-experts // (SCORED_EXPERTS * TEAM_WARPS))
        loads = rounds * -(-hidden // SCORED_COLUMNS) * self.latency
        cycles = (
            rounds
            * SCORED_EXPERTS
            * TEAM_WARPS
            * hidden
            * together
            / self.prompt.block_multiply_adds.value
        )
        size = -(-tokens // together) * experts * hidden * self.plan.options.weight_dtype.bytes
        return max(loads + cycles / self.hz, size / self.cache)

    def _sort_s(self, stage: Stage, tokens: int) -> float:
        """All entries sorted by expert, by every block for itself."""
        entries = tokens * self._routed_of(stage).top_k
        if not self.tensor_cores:
            return entries * self.kernel.element_s.value
        own = -(-entries // (WARP * TEAM_WARPS))
        cycles = own * self.prompt.sort_entry_cycles.value + self.prompt.sort_cycles.value
        return -(-own // ENTRIES_AT_ONCE) * self.latency + cycles / self.hz

    def _sum_s(self, routed: Routed, tokens: int) -> float:
        """What a block's tokens' experts made, added up."""
        hidden = self.plan.shard.hidden
        elements = tokens * routed.top_k * hidden
        if not self.tensor_cores:
            return elements * self.kernel.element_s.value
        rounds = tokens * -(-hidden // (SUMMED_COLUMNS * WARP * TEAM_WARPS))
        waits = rounds * -(-routed.top_k // SUMMED_AT_ONCE) * self.latency
        return max(waits, 4 * elements / self.cache)

    def _routed_of(self, stage: Stage) -> Routed:
        """The experts of a stage's layer."""
        of_layer = (s for s in self.plan.stages if s.layer == stage.layer)
        return next(s.routed for s in of_layer if s.routed)

    def _barrier_s(self) -> float:
        """Arrivals of all blocks queue at one counter of each GPU."""
        handoff, plan = self.node.device.handoff, self.plan
        across = self.node.link.hop_s.value if self.node.link and plan.options.gpus > 1 else 0.0
        arrivals = plan.ranks * plan.blocks * handoff.atomic_s.value
        return (
            self.hop
            + handoff.cross_die_s.value
            + arrivals
            + handoff.poll_s.value / 2
            + across
            + self.kernel.stage_s.value
        )

    def _attention_s(self, stage: Stage, first: int, tokens: int) -> float:
        """Tasks of (kv head, token), neighbours by one block: the chunk's keys and values prepared,
        then what came before scanned.
        """
        plan, own = self.plan, self.plan.kernel_attention()
        tasks = -(-own.kv_heads * tokens // plan.blocks)
        seen = min(first + tokens, stage.window) if stage.window else first + tokens
        size = seen * own.position_bytes(plan.options.kv_dtype)
        if not self.tensor_cores:
            prepared = 2 * tokens * own.head_dim * self.kernel.element_s.value
            looked = multiplied_bytes(size, plan.options.kv_dtype)
            return tasks * (looked / self.kernel.kv_bytes_per_s.value + self.latency) + prepared
        if self.made.tensor:
            return self._tensor_attention_s(own, seen, tokens)
        sets = tasks * own.group  # a query head of a token, by one warp or several
        rows = 2 * tokens + sets
        copied = -(-rows * own.head_dim // (COPIED * WARP * TEAM_WARPS)) + -(
            -tokens * own.head_dim // (COPIED * WARP * TEAM_WARPS)
        )
        prepared = (
            copied * self.latency + -(-rows // TEAM_WARPS) * self.prompt.head_cycles.value / self.hz
        )
        # of a position
        threads = next(
            threads
            for threads, most in ((8, 96), (16, 128), (32, own.head_dim))
            if own.head_dim <= most
        )
        at_once = WARP // threads * POSITIONS * max(1, TEAM_WARPS // sets)
        look = self.prompt.look_cycles.value + (
            self.prompt.cap_cycles.value if self.variant.score_cap else 0
        )
        cycles = -(-sets // TEAM_WARPS) * -(-seen // at_once) * look
        return prepared + max(cycles / self.hz, size / self.cache) + 2 * self.latency

    def _together_s(self, own: Attention) -> float:
        """For a warp's heads of a token, where all heads are normed as one vector: the squares of
        all of them.
        """
        if not self.whole_qk_norm:
            return 0.0
        return -(-own.heads * own.head_dim // (COPIED * WARP)) * self.latency

    def _tensor_attention_s(self, own: Attention, seen: int, tokens: int) -> float:
        """All heads prepared, a barrier, then rows of queries by blocks: each looks at all that its
        tokens see.
        """
        rounds = -(-own.kv_heads * -(-tokens * own.group // SCAN_ROWS) // self.plan.blocks)
        positions = scan_positions(own.head_dim)
        return (
            self._prepared_s(own, tokens)
            + self._barrier_s()
            + rounds
            * (
                -(-seen // positions) * self._tile_s(own, positions)
                + self._stored_s(SCAN_ROWS * own.head_dim / 2)
            )
            + 2 * self.latency
        )

    def _prepared_s(self, own: Attention, tokens: int) -> float:
        """All heads of the tokens normed, turned, put into the cache."""
        cycle, blocks = 1 / self.hz, self.plan.blocks
        heads = tokens * -(-(own.heads + 2 * own.kv_heads) // HEADS_AT_ONCE)
        return -(-heads // (blocks * TEAM_WARPS)) * (
            self.latency
            + HEADS_AT_ONCE * own.head_dim * self.prompt.head_element_cycles.value * cycle
            + self._together_s(own)
        )

    def _tile_s(self, own: Attention, positions: int) -> float:
        """SCAN_ROWS rows of queries and a tile of so many cached positions."""
        cycles = self.prompt.scan_element_cycles.value * own.head_dim
        if self.variant.score_cap:
            cycles += self.prompt.scan_cap_cycles.value
        cycles *= positions / SCAN_POSITIONS
        return (self.prompt.scan_cycles.value + cycles) / self.hz


def _loaded(idle: Number, behind_stream: Number | None, load: float) -> float:
    """Seconds of something that takes `idle` alone and grows with the stream's share of the
    ceiling.
    """
    return (
        idle.value + load * max(0.0, behind_stream.value - idle.value)
        if behind_stream
        else idle.value
    )


def _parts(plan: Plan, read: Read) -> int:
    if not plan.values[read.value].pushed or read.parts is Parts.OWN:
        return 1
    return plan.ranks - (read.parts is Parts.OTHERS)
