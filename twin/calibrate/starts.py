"""Numbers read straight off the probes. From a bad start a rate that does not bind yet has no slope
for the fit to follow.
"""

from __future__ import annotations

from collections.abc import Callable

from twin.calibrate.knee import Knee, knee
from twin.calibrate.probes import STAGES, Probe
from twin.cost.attention import item_kv_bytes
from twin.hardware.types import Device
from twin.models.spec import WEIGHT_TYPES, DType

UNHINDERED = 2.0  # what a consumer multiplies without its sums, against what it consumes (judged)
LOADED = 2.0  # idle hops
RESTART = 1.5  # latencies of memory
OPEN = 2.0
UNDECIDED = 1.25  # between a cache and the cores' shares of it
SMALL = 0.05  # of a stage, at least
Seconds = dict[str, float]  # of a step, by probe
# group, its probes, their seconds, device -> values by path
Starts = Callable[[str, list[Probe], Seconds, Device], dict[str, float]]


def host_starts(
    group: str, probes: list[Probe], seconds: Seconds, device: Device
) -> dict[str, float]:
    """Rates of a CPU, and how much its last cache keeps of a stream: where the measured curves
    bend, of one core and of all.
    """
    if group == "exchange":
        return _exchanged(seconds)
    if group == "codes":
        return {
            f"kernel.{p.name.removeprefix('codes-')}_bytes_per_s": _code_bytes(p) / seconds[p.name]
            for p in probes
        }
    if group == "attention":
        return _attended(probes, seconds)
    if group != "stream":
        return {}
    streams = [p for p in probes if p.name.startswith("stream")]
    if not streams:
        return {}
    size = {p.name: p.plan.weight_bytes() for p in streams}
    rate = {name: bytes_ / seconds[name] for name, bytes_ in size.items()}
    most = max(p.plan.blocks for p in streams)
    alone, together = ([p.name for p in streams if p.plan.blocks == blocks] for blocks in (1, most))
    found = {}
    for dtype in WEIGHT_TYPES:
        same = [p.name for p in streams if p.plan.options.weight_dtype is dtype and p.name in alone]
        if same:
            found[f"block.{dtype.value}_bytes_per_s"] = max(rate[n] for n in same)
    found["l2.bytes_per_s"] = OPEN * max(rate.values())  # the cores' own speed explains these first
    for names, blocks, paths in (
        (together, most, ("memory.stream_bytes_per_s", "llc.bytes_per_s", "llc.capacity_bytes")),
        (alone, 1, ("block.load_bytes_per_s", "llc.block_bytes_per_s", "llc.block_bytes")),
    ):
        if not names:
            continue
        memory, cache, capacity = paths
        longest = max(size[n] for n in names)
        found[memory] = max(rate[n] for n in names if size[n] == longest)
        bend = _bend(streams, blocks, seconds, device)
        if bend is not None:
            found[memory], found[cache] = bend.memory_bytes_per_s, bend.cache_bytes_per_s
            found[capacity] = bend.capacity_bytes
    if most > 1 and {"llc.block_bytes", "llc.capacity_bytes"} <= found.keys():
        # what all cores keep is either the cache or their shares: the other one is out of the way
        shares = most * found["llc.block_bytes"]
        if found["llc.capacity_bytes"] > shares / UNDECIDED:
            found["llc.capacity_bytes"] = max(UNDECIDED * shares, found["llc.capacity_bytes"])
    return found


def _exchanged(seconds: Seconds) -> dict[str, float]:
    """What hand-offs take: of one block without waiting, then of two. Empty without these
    probes.
    """
    try:
        few, many, two, counted = (
            seconds[f"exchange-{name}"] / STAGES
            for name in ("sentinel-64-b1", "sentinel-4096-b1", "sentinel-64-b2", "counter-64-b2")
        )
    except KeyError:
        return {}
    element = (many - few) / (2 * (4096 - 64))  # published, and gathered
    stage = few - 2 * 64 * element
    hop = two - few + 32 * element  # of two blocks each publishes half
    found = {
        "kernel.element_s": element,
        "kernel.stage_s": max(stage, SMALL * few),
        "handoff.hop_s": max(hop, SMALL * two),
        "handoff.atomic_s": max(counted - two, SMALL * two),
    }
    return {path: value for path, value in found.items() if value > 0}


def _attended(probes: list[Probe], seconds: Seconds) -> dict[str, float]:
    """What cached bytes take and what items take, of one block at the shortest and the longest
    context.
    """
    alone = [p for p in probes if p.plan.blocks == 1]
    if len(alone) < 2:
        return {}
    short, long = (pick(alone, key=lambda p: p.plan.options.context) for pick in (min, max))
    items = [
        [(stage, item) for stage in p.plan.stages for span in stage.items for item in range(*span)]
        for p in (short, long)
    ]
    size = [
        sum(item_kv_bytes(p.plan, stage, item) for stage, item in found)
        for p, found in zip((short, long), items, strict=True)
    ]
    rate = (size[1] - size[0]) / max(1e-9, seconds[long.name] - seconds[short.name])
    fixed = (seconds[short.name] - size[0] / rate) / len(items[0]) if rate > 0 else 0.0
    return {
        path: value
        for path, value in (("kernel.kv_bytes_per_s", rate), ("kernel.item_s", fixed))
        if value > 0
    }


def _code_bytes(probe: Probe) -> float:
    """Of codes, without scales."""
    (matrix,) = (matrix for stage in probe.plan.stages for matrix in stage.matrices)
    assert matrix.format is not None
    return matrix.rows * matrix.cols * matrix.format.bits / 8


def _bend(streams: list[Probe], blocks: int, seconds: Seconds, device: Device) -> Knee | None:
    """Of the longest curve of one type of weights, without what cores' own caches hold."""
    if device.llc is None:
        return None
    own = blocks * device.block.on_chip_bytes.value
    curves: dict[DType, dict[int, float]] = {}
    for probe in streams:
        if probe.plan.blocks == blocks and probe.plan.weight_bytes() > own:
            curve = curves.setdefault(probe.plan.options.weight_dtype, {})
            curve[probe.plan.weight_bytes()] = seconds[probe.name]
    return knee(max(curves.values(), key=len), device.llc) if curves else None


def gpu_starts(
    group: str, probes: list[Probe], seconds: Seconds, device: Device
) -> dict[str, float]:
    """Rates of a GPU: all blocks together, one alone, and the consumer's from the cache; a latency
    from the smallest window.
    """
    if group == "launch":  # below the latency of memory it would have no slope
        return {
            "launch.restart_s": max(
                device.launch.restart_s.value, RESTART * device.memory.latency_s.value
            )
        }
    if group == "chain":  # nor below the idle hop
        return {"handoff.loaded_hop_s": LOADED * device.handoff.hop_s.value}
    if group not in ("memory", "consumer"):
        return {}
    rate = {p.name: p.plan.weight_bytes() / seconds[p.name] for p in probes}
    alone = [p for p in probes if p.plan.blocks == 1]
    if group == "consumer":
        found: dict[str, float] = {}
        for probe in probes:
            path = f"block.{probe.plan.options.weight_dtype.value}_bytes_per_s"
            found[path] = max(
                found.get(path, 0.0), UNHINDERED * rate[probe.name] / probe.plan.blocks
            )
        smallest = min(alone, key=lambda p: p.plan.options.slot_bytes, default=None)
        return found | (
            {"kernel.copy_s": smallest.plan.options.slot_bytes / rate[smallest.name]}
            if smallest
            else {}
        )
    found = {"memory.stream_bytes_per_s": max(rate.values())}
    if alone:
        fastest = max(rate[p.name] for p in alone)
        found["block.load_bytes_per_s"] = fastest
        waits = [
            p.plan.options.slot_bytes * (1 / rate[p.name] - 1 / fastest)
            for p in alone
            if p.plan.options.window_slots == 1
        ]
        if waits and max(waits) > 0:
            found["memory.latency_s"] = max(waits)
    return found
