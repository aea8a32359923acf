"""A run as a Chrome trace, for Perfetto: one track per consumer, a counter per loader, the critical path on its own."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twin.sim.attribution import Piece
from twin.sim.program import CAUSES

if TYPE_CHECKING:
    from twin.sim.block import Block
    from twin.sim.machine import Machine

Event = dict[str, object]
CRITICAL = 10**6  # process id of the critical path: after every GPU


@dataclass(frozen=True, slots=True)
class Trace:
    events: tuple[Event, ...]

    def to_json(self) -> str:
        """Chrome's trace format; times in microseconds."""
        lines = ",\n".join(json.dumps(event, sort_keys=True) for event in self.events)
        return f'{{"displayTimeUnit": "ns", "traceEvents": [\n{lines}\n]}}\n'


def collect(machine: Machine, blocks: Collection[int] | None, path: Sequence[Piece]) -> Trace:
    """`blocks` of each GPU, or all; the critical path always."""
    events: list[Event] = []
    for gpu in range(machine.plan.options.gpus):
        events.append(_meta("process_name", gpu, 0, f"Gpu[{gpu}]"))
    for block in machine.blocks:
        if blocks is None or machine.number_on_gpu(block) in blocks:
            events += _consumer(machine, block)
            events += _loader(machine, block)
    events.append(_meta("process_name", CRITICAL, 0, "critical path"))
    events += [_span(machine.plan.stages[p.stage].name, CAUSES[p.cause], CRITICAL, 0, p.start, p.end) | _at(p.block) for p in path]
    return Trace(tuple(events))


def _at(block: str) -> Event:
    return {"args": {"block": block}}


def _consumer(machine: Machine, block: Block) -> Iterator[Event]:
    """Steps, in them stages, in them what the time went to."""
    tid = machine.number_on_gpu(block)
    yield _meta("thread_name", block.gpu, tid, f"{block.name}.consumer")
    begin = 0
    for step, stages in enumerate(block.log):
        yield _span(f"step {step}", "step", block.gpu, tid, begin, block.ended[step])
        for index, segments in enumerate(stages):
            if not segments:
                continue
            yield _span(machine.plan.stages[index].name, "stage", block.gpu, tid, begin, segments[-1][0])
            for end, cause, binder in segments:
                if end > begin:
                    name = CAUSES[cause] if binder is None else f"{CAUSES[cause]}: waits for {binder[0].name}"
                    yield _span(name, CAUSES[cause], block.gpu, tid, begin, end)
                    begin = end
        begin = block.ended[step]


def _loader(machine: Machine, block: Block) -> Iterator[Event]:
    """Slots in flight: requested and not yet arrived."""
    changes = [(issued, 1) for issued, _ in block.ring.history or ()] + [(arrived, -1) for _, arrived in block.ring.history or ()]
    changes.sort()
    end = block.ended[-1]
    level, position = 0, 0
    while position < len(changes) and changes[position][0] <= end:
        time = changes[position][0]
        while position < len(changes) and changes[position][0] == time:
            level += changes[position][1]
            position += 1
        name = f"{block.name}.loader in flight"
        yield {"ph": "C", "name": name, "pid": block.gpu, "ts": time / 1e6, "args": {"slots": level}}


def _span(name: str, category: str, pid: int, tid: int, start: int, end: int) -> Event:
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start / 1e6, "dur": (end - start) / 1e6}


def _meta(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
