"""Predicts how long a round takes: a pass that verifies drafts, by the laws of prompt passes.

Blocks meet before and within stages (`Passes.meetings`), or hand numbers on one by one. What lies
between two stages takes no weights. Where these come through the ring, it fills meanwhile: `_Ring`
is that recurrence.
"""

from __future__ import annotations

from dataclasses import field, replace

from twin.cost.prompt import UTILISATION_ROUNDS, _Passes
from twin.errors import PlanError
from twin.frozen import frozen
from twin.hardware.floor import floor_s
from twin.hardware.kernel import CoreKernel
from twin.hardware.types import Node
from twin.models.spec import DType
from twin.plan.attention import Attention
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix
from twin.plan.types import Plan, Stage
from twin.schedule.block import TEAM_WARPS, WARP
from twin.schedule.choose import schedule_of
from twin.schedule.pass_memory import FEW_COLUMNS, FEW_INPUT_BYTES, FEW_SUMS_BYTES, FEW_TOKENS
from twin.schedule.passes import (
    ROUND_MEETINGS,
    WIDE_POSITIONS,
    Passes,
    PassStage,
    experts_used,
    scan_positions,
    with_rounds,
)

# numbers of a token's inputs that a thread copies at once; loads of a history under way together
UNIT, HISTORY_AT_ONCE = 8, 4
TILES_AT_ONCE = 4  # loads of a row, or of activations, that a warp has under way together
TILE_ROWS = 8  # of a product
HANDED_BYTES = 48 << 10  # next to the ring where numbers are handed on; `Few` in cuda_few.cuh


@frozen
class RoundTime:
    """A pass over `tokens` tokens behind so many cached positions, with the LM head, and what
    decides about its drafts.
    """

    tokens: int
    context: int
    seconds: float
    floor_s: float  # its weights at the read ceiling
    weight_bytes: int  # all packages together; of experts those that some token chooses
    meetings: int  # of all blocks
    waits_s: dict[str, float] = field(default_factory=dict)  # the ring fills meanwhile

    @property
    def causes(self) -> dict[str, float]:
        """Seconds by cause, `products` being all that no wait is."""
        waits = {name: seconds for name, seconds in self.waits_s.items() if seconds}
        return waits | {"products": self.seconds - sum(waits.values())}


def round_passes(plan: Plan) -> Passes:
    """The passes of a plan, rounds among them. Raises PlanError where prompts are read by steps."""
    made = schedule_of(plan).passes
    if made is None:
        raise PlanError(
            f"{plan.name}: passes verify drafts, and this plan reads prompts by steps; choose a "
            "prompt_chunk of at least 16"
        )
    return made if made.rounds else with_rounds(made)


def handed_on(made: Passes) -> bool:
    """Do blocks hand a round's numbers on one by one, as steps do, instead of meeting?"""
    return made.handed_on


def round_time(plan: Plan, node: Node, *, context: int, tokens: int) -> RoundTime:
    """Predicted time of a round. Raises PlanError for one without a place in the plan."""
    made = round_passes(plan)
    limit = min(made.chunk, plan.options.max_context - context)
    if not 1 <= tokens <= limit or context < 0:
        raise PlanError(
            f"a round of {tokens} tokens behind {context}: at least 1 token, at most {limit}, of a "
            f"chunk of {made.chunk} and max_context={plan.options.max_context}"
        )
    size = _weight_bytes(made, tokens)
    streamed = size / (node.gpus * node.device.memory.stream_bytes_per_s.value)
    load = 0.0
    for _ in range(UTILISATION_ROUNDS + 1):
        model = _Rounds(made, node, min(1.0, load))
        waits: dict[str, float] = {}
        seconds = model.round_s(context, tokens, waits)
        load = streamed / seconds
    meetings = sum(made.meetings(one.stage) for one in made.rounds) + ROUND_MEETINGS
    meetings *= not handed_on(made)
    floor = floor_s(node.device, node.gpus, size)
    return RoundTime(tokens, context, seconds, floor, size, meetings, waits)


def _weight_bytes(made: Passes, tokens: int) -> int:
    return replace(made, stages=made.rounds).weight_bytes(tokens)


@frozen
class _Ring:
    """What of the weights is there before blocks multiply them."""

    bytes: float
    rate: float

    def waited(self, held: float, seconds: float) -> float:
        return min(self.bytes, held + seconds * self.rate)

    def multiplied(self, held: float, size: float, seconds: float) -> tuple[float, float]:
        """(seconds for `size` bytes that take so long where all are there, what is held then)."""
        took = max(seconds, (size - held) / self.rate)
        return took, min(self.bytes, held + took * self.rate - size)


class _Rounds(_Passes):
    """One block's way through a round."""

    def __init__(self, made: Passes, node: Node, load: float) -> None:
        super().__init__(made, node, load)
        plan = self.plan
        # `STREAMED_ROUNDS` in cuda_few.cuh; of experts and low-bit weights only the twin knows
        self.streamed = (
            self.tensor_cores and plan.visited is None and not plan.coded
        ) and plan.options.weight_dtype is not DType.FP32
        # an inner division of the ring of steps: the rest holds inputs and sums
        self.handed_on = handed_on(made)
        taken = HANDED_BYTES if self.handed_on else FEW_INPUT_BYTES + 2 * FEW_SUMS_BYTES
        rest = 4 * schedule_of(plan).memory.scratch.floats - taken
        ring = plan.options.ring_slots * plan.options.slot_bytes + rest
        self.ring = _Ring(max(0.0, ring) if self.streamed else 0.0, self.stream)
        memory = node.device.memory
        self.under_way_s = (memory.under_way_s or memory.latency_s).value
        fence = node.device.handoff.fence_s
        self.fence_s = fence.value if fence else 0.0

    def _barrier_s(self) -> float:
        """What threads wrote is made visible before they arrive."""
        return super()._barrier_s() + self.fence_s

    def _consume(self, matrix: Matrix, rows: int, tokens: float) -> float:
        kernel = self.kernel
        if isinstance(kernel, CoreKernel) and kernel.further_token_ratio is not None:
            tokens = 1 + (tokens - 1) * kernel.further_token_ratio.value
        return super()._consume(matrix, rows, tokens)

    def round_s(self, first: int, tokens: int, waits: dict[str, float]) -> float:
        now, held = 0.0, self.ring.bytes  # it filled while the round before was decided
        for one in self.made.rounds:
            paused = self._paused(one.stage, first, tokens)
            for name, seconds in paused.items():
                waits[name] = waits.get(name, 0.0) + seconds
            pause, matrix = sum(paused.values()), one.multiplied
            now, held = now + pause, self.ring.waited(held, pause)
            if matrix and one.stage.routed:
                now += self._routed_s(one, matrix, one.stage.routed, tokens)
            elif matrix and self.streamed:
                size = one.rows * matrix.cols * self.plan.options.weight_dtype.bytes
                took, held = self.ring.multiplied(held, size, self._few_s(one, matrix, tokens))
                now += took
            elif matrix:
                now += self._consume(matrix, one.rows, tokens)
        decided = self._decided_s(first + tokens, tokens)
        waits["decisions"] = decided
        return now + decided

    def _paused(self, stage: Stage, first: int, tokens: int) -> dict[str, float]:
        """Seconds in which a block takes no weights, by cause."""
        if self.handed_on:
            return self._handed(stage, first, tokens)
        paused = self._waits(stage, first, tokens)
        paused["barriers"] = self.made.meetings(stage) * self._barrier_s()
        if stage.kind is StageKind.ATTENTION and self.made.tensor:
            seen = min(first + tokens, stage.window) if stage.window else first + tokens
            paused["attention"] = self._split_attention_s(
                self.plan.kernel_attention(), seen, tokens
            )
        if self.streamed and stage.matrix:
            # weights are there; inputs are copied to shared memory, or loaded with each tile
            paused["starts"] = self._brought_s(stage.matrix, tokens)
        return paused

    def _handed(self, stage: Stage, first: int, tokens: int) -> dict[str, float]:
        """The same where blocks hand numbers on one by one: each input is polled and gathered."""
        poll = self.node.device.handoff.poll_s.value
        each = self.hop + poll + self.kernel.stage_s.value + self.fence_s
        if stage.matrix:  # to threads, and from there to shared memory
            gathered = 2 * 2 * tokens * stage.matrix.cols / self.cache
            return {"hand-offs": each, "gathers": self.latency + gathered}
        seen = min(first + tokens, stage.window) if stage.window else first + tokens
        looked = self._split_attention_s(self.plan.kernel_attention(), seen, tokens)
        return {"hand-offs": 2 * each, "attention": looked}

    def _split_attention_s(self, own: Attention, seen: int, tokens: int) -> float:
        """All heads prepared, each split's tiles looked at by a block, the splits added up."""
        positions = WIDE_POSITIONS if self.handed_on else scan_positions(own.head_dim)
        tiles = -(-seen // positions)
        rounds = -(-own.kv_heads * self.made.round_splits // self.plan.blocks)
        added = -(-tokens * own.heads * own.head_dim // (self.plan.blocks * TEAM_WARPS * WARP))
        return (
            self._prepared_s(own, tokens)
            + rounds * -(-tiles // self.made.round_splits) * self._tile_s(own, positions)
            + (2 + 2 * added) * self.latency
        )

    def _brought_s(self, matrix: Matrix, tokens: int) -> float:
        if self._lies_far(matrix, tokens):
            return 0.0
        rounds = -(-tokens * matrix.cols // (UNIT * WARP * TEAM_WARPS))
        return max(self.latency, 2 * tokens * matrix.cols / self.cache) + rounds / self.hz

    def _lies_far(self, matrix: Matrix, tokens: int) -> bool:
        """Do a stage's inputs not fit shared memory next to the ring? `few_pitch`."""
        return tokens * (-(-2 * matrix.cols // 128) * 128 + 64) > FEW_INPUT_BYTES

    def _few_s(self, one: PassStage, matrix: Matrix, tokens: int) -> float:
        """Products of a block's rows and FEW_TOKENS columns, whatever the round holds of them: a
        warp has a slot of the ring while it multiplies its tile, so few warps do at a time.
        """
        prompt, cycle = self.prompt, 1 / self.hz
        rate = prompt.few_bytes_per_cycle.value
        size = one.rows * matrix.cols * self.plan.options.weight_dtype.bytes
        turn = prompt.few_turn_cycles.value
        if self.handed_on:  # inputs lie in shared memory, slices of them in turn
            rate = self.kernel.tensor_bytes_per_cycle.value
        elif self._lies_far(matrix, tokens):
            turn += prompt.few_far_cycles.value
        turns = -(-min(matrix.tile_cols, matrix.cols) // (TILES_AT_ONCE * FEW_COLUMNS))
        tile = -(-matrix.tile_rows // TILE_ROWS) * turns * turn * cycle
        refilled = self.ring.bytes / (self.under_way_s + tile)
        multiplied = max(size / refilled, size / rate * cycle)
        elements = one.rows // matrix.unit * min(tokens, FEW_TOKENS)
        return multiplied + tile + self._stored_s(elements)

    def _decided_s(self, history: int, tokens: int) -> float:
        """Each block's best logits, of all blocks' the best, the next draft."""
        plan, threads = self.plan, WARP * TEAM_WARPS
        if not self.tensor_cores:
            looked = tokens * plan.shard.vocab / plan.blocks + history
            return looked * self.kernel.element_s.value + ROUND_MEETINGS * self._barrier_s()
        own = -(-plan.shard.vocab // (plan.blocks * threads))
        matched = -(-history // (threads * HISTORY_AT_ONCE))
        best = -(-plan.ranks * plan.blocks // WARP)
        loads = tokens * own + best + 2 * matched + 4
        met = 0.0 if self.handed_on else ROUND_MEETINGS * self._barrier_s()
        return loads * self.latency + 2 * self.kernel.stage_s.value + met


def distinct_experts(plan: Plan, tokens: int) -> float | None:
    """Of a layer, that some token of a round visits; None without experts."""
    return experts_used(plan.visited, tokens) if plan.visited else None
