"""Proves that no word of an exchange buffer is reused too early, by following who knows what about
whom.

`own[b, x]` is the latest stage (on a time line of three unrolled steps) that block b knows block x
of its rank to have completed, meaning its reads and its resets; `foreign[b, x]` is the same for
block x of *every* other rank, which is one number because all ranks run the same plan. A successful
poll teaches what the writer knew when it published. A path of knowledge that starts at some stage
only uses what is published after it, so a hazard holds in every step or in none and is checked
once.

Assumed of an executor: a block's reads are performed before its publication can be seen, at
whatever rank it is seen (release), and nothing after a successful poll is performed before it
(acquire). Resets of a resident plan are performed before the block's publication of the next stage,
those of the LM head before its own: a scheduler warp reads them back while the block computes on.
Other plans make theirs before the stage's own publication.

A block's scheduler warp may make sums of late parts (`Stage.late`) while the block goes on to other
stages. It begins when the block's reads of the stage before have succeeded, and the block publishes
in the stage behind only when the scheduler warp is done: so resets and publications follow it as in
the plan. Polls do not: the block begins them with what its own reads taught it (`polling`), without
what its scheduler warp learned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.frozen import frozen
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.options import Execution, HandOffKind
from twin.plan.types import Parts, Plan, Read, Stage, Value
from twin.proof.violation import Violation

# a value, its reset at most a step later, the next value in that copy and its polls at most a step
# after it
STEPS = 3
NEVER = -1
# groups of readers that are compared with all owners at once: more would not stay in the cache
GROUPS_AT_ONCE = 16

Times = NDArray[np.signedinteger[Any]]  # [blocks, blocks]
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


@frozen
class _Lesson:
    """Who learns from whom by one read: blocks that poll words of the same writers learn the
    same.
    """

    readers: Numbers  # blocks that poll anything that is written
    group: Numbers  # of each of them
    writers: Numbers  # of the groups, one after the other
    starts: Numbers  # [groups] in `writers`

    def latest(self, known: Times) -> Times:
        """[groups, blocks] what the writers of a group know together."""
        if len(self.starts) == 1:
            together: Times = (
                known if len(self.writers) == len(known) else known[self.writers]
            ).max(axis=0, keepdims=True)
            return together
        rows = known[self.writers]
        return (
            rows
            if len(self.starts) == len(rows)
            else np.maximum.reduceat(rows, self.starts, axis=0)
        )

    def teach(self, known: Times, news: Times) -> None:
        """`news` [groups, blocks] joins what the readers know."""
        if len(self.readers) < len(known):
            known[self.readers] = np.maximum(known[self.readers], news[self.group])
        else:  # all blocks, in order
            np.maximum(known, news if len(news) == 1 else news[self.group], out=known)


@dataclass(slots=True)
class _Machine:
    """All blocks of one rank, walked stage by stage."""

    plan: Plan
    proof: Proof = field(default_factory=Proof)
    own: Times = field(init=False)
    foreign: Times = field(init=False)
    # `own` without what sums of late parts add to it; None: no scheduler warp makes any
    polling: Times | None = field(init=False)
    on_entry: dict[int, list[Check]] = field(default_factory=lambda: defaultdict(list))
    after_reads: dict[int, list[Check]] = field(default_factory=lambda: defaultdict(list))
    reads: dict[int, list[tuple[Stage, Read]]] = field(init=False)  # by value
    # by value, step and lesson
    published: dict[tuple[int, int, int], tuple[Times, Times]] = field(default_factory=dict)
    # by stage: (value, previous step)
    last_reads: dict[int, list[tuple[int, bool]]] = field(default_factory=lambda: defaultdict(list))
    numbers: dict[int, int] = field(default_factory=dict)  # of spans, by the plan's objects
    contents: dict[object, int] = field(default_factory=dict)  # and by what they say
    masks: dict[tuple[int, int], Mask] = field(default_factory=dict)
    overlaps: dict[tuple[int, int], Mask] = field(default_factory=dict)
    lessons: dict[tuple[int, int], _Lesson | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reads = _reads(self.plan)
        last: dict[int, tuple[int, bool]] = {}
        for stage in self.plan.stages:
            for read in stage.reads:
                last[read.value] = max(
                    last.get(read.value, (-1, False)),
                    (stage.index, read.previous_step),
                    key=lambda at: (at[1], at[0]),
                )
        for value, (index, previous) in last.items():
            self.last_reads[index].append((value, previous))
        small = STEPS * len(self.plan.stages) <= np.iinfo(np.int16).max
        # half the bytes to go through
        times: type[np.signedinteger[Any]] = np.int16 if small else np.int32
        self.own = np.full((self.plan.blocks, self.plan.blocks), NEVER, times)
        self.foreign = self.own.copy()
        resident = self.plan.options.execution is Execution.RESIDENT
        self.polling = (
            self.own.copy() if resident and any(stage.late for stage in self.plan.stages) else None
        )

    def run(self) -> Proof:
        """Walks the steps until nothing is left to check."""
        for step in range(STEPS):
            for stage in self.plan.stages:
                if not self.on_entry and not self.after_reads:
                    return self.proof
                self.walk(stage, step)
        return self.proof

    def walk(self, stage: Stage, step: int) -> None:
        """What all blocks know once they have done the stage, with the checks that belong to it."""
        now = step * len(self.plan.stages) + stage.index
        late = stage.late
        self._enter(now, polls=not late)
        for read in stage.reads:
            self._learn(read, step, polls=not late)
        if stage.kind is StageKind.COLLECTIVE:  # the library returns when every rank has called it
            np.maximum(self.foreign, now - 1, out=self.foreign)
        np.fill_diagonal(self.own, now)
        if self.polling is not None and not late:
            np.fill_diagonal(self.polling, now)
        self._check(self.after_reads.pop(now, []))
        if stage.publishes is not None:
            self._publish(stage.publishes, step)
        for value, previous in self.last_reads.get(stage.index, ()):
            for _, read in self.reads[value]:
                self.published.pop((value, step - previous, self._number(read.spans)), None)
        self._barrier(stage, now)

    def _enter(self, now: int, *, polls: bool) -> None:
        checks, latest = self.on_entry.pop(now, []), self.own
        if self.polling is not None and polls:
            self.own = self.polling
        self._check(checks)
        self.own = latest

    def _check(self, checks: list[Check]) -> None:
        self.proof.orderings += len(checks)
        self.proof.violations += [found for check in checks if (found := check()) is not None]

    def _publish(self, id: int, step: int) -> None:
        """Keeps what the readers of a value will learn: of all that its writers know, only that."""
        if self.plan.options.handoff is HandOffKind.GRID:
            return
        for _, read in self.reads[id]:
            key, lesson = (id, step, self._number(read.spans)), self._lesson(read)
            if lesson is not None and key not in self.published:
                self.published[key] = (lesson.latest(self.own), lesson.latest(self.foreign))

    def _learn(self, read: Read, step: int, *, polls: bool) -> None:
        """Every block that polled takes over what the writers it saw knew when they published:
        about their own rank, and about every rank that is foreign to them.
        """
        known = self.published.get(
            (read.value, step - read.previous_step, self._number(read.spans))
        )
        lesson = self._lesson(read)
        if known is None or lesson is None:
            return
        of_writer, of_others = known
        about_own, about_others = of_writer, of_others
        if read.parts is not Parts.OWN:
            either = np.maximum(of_writer, of_others)
            about_own = of_others if read.parts is Parts.OTHERS else either
            # With two ranks, the writer's only foreign rank is the reader's own.
            about_others = (
                of_writer if read.parts is Parts.OTHERS and self.plan.ranks == 2 else either
            )
        lesson.teach(self.own, about_own)
        if self.plan.ranks > 1:
            lesson.teach(self.foreign, about_others)
        if self.polling is not None and polls:
            lesson.teach(self.polling, about_own)

    def _lesson(self, read: Read) -> _Lesson | None:
        """None: no block polls anything that is written. Found once for all steps and for all
        layers that are alike.
        """
        owned = _written_by(self.plan.values[read.value])
        key = (self._number(read.spans), self._number(owned))
        if key not in self.lessons:
            if self.plan.options.handoff is HandOffKind.COUNTER:
                polled = (
                    np.array([bool(spans) for spans in read.spans])[:, None] & _written(owned)[None]
                )
            else:
                polled = self.touches(read.spans, owned)
            self.lessons[key] = _lesson_of(polled)
        return self.lessons[key]

    def _number(self, spans: tuple[object, ...]) -> int:
        """Equal spans share it: layers that are alike have them in tuples of their own, which are
        compared here once.
        """
        known = self.numbers.get(id(spans))
        if known is None:
            known = self.numbers[id(spans)] = self.contents.setdefault(spans, len(self.contents))
        return known

    def _barrier(self, stage: Stage, now: int) -> None:
        """A kernel's end orders all blocks of a GPU, the grid protocol those of a rank, or of all
        ranks if the stage pushed.
        """
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
        key = (self._number(spans), self._number(owned))
        if key not in self.masks:
            self.masks[key] = _touched(spans, owned)
        return self.masks[key]

    def overlap(self, mine: tuple[Span, ...], theirs: tuple[Span, ...]) -> Mask:
        """[mine, theirs]: do both spans hold a common element?"""
        key = (self._number(mine), self._number(theirs))
        if key not in self.overlaps:
            (lo, hi), (low, high) = np.array(mine).T, np.array(theirs).T
            self.overlaps[key] = np.maximum(lo[:, None], low[None]) < np.minimum(
                hi[:, None], high[None]
            )
        return self.overlaps[key]


# ---- sentinel: readers before reset before the next write, and before the next poll begins -------


def _plan_sentinel_checks(machine: _Machine) -> None:
    plan, count = machine.plan, len(machine.plan.stages)
    reset_at = {r.value: s.index + count * r.previous_step for s in plan.stages for r in s.resets}
    reads = machine.reads
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
        made = _made(plan, reset)
        machine.after_reads[count + new.stage].append(
            _reset_before_write(machine, old, new, reset, made)
        )
        for stage, read in reads[new.id]:
            polled = count * (1 + read.previous_step) + stage.index
            machine.on_entry[polled].append(
                _reset_before_poll(machine, old, stage, read, reset, made)
            )


def _readers_before_reset(
    machine: _Machine, value: Value, stage: Stage, read: Read, reset: int
) -> Check:
    plan = machine.plan
    read_at = stage.index + len(plan.stages) * read.previous_step
    place = plan.stages[reset % len(plan.stages)].name

    def check() -> Violation | None:
        if machine.own.min() >= read_at:  # whoever reads, all know it
            return None
        bad = machine.touches(read.spans, value.owned) & (machine.own < read_at).T
        if not bad.any():
            return None
        reader, owner = _first(bad)
        where = _common(read.spans[reader], value.owned[owner])
        return Violation(
            "race",
            place,
            f"block {owner} resets {value.name}[{where}] before block {reader} is known to have "
            f"read it in {stage.name}",
        )

    return check


def _made(plan: Plan, reset: int) -> int:
    """The stage whose publication tells others that a reset of stage `reset` is made."""
    resident = plan.options.execution is Execution.RESIDENT
    later = plan.stages[reset % len(plan.stages)].kind is not StageKind.LM_HEAD
    return reset + (resident and later)


def _needed(plan: Plan, reset: int, made: int, *, own: bool) -> Times | int:
    """What a block must know of another one that resets; of itself, that it has."""
    return np.where(np.eye(plan.blocks, dtype=bool), reset, made) if own else made


def _reset_before_write(machine: _Machine, old: Value, new: Value, reset: int, made: int) -> Check:
    plan = machine.plan
    stage, place = plan.stages[new.stage].name, plan.stages[reset % len(plan.stages)].name

    def check() -> Violation | None:
        for known, who in ((machine.own, "its rank"), (machine.foreign, "another rank")):
            if (who == "another rank" and not new.pushed) or known.min() >= made:
                continue
            needed = _needed(plan, reset, made, own=known is machine.own)
            writes = _written_by(new)
            bad = machine.overlap(writes, old.owned) & (known < needed)
            if bad.any():
                writer, owner = _first(bad)
                where = _common((writes[writer],), old.owned[owner])
                return Violation(
                    "race",
                    stage,
                    f"block {writer} writes {new.name}[{where}] before block {owner} of {who} is "
                    f"known to have reset {old.name} in {place}",
                )
        return None

    return check


def _reset_before_poll(
    machine: _Machine, old: Value, stage: Stage, read: Read, reset: int, made: int
) -> Check:
    plan = machine.plan
    new, place = plan.values[read.value], plan.stages[reset % len(plan.stages)].name

    def check() -> Violation | None:
        if machine.own.min() >= made:
            return None
        needed = _needed(plan, reset, made, own=True)
        bad = machine.touches(read.spans, old.owned) & (machine.own < needed)
        if not bad.any():
            return None
        reader, owner = _first(bad)
        where = _common(read.spans[reader], old.owned[owner])
        return Violation(
            "race",
            stage.name,
            f"block {reader} may take a stale {old.name}[{where}] for {new.name}: block {owner} "
            f"is not known to have reset it in {place}",
        )

    return check


# ---- counter, grid: readers before the next write ------------------------------------------------


def _plan_counter_checks(machine: _Machine) -> None:
    plan, count = machine.plan, len(machine.plan.stages)
    for old, new, step in _successions(plan):
        for stage, read in machine.reads[old.id]:
            read_at = count * (step + read.previous_step) + stage.index
            machine.after_reads[count + new.stage].append(
                _readers_before_write(machine, old, new, stage, read, read_at)
            )


def _readers_before_write(
    machine: _Machine, old: Value, new: Value, stage: Stage, read: Read, read_at: int
) -> Check:
    """All writers against all readers, whatever their elements: an early arrival would also
    complete the old count.
    """

    def check() -> Violation | None:
        for known, who in ((machine.own, "its rank"), (machine.foreign, "another rank")):
            if (who == "another rank" and not new.pushed) or known.min() >= read_at:
                continue
            readers = np.array([bool(spans) for spans in read.spans])
            bad = _written(new.owned)[:, None] & readers[None] & (known < read_at)
            if bad.any():
                writer, reader = _first(bad)
                place = machine.plan.stages[new.stage].name
                message = (
                    f"block {writer} writes {new.name} over {old.name} before block {reader} of "
                    f"{who} is known to have read it in"
                )
                return Violation("race", place, f"{message} {stage.name}")
        return None

    return check


# ---- who follows whom ----------------------------------------------------------------------------


def _reads(plan: Plan) -> dict[int, list[tuple[Stage, Read]]]:
    found: dict[int, list[tuple[Stage, Read]]] = {value.id: [] for value in plan.values}
    for stage in plan.stages:
        for read in stage.reads:
            found[read.value].append((stage, read))
    return found


def _successions(plan: Plan) -> Iterator[tuple[Value, Value, int]]:
    """(old, new, step of old) for each `new` of step 1 and the value before it in its copy; older
    ones follow by transitivity.

    A value that is not pushed still resets every part, so a pushed successor waits for it at all
    ranks too.
    """
    chains: dict[tuple[int, int], list[Value]] = defaultdict(list)
    for value in sorted(plan.values, key=lambda value: value.stage):
        chains[value.buffer, value.copy].append(value)
    for chain in chains.values():
        for index, new in enumerate(chain):
            yield chain[index - 1], new, int(index > 0)


def _lesson_of(polled: Mask) -> _Lesson | None:
    """`polled` [reader, writer]."""
    groups: dict[bytes, int] = {}
    rows: list[Numbers] = []
    group = np.full(len(polled), -1)
    for block in np.flatnonzero(polled.any(axis=1)):
        key = polled[block].tobytes()
        if key not in groups:
            groups[key] = len(rows)
            rows.append(np.flatnonzero(polled[block]))
        group[block] = groups[key]
    if not rows:
        return None
    readers = np.flatnonzero(group >= 0)
    starts = np.cumsum([0, *(len(row) for row in rows[:-1])])
    return _Lesson(readers, group[readers], np.concatenate(rows), starts)


def _touched(spans: tuple[tuple[Span, ...], ...], owned: tuple[Span, ...]) -> Mask:
    """[reader, owner]: does the reader's spans hold an element of the owner's?"""
    lo, hi = np.array(owned).T
    number = {group: at for at, group in enumerate(dict.fromkeys(spans))}
    touched = np.zeros((len(number), len(owned)), np.bool_)
    groups = [(at, group) for group, at in number.items() if group]
    for first in range(0, len(groups), GROUPS_AT_ONCE):
        some = groups[first : first + GROUPS_AT_ONCE]
        low, high = np.array([span for _, group in some for span in group]).T
        both = np.maximum(lo, low[:, None]) < np.minimum(hi, high[:, None])
        starts = np.cumsum([0, *(len(group) for _, group in some[:-1])])
        touched[[at for at, _ in some]] = np.logical_or.reduceat(both, starts, axis=0)
    return touched[[number[group] for group in spans]]


def _written_by(value: Value) -> tuple[Span, ...]:
    """[blocks] To a sum every block adds, whoever resets it."""
    return ((0, value.elements),) * len(value.owned) if value.summed else value.owned


def _written(owned: tuple[Span, ...]) -> Mask:
    return np.array([lo < hi for lo, hi in owned])


def _first(bad: Mask) -> tuple[int, int]:
    row, column = np.argwhere(bad)[0]
    return int(row), int(column)


def _common(spans: tuple[Span, ...], owned: Span) -> int:
    """The first element that a reader or writer shares with the owner."""
    return min(max(lo, owned[0]) for lo, hi in spans if max(lo, owned[0]) < min(hi, owned[1]))
