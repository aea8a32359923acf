"""Runs tiny plans word by word, in any order the hardware might choose, and says what went wrong.

Every poll, reset and store is an operation of its own; a store travels and lands whenever the
scheduler likes. A word remembers who wrote it, when, and a number that stands for its content, so a
stale read, a lost store and a wrong sum all show. Elements with the same owners and readers
everywhere behave alike and are simulated as one word. Of chosen experts' rows a block publishes as
many as the step's routing gives it, and at least one. Stages that use parts of vectors (items,
heads) are followed less closely: who wrote what they read, not what it sums up to. Resident blocks
that poll have a scheduler for sums of late parts: it begins one when the resets of the stage before
are made, and the block makes those of the stage behind when it is done. Their other resets may come
as late as before the publication of the stage behind, those of the LM head before its own. Shares
no code with twin.plan beyond the types.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from twin.models.spec import DType
from twin.plan.catalogue import StageKind
from twin.plan.options import CollectiveKind, Execution, HandOffKind, Residual
from twin.plan.types import Parts, Plan, Stage
from twin.schedule.choose import schedule_of

PRIME = (1 << 61) - 1
KINDS = list(StageKind)
# besides QKV and GATE_UP
ENTERING = (StageKind.HYPER, StageKind.LATENT, StageKind.DELTA_IN, StageKind.ROUTER)
# alike in every model
COMMON_KINDS = (StageKind.EMBED, StageKind.COLLECTIVE, StageKind.LM_HEAD, StageKind.SAMPLE)


class Fault(Exception):
    """What the run did wrong, and where."""


class Word(NamedTuple):
    value: int
    step: int
    rank: int  # writer
    content: int


class Op(NamedTuple):
    """One operation of one block; also the key by which a scheduler holds it back."""

    what: str  # poll, wait, reset, store, arrive, barrier
    rank: int
    block: int
    step: int
    stage: int
    about: tuple[int, ...]


def _mix(*parts: int) -> int:
    return hash(parts) * 0x9E3779B97F4A7C15 % PRIME


def _weight(element: int, salt: int) -> int:
    x = (element + 1) * 0xBF58476D1CE4E5B9 + salt
    x ^= x >> 29
    return x * x % PRIME


@dataclass(slots=True)
class Schedule:
    """How the next operation is chosen."""

    seed: int = 0
    # random, ahead (one runs on), slow (all in step), priority (a random order of blocks)
    blocks: str = "random"
    stores: str = "random"  # random, eager, late, late-remote
    held: Op | None = None  # not done before nothing else can be
    single_counter: bool = False  # one counter per (buffer, copy) instead of one per part


class Compiled:
    """The plan with elements gathered into words."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        cuts: dict[int, set[int]] = {b.id: {0, b.elements} for b in plan.buffers}
        for value in plan.values:
            cuts[value.buffer].update(edge for span in value.owned for edge in span)
        for stage in plan.stages:
            for read in stage.reads:
                cuts[plan.values[read.value].buffer].update(
                    edge for spans in set(read.spans) for span in spans for edge in span
                )
            self._model_cuts(stage, cuts)
            if divides(stage) and stage.publishes is not None:
                buffer = plan.values[stage.publishes].buffer
                cuts[buffer].update(range(plan.buffers[buffer].elements + 1))
        before = -1
        # the library copies word by word
        while before != (before := sum(len(edges) for edges in cuts.values())):
            self._equal_cuts(cuts)
        self.words = {
            b: list(zip(s := sorted(edges), s[1:], strict=False)) for b, edges in cuts.items()
        }
        self.owned = {
            v.id: [self.inside(v.buffer, (span,)) for span in v.owned] for v in plan.values
        }
        self.reads = {
            (s.index, i): [self.inside(plan.values[r.value].buffer, spans) for spans in r.spans]
            for s in plan.stages
            for i, r in enumerate(s.reads)
        }
        self.skip = self._targets()
        self.sums: dict[Any, int] = {}

    def _equal_cuts(self, cuts: dict[int, set[int]]) -> None:
        """The same words in both buffers of a library call; a buffer may belong to several."""
        plan = self.plan
        for stage in plan.stages:
            if stage.kind is StageKind.COLLECTIVE and stage.reads and stage.publishes is not None:
                pair = [
                    plan.values[stage.reads[0].value].buffer,
                    plan.values[stage.publishes].buffer,
                ]
                both = cuts[pair[0]] | cuts[pair[1]]
                for buffer in pair:
                    cuts[buffer] = {edge for edge in both if edge <= plan.buffers[buffer].elements}

    def _model_cuts(self, stage: Stage, cuts: dict[int, set[int]]) -> None:
        plan = self.plan
        if stage.publishes is not None and stage.matrix and not stage.more:
            rows = {edge // stage.matrix.unit for span in stage.matrix.owned for edge in span}
            buffer = plan.values[stage.publishes].buffer
            cuts[buffer].update(row for row in rows if row <= plan.buffers[buffer].elements)
        if stage.kind is StageKind.ATTENTION and stage.reads and stage.scan is None:
            own = plan.kernel_attention()
            vectors = own.heads + 2 * own.kv_heads
            cuts[plan.values[stage.reads[0].value].buffer].update(
                i * own.head_dim for i in range(vectors + 1)
            )
            if stage.publishes is not None:
                width = partial_width(plan)
                buffer = plan.values[stage.publishes].buffer
                cuts[buffer].update(range(0, plan.buffers[buffer].elements + 1, width))
        if stage.kind is StageKind.LM_HEAD and stage.publishes is not None:
            buffer = plan.values[stage.publishes].buffer
            if plan.buffers[buffer].elements == 2 * plan.blocks:
                cuts[buffer].update(range(2 * plan.blocks))

    def inside(self, buffer: int, spans: tuple[tuple[int, int], ...]) -> list[int]:
        return [
            i
            for i, (lo, hi) in enumerate(self.words[buffer])
            if any(a <= lo and hi <= b for a, b in spans)
        ]

    def _targets(self) -> dict[int, tuple[int, int, int, int]]:
        """value -> arrivals up to it within its step and per step: (own part, a step's own, foreign
        part, a step's foreign).
        """
        found = {}
        for value in self.plan.values:
            same = [v for v in self.plan.values if (v.buffer, v.copy) == (value.buffer, value.copy)]
            upto = [v for v in same if v.stage <= value.stage]
            found[value.id] = tuple(
                sum(sum(lo < hi for lo, hi in v.owned) for v in group if own or v.pushed)
                for own in (True, False)
                for group in (upto, same)
            )
        return found  # type: ignore[return-value]

    def weight(self, stage: int, value: int, word: int, rank: int, block: int) -> int:
        """Sum of the elements' weights; elements whose rows the block does not own count as
        garbage.
        """
        key = (stage, value, word, rank, block)
        if key not in self.sums:
            self.sums[key] = self._weight(*key)
        return self.sums[key]

    def _weight(self, index: int, value: int, word: int, rank: int, block: int) -> int:
        plan, stage = self.plan, self.plan.stages[index]
        lo, hi = self.words[plan.values[value].buffer][word]
        salt = _mix(
            KINDS.index(stage.kind),
            stage.layer,
            rank,
            stage.matrix.cols if stage.matrix else 0,
            stage.window,
        )
        if (
            stage.kind is StageKind.LM_HEAD
            and stage.matrix
            and plan.values[value].elements == 2 * plan.blocks != stage.matrix.rows
        ):
            rows = range(*stage.matrix.owned[block])
            mine = sum(_weight(row, salt) for row in rows) if lo // 2 == block else 0
            return (mine if lo % 2 == 0 else 3 * mine) % PRIME
        if stage.matrix and stage.publishes is not None and not stage.more and stage.matrix.owned:
            first, last = (edge // stage.matrix.unit for edge in stage.matrix.owned[block])
            if not first <= lo < hi <= last:
                return 0
        return sum(_weight(e, salt) for e in range(lo, hi)) % PRIME


def divides(stage: Stage) -> bool:
    """Do the blocks divide the rows of chosen experts?"""
    return stage.routed is not None and stage.matrix is not None and not stage.matrix.owned


def active(plan: Plan, value: int, rank: int, step: int, block: int) -> int:
    """Elements from a block's first that it publishes in a step: its share of the chosen experts'
    rows, at least one.
    """
    stage = plan.stages[plan.values[value].stage]
    assert stage.routed
    assert stage.matrix
    used = _mix(rank, step, stage.layer) % (stage.routed.most + 1)
    rows = used * stage.matrix.rows // stage.matrix.unit
    return max(1, (block + 1) * rows // plan.blocks - block * rows // plan.blocks)


def partial_width(plan: Plan) -> int:
    group, dim = plan.kernel_attention().group, plan.kernel_attention().head_dim
    # 16-bit outputs in pairs, maxima and sums
    words = group * dim // (1 if plan.options.kv_dtype is DType.FP32 else 2) + 2 * group
    return words + (-words) % 4


def item_words(compiled: Compiled, value: int, item: int) -> set[int]:
    """The words of q, k and v that one attention item uses."""
    plan, own = compiled.plan, compiled.plan.kernel_attention()
    head, group = item // own.splits, own.group
    vectors = [head * group + i for i in range(group)] + [
        own.heads + head,
        own.heads + own.kv_heads + head,
    ]
    spans = tuple((v * own.head_dim, (v + 1) * own.head_dim) for v in vectors)
    return set(compiled.inside(plan.values[value].buffer, spans))


@dataclass(slots=True)
class Block:
    rank: int
    block: int
    step: int = 0
    stage: int = -1
    phase: int = 3
    pending: list[Op] = field(default_factory=list)
    late: list[Op] = field(default_factory=list)  # resets that it still owes
    # (read, word) -> content, parts summed
    seen: dict[tuple[int, int], int] = field(default_factory=dict)
    residual: int = 0
    embedded: int = 0
    entered: int = 0  # the input of the layer's router
    route: tuple[int, int, int] = (-1, -1, 0)  # (step, stage, what it chose)
    kept: int = 0
    token: int = 7
    trail: list[int] = field(default_factory=list)  # what it ended up with, step by step
    landing: int = 0  # own stores of the current stage that still travel
    done: bool = False
    scheduler: Block | None = None  # while it sums late parts and the block goes on
    # (step, stage) behind which the block last let the scheduler go on
    resumed: tuple[int, int] = (0, -1)


class Machine:
    """One run of a plan for `steps` steps under one schedule."""

    def __init__(self, compiled: Compiled, schedule: Schedule, steps: int = 3) -> None:
        plan = self.plan = compiled.plan
        self.compiled, self.schedule, self.steps = compiled, schedule, steps
        self.random = random.Random(schedule.seed)
        self.memory: list[dict[tuple[int, int, int, int], Word]] = [{} for _ in range(plan.ranks)]
        self.counters: list[dict[tuple[int, int, int], int]] = [
            defaultdict(int) for _ in range(plan.ranks)
        ]
        self.blocks = {(r, b): Block(r, b) for r in range(plan.ranks) for b in range(plan.blocks)}
        self.flights: list[list[tuple[Op, int, tuple[int, ...], Word | None]]] = []
        # (step, stage) -> blocks past it
        self.finished: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        self.released = schedule.held is None
        self.of_rank = [[(r, b) for b in range(plan.blocks)] for r in range(plan.ranks)]
        self.order = list(self.blocks)
        self.random.shuffle(self.order)
        self.resident = plan.options.execution is Execution.RESIDENT
        self.sentinel = plan.options.handoff is HandOffKind.SENTINEL
        self.counter = plan.options.handoff is HandOffKind.COUNTER
        self.grid = plan.options.handoff is HandOffKind.GRID
        self.pushed_stage = {
            s.index: s.publishes is not None and plan.values[s.publishes].pushed
            for s in plan.stages
        }

    # ---- scheduling ------------------------------------------------------------------------------

    def run(self) -> dict[tuple[int, int], list[int]]:
        """What each block ended up with. Raises Fault."""
        waiting: set[tuple[int, int]] = set()
        while True:
            ready = [key for key in self.order if key not in waiting and not self.blocks[key].done]
            if not ready and not self._can_land():
                if all(block.done for block in self.blocks.values()) and not self.flights:
                    return {key: block.trail for key, block in self.blocks.items()}
                if self.released:
                    stuck = [
                        (key, block.step, block.stage, block.pending[:2])
                        for key, block in self.blocks.items()
                        if not block.done
                    ]
                    raise Fault(f"hang: {stuck[:3]}")
                self.released = True
                waiting.clear()
                continue
            if self._can_land() and (not ready or self._store_first()):
                waiting -= self._land()
                continue
            key = self._choose(ready)
            block = self.blocks[key]
            if not self._advance(block):
                waiting.add(key)
            elif block.phase == 3 and (not self.resident or self.grid or block.done):
                waiting.clear()

    def _choose(self, ready: list[tuple[int, int]]) -> tuple[int, int]:
        def progress(key: tuple[int, int]) -> int:
            block = self.blocks[key]
            return block.step * len(self.plan.stages) + block.stage

        match self.schedule.blocks:
            case "ahead":
                return max(ready, key=progress)
            case "slow":
                return min(ready, key=progress)
            case "priority":
                return ready[0]
            case _:
                return self.random.choice(ready)

    def _store_first(self) -> bool:
        match self.schedule.stores:
            case "eager":
                return True
            case "late":
                return False
            case "late-remote":
                return any(flight[0][1] == flight[0][0].rank for flight in self.flights)
            case _:
                return self.random.random() < 0.5

    def _can_land(self) -> bool:
        return any(self._free(flight[0][0]) for flight in self.flights)

    def _free(self, op: Op) -> bool:
        return self.released or op != self.schedule.held

    # ---- stores ----------------------------------------------------------------------------------

    def _land(self) -> set[tuple[int, int]]:
        """One travelling store or arrival reaches the memory it was sent to. Returns the blocks
        that it may wake.
        """
        landable = [i for i, flight in enumerate(self.flights) if self._free(flight[0][0])]
        if self.schedule.stores == "late-remote":
            local = [i for i in landable if self.flights[i][0][1] == self.flights[i][0][0].rank]
            landable = local or landable
        index = self.random.choice(landable)
        op, to, at, word = self.flights[index].pop(0)
        if not self.flights[index]:
            self.flights[index] = self.flights[-1]
            self.flights.pop()
        sender = self.blocks[op.rank, op.block]
        if (sender.step, sender.stage) == (op.step, op.stage):
            sender.landing -= 1
        woken = set(self.blocks) if not self.resident else {*self.of_rank[to], (op.rank, op.block)}
        if word is None:
            self.counters[to][at[0], at[1], at[2]] += 1
            return woken
        if to == op.rank:
            self._reset_own(sender, op, at)
        old = self.memory[to].get((at[0], at[1], at[2], at[3]))
        if self.sentinel and old is not None:
            raise Fault(f"lost: {op} lands on {old} in rank {to}")
        if old is not None and (old.value, old.step) == (word.value, word.step):
            raise Fault(f"double write: {op} over {old} in rank {to}")
        self.memory[to][at[0], at[1], at[2], at[3]] = word
        return woken

    # ---- blocks ----------------------------------------------------------------------------------

    def _advance(self, block: Block) -> bool:
        """One operation, or one change of phase, of the block or its scheduler. False: both have to
        wait.
        """
        if block.late and self.random.random() < 0.2:
            return self._reset_late(block) or self._go_on(block)
        if block.scheduler is not None and self.random.random() < 0.5:
            return self._keep(block) or self._go_on(block)
        return (
            self._go_on(block)
            or (block.scheduler is not None and self._keep(block))
            or self._reset_late(block)
        )

    def _reset_late(self, block: Block) -> bool:
        """One of the resets that the block may still owe."""
        allowed = [op for op in block.late if self._free(op)]
        if not allowed:
            return False
        op = self.random.choice(allowed)
        block.late.remove(op)
        return self._reset(op)

    def _keep(self, block: Block) -> bool:
        """One operation of the scheduler, or its step to the next stage."""
        scheduler = block.scheduler
        assert scheduler is not None
        if scheduler.pending:
            return self._one_of(scheduler)
        self._publish(scheduler, self.plan.stages[scheduler.stage])
        block.scheduler = self._scheduler_at(scheduler)
        return True

    def _scheduler_at(self, after: Block) -> Block | None:
        """At the stage behind, if a scheduler makes it."""
        index = after.stage + 1
        if not (
            self.resident
            and self.sentinel
            and index < len(self.plan.stages)
            and self.plan.stages[index].late
        ):
            return None
        scheduler = Block(after.rank, after.block, after.step, index)
        scheduler.pending = list(self._polls(scheduler, self.plan.stages[index]))
        return scheduler

    def _reset_own(self, block: Block, before: Op, at: tuple[int, ...]) -> None:
        """A block's own store or poll of a word follows the reset of that word that it made."""
        for owed in (block.late, block.pending):
            for i, op in enumerate(owed):
                if op.what != "reset" or (op.step, op.stage) > (before.step, before.stage):
                    continue
                value = self.plan.values[op.about[0]]
                if (value.buffer, value.copy, op.about[2], op.about[3]) == tuple(at):
                    owed[i] = op._replace(what="done")
                    self._reset(op)
        block.late = [op for op in block.late if op.what != "done"]

    def _go_on(self, block: Block) -> bool:
        if block.pending:
            return self._one_of(block)
        stage = self.plan.stages[block.stage] if block.stage >= 0 else None
        if block.phase == 3:
            return self._next_stage(block)
        assert stage is not None
        if block.scheduler is not None and block.resumed != (block.step, block.stage):
            return False  # sums of the stages before are not made yet
        if (
            block.phase == 1
            and block.resumed != (block.step, block.stage)
            and (scheduler := self._scheduler_at(block)) is not None
        ):
            block.scheduler, block.resumed = scheduler, (block.step, block.stage)
            scheduler.pending += block.late
            block.late = []
            return True
        block.phase += 1
        if block.phase == 1:
            own = list(self._resets(block, stage))
            if self.resident and self.sentinel and stage.kind is not StageKind.LM_HEAD:
                # made before what the block publishes in its next stage
                block.pending, block.late = block.late, own
            else:
                block.pending, block.late = block.late + own, []
        elif block.phase == 2:
            self._publish(block, stage)
        else:
            return self._finish(block, stage)
        return True

    def _one_of(self, block: Block) -> bool:
        order = list(range(len(block.pending)))
        self.random.shuffle(order)
        burst = self.schedule.blocks != "random" or self.random.random() < 0.5
        progressed = False
        for i in order:
            op = block.pending[i]
            if op.what != "done" and self._free(op) and self._try(block, op):
                block.pending[i] = op._replace(what="done")
                progressed = True
                if not burst:
                    break
        left = [op for op in block.pending if op.what != "done"]
        progressed = progressed or len(left) < len(block.pending)  # some by a store or poll
        block.pending = left
        return progressed

    def _next_stage(self, block: Block) -> bool:
        index = block.stage + 1
        while (
            self.resident
            and self.sentinel
            and index < len(self.plan.stages)
            and self.plan.stages[index].late
        ):
            index += 1  # the scheduler's
        step = block.step + (index == len(self.plan.stages))
        index %= len(self.plan.stages)
        if step == self.steps:
            block.pending, block.late = block.late, []
            if block.pending:
                return True
            block.done = True
            return True
        if self._oversubscribed(block, step, index) or not self._kernel_may_start(
            block, step, index
        ):
            return False
        if (step, index) != (0, 0) and not self._entered(block, step, index):
            return False
        block.step, block.stage, block.phase, block.landing = step, index, 0, 0
        block.seen = {}
        block.pending = list(self._polls(block, self.plan.stages[index]))
        return True

    def _oversubscribed(self, block: Block, step: int, index: int) -> bool:
        """A resident block beyond what fits starts when another one of its GPU has left."""
        limits, plan = self.plan.limits, self.plan
        if not self.resident or limits.oversubscribe or (step, index) != (0, 0):
            return False
        gpu = block.rank // plan.ranks_per_gpu
        live = [
            b
            for b in self.blocks.values()
            if b.rank // plan.ranks_per_gpu == gpu and b.stage >= 0 and not b.done
        ]
        return len(live) >= limits.blocks

    def _kernel_may_start(self, block: Block, step: int, index: int) -> bool:
        """Between kernels, all blocks of the GPU have finished and their stores to its own ranks
        have landed.
        """
        if self.resident or (step, index) == (0, 0):
            return True
        before = (step, index - 1) if index else (step - 1, len(self.plan.stages) - 1)
        gpu = block.rank // self.plan.ranks_per_gpu
        ranks = [r for r in range(self.plan.ranks) if r // self.plan.ranks_per_gpu == gpu]
        travelling = any(
            op.rank in ranks and to in ranks for flight in self.flights for op, to, _, _ in flight
        )
        return not travelling and all(
            (r, b) in self.finished[before] for r in ranks for b in range(self.plan.blocks)
        )

    def _entered(self, block: Block, step: int, index: int) -> bool:
        """A library call starts when every rank has called it."""
        if self.plan.stages[index].kind is not StageKind.COLLECTIVE:
            return True
        if self.resident or self.plan.options.collective is not CollectiveKind.LIBRARY:
            raise Fault("a library call inside a resident kernel")
        before = (step, index - 1) if index else (step - 1, len(self.plan.stages) - 1)
        return len(self.finished[before]) == len(self.blocks)

    def used(self, words: list[int], value: int, rank: int, step: int) -> list[int]:
        """Of these words those that hold something in a step."""
        plan = self.plan
        if not divides(plan.stages[plan.values[value].stage]):
            return words
        spans = [
            (lo, lo + active(plan, value, rank, step, block))
            for block, (lo, hi) in enumerate(plan.values[value].owned)
            if lo < hi
        ]
        held = self.compiled.words[plan.values[value].buffer]
        return [
            word
            for word in words
            if any(lo <= held[word][0] and held[word][1] <= hi for lo, hi in spans)
        ]

    def _polls(self, block: Block, stage: Stage) -> Iterator[Op]:
        for i, read in enumerate(stage.reads):
            if read.previous_step and block.step == 0:
                continue
            value = self.plan.values[read.value]
            words = self.used(
                self.compiled.reads[stage.index, i][block.block],
                value.id,
                block.rank,
                block.step - read.previous_step,
            )
            for part in self._parts(read.parts, block.rank, value.pushed):
                for word in words:
                    yield Op(
                        "poll", block.rank, block.block, block.step, stage.index, (i, part, word)
                    )

    def _parts(self, parts: Parts, rank: int, pushed: bool) -> list[int]:
        """Part 0 holds what is not pushed."""
        if not pushed:
            return [0] if parts is not Parts.OTHERS else []
        return [
            p
            for p in range(self.plan.ranks)
            if parts is Parts.ALL or (parts is Parts.OWN) == (p == rank)
        ]

    def _resets(self, block: Block, stage: Stage) -> Iterator[Op]:
        for reset in stage.resets:
            if reset.previous_step and block.step == 0:
                continue
            value = self.plan.values[reset.value]
            for part in range(self.plan.buffers[value.buffer].parts):
                written = block.step - reset.previous_step
                for word in self.used(
                    self.compiled.owned[value.id][block.block], value.id, block.rank, written
                ):
                    about = (value.id, int(reset.previous_step), part, word)
                    yield Op("reset", block.rank, block.block, block.step, stage.index, about)

    def _try(self, block: Block, op: Op) -> bool:
        match op.what:
            case "poll":
                return self._poll(block, op)
            case "reset":
                return self._reset(op)
            case _:
                return self._barrier_open(op)

    def _poll(self, block: Block, op: Op) -> bool:
        i, part, word = op.about
        read = self.plan.stages[op.stage].reads[i]
        value = self.plan.values[read.value]
        step = op.step - read.previous_step
        if self.counter and not self._counted(op.rank, read.value, step, part, read.parts):
            return False
        self._reset_own(block, op, (value.buffer, value.copy, part, word))
        found = self.memory[op.rank].get((value.buffer, value.copy, part, word))
        if found is None:
            if self.sentinel:
                return False
            raise Fault(f"unwritten: {op} reads {value.name}")
        expected = (value.id, step, part if value.pushed else op.rank)
        if found[:3] != expected:
            raise Fault(f"stale: {op} wants {value.name} {expected}, finds {found}")
        block.seen[i, word] = (block.seen.get((i, word), 0) + found.content) % PRIME
        return True

    def _counted(self, rank: int, value_id: int, step: int, part: int, parts: Parts) -> bool:
        """Have all arrivals up to this value come? Per part, or of all parts in one counter."""
        value = self.plan.values[value_id]
        own_upto, own_step, foreign_upto, foreign_step = self.compiled.skip[value_id]
        counters = self.counters[rank]
        if self.schedule.single_counter:
            others = self.plan.ranks - 1 if self.plan.buffers[value.buffer].parts > 1 else 0
            target = step * (own_step + others * foreign_step) + own_upto + others * foreign_upto
            return (
                sum(counters[value.buffer, value.copy, p] for p in range(self.plan.ranks)) >= target
            )
        if part == rank or not value.pushed:
            return counters[value.buffer, value.copy, rank] >= step * own_step + own_upto
        return counters[value.buffer, value.copy, part] >= step * foreign_step + foreign_upto

    def _reset(self, op: Op) -> bool:
        id, previous, part, word = op.about
        value = self.plan.values[id]
        found = self.memory[op.rank].pop((value.buffer, value.copy, part, word), None)
        written = value.pushed or part == 0
        if found is None and written and self.sentinel:
            raise Fault(f"early reset: {op} of {value.name}, which has not arrived")
        if found is not None and (found.value, found.step) != (id, op.step - previous):
            raise Fault(f"lost: {op} of {value.name} destroys {found}")
        return True

    def _publish(self, block: Block, stage: Stage) -> None:
        content = self._compute(block, stage)
        if stage.publishes is None:
            return
        value = self.plan.values[stage.publishes]
        if stage.kind is StageKind.COLLECTIVE:
            self._gather(block, stage)
            return
        part = block.rank if value.pushed else 0
        words = list(
            self.used(self.compiled.owned[value.id][block.block], value.id, block.rank, block.step)
        )
        self.random.shuffle(words)
        for to in range(self.plan.ranks) if value.pushed else (block.rank,):
            queue: list[tuple[Op, int, tuple[int, ...], Word | None]] = []
            for word in words:
                op = Op("store", block.rank, block.block, block.step, stage.index, (to, word))
                queue.append(
                    (
                        op,
                        to,
                        (value.buffer, value.copy, part, word),
                        Word(value.id, block.step, block.rank, content(word)),
                    )
                )
            if self.counter and queue:
                op = Op("arrive", block.rank, block.block, block.step, stage.index, (to,))
                queue.append((op, to, (value.buffer, value.copy, block.rank), None))
                self.flights.append(queue)
            elif queue:
                self.flights += [[store] for store in queue]
            block.landing += len(queue)

    def _gather(self, block: Block, stage: Stage) -> None:
        """The library copies what the blocks read into this rank's part on every rank, each word
        once: its owner's if that read it.
        """
        value = self.plan.values[stage.publishes or 0]
        owned, reads = self.compiled.owned[value.id], self.compiled.reads[stage.index, 0]
        for (_, word), content in block.seen.items():
            readers = sorted(
                (word not in owned[other], other)
                for other in range(self.plan.blocks)
                if word in reads[other]
            )
            if readers[0][1] != block.block:
                continue
            for to in range(self.plan.ranks):
                op = Op("store", block.rank, block.block, block.step, stage.index, (to, word))
                at = (value.buffer, value.copy, block.rank, word)
                self.flights.append([(op, to, at, Word(value.id, block.step, block.rank, content))])
                block.landing += 1
        if self.counter and value.owned[block.block][0] < value.owned[block.block][1]:
            for to in range(self.plan.ranks):
                self.counters[to][value.buffer, value.copy, block.rank] += 1

    def _finish(self, block: Block, stage: Stage) -> bool:
        """The end of the stage; grid blocks then wait for the others."""
        if stage.kind is StageKind.COLLECTIVE:
            arrivals = [
                f
                for f in self.flights
                if (f[0][0].step, f[0][0].stage) == (block.step, stage.index)
                and f[0][1] == block.rank
            ]
            everybody = all(
                (b.step, b.stage, b.phase) >= (block.step, stage.index, 2)
                for b in self.blocks.values()
            )
            if arrivals or block.landing or not everybody:
                block.phase = 2
                return False
        if self.grid and self.resident:
            if block.landing:
                block.phase = 2
                return False
            self.finished[block.step, stage.index].add((block.rank, block.block))
            block.pending = [Op("barrier", block.rank, block.block, block.step, stage.index, ())]
            return True
        self.finished[block.step, stage.index].add((block.rank, block.block))
        return True

    def _barrier_open(self, op: Op) -> bool:
        ranks = range(self.plan.ranks) if self.pushed_stage[op.stage] else (op.rank,)
        past = self.finished[op.step, op.stage]
        return all((r, b) in past for r in ranks for b in range(self.plan.blocks))

    # ---- what the numbers mean -------------------------------------------------------------------

    def _compute(self, block: Block, stage: Stage) -> Callable[[int], int]:
        """Update the block's own state and return the content of each word that it publishes."""
        compiled = self.compiled
        sums: list[int] = [0] * len(stage.reads)
        for (i, _), content in block.seen.items():
            sums[i] = (sums[i] + content) % PRIME
        plain = 0
        for read, total in zip(stage.reads, sums, strict=True):
            if read.residual:
                block.residual = (block.residual + round(read.scale * 1_000_003) * total) % PRIME
            else:
                plain = (plain + total) % PRIME
        value = stage.publishes
        if (
            self.plan.spec is not None
            and (self.plan.spec.layout or self.plan.tokens > 1)
            and stage.kind not in COMMON_KINDS
        ):
            return self._layered(block, stage, sums, plain)
        match stage.kind:
            case StageKind.EMBED:
                token = plain if stage.reads and block.step else block.token
                block.residual = block.embedded = _mix(1, token)
                block.trail.append(token)
                return lambda word: 0
            case StageKind.ATTENTION if value is not None:
                return self._attend(block, stage)
            case StageKind.SAMPLE:
                block.token = _mix(2, plain)
                block.trail.append(plain if stage.publishes is None else 0)
                return lambda word: block.token
            case StageKind.EXCHANGE | StageKind.STREAM:
                block.trail.append(plain)
        takes_residual = stage.kind in (StageKind.QKV, StageKind.GATE_UP, StageKind.LANE_MEAN) or (
            stage.kind is StageKind.LM_HEAD and not (stage.reads and not stage.reads[0].residual)
        )
        factor = _mix(block.residual) if takes_residual else _mix(plain)
        return lambda word: (
            factor * compiled.weight(stage.index, value or 0, word, block.rank, block.block) % PRIME
        )

    def _layered(
        self, block: Block, stage: Stage, sums: list[int], plain: int
    ) -> Callable[[int], int]:
        """Stages of layers described one by one."""
        whole = sums[0] if sums else 0
        factor = _mix(stage.index)
        match stage.kind:
            case StageKind.ROUTE:
                block.route = (block.step, stage.index, _mix(whole))
            case StageKind.SHARED_DOWN if stage.kept:
                block.kept = _mix(whole)
            case StageKind.SHARED_UP:
                factor = _mix(block.entered)
            case StageKind.ROUTED_UP:
                self._fetch(block, stage)
                factor = _mix(block.entered, block.route[2])
            case StageKind.ROUTED_DOWN:
                self._fetch(block, stage)
                factor = _mix(whole, block.kept, block.route[2])
                block.kept = 0
            case StageKind.O_PROJ | StageKind.DOWN:
                factor = _mix(whole)
            case kind if kind in ENTERING or kind in (StageKind.QKV, StageKind.GATE_UP):
                # then a block's own residual is that of its elements alone
                sliced = self.plan.options.residual is Residual.SLICED
                factor = block.entered = _mix(block.embedded if sliced else block.residual, plain)
        return lambda word: (
            factor
            * self.compiled.weight(stage.index, stage.publishes or 0, word, block.rank, block.block)
            % PRIME
        )

    def _fetch(self, block: Block, stage: Stage) -> None:
        """The loader asks for experts once the block is past the gate."""
        hashed = (
            getattr(self.plan.spec.layer(stage.layer).feed, "hashed", False)
            if self.plan.spec
            else False
        )
        step, known, _ = block.route
        if stage.gate is None or (not hashed and (step != block.step or stage.gate < known)):
            raise Fault(
                f"blind fetch: {stage.name} behind stage {stage.gate}, chosen in stage {known} of "
                f"step {step}"
            )

    def _attend(self, block: Block, stage: Stage) -> Callable[[int], int]:
        compiled, plan = self.compiled, self.plan
        width = partial_width(plan)

        def content(word: int) -> int:
            lo, _ = compiled.words[plan.values[stage.publishes or 0].buffer][word]
            item = lo // width
            if (
                not (stage.items[block.block][0] <= item < stage.items[block.block][1])
                or not stage.reads
            ):
                return 0
            used = item_words(compiled, stage.reads[0].value, item)
            total = sum(c for (_, w), c in block.seen.items() if w in used) % PRIME
            return (
                _mix(total)
                * compiled.weight(stage.index, stage.publishes or 0, word, block.rank, block.block)
                % PRIME
            )

        return content


# ---- what a test asks ----------------------------------------------------------------------------


def budget_faults(plan: Plan) -> list[str]:
    """Budgets by plain arithmetic."""
    o, faults = plan.options, []
    faults += ["window"] if o.window_slots > o.ring_slots else []
    for stage in plan.stages:
        for matrix in stage.matrices:
            size = (
                matrix.tile_rows
                * matrix.tile_cols
                * (matrix.format.bits / 8 if matrix.format else o.weight_dtype.bytes)
            )
            if size > o.slot_bytes:
                faults.append("tile")
            if matrix.owned and sum(hi - lo for lo, hi in matrix.owned) != matrix.rows:
                faults.append("rows")
    faults += ["ahead"] if o.ahead_slots >= o.ring_slots else []
    faults += ["memory"] if plan.memory_bytes() > plan.limits.memory_bytes else []
    faults += ["on chip"] if schedule_of(plan).block_bytes > plan.limits.on_chip_bytes else []
    faults += ["context"] if o.context > o.max_context else []
    faults += (
        ["dies"]
        if len(plan.die_of_block) != o.blocks or max(plan.die_of_block) >= plan.limits.dies
        else []
    )
    return faults


def operations(plan: Plan, step: int, rank: int = 0) -> list[Op]:
    """Everything one rank does in one step: what a scheduler can hold back."""
    machine = Machine(Compiled(plan), Schedule())
    found: list[Op] = []
    for (r, _), block in machine.blocks.items():
        if r != rank:
            continue
        block.step = step
        for stage in plan.stages:
            block.stage = stage.index
            found += machine._polls(block, stage)
            found += machine._resets(block, stage)
            if stage.publishes is not None:
                value = plan.values[stage.publishes]
                targets = range(plan.ranks) if value.pushed else (rank,)
                for word in machine.used(
                    machine.compiled.owned[value.id][block.block], value.id, rank, step
                ):
                    found += [
                        Op("store", rank, block.block, step, stage.index, (to, word))
                        for to in targets
                    ]
    return found


def find_fault(
    plan: Plan,
    schedules: list[Schedule],
    expected: dict[tuple[int, int], list[int]] | None,
    steps: int = 3,
) -> str | None:
    """The first thing that goes wrong under any of the schedules, or that any block computes
    differently from `expected`.
    """
    faults = budget_faults(plan)
    if faults:
        return str(faults)
    compiled = Compiled(plan)
    for schedule in schedules:
        try:
            trail = Machine(compiled, schedule, steps).run()
        except Fault as fault:
            return f"{schedule}: {fault}"
        if expected is not None and trail != expected:
            return f"{schedule}: computes something else"
    return None


def meaning(plan: Plan, steps: int = 3) -> dict[tuple[int, int], list[int]]:
    """What every block of a sound plan ends up with."""
    return Machine(Compiled(plan), Schedule(blocks="slow", stores="eager"), steps).run()


def schedules(seed: int, plan: Plan, count: int, sound: Plan | None = None) -> list[Schedule]:
    """Adversaries first, then single operations held back as long as anything else can run.

    Half of the latter touch a value that differs between the plan and the sound one that it was
    made from.
    """
    chance = random.Random(seed)
    counters = (False, True) if plan.options.handoff is HandOffKind.COUNTER else (False,)
    found = [
        Schedule(chance.random(), blocks, stores, None, single)
        for single in counters
        for blocks, stores in (("random", "random"), ("ahead", "late-remote"), ("priority", "late"))
    ]
    candidates = operations(plan, 1) + operations(plan, 0) if count else []
    changed = _changed(plan, sound) if sound else set()
    near = [op for op in candidates if _value_of(plan, op) in changed]
    for group in (near, candidates):
        for op in chance.sample(group, min((count + 1) // 2, len(group))):
            found.append(
                Schedule(
                    chance.random(),
                    chance.choice(("random", "ahead", "priority")),
                    "random",
                    op,
                    chance.choice(counters),
                )
            )
    return found


def _value_of(plan: Plan, op: Op) -> int | None:
    stage = plan.stages[op.stage]
    return (
        stage.reads[op.about[0]].value
        if op.what == "poll"
        else op.about[0]
        if op.what == "reset"
        else stage.publishes
    )


def _changed(plan: Plan, sound: Plan) -> set[int | None]:
    """Values that are written, read, reset or stored differently."""
    found: set[int | None] = {
        a.id for a, b in zip(plan.values, sound.values, strict=True) if a != b
    }
    for a, b in zip(plan.stages, sound.stages, strict=True):
        mine, theirs = ({*s.reads, *s.resets} for s in (a, b))
        found |= {item.value for item in mine ^ theirs}
    return found
