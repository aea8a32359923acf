"""Hardware as data: every number carries its kind and its source. What the code of our kernel
costs there: twin/hardware/kernel.py.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from twin.frozen import frozen
from twin.hardware.kernel import CoreKernel, WarpKernel
from twin.hardware.number import Number

HOST = "host"  # the instruction set of this computer's CPU, and the name of the device
# of the stream's queue at memory, to which loaded times refer: bytes in flight over bandwidth, less
# the latency
QUEUE_S = 1e-6


@frozen
class Structure:
    """What the package is made of. A block is a resident thread block: one SM, one CU, one core."""

    dies: Number  # dies that carry blocks (XCDs, GPU dies; 1 for monolithic)
    blocks_per_die: Number
    io_dies: Number  # dies that carry memory stacks; equal to `dies` where one die does both
    stacks: Number  # memory stacks (channels groups on a CPU)


@frozen
class Block:
    """One SM, CU or core, as the engine uses it.

    `loading` says when weights move: "ahead" by a loader that fills the ring while the block waits,
    or "on-demand" by the core itself while it computes (a CPU), so that every hand-off drains the
    stream.
    `inputs` says where a stage's input lies while a block multiplies with it: in the "registers" of
    its warps, teams of which share the rows of a matrix, or in "on-chip" memory.
    """

    clock_hz: Number
    on_chip_bytes: Number  # ring and activations live here (shared memory, LDS; L2 slice of a core)
    load_bytes_per_s: Number  # most that one block can stream alone
    loading: Literal["ahead", "on-demand"] = "ahead"
    inputs: Literal["on-chip", "registers"] = "on-chip"
    # behind which it loads load_bytes_per_s: more is more bytes in flight; None: memory's
    load_latency_s: Number | None = None
    # most that two neighbouring blocks stream together; None: each by itself
    pair_bytes_per_s: Number | None = None


@frozen
class Memory:
    """Device memory, all stacks together."""

    capacity_bytes: Number  # as the driver shows it; datasheets round, and count GB or GiB
    peak_bytes_per_s: Number  # datasheet: the denominator of MBU
    # of the pipe by which the twin serves a stream; a fit makes it agree with probes
    stream_bytes_per_s: Number
    latency_s: Number
    # best plain read that was measured: twin/hardware/floor.py; None: as the pipe
    ceiling_bytes_per_s: Number | None = None
    # of the pipe's rate, that must be under way for the memory to deliver it
    # (twin/cost/under_way.py); None: any amount does
    under_way_s: Number | None = None
    # of the rate, lost where nothing of that is under way
    shortfall_ratio: Number | None = None
    # by which memory answers a block's copy later or sooner than the mean one, at most; None: it
    # answers all alike
    jitter_s: Number | None = None
    # of the capacity, what the driver and a program's context keep; None: nothing
    reserved_bytes: Number | None = None

    @property
    def usable_bytes(self) -> int:
        """What plans may fill."""
        kept = self.reserved_bytes.value if self.reserved_bytes else 0
        return max(0, int(self.capacity_bytes.value - kept))


@frozen
class Cache:
    """The last cache before memory that all blocks of a die (L2) or of the package (LLC) share.

    `retention` says what a stream larger than the cache leaves in it: with "whole" nothing
    (streaming loads are evicted first or bypass it), with "random" a share that falls smoothly with
    the stream's size (a CPU's hashed, adaptive L3). With "none" nothing of any stream: the loads of
    weights do not fill it.
    """

    capacity_bytes: Number  # per die for L2, in all for LLC
    bytes_per_s: Number  # likewise
    latency_s: Number
    retention: Literal["whole", "random", "none"] = "whole"
    # of a hit behind QUEUE_S of the stream, or latency_s if that is more; None: it does not grow
    loaded_latency_s: Number | None = None
    # most that the stream of one block keeps in it: a core's own L2, or its share of a cache that
    # other computers use too; None: all of it
    block_bytes: Number | None = None
    # most that one block loads from it; None: as many bytes in flight as from memory
    block_bytes_per_s: Number | None = None


@frozen
class Fabric:
    """Between the dies of one package."""

    die_port_bytes_per_s: Number  # most that one compute die reads over its port
    io_ingress_bytes_per_s: Number  # most that one I/O die takes in from the others, per direction
    hop_s: Number  # added latency of one hop between I/O dies


@frozen
class Slices:
    """Of the last-level cache those of one I/O die, where the words that blocks exchange are read
    and polled past the dies' own L2.
    """

    bytes_per_s: Number  # most that they answer, all together
    near_s: Number  # a load by a die of the same I/O die; llc.latency_s is the mean over all


@frozen
class HandOff:
    """Publish to poll inside one GPU."""

    hop_s: Number  # one way, between two blocks of a die, idle
    cross_die_s: Number  # added one way between dies
    atomic_s: Number  # service time of one arrival at a counter: arrivals at one counter queue
    poll_s: Number  # period of a poll, paid half on average
    # the hop behind QUEUE_S of the stream, or hop_s if that is more; None: it does not grow
    loaded_hop_s: Number | None = None
    # before an arrival at a counter: what the block has written must be visible; None: nothing
    fence_s: Number | None = None


@frozen
class Launch:
    """Kernel borders."""

    stream_s: Number  # kernel after kernel in a stream
    graph_edge_s: Number  # kernel after kernel in a graph
    restart_s: Number  # memory pipeline refill at the start of a kernel


@frozen
class Sharing:
    """More blocks than cores (a CPU): blocks of one core take turns."""

    switch_s: Number  # from one block to the next on the same core


@frozen
class Power:
    tdp_w: Number | None = None
    # at the power cap, while all blocks stream flat out; None: nobody saw the clock fall
    streaming_clock_hz: Number | None = None


@frozen
class Device:
    """One package. `None` for a part that the device does not have; capabilities decide, never
    names.
    """

    name: str
    title: str
    vendor: str
    isa: str | None  # what the engine compiles for: sm_90a, gfx942, host; None: the twin only
    structure: Structure
    block: Block
    memory: Memory
    l2: Cache
    handoff: HandOff
    launch: Launch
    kernel: WarpKernel | CoreKernel  # what our kernel costs there
    llc: Cache | None = None
    fabric: Fabric | None = None
    slices: Slices | None = None  # None: what looks at exchanged words takes of a cache is no load
    sharing: Sharing | None = None
    power: Power = field(default_factory=Power)

    @property
    def nvidia(self) -> bool:
        """Does our kernel for NVIDIA run there?"""
        return self.isa is not None and self.isa.startswith("sm_")

    @property
    def amd(self) -> bool:
        """Does our kernel for AMD run there?"""
        return self.isa is not None and self.isa.startswith("gfx")

    @property
    def teams(self) -> bool:
        """Do teams of warps share a matrix's rows? They do where warps keep a stage's input in
        registers.
        """
        return self.block.inputs == "registers"

    @property
    def exchange(self) -> Cache:
        """Where blocks of all dies see the same words."""
        return self.llc if self.llc is not None and self.structure.dies.value > 1 else self.l2

    @property
    def blocks(self) -> int:
        """Blocks that can be resident, one per SM, CU or core."""
        return int(self.structure.dies.value * self.structure.blocks_per_die.value)


@frozen
class Link:
    """Between two GPUs of a node."""

    # "mesh": a link per pair; "switch": one port per GPU shared by all peers; "memory": emulated
    topology: Literal["mesh", "switch", "memory"]
    bytes_per_s: Number  # per direction: per pair in a mesh, per GPU behind a switch
    hop_s: Number  # store to remote poll, one way, idle
    loaded_hop_s: Number  # the same while both ends stream, or hop_s if that is more
    # of all GPUs: until a block's stores into other GPUs are there; with counters and barriers
    fence_s: Number
    # how much later the last word is there where many blocks store some: half of it with a sector
    # of words, and more with each further one
    spread_s: Number
    # of a block that pushes, with sentinels: its time for each rank on other GPUs beyond the first
    peer_s: Number
    # a vendor library's small all-reduce inside a graph, all GPUs of the node
    library_allreduce_s: Number
    like: str = ""  # device whose links these are: what is assumed here follows their fit
    # device whose links differ and whose blocks push alike: spread, peer and fence follow its fit
    pushes_like: str = ""


@frozen
class Node:
    """1 to 72 equal devices. `link` is None for a single device."""

    name: str
    # `twin hardware` shows these numbers; a notebook that shows a node would fill a page with them
    device: Device = field(repr=False)
    gpus: int
    link: Link | None = field(default=None, repr=False)
