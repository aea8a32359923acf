"""The arrays of a compiled simulation, and the C++ header that describes them. Times in
picoseconds, counts and places as they are; -1: none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from twin.cost.causes import CAUSES
from twin.cost.terms import LONGEST_PS
from twin.sim.clock import LAST_PS
from twin.sim.ring import SHARES
from twin.sim.slices import LINE_BYTES, POLLED_BYTES
from twin.sim.times import QUEUE

Array = NDArray[Any]


def _record(*fields: str | tuple[str, np.dtype[Any]]) -> np.dtype[Any]:
    """Words of 64 bits, but for fields that are records themselves."""
    named = [
        field if isinstance(field, tuple) else (name, np.dtype(np.int64))
        for field in fields
        for name in _names(field)
    ]
    return np.dtype(named)


def _names(field: str | tuple[str, np.dtype[Any]]) -> list[str]:
    return [field[0]] if isinstance(field, tuple) else field.split()


BINDER = _record("block stage at")  # who published last, in which stage, when
MACHINE = _record(
    # so far; of an error, see ERRORS
    "now sequence queued segments ended error stuck beyond beyond_high",
    # blocks: of all ranks
    "steps kept_from blocks blocks_of_rank blocks_of_gpu ranks gpus stages channels dies sizes",
    "resident borders barriers on_demand fetch memory_latency restart library switch_time",
    "capacity window wide_window pace leave answers kv_arrivals gated ahead gates has_schedulers",
    "hop cross atomic poll near_poll growth fetch_growth load link_hop link_growth link_window",
    "link_spread link_fence further counter_total",
    # where one GPU stands for all: see native/simulator/mirror.h
    "mirrors represents sends group parent requests pushed hop_then see plain loose loosened die",
)
EVENT = _record("time order")
BLOCK = _record(
    "rank gpu die package core exchange slice next",
    "place after step stage work wires read slot last_cause clock looked entered taken resumed kv "
    "requested consumed log",
    "wide_begin wide_end",  # slots of a step for which `wide_window` counts
    "stream per_step kept limit open_at copied paused waiting issued freed memory cached history",
    "head head_step head_stretch beyond",  # of a gated ring
    "start first_answer waited_group run_group wake_group",
    "sums_due sums_made",  # of a scheduler
    "owed",
    ("waited", BINDER),  # of a block: sums made before its next publication; the last one
)
PIPE = _record("free small_free bytes rate numerator denominator waiting period")
PATH = _record("start end latency")
PACKAGE = _record("start end domains")
LOAD = _record("marked before load most")  # `most`: see mirror.h
WORK = _record(
    "reads reads_end fixed_ps fixed_cause embed library slots slots_end kv kv_end kv_ahead "
    "sample_ps fence_ps launch_ps touches_memory",
    "size pushed stored kv_after by_scheduler sums_behind ahead ahead_end group far_fences",
)
PUSH = _record("wires first size stored", ("who", BINDER))  # of a GPU that stands for others
STAGE = _record("across gate opens")  # gates as they are numbered
# of a block in a stage: places among `waits` and `feeds`
WIRES = _record("reads own own_end others others_end")
READ = _record("previous_step size cost_ps rounds cause nearer")
ITEM = _record("cost size")
STREAM = _record("slots slots_end stretches stretches_end")  # of a block in a step
# slots of a stream up to `end` that may be requested once the gate is open
STRETCH = _record("end gate")
THERE = _record("slot arrival")
CHANNEL = _record("arrivals counted cause counter remote sectors near")
RECORD = _record(
    "begun arrived seen waits group loose early remote",
    ("remote_who", BINDER),
    "last last_remote",
    ("last_who", BINDER),
)
# of a record, from one die
SIGHT = _record("local", ("local_who", BINDER), "time cause", ("who", BINDER), "head tail order")
# of a rank
BARRIER = _record(
    "arrived data complete time", ("who", BINDER), "cause", ("waited_for", BINDER), "head tail"
)
BORDER = _record("arrived", ("who", BINDER), "head tail")  # of a GPU; the last one of all GPUs
CORE = _record("running last head tail")
SEGMENT = _record("end cause", ("who", BINDER), "before")
WORD = np.dtype(np.int64)

RECORDS = {
    "Binder": BINDER,
    "Machine": MACHINE,
    "Event": EVENT,
    "Block": BLOCK,
    "Pipe": PIPE,
    "Path": PATH,
    "Package": PACKAGE,
    "Load": LOAD,
    "Work": WORK,
    "Stage": STAGE,
    "Push": PUSH,
    "Wires": WIRES,
    "Read": READ,
    "Item": ITEM,
    "Stream": STREAM,
    "Stretch": STRETCH,
    "There": THERE,
    "Channel": CHANNEL,
    "Record": RECORD,
    "Sight": SIGHT,
    "Barrier": BARRIER,
    "Border": BORDER,
    "Core": CORE,
    "Segment": SEGMENT,
    "Int": WORD,
}
EVENTS = ("RUN", "WAKE_LOADER", "SEE", "PASS_BARRIER", "PASS_BORDER", "END", "STOP")
KIND_BITS = 3
TARGET_BITS = 26  # blocks and sights; the sequence number takes the bits above
ERRORS = (  # why the simulation came back; the first error counts
    "FINISHED",
    "DEADLOCK",
    "STARVED",  # `stuck` is the block
    # the clock's end; `beyond` and `beyond_high` are the 128 bits of the time that was needed
    "BEYOND",
    "AMBIGUOUS",  # other GPUs may have done the same in another order
    "SLOW",  # a transfer takes too long; `stuck` is the pipe, `beyond` the place of the size
)
PLACES = (  # where a block goes on when it runs next
    "ENTER",
    "AT_BORDER",
    "ENTERED",
    "TAKE",
    "LEAVE_AHEAD",
    "READ",
    "AT_READ",
    "GATHER",
    "GATHERED",
    "WORK",
    "SLOT",
    "SLOT_DONE",
    "ATTEND",
    "ITEM",
    "ITEM_DONE",
    "FINISH",
    "FENCE",
    "PUBLISH",
    "AT_BARRIER",
    "LEAVE",
    "RESUME",
    "TURN",
    "SWITCHED",
    "OWED",
    "IDLE",
    "SUM",
    "SUMMED",
)


class State(NamedTuple):
    machine: Array  # [1] MACHINE
    queue: Array  # EVENT, a binary heap
    blocks: Array  # [blocks] BLOCK, and as many again for their schedulers where these make sums
    answers: Array  # [machine.answers] ps by which memory answers a request later or sooner
    arrivals: Array  # [blocks][capacity] of ring slots, by request
    starts: Array  # gated rings: [blocks][steps + 2] first slot of each step
    opened: Array  # [blocks][steps + 1][gates]
    there: Array  # [blocks][capacity] THERE: slots requested and not freed
    beyond: Array  # [blocks][ahead + 1] slots requested behind the first that is not
    kv_arrivals: Array  # [blocks][machine.kv_arrivals]
    pipes: Array  # PIPE
    costs: Array  # [rates][sizes] ps
    sizes: Array  # [sizes] bytes
    paths: Array  # PATH: from start to end in path_pipes
    path_pipes: Array
    routes: Array  # [gpus][gpus][2] pipes
    # PACKAGE: from start to end in package_pipes, whose load is that of the package
    packages: Array
    package_pipes: Array
    loads: Array  # [packages] LOAD, as links see it
    choices: Array  # [steps + 1][ranks] variants
    variants: Array  # [variants][blocks_of_rank][stages] works
    # [variants][blocks_of_rank][stages] slots up to and including the stage, where somebody looks
    # for them
    ends: Array
    works: Array  # WORK, each once
    stages: Array  # [stages] STAGE
    wires: Array  # [blocks_of_rank][stages] WIRES
    waits: Array  # channels of reads
    reads: Array  # READ
    slot_costs: Array  # ps of the slots of each work
    streams: Array  # [variants][blocks_of_rank] STREAM
    slots: Array  # size of the slots of each stream
    stretches: Array  # STRETCH
    kv: Array  # ITEM
    feeds: Array  # channels
    channels: Array  # CHANNEL
    crossings: Array  # [dies][dies] ps, of words that lie on the reader's I/O die
    records: Array  # [ranks][steps][channels] RECORD
    # [ranks][steps][channels][dies] SIGHT; set by whoever comes to their record first
    sights: Array
    counter_times: Array  # [ranks][steps][counter_total] arrivals at counters
    pushes: Array  # PUSH: to other GPUs, at one time
    barriers: Array  # [ranks] BARRIER
    barrier_times: Array  # [ranks][blocks_of_rank]
    borders: Array  # [gpus + 1] BORDER
    cores: Array  # CORE
    segments: Array  # SEGMENT
    logs: Array  # [kept steps][blocks][stages] last segment
    ended: Array  # [steps][blocks]
    history: Array  # [..][2] issued, arrived


TYPES = {
    "machine": MACHINE,
    "queue": EVENT,
    "blocks": BLOCK,
    "there": THERE,
    "pipes": PIPE,
    "paths": PATH,
    "packages": PACKAGE,
    "loads": LOAD,
    "works": WORK,
    "stages": STAGE,
    "wires": WIRES,
    "pushes": PUSH,
    "reads": READ,
    "streams": STREAM,
    "stretches": STRETCH,
    "kv": ITEM,
    "channels": CHANNEL,
    "records": RECORD,
    "sights": SIGHT,
    "barriers": BARRIER,
    "borders": BORDER,
    "cores": CORE,
    "segments": SEGMENT,
}


def header() -> str:
    """layout.h: the records, the table of arrays in the order of State, and the names that both
    sides use.
    """
    causes = tuple(cause.upper() for cause in CAUSES)
    lines = ["// Generated from twin/sim/compiled/state.py.", "#pragma once", "#include <cstdint>"]
    lines += [
        "namespace twin {",
        "using Int = int64_t;",
        f"constexpr Int SHARES = {SHARES}, KIND_BITS = {KIND_BITS}, TARGET_BITS = {TARGET_BITS}, "
        f"QUEUE = {QUEUE};",
        f"constexpr Int LAST = {LAST_PS}, LONGEST = {LONGEST_PS};",
        f"constexpr Int POLLED_BYTES = {POLLED_BYTES}, LINE_BYTES = {LINE_BYTES};",
    ]
    lines += [f"enum : Int {{ {', '.join(names)} }};" for names in (causes, EVENTS, ERRORS, PLACES)]
    for name, dtype in RECORDS.items():
        fields = (dtype.fields or {}).items()
        if fields:
            lines.append(
                f"struct {name} {{ "
                f"{' '.join(f'{_type(kind)} {field};' for field, (kind, *_) in fields)} }};"
            )
    lines.append("struct State {")
    lines += [f"  {_type(TYPES.get(field, WORD))}* {field};" for field in State._fields]
    return "\n".join([*lines, "};", "}  // namespace twin", ""])


def _type(dtype: np.dtype[Any]) -> str:
    return next(name for name, known in RECORDS.items() if known == dtype)
