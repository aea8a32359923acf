"""Builds the simulated machine from a node and a plan, and runs it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from twin.cost.lowering import compile_plan
from twin.cost.program import Program
from twin.cost.terms import cost_in_time
from twin.cost.under_way import delivered_share
from twin.errors import HardwareError
from twin.hardware.floor import floor_s
from twin.hardware.override import numbers
from twin.hardware.types import Node
from twin.plan.catalogue import StageKind
from twin.plan.types import Plan
from twin.sim.block import Block, Shared
from twin.sim.clock import SimulationError
from twin.sim.core import Core
from twin.sim.gated import GatedRing, Stream
from twin.sim.handoff import HandOffs
from twin.sim.links import Links, LinkTimes
from twin.sim.meetings import Meetings
from twin.sim.memory import Package, Path, Pipe
from twin.sim.place import Place
from twin.sim.ring import NOWHERE, Ring
from twin.sim.slices import Slice, slices_of
from twin.sim.times import Times
from twin.units import picoseconds, unit_of

ANSWERS = 2**16  # times that memory takes, drawn once for all blocks
PS_OF_NS = 1000
# copies between the places where two blocks begin among them: more than a stage of a layer has
STAGGER = 491


class Machine:
    """Packages, links, cores and blocks, wired. `run` lets every block walk the plan `steps`
    times.
    """

    def __init__(
        self,
        plan: Plan,
        node: Node,
        *,
        steps: int,
        keep_all: bool,
        program: Program | None = None,
        first_of_equals: bool = False,
        represents: bool = False,
    ) -> None:
        """`program` is what compile_plan makes of the plan on the node's device, if it is known
        already. `first_of_equals`: only the first GPU, which stands for all (`one_stands_for_all`);
        only compiled code runs that. `represents`: where the others may do the same in another
        order, too.
        """
        check(plan, node)
        device = node.device
        self.plan = plan
        self.node = node
        self.steps = steps
        self.keep_all = keep_all
        self.program = program or compile_plan(plan, device, steps=steps)
        self.has_schedulers = any(work.by_scheduler for work in self.program.stages[0])
        self.head_slots: dict[int, range] = {}  # by the identity of a block's stages
        self.gates = frozenset(stage.gate for stage in plan.stages if stage.gate is not None)
        # GPUs that share one package
        self.emulated = node.link is not None and node.link.topology == "memory"
        self.times = Times.of(device, lone=plan.ranks * plan.blocks == 1)
        self.stands_for = plan.options.gpus if first_of_equals else 1  # GPUs
        self.represents = represents
        self.gpus, self.ranks = plan.options.gpus // self.stands_for, plan.ranks // self.stands_for
        count = 1 if self.emulated else self.gpus
        delivered = delivered_share(plan, device)
        streaming = min(device.blocks, plan.options.blocks * self.gpus // count)
        self.packages = [
            Package(
                device,
                self.times,
                plan.options.placement,
                index,
                delivered=delivered,
                blocks=streaming,
            )
            for index in range(count)
        ]
        self.slices = [slices_of(device, plan, package.name) for package in self.packages]
        packages = [self.package_of(gpu) for gpu in range(self.gpus)]
        self.links = (
            Links(node.link, packages) if node.link is not None and plan.options.gpus > 1 else None
        )
        self.link_times = self.links.times if self.links else LinkTimes()
        self.handoffs = HandOffs(
            self.program, self.times, int(device.structure.dies.value), self.links
        )
        self.answers = _answers(self.times.jitter)
        self.resident = plan.options.resident
        # between kernels, borders open the rings
        self.on_demand = self.resident and device.block.loading == "on-demand"
        self.cores = self._cores()
        self.ports: dict[object, Pipe] = {}
        # by the variants of the steps, and block
        self.streams: dict[tuple[tuple[int, ...], int], Stream] = {}
        shared = self._shared()
        self.blocks = [
            self._block(shared, rank, index)
            for rank in range(self.ranks)
            for index in range(plan.blocks)
        ]

    @property
    def further(self) -> int:
        """Ps by which a block takes longer to push to all ranks than to one on another GPU; those
        on its own cost nothing. With sentinels alone: counters and barriers of four GPUs are
        predicted well without it.
        """
        plan = self.plan
        if self.links is None or not plan.options.polled:
            return 0
        return max(0, plan.ranks - plan.ranks // plan.options.gpus - 1) * self.link_times.peer

    def run(self) -> None:
        """Until the last block has finished its last step. The loaders are then already in the next
        one.
        """
        from twin.sim.events import Clock  # SimPy: compiled code does without

        env = self.handoffs.env = Clock()
        for core in self.cores:
            core.env = env
        for block in self.blocks:
            block.env = block.ring.env = env
        if self.resident:
            for block in self.blocks:
                block.ring.pump()
        for block in self.blocks if self.has_schedulers else ():
            assert block.scheduler is not None
            env.process(block.scheduler.run())
        done = env.all_of([env.process(block.run()) for block in self.blocks])
        try:
            env.run(until=done)
        except RuntimeError as error:  # simpy: no event left
            raise self.deadlock() from error

    def deadlock(self) -> SimulationError:
        stuck = next(block.place.name for block in self.blocks if len(block.ended) < self.steps)
        return SimulationError(
            f"deadlock: {stuck} waits for something that nobody publishes; validate the plan"
        )

    def package_of(self, gpu: int) -> Package:
        return self.packages[0 if self.emulated else gpu]

    def number_on_gpu(self, block: Block) -> int:
        return block.place.rank % self.plan.ranks_per_gpu * self.plan.blocks + block.place.index

    def record_loaders(self, blocks: Collection[int] | None) -> None:
        """Keep every request's times, for a trace of these blocks of each GPU."""
        for block in self.blocks:
            if blocks is None or self.number_on_gpu(block) in blocks:
                block.ring.history = []

    def pipes(self) -> list[Pipe]:
        shared = [pipe for package in self.packages for pipe in package.pipes()]
        return [*shared, *(pipe for slices in self.slices for pipe in slices), *self.loads()]

    def loads(self) -> list[Pipe]:
        """What blocks load, from memory and from caches: every byte passes exactly one of these."""
        return [*self.ports.values(), *(pipe for package in self.packages for pipe in package.near)]

    def package_count(self) -> int:
        """With those that one stands for."""
        return len(self.packages) * self.stands_for

    def footprint(self) -> int:
        """Bytes that one package reads per step."""
        return self.program.step_bytes(0) // self.package_count()

    def floor_s(self, step: int) -> float:
        """No step takes less, but for what lay in the rings when it began: its bytes at the ceiling
        of the memory, or of the cache that serves them since the step before, whichever takes
        longer.
        """
        moved = self.program.step_bytes(step)
        kept = self.stands_for * sum(block.kept_bytes(step) for block in self.blocks)
        memory_s = floor_s(self.node.device, self.package_count(), moved - kept)
        return (
            max(
                memory_s,
                kept
                / (self.package_count() * self.packages[0].cache_bytes_per_s(self.footprint())),
            )
            if kept
            else memory_s
        )

    # ---- wiring ----------------------------------------------------------------------------------

    def _cores(self) -> list[Core]:
        """Cores that blocks take turns on; none where every block has its own."""
        device, gpus = self.node.device, self.plan.options.gpus
        packages = len(self.packages)
        if device.sharing is None or self.plan.options.blocks * gpus // packages <= device.blocks:
            return []
        return [Core(self.times.switch) for _ in range(device.blocks * packages)]

    def _shared(self) -> Shared:
        return Shared(
            program=self.program,
            handoffs=self.handoffs,
            meetings=Meetings(self.handoffs),
            steps=self.steps,
            kept_from=0 if self.keep_all else self.steps - 1,
            gates=self.gates,
            has_schedulers=self.has_schedulers,
            on_demand=self.on_demand,
            times=self.times,
            library=self.link_times.library,
            far_fence=self.link_times.fence,
            further=self.further,
        )

    def _block(self, shared: Shared, rank: int, index: int) -> Block:
        plan = self.plan
        gpu = plan.gpu_of_rank(rank)
        on_gpu = rank % plan.ranks_per_gpu * plan.blocks + index
        die = plan.die_of_block[on_gpu]
        package = self.package_of(gpu)
        crossed, polled = self._exchange(package, die)
        place = Place(
            number=rank * plan.blocks + index,
            rank=rank,
            index=index,
            gpu=gpu,
            die=die,
            name=f"Gpu[{gpu}].Die[{die}].Block[{on_gpu}]",
            package=package,
            exchange=(*package.exchange_pipes(die), *crossed, *polled),
            slice=polled[0] if polled else None,
            start=PS_OF_NS * plan.start_ns(rank),
        )
        core, port = self._core(gpu, on_gpu, place.name)
        memory = package.memory_path(die, port)
        ring = self._ring(rank, index, memory, package.cached_path(die, port, self.footprint()))
        ring.answers, ring.first_answer = self.answers, STAGGER * on_gpu
        ring.paused = core is not None
        return Block(place, shared, ring, core)

    def _exchange(self, package: Package, die: int) -> tuple[list[Pipe], tuple[Slice, ...]]:
        """What a die's words pass besides its own pipes: an edge of its I/O die, where they lie on
        all of them, and slices of a cache.
        """
        slices, io = self.slices[self.packages.index(package)], package.io_of(die)
        if len(slices) > 1:
            return [], slices[io : io + 1]
        return package.ingress[io : io + 1] if slices else [], slices

    def _ring(self, rank: int, index: int, memory: Path, cached: tuple[Path, float] | None) -> Ring:
        """Streams that do not vary, and hold no experts, are walked without looking at gates."""
        options, program = self.plan.options, self.program
        pace = (
            self.times.loader.watched_copy
            if options.window_slots < options.ring_slots
            else self.times.loader.copy
        )
        ahead = self.resident and not self.on_demand
        if self.gates or program.drawn:
            return GatedRing(
                self._stream(rank, index),
                ahead=options.ahead_slots,
                capacity=options.ring_slots,
                window=options.window_slots,
                memory=memory,
                cached=cached,
                open_from_start=ahead,
                pace=pace,
            )
        sizes = program.sizes[index]
        return Ring(
            sizes,
            capacity=options.ring_slots,
            window=options.window_slots,
            memory=memory,
            cached=cached,
            limit=(self.steps + 1) * len(sizes) if ahead else 0,
            pace=pace,
            wide=self._head_slots(index),
            wide_window=options.head_window,
        )

    def _head_slots(self, index: int) -> range:
        """Of a step of one block: those that come once the LM head's first ones are used."""
        plan = self.plan
        if not plan.head_rows:
            return NOWHERE
        head = next(stage for stage in plan.stages if stage.kind is StageKind.LM_HEAD)
        assert head.matrix is not None
        works = self.program.stages[index]
        if id(works) not in self.head_slots:  # blocks that do the same share theirs
            begin = sum(len(work.slots) for work in works[: head.index])
            end = begin + len(works[head.index].slots)
            tiles = plan.head_rows // head.matrix.tile_rows * head.matrix.slices
            self.head_slots[id(works)] = range(min(end, begin + tiles), end)
        return self.head_slots[id(works)]

    def _stream(self, rank: int, index: int) -> Stream:
        program = self.program
        chosen = tuple(row[rank] for row in program.choices[: self.steps + 1])
        if (chosen, index) not in self.streams:
            variants = [program.variant(step, rank) for step in range(self.steps + 1)]
            gates = [stage.gate for stage in self.plan.stages]
            self.streams[chosen, index] = Stream(
                [(variant.stages[index], variant.sizes[index]) for variant in variants], gates
            )
        return self.streams[chosen, index]

    def _core(self, gpu: int, on_gpu: int, name: str) -> tuple[Core | None, Pipe]:
        """A block's core, and the pipe of what one core can load."""
        device = self.node.device
        rate = self.package_of(gpu).block_bytes_per_s(self.footprint())
        if not self.cores:
            return None, self._port(gpu, on_gpu, name, rate)
        number = gpu * device.blocks + on_gpu % device.blocks
        if self.emulated:  # as the engine pins its threads
            number = (gpu * self.plan.options.blocks + on_gpu) % device.blocks
        if number not in self.ports:
            self.ports[number] = Pipe(f"Core[{number}].load", rate)
        return self.cores[number], self.ports[number]

    def _port(self, gpu: int, on_gpu: int, name: str, rate: float) -> Pipe:
        """What a block can load at `rate`, or it and its neighbour: blocks are placed on free pairs
        of units first.
        """
        device = self.node.device
        together, pairs = device.block.pair_bytes_per_s, device.blocks // 2
        pair = on_gpu % pairs if pairs else 0
        if together is None or not pairs or pair + pairs >= self.plan.options.blocks:
            port = self.ports[name] = Pipe(f"{name}.load", rate)
            return port
        if (gpu, pair) not in self.ports:
            self.ports[gpu, pair] = Pipe(f"Gpu[{gpu}].Pair[{pair}].load", together.value)
        return self.ports[gpu, pair]


def _answers(jitter: int) -> NDArray[np.int64] | None:
    """[ANSWERS] ps by which memory answers copies of warps' loaders later or sooner than on
    average; None: always alike.

    The stream of a block is then a random walk about the mean, as measured: of the lag of a block
    behind the others at the end of a stage a fifth comes again in the next step, and over a long
    matrix it grows as the root of its tiles (studies/h200-history).
    """
    if not jitter:
        return None
    drawn: NDArray[np.int64] = (jitter * np.random.default_rng(0).uniform(-1, 1, ANSWERS)).astype(
        np.int64
    )
    return drawn


def one_stands_for_all(plan: Plan, node: Node, program: Program) -> bool:
    """May all GPUs do the same at the same times? They are alike, and all ranks have the same work,
    or that of the busiest. Whether they do is decided while one of them runs
    (native/simulator/mirror.h).
    """
    return gpus_alike(plan, node) and (not program.drawn or program.busiest)


def gpus_alike(plan: Plan, node: Node) -> bool:
    """Has each GPU of several one rank and its own memory, and polls words?"""
    options = plan.options
    separate = (
        options.gpus > 1
        and plan.ranks_per_gpu == 1
        and node.link is not None
        and node.link.topology != "memory"
    )
    return options.polled and separate and node.device.sharing is None


def check(plan: Plan, node: Node) -> None:
    """Raises HardwareError if the plan was made for other hardware than the node, or a time of it
    is no single cost.
    """
    for path, number in numbers(node).items():
        if unit_of(path.rsplit(".", 1)[-1]) == "s":
            cost_in_time(path, picoseconds(number.value))
    device, options = node.device, plan.options
    dies = int(device.structure.dies.value)
    if options.gpus > node.gpus:
        raise HardwareError(
            f"gpus={options.gpus}: node {node.name} has {node.gpus}; plan for at most that many"
        )
    if max(plan.die_of_block) >= dies:
        raise HardwareError(
            f"the plan uses {max(plan.die_of_block) + 1} dies, {device.name} has {dies}: plan "
            "with this device's limits"
        )
    if options.blocks > device.blocks and device.sharing is None:
        raise HardwareError(
            f"blocks={options.blocks}: {device.name} holds {device.blocks} resident blocks; plan "
            "for at most that many"
        )
    crosses = plan.ranks > plan.ranks_per_gpu and any(value.pushed for value in plan.values)
    if crosses and node.link is None:
        raise HardwareError(
            f"the plan exchanges between GPUs, but node {node.name} has no link: add one or plan "
            "for one GPU"
        )
    library = any(stage.kind is StageKind.COLLECTIVE for stage in plan.stages)
    if library and node.link is None:
        raise HardwareError(
            f"the plan calls a library collective, but node {node.name} has no link"
        )
    if library and options.resident:
        raise HardwareError(
            "a library collective cannot run inside a resident kernel: use push, or execution "
            "graph or stream"
        )
