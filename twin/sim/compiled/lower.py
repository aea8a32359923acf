"""Flattens a machine that has not run: programs, then pipes and paths, then the state of blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from twin.cost.program import Program, StageWork, Variant
from twin.cost.terms import LONGEST_PS
from twin.cost.wiring import Wiring
from twin.errors import TwinError
from twin.frozen import frozen
from twin.kernel.fields import in_order
from twin.plan.catalogue import StageKind
from twin.plan.types import Parts, Stage
from twin.sim.compiled import state
from twin.sim.compiled.room import Room
from twin.sim.compiled.state import PLACES, Array, State
from twin.sim.gated import GatedRing
from twin.sim.links import Links
from twin.sim.machine import Machine
from twin.sim.memory import Path, Pipe
from twin.sim.slices import Slice

END_OF_TIME = 2**63 - 1
ROUTE = 2  # pipes at most between two GPUs
SEGMENTS = 11  # at most in a stage, besides its slots and GATHERS for each read
GATHERS = 3
MOST_SHIFT = 62  # bits
# of a StageWork, as they are
OF_WORK = (
    *("fixed_ps", "fixed_cause", "library", "kv_ahead", "sample_ps", "fence_ps", "far_fences"),
    *("launch_ps", "touches_memory", "kv_after", "by_scheduler", "sums_behind", "group"),
)
# of Times and LinkTimes, which compiled code calls alike
TIMES = ("hop", "cross", "atomic", "poll", "near_poll", "growth", "fetch_growth", "restart")
LINK_TIMES = ("hop", "growth", "window", "spread", "fence")


class Unsupported(TwinError):
    """The compiled executor cannot run this machine; SimPy can."""


@frozen
class FlatProgram:
    """A Program as arrays. `segments`: most that the log of one step of one rank can hold."""

    arrays: dict[str, Array]  # of State, by name
    sizes: tuple[int, ...]  # bytes; sizes in the arrays are places in it
    gates: int
    kv_ahead: int
    segments: int


def flatten(program: Program) -> FlatProgram:
    """Independent of bandwidths and latencies of pipes: kept for all machines that run the same
    program.
    """
    return _Flattening(program).done()


@frozen
class FlatWires:
    """A Wiring as arrays: what does not depend on any cost."""

    arrays: dict[str, Array]  # of State, by name
    counter_total: int


_wires: WeakKeyDictionary[Wiring, FlatWires] = WeakKeyDictionary()


def flat_wires(wiring: Wiring) -> FlatWires:
    """Kept as long as the wiring is."""
    if wiring not in _wires:
        _wires[wiring] = _flatten_wires(wiring)
    return _wires[wiring]


def _flatten_wires(wiring: Wiring) -> FlatWires:
    stages = len(wiring.stages)
    wires = np.zeros((wiring.plan.blocks, stages), state.WIRES)
    waits, feeds, waited, fed = [], [], 0, 0
    for stage, of_stage in enumerate(wiring.stages):
        wires["reads"][:, stage] = waited + of_stage.reads.starts[:-1]
        waits.append(of_stage.reads.channels)
        waited += len(of_stage.reads.channels)
        for name, lists in (("own", of_stage.own), ("others", of_stage.others)):
            wires[name][:, stage] = fed + lists.starts[:-1]
            wires[f"{name}_end"][:, stage] = fed + lists.starts[1:]
            feeds.append(lists.channels)
            fed += len(lists.channels)
    counters = [channel.arrivals if channel.counted else 0 for channel in wiring.channels]
    starts = accumulate(counters, initial=0)
    remote = [
        wiring.plan.values[c.value].pushed and c.parts is not Parts.OWN for c in wiring.channels
    ]
    channels = [
        (c.arrivals, c.counted, c.cause, *rest, min(c.sectors, MOST_SHIFT), c.near)
        for c, *rest in zip(wiring.channels, starts, remote, strict=False)
    ]
    nothing = np.zeros(0, np.int64)
    return FlatWires(
        {
            "wires": wires.reshape(-1),
            "waits": np.concatenate([nothing, *waits]),
            "feeds": np.concatenate([nothing, *feeds]),
            "channels": np.array(channels, state.CHANNEL),
        },
        counter_total=sum(counters),
    )


class _Flattening:
    """Works that several variants share are written once."""

    def __init__(self, program: Program) -> None:
        plan = program.plan
        self.program = program
        self.gates = {
            stage: n
            for n, stage in enumerate(sorted({s.gate for s in plan.stages if s.gate is not None}))
        }
        self.places: dict[int, int] = {}  # of each size
        self.known: dict[int, int] = {}  # by the identity of a work
        self.works: list[tuple[int, ...]] = []
        self.reads: list[tuple[int, ...]] = []
        self.kv: list[tuple[int, int]] = []
        self.slot_costs: list[int] = []
        self.stretches: list[tuple[int, int]] = []

    def done(self) -> FlatProgram:
        rows = [stages for variant in self.program.variants for stages in variant.stages]
        distinct = {id(stages): stages for stages in rows}
        numbers = {known: self._numbers(stages) for known, stages in distinct.items()}
        stretches = {known: self._stretches(stages) for known, stages in distinct.items()}
        streamed = [sizes for variant in self.program.variants for sizes in variant.sizes]
        spans, slots = self._stream({id(sizes): sizes for sizes in streamed})
        return FlatProgram(
            {
                "variants": np.array([numbers[id(stages)] for stages in rows], np.int64),
                "ends": np.array(
                    [ends for variant in self.program.variants for ends in variant.ends], np.int64
                ),
                "works": np.array(self.works, state.WORK),
                "stages": np.array(
                    [self._stage(stage) for stage in self.program.plan.stages], state.STAGE
                ),
                "reads": np.array(self.reads, state.READ),
                "slot_costs": np.array(self.slot_costs, np.int64),
                "streams": np.array(
                    [
                        (*spans[id(z)], *stretches[id(s)])
                        for z, s in zip(streamed, rows, strict=True)
                    ],
                    state.STREAM,
                ),
                "slots": slots,
                "stretches": np.array(self.stretches, state.STRETCH),
                "kv": np.array(self.kv, state.ITEM),
            },
            sizes=tuple(self.places),
            gates=len(self.gates),
            kv_ahead=max(work.kv_ahead for work in rows[0]),
            segments=max(self._segments(variant) for variant in self.program.variants),
        )

    def _stream(
        self, distinct: dict[int, tuple[int, ...]]
    ) -> tuple[dict[int, tuple[int, int]], Array]:
        """First slot and end of each stream, and the place of each slot's size; equal blocks share
        theirs.
        """
        ends = list(accumulate(map(len, distinct.values())))
        spans = {
            known: (end - len(sizes), end)
            for (known, sizes), end in zip(distinct.items(), ends, strict=True)
        }
        slots = np.fromiter(chain.from_iterable(distinct.values()), np.int64, ends[-1])
        # slots are small: a table is quicker than a search
        places = np.zeros(1 + slots.max(initial=0), np.int64)
        for size in np.flatnonzero(np.bincount(slots)).tolist():
            places[size] = self._place(size)
        return spans, places[slots]

    def _segments(self, variant: Variant) -> int:
        alike = Counter(map(id, variant.stages))
        distinct = {id(stages): stages for stages in variant.stages}
        gathers = sum(
            alike[known] * sum(len(work.reads) for work in stages)
            for known, stages in distinct.items()
        )
        return (
            SEGMENTS * len(variant.stages) * len(self.program.plan.stages)
            + GATHERS * gathers
            + sum(map(len, variant.sizes))
        )

    def _stage(self, stage: Stage) -> tuple[Any, ...]:
        plan = self.program.plan
        across = (
            stage.publishes is not None and plan.values[stage.publishes].pushed and plan.ranks > 1
        )
        gate = -1 if stage.gate is None else self.gates[stage.gate]
        return _row(state.STAGE, across=across, gate=gate, opens=self.gates.get(stage.index, -1))

    def _place(self, size: int) -> int:
        return self.places.setdefault(size, len(self.places))

    def _numbers(self, stages: Sequence[StageWork]) -> list[int]:
        known = self.known
        for work in stages:
            if id(work) not in known:
                known[id(work)] = len(self.works)
                self._work(work)
        return [known[id(work)] for work in stages]

    def _work(self, work: StageWork) -> None:
        published, place = work.publication, self._place
        reads, slots, kv = len(self.reads), len(self.slot_costs), len(self.kv)
        self.reads += [
            _row(
                state.READ,
                **{name: getattr(r, name) for name in state.READ.names or ()}
                | {"size": place(r.size)},
            )
            for r in work.reads
        ]
        self.slot_costs += work.slots
        ahead = len(self.slot_costs)
        self.slot_costs += work.ahead
        self.kv += [(cost, place(size)) for size, cost in work.kv]
        self.works.append(
            _row(
                state.WORK,
                reads=reads,
                reads_end=len(self.reads),
                **{name: getattr(work, name) for name in OF_WORK},
                embed=work.kind is StageKind.EMBED,
                slots=slots,
                slots_end=ahead,
                kv=kv,
                kv_end=len(self.kv),
                size=place(published.size) if published else -1,
                pushed=published is not None and published.pushed,
                stored=place(work.stored) if work.stored else -1,
                ahead=ahead,
                ahead_end=len(self.slot_costs),
            )
        )

    def _stretches(self, stages: Sequence[StageWork]) -> tuple[int, int]:
        """Of slots with one gate, in the order of the stream."""
        first, end = len(self.stretches), 0
        if self.gates:
            for stage, work in zip(self.program.plan.stages, stages, strict=True):
                if work.slots:
                    end += len(work.slots)
                    self.stretches.append(
                        (end, -1 if stage.gate is None else self.gates[stage.gate])
                    )
        return first, len(self.stretches)


@frozen
class Lowered:
    state: State
    pipes: tuple[Pipe, ...]  # in the order of state.pipes


def lower(machine: Machine, flat: FlatProgram, room: Room | None = None) -> Lowered:
    """Large arrays lie in `room`. Raises Unsupported where an event cannot name what it is for."""
    room = room or Room()
    plan, steps = machine.plan, machine.steps
    ranks, gpus = machine.ranks, machine.gpus
    sights = ranks * steps * len(machine.program.channels) * machine.handoffs.dies
    if max(sights, 2 * len(machine.blocks)) > 2**state.TARGET_BITS:
        raise Unsupported(
            f"{sights} waits are more than compiled code can number ({2**state.TARGET_BITS}): use "
            "the SimPy executor, or fewer steps"
        )
    pipes = _Pipes(machine)
    kept = steps if machine.keep_all else 1
    count = len(machine.blocks)
    window = min(plan.options.window_slots, plan.options.ring_slots)
    kv_arrivals = max(flat.kv_ahead, window)
    records = ranks * steps * len(machine.program.channels)
    gated = [block.ring for block in machine.blocks if isinstance(block.ring, GatedRing)]
    blocks, history = _blocks(machine, flat, pipes, kept_from=steps - kept)
    wires = flat_wires(machine.program.wiring)
    made = State(
        machine=_machine(machine, flat, window=window, kv_arrivals=kv_arrivals),
        queue=_filled(
            3 * count + ranks + gpus + 8, state.EVENT, time=END_OF_TIME, order=END_OF_TIME
        ),
        blocks=blocks,
        answers=np.zeros(0, np.int64) if machine.answers is None else machine.answers,
        arrivals=np.zeros((count, plan.options.ring_slots), np.int64),
        starts=np.array([ring.starts for ring in gated], np.int64),
        opened=np.full(len(gated) * (steps + 1) * flat.gates, -1, np.int64),
        there=_filled(len(gated) * plan.options.ring_slots, state.THERE, slot=-1),
        beyond=np.empty(len(gated) * (plan.options.ahead_slots + 1), np.int64),
        kv_arrivals=np.zeros((count, kv_arrivals), np.int64),
        pipes=pipes.table(),
        costs=pipes.costs(flat.sizes),
        sizes=np.array(flat.sizes, np.int64),
        paths=_spans([(len(path.pipes), path.latency) for path in pipes.paths], state.PATH),
        path_pipes=np.array(
            [pipes.number[id(pipe)] for path in pipes.paths for pipe in path.pipes], np.int64
        ),
        routes=_routes(machine.links, pipes, gpus),
        packages=_spans(
            [(len(p.domains) + len(p.llc), len(p.domains)) for p in machine.packages], state.PACKAGE
        ),
        package_pipes=np.array(
            [pipes.number[id(pipe)] for p in machine.packages for pipe in (*p.domains, *p.llc)],
            np.int64,
        ),
        loads=np.zeros(len(machine.packages), state.LOAD),
        choices=np.array(machine.program.choices or [[0] * ranks] * (steps + 1), np.int64),
        **flat.arrays,
        **wires.arrays,
        crossings=np.array(machine.times.crossings, np.int64).reshape(-1),
        records=_filled(records, state.RECORD, remote=-1, last=-1, group=-1),
        sights=room.take("sights", records * machine.handoffs.dies, state.SIGHT),
        counter_times=np.empty(ranks * steps * wires.counter_total, np.int64),
        pushes=np.zeros(count if machine.stands_for > 1 else 0, state.PUSH),
        barriers=_filled(ranks, state.BARRIER, head=-1),
        barrier_times=np.empty((ranks, plan.blocks), np.int64),
        borders=_filled(gpus + 1, state.BORDER, head=-1),
        cores=_filled(len(machine.cores), state.CORE, running=-1, last=-1, head=-1),
        # touched only as far as it is used
        segments=room.take("segments", kept * ranks * flat.segments, state.SEGMENT),
        logs=np.full(kept * count * len(plan.stages), -1, np.int64),
        ended=np.zeros((steps, count), np.int64),
        history=history,
    )
    return Lowered(made, tuple(pipes.pipes))


def _machine(machine: Machine, flat: FlatProgram, *, window: int, kv_arrivals: int) -> Array:
    plan, times, links = machine.plan, machine.times, machine.links
    values = {
        "steps": machine.steps,
        "kept_from": 0 if machine.keep_all else machine.steps - 1,
        "blocks": len(machine.blocks),
        "blocks_of_rank": plan.blocks,
        "blocks_of_gpu": plan.options.blocks,
        "ranks": machine.ranks,
        "gpus": machine.gpus,
        "stages": len(plan.stages),
        "channels": len(machine.program.channels),
        "dies": machine.handoffs.dies,
        "borders": machine.program.borders,
        "barriers": machine.program.barriers,
        "on_demand": machine.on_demand,
        "resident": machine.resident,
        "fetch": machine.program.fetch_ps,
        "memory_latency": times.memory,
        "library": machine.link_times.library,
        "switch_time": times.switch if machine.cores else 0,
        "capacity": plan.options.ring_slots,
        "window": window,
        "wide_window": machine.blocks[0].ring.wide_window,
        "kv_arrivals": kv_arrivals,
        "sizes": len(flat.sizes),
        "gated": isinstance(machine.blocks[0].ring, GatedRing),
        "ahead": plan.options.ahead_slots,
        "gates": flat.gates,
        "has_schedulers": machine.has_schedulers,
        "pace": machine.blocks[0].ring.pace,
        "leave": times.loader.leave,
        "answers": 0 if machine.answers is None else len(machine.answers),
        **{name: getattr(times, name) for name in TIMES},
        "load": times.loader.look,
        **{f"link_{name}": getattr(machine.link_times, name) for name in LINK_TIMES},
        "further": machine.further,
        "counter_total": flat_wires(machine.program.wiring).counter_total,
        "mirrors": machine.stands_for - 1,
        "represents": machine.represents,
        "sends": 1 if links and links.meshed else machine.stands_for - 1,
        "see": -1,
        "plain": -1,
    }
    return _filled(1, state.MACHINE, **values)


def _blocks(
    machine: Machine, flat: FlatProgram, pipes: _Pipes, *, kept_from: int
) -> tuple[Array, Array]:
    """The blocks, and room for the history of those whose requests are recorded."""
    rows = _filled(
        len(machine.blocks),
        state.BLOCK,
        next=-1,
        place=PLACES.index("RESUME"),
        after=PLACES.index("ENTER"),
        log=-1,
        waited_group=-2,
    )
    if kept_from == 0:  # the first turn on a shared core belongs to the first stage
        rows["log"] = np.arange(len(rows)) * len(machine.plan.stages)
    cores = {id(core): number for number, core in enumerate(machine.cores)}
    packages = {id(package): number for number, package in enumerate(machine.packages)}
    choices = machine.program.choices[0] if machine.program.choices else ()
    columns: dict[str, list[int]] = defaultdict(list)
    recorded = 0
    for block in machine.blocks:
        ring = block.ring
        stream = (
            choices[block.place.rank] if choices else 0
        ) * machine.plan.blocks + block.place.index
        history = -1
        if ring.history is not None:
            history = recorded
            recorded += ring.first_slot(machine.steps + 1)
        values = {
            "rank": block.place.rank,
            "gpu": block.place.gpu,
            "die": block.place.die,
            "package": packages[id(block.place.package)],
            "core": cores[id(block.core)] if block.core else -1,
            "exchange": pipes.path(Path(block.place.exchange, 0)),
            "slice": -1 if block.place.slice is None else pipes.number[id(block.place.slice)],
            "work": stream * len(machine.plan.stages),
            "wires": block.place.index * len(machine.plan.stages),
            "stream": stream,
            "per_step": ring.per_step,
            "wide_begin": ring.wide.start,
            "wide_end": ring.wide.stop,
            "kept": ring.kept,
            "limit": ring.limit,
            "paused": ring.paused,
            "memory": pipes.path(ring.loaded),
            "cached": pipes.path(ring.cached),
            "history": history,
            "start": block.place.start,
            "first_answer": ring.first_answer,
        }
        for name, value in values.items():
            columns[name].append(value)
    for name, column in columns.items():
        rows[name] = column
    if machine.has_schedulers:
        schedulers = rows.copy()
        schedulers["place"] = PLACES.index("IDLE")
        rows = np.concatenate([rows, schedulers])
    return rows, np.zeros((recorded, 2), np.int64)


class _Pipes:
    """All pipes and paths of a machine, numbered; rates that are equal share their costs."""

    def __init__(self, machine: Machine) -> None:
        links = chain.from_iterable(machine.links.routes.values()) if machine.links else ()
        self.pipes = list({id(pipe): pipe for pipe in chain(machine.pipes(), links)}.values())
        self.number = {id(pipe): number for number, pipe in enumerate(self.pipes)}
        self.rates = {
            rate: number
            for number, rate in enumerate(dict.fromkeys(_rate(pipe) for pipe in self.pipes))
        }
        self.paths: list[Path] = []
        self.known: dict[tuple[int, ...], int] = {}

    def path(self, path: Path) -> int:
        key = (path.latency, *(id(pipe) for pipe in path.pipes))
        if key not in self.known:
            self.known[key] = len(self.paths)
            self.paths.append(path)
        return self.known[key]

    def table(self) -> Array:
        table = np.zeros(len(self.pipes), state.PIPE)
        for name, column in (
            ("rate", [self.rates[_rate(pipe)] for pipe in self.pipes]),
            ("denominator", [pipe.denominator for pipe in self.pipes]),
            ("numerator", [pipe.numerator for pipe in self.pipes]),
            ("period", [p.period if isinstance(p, Slice) else 0 for p in self.pipes]),
        ):
            table[name] = column
        return table

    def costs(self, sizes: Sequence[int]) -> Array:
        """[rates][sizes], as Pipe.cost; what that refuses is refused where it is requested, and
        here a picosecond more than the longest.
        """
        costs = [
            [min(-(-size * numerator // denominator), LONGEST_PS + 1) for size in sizes]
            for numerator, denominator in self.rates
        ]
        return np.array(costs, np.int64).reshape(len(costs), len(sizes))


def _rate(pipe: Pipe) -> tuple[int, int]:
    return pipe.numerator, pipe.denominator


def _routes(links: Links | None, pipes: _Pipes, gpus: int) -> Array:
    routes = np.full((gpus * gpus, ROUTE), -1, np.int64)
    if links:
        for (source, target), way in links.routes.items():
            routes[source * gpus + target, : len(way)] = [pipes.number[id(pipe)] for pipe in way]
    return routes


def _spans(rows: Iterable[tuple[int, int]], dtype: np.dtype[Any]) -> Array:
    """(length, value) rows to (start, end, value)."""
    lengths, values = zip(*rows, strict=True)
    ends = list(accumulate(lengths))
    return np.array(
        [
            (end - length, end, value)
            for end, length, value in zip(ends, lengths, values, strict=True)
        ],
        dtype,
    )


def _row(dtype: np.dtype[Any], **named: int) -> tuple[Any, ...]:
    return in_order(dtype.names or (), named)


def _filled(count: int, dtype: np.dtype[Any], **values: int) -> Array:
    """Zero but for these fields."""
    made = np.zeros(count, dtype)
    for name, value in values.items():
        made[name] = value
    return made
