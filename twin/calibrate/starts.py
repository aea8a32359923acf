"""Numbers read straight off the probes. From a bad start a rate that does not bind yet has no slope
for the fit to follow.
"""

from __future__ import annotations

from collections.abc import Callable

from twin.calibrate.probes import Probe
from twin.hardware.types import Device
from twin.models.spec import DType

UNHINDERED = 2.0  # what a consumer multiplies without its sums, against what it consumes (judged)
LOADED = 2.0  # idle hops
RESTART = 1.5  # latencies of memory
Seconds = dict[str, float]  # of a step, by probe
# group, its probes, their seconds, device -> values by path
Starts = Callable[[str, list[Probe], Seconds, Device], dict[str, float]]


def host_starts(
    group: str, probes: list[Probe], seconds: Seconds, device: Device
) -> dict[str, float]:
    """Rates of a CPU, by the footprint that each level of its memory holds."""
    if group != "stream":
        return {}
    streams = [p for p in probes if p.name.startswith("stream")]
    size = {p.name: p.plan.weight_bytes() for p in streams}
    rate = {name: bytes_ / seconds[name] for name, bytes_ in size.items()}
    alone = [p.name for p in streams if p.plan.blocks == 1]
    together = [p.name for p in streams if p.plan.blocks == max(q.plan.blocks for q in streams)]
    large, small = max(size.values()), min(size.values())
    read_off = {
        "memory.stream_bytes_per_s": [n for n in together if size[n] > large / 2],
        "block.load_bytes_per_s": [n for n in alone if size[n] > large / 2],
        "llc.bytes_per_s": [n for n in together if small * 2 < size[n] < large / 4],
        "l2.bytes_per_s": together,
    }
    for dtype in DType:
        same = [p.name for p in streams if p.plan.options.weight_dtype is dtype]
        read_off[f"block.{dtype.value}_bytes_per_s"] = [n for n in alone if n in same]
    return {path: max(rate[n] for n in names) for path, names in read_off.items() if names}


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
            {"warps.copy_s": smallest.plan.options.slot_bytes / rate[smallest.name]}
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
