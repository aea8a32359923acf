"""Proves that no word of an exchange buffer is reused too early, by following who knows what about whom.

`own[b, x]` is the latest stage (on a time line of three unrolled steps) that block b knows block x of its rank to have
completed, meaning its reads and its resets; `foreign[b, x]` is the same for block x of *every* other rank, which is one number
because all ranks run the same plan. A successful poll teaches what the writer knew when it published. A path of
knowledge that starts at some stage only uses what is published after it, so a hazard holds in every step or in none
and is checked once.

Assumed of an executor: a block's reads and resets are performed before its publication can be seen, at whatever
rank it is seen (release), and nothing after a successful poll is performed before it (acquire).

Sums of late parts (`Stage.late`) a helper of the block may make beside the block's other stages. It begins when the block's reads of the
stage before have succeeded, and the block publishes in the stage behind only when the helper is done: so resets and publications follow
it as in the plan. Polls do not: the block begins them with what its own reads taught it (`polling`), without what the helper learned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twin.plan.types import Execution, HandOffKind, Parts, Plan, Read, Span, Stage, StageKind, Value
from twin.proof.violation import Violation

STEPS = 3  # a value, its reset at most a step later, the next value in that copy and its polls at most a step after it
NEVER = -1

Times = NDArray[np.int32]  # [blocks, blocks]
Mask = NDArray[np.bool_]
Numbers = NDArray[np.intp]  # of blocks
Check = Callable[[], Violation | None]


@dataclass(slots=True)
class Proof:
    """What the search found: how many orderings it proved, and those that do not hold."""

    orderings: int = 0
    violations: list[Violation] = field(default_factory=list)


def prove_reuse(plan: Plan) -> Proof:
    """Check every reuse of every exchange buffer. The plan's structure must be sound."""
    machine = _Machine(plan)
    if plan.options.handoff is HandOffKind.SENTINEL:
        _plan_sentinel_checks(machine)
    else:
        _plan_counter_checks(machine)
    return machine.run()


@dataclass(slots=True)
class _Machine:
    """All blocks of one rank, walked stage by stage."""

    plan: Plan
    proof: Proof = field(default_factory=Proof)
    own: Times = field(init=False)
    foreign: Times = field(init=False)
    polling: Times | None = field(init=False)  # `own` without what sums of late parts add to it; None: no helper makes any
    on_entry: dict[int, list[Check]] = field(default_factory=lambda: defaultdict(list))
    after_reads: dict[int, list[Check]] = field(default_factory=lambda: defaultdict(list))
    published: dict[tuple[int, int], tuple[Times, Times]] = field(default_factory=dict)
    masks: dict[tuple[int, int], Mask] = field(default_factory=dict)
    overlaps: dict[tuple[int, int], Mask] = field(default_factory=dict)
    polls: dict[tuple[int, int], list[tuple[Numbers, Numbers]]] = field(default_factory=dict)
    last_reads: dict[int, list[tuple[int, bool]]] = field(
        default_factory=lambda: defaultdict(list)
    )  # [stage] values read for the last time

    def __post_init__(self) -> None:
        last: dict[int, tuple[int, bool]] = {}
        for stage in self.plan.stages:
            for read in stage.reads:
                last[read.value] = max(last.get(read.value, (-1, False)), (stage.index, read.previous_step), key=lambda at: (at[1], at[0]))
        for value, (index, previous) in last.items():
            self.last_reads[index].append((value, previous))
        blocks = self.plan.blocks
        self.own = np.full((blocks, blocks), NEVER, np.int32)
        self.foreign = np.full((blocks, blocks), NEVER, np.int32)
        resident = self.plan.options.execution is Execution.RESIDENT
        self.polling = self.own.copy() if resident and any(stage.late for stage in self.plan.stages) else None

    def run(self) -> Proof:
        for step in range(STEPS):
            self.walk(step)
        return self.proof

    def walk(self, step: int) -> None:
        for stage in self.plan.stages:
            self._stage(stage, step)

    def _stage(self, stage: Stage, step: int) -> None:
        now = step * len(self.plan.stages) + stage.index
        self._enter(stage, now)
        for read in stage.reads:
            self._learn(stage, read, step)
        if stage.kind is StageKind.COLLECTIVE:  # the library returns when every rank has called it
            np.maximum(self.foreign, now - 1, out=self.foreign)
        np.fill_diagonal(self.own, now)
        if self.polling is not None and not stage.late:
            np.fill_diagonal(self.polling, now)
        self._check(self.after_reads.pop(now, []))
        if stage.publishes is not None:
            self.published[stage.publishes, step] = (self.own.copy(), self.foreign.copy())
        for value, previous in self.last_reads.get(stage.index, ()):
            self.published.pop((value, step - previous), None)
        self._barrier(stage, now)

    def _enter(self, stage: Stage, now: int) -> None:
        checks, latest = self.on_entry.pop(now, []), self.own
        if self.polling is not None and not stage.late:
            self.own = self.polling
        self._check(checks)
        self.own = latest

    def _check(self, checks: list[Check]) -> None:
        self.proof.orderings += len(checks)
        self.proof.violations += [found for check in checks if (found := check()) is not None]

    def _learn(self, stage: Stage, read: Read, step: int) -> None:
        """Every block that polled takes over what the writers it saw knew when they published."""
        known = self.published.get((read.value, step - read.previous_step))
        if known is None or self.plan.options.handoff is HandOffKind.GRID:
            return
        for blocks, writers in self._polled(read):
            of_writer, of_others = known[0][writers].max(axis=0), known[1][writers].max(axis=0)
            self._take(read.parts, blocks, of_writer, of_others)
            if self.polling is not None and not stage.late:
                self._poll(read.parts, blocks, of_writer, of_others)

    def _polled(self, read: Read) -> list[tuple[Numbers, Numbers]]:
        """Blocks that poll the same elements, and the blocks that write these: found once for all steps."""
        owned = self.plan.values[read.value].owned
        key = (id(read.spans), id(owned))
        if key not in self.polls:
            counter, bounds = self.plan.options.handoff is HandOffKind.COUNTER, np.array(owned).T
            found = [(blocks, _written(owned) if counter and spans else _touched(spans, bounds)) for blocks, spans in grouped(read.spans)]
            self.polls[key] = [(blocks, np.flatnonzero(writers)) for blocks, writers in found if writers.any()]
        return self.polls[key]

    def _take(self, parts: Parts, blocks: Numbers, of_writer: Times, of_others: Times) -> None:
        """`of_writer` is about the writers' own rank, `of_others` about every rank that is foreign to them."""
        own, foreign = self.own[blocks], self.foreign[blocks]
        if parts is not Parts.OTHERS:
            np.maximum(own, of_writer, out=own)
            np.maximum(foreign, of_others, out=foreign)
        if parts is not Parts.OWN and self.plan.ranks > 1:
            np.maximum(foreign, of_writer, out=foreign)
            np.maximum(own, of_others, out=own)
            if self.plan.ranks > 2:  # with two ranks, the writer's only foreign rank is the reader's own
                np.maximum(foreign, of_others, out=foreign)
        self.own[blocks], self.foreign[blocks] = own, foreign

    def _poll(self, parts: Parts, blocks: Numbers, of_writer: Times, of_others: Times) -> None:
        """`_take` for `polling`."""
        assert self.polling is not None
        learned = of_others if parts is Parts.OTHERS else of_writer if parts is Parts.OWN else np.maximum(of_writer, of_others)
        self.polling[blocks] = np.maximum(self.polling[blocks], learned)

    def _barrier(self, stage: Stage, now: int) -> None:
        """A kernel's end orders all blocks of a GPU, the grid protocol those of a rank, or of all ranks if the stage pushed."""
        resident = self.plan.options.execution is Execution.RESIDENT
        if resident and self.plan.options.handoff is not HandOffKind.GRID:
            return
        self.own[:] = now
        if self.polling is not None:
            self.polling[:] = now
        self.foreign[:] = self.foreign.max(axis=0)
        pushed = stage.publishes is not None and self.plan.values[stage.publishes].pushed
        if pushed if resident else self.plan.options.gpus == 1:
            self.foreign[:] = now

    def touches(self, spans: tuple[tuple[Span, ...], ...], owned: tuple[Span, ...]) -> Mask:
        """[reader, owner]: does the reader poll an element of the owner?"""
        key = (id(spans), id(owned))
        if key not in self.masks:
            mask = np.zeros((self.plan.blocks, self.plan.blocks), np.bool_)
            bounds = np.array(owned).T
            for blocks, group in grouped(spans):
                mask[blocks] = _touched(group, bounds)
            self.masks[key] = mask
        return self.masks[key]

    def overlap(self, mine: tuple[Span, ...], theirs: tuple[Span, ...]) -> Mask:
        """[mine, theirs]: do both spans hold a common element?"""
        key = (id(mine), id(theirs))
        if key not in self.overlaps:
            (lo, hi), (low, high) = np.array(mine).T, np.array(theirs).T
            self.overlaps[key] = np.maximum(lo[:, None], low[None]) < np.minimum(hi[:, None], high[None])
        return self.overlaps[key]


# ---- sentinel: readers before reset before the next write, and before the next poll begins --------------------------


def _plan_sentinel_checks(machine: _Machine) -> None:
    plan, count = machine.plan, len(machine.plan.stages)
    reset_at = {r.value: s.index + count * r.previous_step for s in plan.stages for r in s.resets}
    reads = _reads(plan)
    for value in plan.values:
        if value.id not in reset_at:
            continue  # refused elsewhere: every value has exactly one reset
        for stage, read in reads[value.id]:
            check = _readers_before_reset(machine, value, stage, read, reset_at[value.id])
            machine.after_reads[reset_at[value.id]].append(check)
    for old, new, step in _successions(plan):
        if old.id not in reset_at:
            continue
        reset = reset_at[old.id] + step * count
        machine.after_reads[count + new.stage].append(_reset_before_write(machine, old, new, reset))
        for stage, read in reads[new.id]:
            polled = count * (1 + read.previous_step) + stage.index
            machine.on_entry[polled].append(_reset_before_poll(machine, old, stage, read, reset))


def _readers_before_reset(machine: _Machine, value: Value, stage: Stage, read: Read, reset: int) -> Check:
    plan = machine.plan
    read_at = stage.index + len(plan.stages) * read.previous_step
    place = plan.stages[reset % len(plan.stages)].name

    def check() -> Violation | None:
        bad = machine.touches(read.spans, value.owned) & (read_at > machine.own.T)
        if not bad.any():
            return None
        reader, owner = _first(bad)
        where = _common(read.spans[reader], value.owned[owner])
        return Violation(
            "race", place, f"block {owner} resets {value.name}[{where}] before block {reader} is known to have read it in {stage.name}"
        )

    return check


def _reset_before_write(machine: _Machine, old: Value, new: Value, reset: int) -> Check:
    plan = machine.plan
    stage, place = plan.stages[new.stage].name, plan.stages[reset % len(plan.stages)].name

    def check() -> Violation | None:
        both = machine.overlap(new.owned, old.owned)
        for known, who in ((machine.own, "its rank"), (machine.foreign, "another rank")):
            if who == "another rank" and not new.pushed:
                continue
            bad = both & (known < reset)
            if bad.any():
                writer, owner = _first(bad)
                where = _common((new.owned[writer],), old.owned[owner])
                return Violation(
                    "race",
                    stage,
                    f"block {writer} writes {new.name}[{where}] before block {owner} of {who} is known to have reset {old.name} in {place}",
                )
        return None

    return check


def _reset_before_poll(machine: _Machine, old: Value, stage: Stage, read: Read, reset: int) -> Check:
    plan = machine.plan
    new, place = plan.values[read.value], plan.stages[reset % len(plan.stages)].name

    def check() -> Violation | None:
        bad = machine.touches(read.spans, old.owned) & (machine.own < reset)
        if not bad.any():
            return None
        reader, owner = _first(bad)
        where = _common(read.spans[reader], old.owned[owner])
        return Violation(
            "race",
            stage.name,
            f"block {reader} may take a stale {old.name}[{where}] for {new.name}: block {owner} is not known to have reset it in {place}",
        )

    return check


# ---- counter, grid: readers before the next write ---------------------------------------------------------------------


def _plan_counter_checks(machine: _Machine) -> None:
    plan, count = machine.plan, len(machine.plan.stages)
    reads = _reads(plan)
    for old, new, step in _successions(plan):
        for stage, read in reads[old.id]:
            read_at = count * (step + read.previous_step) + stage.index
            machine.after_reads[count + new.stage].append(_readers_before_write(machine, old, new, stage, read, read_at))


def _readers_before_write(machine: _Machine, old: Value, new: Value, stage: Stage, read: Read, read_at: int) -> Check:
    """All writers against all readers, whatever their elements: an early arrival would also complete the old count."""

    def check() -> Violation | None:
        readers = np.array([bool(spans) for spans in read.spans])
        both = _written(new.owned)[:, None] & readers[None]
        for known, who in ((machine.own, "its rank"), (machine.foreign, "another rank")):
            if who == "another rank" and not new.pushed:
                continue
            bad = both & (known < read_at)
            if bad.any():
                writer, reader = _first(bad)
                place = machine.plan.stages[new.stage].name
                message = f"block {writer} writes {new.name} over {old.name} before block {reader} of {who} is known to have read it in"
                return Violation("race", place, f"{message} {stage.name}")
        return None

    return check


# ---- who follows whom -------------------------------------------------------------------------------------------------


def _reads(plan: Plan) -> dict[int, list[tuple[Stage, Read]]]:
    found: dict[int, list[tuple[Stage, Read]]] = {value.id: [] for value in plan.values}
    for stage in plan.stages:
        for read in stage.reads:
            found[read.value].append((stage, read))
    return found


def _successions(plan: Plan) -> Iterator[tuple[Value, Value, int]]:
    """(old, new, step of old) for each `new` of step 1 and the value before it in its copy; older ones follow by transitivity.

    A value that is not pushed still resets every part, so a pushed successor waits for it at all ranks too.
    """
    chains: dict[tuple[int, int], list[Value]] = defaultdict(list)
    for value in sorted(plan.values, key=lambda value: value.stage):
        chains[value.buffer, value.copy].append(value)
    for chain in chains.values():
        for index, new in enumerate(chain):
            yield chain[index - 1], new, int(index > 0)


def grouped(spans: tuple[tuple[Span, ...], ...]) -> Iterator[tuple[Numbers, tuple[Span, ...]]]:
    """Blocks that poll the same elements."""
    groups: dict[tuple[Span, ...], list[int]] = defaultdict(list)
    for block, group in enumerate(spans):
        groups[group].append(block)
    for group, blocks in groups.items():
        yield np.array(blocks), group


def _touched(spans: tuple[Span, ...], bounds: NDArray[np.intp]) -> Mask:
    """The owners of elements in `spans`; `bounds` [2][owner] are their first elements and those behind their last."""
    lo, hi = bounds
    touched = np.zeros(len(lo), np.bool_)
    for low, high in spans:
        touched |= np.maximum(lo, low) < np.minimum(hi, high)
    return touched


def _written(owned: tuple[Span, ...]) -> Mask:
    return np.array([lo < hi for lo, hi in owned])


def _first(bad: Mask) -> tuple[int, int]:
    row, column = np.argwhere(bad)[0]
    return int(row), int(column)


def _common(spans: tuple[Span, ...], owned: Span) -> int:
    """The first element that a reader or writer shares with the owner."""
    return min(max(lo, owned[0]) for lo, hi in spans if max(lo, owned[0]) < min(hi, owned[1]))
