"""A run as a Chrome trace, for Perfetto: one track per consumer, a counter per loader, the critical
path on its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from twin.cost.causes import CAUSES, LAUNCH
from twin.frozen import frozen
from twin.sim.attribution import Piece
from twin.sim.block import Block, Segment
from twin.sim.machine import Machine

Event = dict[str, object]
CRITICAL = 10**6  # process id of the critical path: after every GPU


@frozen
class Trace:
    events: tuple[Event, ...]

    def to_json(self) -> str:
        """Chrome's trace format; times in microseconds."""
        write = json.JSONEncoder(sort_keys=True).encode  # json.dumps would make one for each
        lines = ",\n".join(map(write, self.events))
        return f'{{"displayTimeUnit": "ns", "traceEvents": [\n{lines}\n]}}\n'


def collect(
    machine: Machine,
    blocks: Collection[int] | None,
    path: Sequence[Piece],
    *,
    first_step: int = 0,
    group: str = "",
) -> Trace:
    """`blocks` of each GPU, or all, from `first_step` on, which is then called step 0; the critical
    path always.

    `group` stands before the names of processes, for a file that holds another trace too
    one.
    """
    events: list[Event] = []
    for gpu in range(machine.plan.options.gpus):
        events.append(named_process(gpu, f"{group}Gpu[{gpu}]"))
    for block in machine.blocks:
        if blocks is None or machine.number_on_gpu(block) in blocks:
            events += _consumer(machine, block, first_step)
            events += _loader(machine, block, first_step)
    events.append(named_process(CRITICAL, f"{group}critical path"))
    events += [
        span(machine.plan.stages[p.stage].name, CAUSES[p.cause], CRITICAL, 0, p.start, p.end)
        | _at(p.block)
        for p in path
    ]
    return Trace(tuple(events))


def marks(machine: Machine) -> NDArray[np.int64]:
    """[steps][ranks][blocks][stages][inputs ready, finished] in ps, as the kernel marks them. Needs
    a machine that keeps all steps.
    """
    plan = machine.plan
    made = np.zeros((machine.steps, plan.ranks, plan.blocks, len(plan.stages), 2), np.int64)
    for block in machine.blocks:
        before = 0
        for step, stages in enumerate(block.log):
            for index, segments in enumerate(stages):
                if block.program[index].by_scheduler:
                    made[step, block.place.rank, block.place.index, index] = (
                        segments[0][0],
                        segments[-1][0],
                    )
                    continue
                ready = _inputs_ready(block, step, index, segments, before)
                before = segments[-1][0] if segments else before
                made[step, block.place.rank, block.place.index, index] = ready, before
    return made


def _inputs_ready(
    block: Block, step: int, index: int, segments: Sequence[Segment], begin: int
) -> int:
    """The end of the last gather; of the kernel's launch, or the stage's begin, when it gathers
    nothing.
    """
    gathers = [read.cause for read in block.program[index].reads if step or not read.previous_step]
    done, ready = 0, begin
    for end, cause, binder in segments:
        if cause == LAUNCH:
            ready = end
        elif done < len(gathers) and binder is None and cause == gathers[done]:
            done, ready = done + 1, end
    return ready


def _at(block: str) -> Event:
    return {"args": {"block": block}}


def _consumer(machine: Machine, block: Block, first_step: int) -> Iterator[Event]:
    """Steps, in them stages, in them what the time went to."""
    tid = machine.number_on_gpu(block)
    yield named_track(block.place.gpu, tid, f"{block.place.name}.consumer")
    if any(work.by_scheduler for work in block.program):
        yield named_track(
            block.place.gpu, _scheduler_track(machine, block), f"{block.place.name}.helper"
        )
    begin = block.ended[first_step - 1] if first_step else 0
    for step, stages in enumerate(block.log[first_step:], start=first_step):
        yield span(
            f"step {step - first_step}", "step", block.place.gpu, tid, begin, block.ended[step]
        )
        for index, segments in enumerate(stages):
            if not segments:
                continue
            if block.program[index].by_scheduler:
                yield from _scheduler(machine, block, index, segments)
                continue
            yield span(
                machine.plan.stages[index].name,
                "stage",
                block.place.gpu,
                tid,
                begin,
                segments[-1][0],
            )
            for end, cause, binder in segments:
                if end > begin:
                    name = (
                        CAUSES[cause]
                        if binder is None
                        else f"{CAUSES[cause]}: waits for {machine.blocks[binder[0]].place.name}"
                    )
                    yield span(name, CAUSES[cause], block.place.gpu, tid, begin, end)
                    begin = end
        begin = block.ended[step]


def _scheduler(
    machine: Machine, block: Block, index: int, segments: Sequence[Segment]
) -> Iterator[Event]:
    """A stage that the block's scheduler makes, on a track of its own."""
    tid = _scheduler_track(machine, block)
    begin = segments[0][0]
    yield span(
        machine.plan.stages[index].name, "stage", block.place.gpu, tid, begin, segments[-1][0]
    )
    for end, cause, _ in segments:
        if end > begin:
            yield span(CAUSES[cause], CAUSES[cause], block.place.gpu, tid, begin, end)
            begin = end


def _scheduler_track(machine: Machine, block: Block) -> int:
    return machine.plan.options.blocks + machine.number_on_gpu(block)


def _loader(machine: Machine, block: Block, first_step: int) -> Iterator[Event]:
    """Slots in flight: requested and not yet arrived."""
    changes = [(issued, 1) for issued, _ in block.ring.history or ()] + [
        (arrived, -1) for _, arrived in block.ring.history or ()
    ]
    changes.sort()
    begin, end = block.ended[first_step - 1] if first_step else 0, block.ended[-1]
    level, position = 0, 0
    while position < len(changes) and changes[position][0] <= end:
        time = changes[position][0]
        while position < len(changes) and changes[position][0] == time:
            level += changes[position][1]
            position += 1
        if time < begin:
            continue
        name = f"{block.place.name}.loader in flight"
        yield {
            "ph": "C",
            "name": name,
            "pid": block.place.gpu,
            "ts": time / 1e6,
            "args": {"slots": level},
        }


def span(name: str, category: str, pid: int, tid: int, start: float, end: float) -> Event:
    """Times in ps."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": start / 1e6,
        "dur": (end - start) / 1e6,
    }


def named_process(pid: int, name: str) -> Event:
    return _meta("process_name", pid, 0, name)


def named_track(pid: int, tid: int, name: str) -> Event:
    return _meta("thread_name", pid, tid, name)


def _meta(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
