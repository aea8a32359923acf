"""This computer's CPU as a device: a core stands in for an SM, the operating system says what it
has.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from twin.hardware.number import Kind, Number
from twin.hardware.stated import of_a_core
from twin.hardware.types import Block, Cache, Device, HandOff, Launch, Memory, Sharing, Structure

_DEFAULT = "default for an unknown CPU; replaced by the fit of its probes"
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def detect_host(root: Path = Path("/"), cpus: Sequence[int] | None = None) -> Device:
    """The host device. What the system does not tell (a container, ARM) is assumed, and its source
    says so.

    `root` is where /proc and /sys are looked for; `cpus` replaces the scheduler's affinity.
    """
    usable = sorted(_affinity() if cpus is None else cpus) or [0]
    cores = min(len(usable), _quota_cores(root) or len(usable))
    l2 = _caches(root, usable, level=2)
    l3 = _caches(root, usable, level=3)
    return Device(
        name="host",
        title=_title(root),
        vendor="host",
        isa="host",
        structure=_structure(cores, len(usable)),
        block=_block(root, usable[0], l2),
        memory=_memory(root, cores),
        l2=_l2(l2, cores),
        handoff=_handoff(),
        launch=_launch(),
        kernel=of_a_core(),
        llc=_llc(sum(size for size, _ in l3), cores),
        sharing=Sharing(switch_s=_assumed(0.1e-6, 0.03e-6, 20e-6, "fibers of one core in turn")),
    )


def _structure(cores: int, affinity: int) -> Structure:
    source = (
        f"operating system: {affinity} CPUs in the affinity mask, {cores} after the control "
        "group's quota"
    )
    one = Number(1, Kind.DATASHEET, "a CPU is treated as one die")
    channels = _assumed(1, 1, 16, "memory channels are not visible; only their sum matters")
    return Structure(
        dies=one, blocks_per_die=Number(cores, Kind.DATASHEET, source), io_dies=one, stacks=channels
    )


def _block(root: Path, cpu: int, l2: list[tuple[int, int]]) -> Block:
    return Block(
        clock_hz=_clock(root, cpu),
        on_chip_bytes=_on_chip(l2),
        load_bytes_per_s=_assumed(10e9, 2e9, 40e9, "one core's stream"),
        loading="on-demand",
    )


def _clock(root: Path, cpu: int) -> Number:
    khz = _read(root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq")
    if khz and khz.isdigit() and int(khz) > 0:
        return Number(int(khz) * 1e3, Kind.DATASHEET, "operating system: cpufreq maximum")
    mhz = _positive(_cpuinfo(root, "cpu MHz"))
    if mhz:
        return _assumed(
            mhz * 1e6,
            mhz * 0.5e6,
            mhz * 2e6,
            "/proc/cpuinfo's present clock; the maximum is not visible",
        )
    return _assumed(2.5e9, 1e9, 5e9, "clock not visible")


def _on_chip(l2: list[tuple[int, int]]) -> Number:
    if l2:
        size, sharers = l2[0]
        return Number(
            size // sharers,
            Kind.DATASHEET,
            f"operating system: L2 of {size} bytes, {sharers} usable CPUs share it",
        )
    return _assumed(512 * 2**10, 128 * 2**10, 4 * 2**20, "L2 not visible")


def _memory(root: Path, cores: int) -> Memory:
    stream = min(cores * 40e9, 100e9)
    return Memory(
        capacity_bytes=_capacity(root),
        peak_bytes_per_s=_assumed(
            stream * 1.5, stream * 0.5, 900e9, "memory channels are not visible"
        ),
        stream_bytes_per_s=_assumed(
            stream, stream * 0.2, 600e9, "more than a core loads, at most 100 GB/s"
        ),
        latency_s=_assumed(100e-9, 60e-9, 300e-9),
    )


def _capacity(root: Path) -> Number:
    total = _positive((_field(root / "proc/meminfo", "MemTotal") or "").removesuffix("kB").strip())
    limits = [
        int(text)
        for text in _cgroup(root, "memory.max", "memory/memory.limit_in_bytes")
        if text.isdigit() and int(text) > 0
    ]
    if total:
        capacity = min([int(total) * 2**10, *limits])
        return Number(
            capacity,
            Kind.DATASHEET,
            "operating system: MemTotal and the control group's limit, the smaller",
        )
    return _assumed(8e9, 1e9, 1e12, "memory size not visible")


def _l2(l2: list[tuple[int, int]], cores: int) -> Cache:
    size = sum(s for s, _ in l2)
    capacity = (
        Number(size, Kind.DATASHEET, f"operating system: {len(l2)} L2 caches together")
        if size
        else _assumed(cores * 512 * 2**10, cores * 128 * 2**10, cores * 4 * 2**20, "L2 not visible")
    )
    return Cache(
        capacity,
        _assumed(cores * 100e9, cores * 10e9, cores * 400e9),
        _assumed(5e-9, 2e-9, 15e-9),
        block_bytes=_on_chip(l2),
    )


def _llc(size: int, cores: int) -> Cache:
    """What the system says is where a fit looks, not what it finds: a virtual machine has a share
    of a cache whose whole size it sees, and a container may see nothing.
    """
    source = "operating system: L3 caches of the usable CPUs together"
    said = Number(size, Kind.DATASHEET, source)
    if not size:
        source = "L3 not visible"
        size = 32 * 2**20
        said = _assumed(size, 2**20, 2**30, source)
    return Cache(
        said,
        _assumed(cores * 60e9, cores * 5e9, cores * 200e9),
        _assumed(20e-9, 8e-9, 80e-9),
        retention="random",
        block_bytes=Number(size, Kind.ASSUMED, f"{source}; {_DEFAULT}", size / 100, size),
        block_bytes_per_s=_assumed(20e9, 5e9, 80e9, "one core's stream from L3"),
    )


def _handoff() -> HandOff:
    return HandOff(
        hop_s=_assumed(0.1e-6, 0.03e-6, 2e-6, "a cache line from core to core"),
        cross_die_s=Number(0.0, Kind.DATASHEET, "a CPU is treated as one die"),
        atomic_s=_assumed(30e-9, 5e-9, 300e-9),
        poll_s=_assumed(20e-9, 1e-9, 500e-9),
    )


def _launch() -> Launch:
    return Launch(
        stream_s=_assumed(20e-6, 2e-6, 200e-6, "threads woken and joined"),
        graph_edge_s=_assumed(10e-6, 1e-6, 100e-6, "a barrier between kernels"),
        restart_s=_assumed(0.2e-6, 0.05e-6, 2e-6),
    )


def _assumed(value: float, low: float, high: float, note: str = "") -> Number:
    return Number(value, Kind.ASSUMED, f"{note}; {_DEFAULT}" if note else _DEFAULT, low, high)


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _quota_cores(root: Path) -> int | None:
    """Whole cores that the control group's CPU quota allows; polling threads need whole ones."""
    cores: list[float] = []
    for text in _cgroup(root, "cpu.max", "cpu/cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and int(quota) > 0:
            cores.append(int(quota) / (_positive(period) or 100_000))
    return max(1, math.floor(min(cores))) if cores else None


def _cgroup(root: Path, v2: str, v1: str) -> list[str]:
    """The texts of a control file in this process's group and in each of its parents."""
    top = root / "sys/fs/cgroup"
    own = next(
        (
            line[3:]
            for line in (_read(root / "proc/self/cgroup") or "").splitlines()
            if line.startswith("0::")
        ),
        "/",
    )
    group = top / own.strip().lstrip("/")
    folders = [group, *(p for p in group.parents if p == top or top in p.parents)]
    texts = [_read(folder / v2) for folder in folders] + [_read(top / v1)]
    return [t for t in texts if t]


def _caches(root: Path, cpus: Sequence[int], *, level: int) -> list[tuple[int, int]]:
    """(bytes, how many of `cpus` share it) of each distinct data cache of a level."""
    found: dict[frozenset[int], int] = {}
    for cpu in cpus:
        for index in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
            size = _size(_read(index / "size"))
            if (
                _read(index / "level") != str(level)
                or _read(index / "type") == "Instruction"
                or not size
            ):
                continue
            shared = _cpu_list(_read(index / "shared_cpu_list")) | {cpu}
            found[frozenset(shared & set(cpus))] = size
    return [(size, len(sharers)) for sharers, size in found.items()]


def _size(text: str | None) -> int:
    """Bytes of "512K"; 0 if unreadable."""
    if not text:
        return 0
    digits, scale = (text[:-1], _UNITS[text[-1]]) if text[-1] in _UNITS else (text, 1)
    return int(digits) * scale if digits.isdigit() else 0


def _cpu_list(text: str | None) -> set[int]:
    """CPUs of "0-3,8"; none if unreadable."""
    cpus: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _title(root: Path) -> str:
    name = next(
        (n for key in ("model name", "Hardware", "CPU part") if (n := _cpuinfo(root, key))), None
    )
    return f"This computer ({name})" if name else "This computer"


def _cpuinfo(root: Path, key: str) -> str | None:
    return _field(root / "proc/cpuinfo", key)


def _field(path: Path, key: str) -> str | None:
    """The first `key: value` of a /proc file."""
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key and value.strip():
            return value.strip()
    return None


def _positive(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if value > 0 and math.isfinite(value) else None


def _read(path: Path) -> str | None:
    """A small file's text, or None: any of these may be missing or forbidden in a container."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
