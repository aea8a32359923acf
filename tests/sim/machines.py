"""Synthetic devices, nodes and plans for the twin's laws; no real device is meant."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hypothesis import strategies as st

from twin.calibrate.gpu_layers import chain_spec
from twin.cost.formats import RATES as DECODED_RATES
from twin.hardware.kernel import CoreKernel, WarpKernel
from twin.hardware.load import load_device
from twin.hardware.number import Kind, Number
from twin.hardware.override import apply_fit
from twin.hardware.stated import of_a_core
from twin.hardware.types import (
    Block,
    Cache,
    Device,
    Fabric,
    HandOff,
    Launch,
    Link,
    Memory,
    Node,
    Sharing,
    Slices,
    Structure,
)
from twin.models.spec import DType, Lanes, ModelSpec, Rope
from twin.plan.options import (
    CollectiveKind,
    Exchanged,
    HandOffKind,
    Limits,
    Options,
    Placement,
    Sampling,
)
from twin.plan.types import Plan
from twin.schedule import options as defaults
from twin.schedule.plans import build
from twin.schedule.probe import exchange_probe, stream_probe
from twin.sim.run import simulate
from twin.units import unit_of

RATES = (
    "memory.stream_bytes_per_s",
    "block.load_bytes_per_s",
    "kernel.bf16_bytes_per_s",
    "kernel.kv_bytes_per_s",
    "l2.bytes_per_s",
)
TIMES = (
    "kernel.row_s",
    "kernel.element_s",
    "kernel.stage_s",
    "memory.latency_s",
    "handoff.hop_s",
    "handoff.atomic_s",
    "handoff.poll_s",
)
FAST = 1e18  # bytes/s; a pipe that never binds
FREE = {
    "fp16_bytes_per_s": FAST,
    "bf16_bytes_per_s": FAST,
    "fp32_bytes_per_s": FAST,
    "row_s": 0.0,
    "element_s": 0.0,
    "stage_s": 0.0,
    "kv_bytes_per_s": FAST,
    "sample_element_s": 0.0,
}
_OPTIONAL = [f.name for f in fields(CoreKernel) if f.default is None]
WARP_TIMES = [
    f.name
    for f in fields(WarpKernel)
    if f.name not in FREE and f.name != "border_s" and unit_of(f.name) == "s"
]
MODEL = ModelSpec(
    name="tiny",
    family="test",
    layers=2,
    hidden=64,
    heads=8,
    kv_heads=4,
    head_dim=16,
    ffn=128,
    vocab=96,
    context=256,
    norm_eps=1e-5,
    rope=Rope(10000.0),
    windows=(0, 16),
)


def number(value: float) -> Number:
    return Number(value, Kind.ASSUMED, "synthetic")


def numbers(**values: float) -> dict[str, Any]:
    return {name: number(value) for name, value in values.items()}


def ideal(*, dies: int = 1, per_die: int = 4, io_dies: int = 1, stream: float = 1e12) -> Device:
    """Only the memory's rate is finite."""
    return Device(
        name="ideal",
        title="ideal",
        vendor="none",
        isa=None,
        structure=Structure(
            **numbers(dies=dies, blocks_per_die=per_die, io_dies=io_dies, stacks=io_dies)
        ),
        block=Block(
            **numbers(
                clock_hz=1e9,
                on_chip_bytes=1e9,
                load_bytes_per_s=FAST,
            )
        ),
        memory=Memory(
            **numbers(
                capacity_bytes=1e12, peak_bytes_per_s=stream, stream_bytes_per_s=stream, latency_s=0
            )
        ),
        l2=Cache(**numbers(capacity_bytes=0, bytes_per_s=FAST, latency_s=0)),
        handoff=HandOff(**numbers(hop_s=0, cross_die_s=0, atomic_s=0, poll_s=0)),
        launch=Launch(**numbers(stream_s=0, graph_edge_s=0, restart_s=0)),
        kernel=core_kernel(),
    )


def core_kernel() -> CoreKernel:
    """Free, but for the laws by which costs grow, which are those on file."""
    on_file, nothing = of_a_core(), dict.fromkeys(_OPTIONAL)
    return replace(on_file, **nothing, **numbers(**FREE))


def warp_kernel(**costs: float) -> WarpKernel:
    """Free but for these costs; its laws are those of an H200's kernel on file."""
    on_file = load_device("h200-sxm").kernel
    assert isinstance(on_file, WarpKernel)
    rates = dict.fromkeys(("gather_bytes_per_s", *DECODED_RATES.values()), FAST)
    free = dict.fromkeys(WARP_TIMES, 0.0)
    return replace(on_file, border_s=None, **numbers(**{**FREE, **rates, **free, **costs}))


def usual(*, dies: int = 1, per_die: int = 4, io_dies: int = 1) -> Device:
    """Every cost of ordinary size, scaled to the tiny model."""
    device = ideal(dies=dies, per_die=per_die, io_dies=io_dies, stream=4e11)
    return apply_fit(
        replace(
            device,
            fabric=Fabric(
                **numbers(die_port_bytes_per_s=4e11, io_ingress_bytes_per_s=4e11, hop_s=6e-8)
            )
            if dies > 1
            else None,
        ),
        numbers(
            **{
                "block.load_bytes_per_s": 2e11,
                "kernel.fp16_bytes_per_s": 1e11,
                "kernel.bf16_bytes_per_s": 1e11,
                "kernel.fp32_bytes_per_s": 1e11,
                "kernel.row_s": 5e-9,
                "kernel.element_s": 1e-10,
                "kernel.stage_s": 1e-7,
                "kernel.kv_bytes_per_s": 5e10,
                "kernel.sample_element_s": 2e-10,
                "memory.latency_s": 3e-7,
                "l2.bytes_per_s": 2e12,
                "l2.latency_s": 1e-7,
                "handoff.hop_s": 3e-7,
                "handoff.cross_die_s": 1e-7 if dies > 1 else 0,
                "handoff.atomic_s": 5e-9,
                "handoff.poll_s": 5e-8,
                "launch.stream_s": 4.5e-6,
                "launch.graph_edge_s": 1.5e-6,
                "launch.restart_s": 6e-7,
            }
        ),
    )


def node_of(
    device: Device,
    gpus: int = 1,
    *,
    topology: str = "mesh",
    hop_s: float = 1e-6,
    loaded_hop_s: float | None = None,
    spread_s: float = 0.0,
    peer_s: float = 0.0,
    fence_s: float = 0.0,
) -> Node:
    if gpus == 1:
        return Node("synthetic", device, 1)
    loaded = hop_s if loaded_hop_s is None else loaded_hop_s
    rates = numbers(
        bytes_per_s=5e10, hop_s=hop_s, loaded_hop_s=loaded, spread_s=spread_s,
        peer_s=peer_s, fence_s=fence_s, library_allreduce_s=4e-6,
    )  # fmt: skip
    return Node("synthetic", device, gpus, Link(topology, **rates))


def limits_of(device: Device) -> Limits:
    return Limits(
        device.blocks, int(device.structure.dies.value), 10**9, 10**12, device.sharing is not None
    )


def plan_for(node: Node, options: Options, *, lanes: Lanes | None = None) -> Plan:
    return build(replace(MODEL, lanes=lanes), options, limits_of(node.device))


def rounds_of_splits(node: Node, heads: int, slot_bytes: int) -> Plan:
    """A layer of 2,560 columns, heads of 128 elements, whose output projection gathers twelve
    splits.
    """
    spec = chain_spec(
        "rounds", layers=1, hidden=2560, heads=heads, kv_heads=4, head_dim=128, ffn=5120
    )
    return defaults.plan_for(
        spec, node, context=1500, slot_bytes=slot_bytes, attention_splits=12, prompt_chunk=1
    )


@st.composite
def devices(draw: st.DrawFn, *, caches: bool = False) -> Device:
    """Any size, any balance, sometimes with free parts."""
    dies = draw(st.sampled_from((1, 1, 2, 4)))
    io_dies = draw(st.sampled_from([n for n in (1, 2, 4) if n <= dies and dies % n == 0]))
    device = usual(dies=dies, per_die=draw(st.integers(1, 3)) if dies < 4 else 1, io_dies=io_dies)
    scale = st.sampled_from((0.01, 0.1, 0.3, 1.0, 3.0))
    times = st.sampled_from((0.0, 0.3, 1.0, 1.0, 4.0))
    fit = {}
    for path in RATES:
        fit[path] = number(_value(device, path) * draw(scale))
    for path in TIMES:
        fit[path] = number(_value(device, path) * draw(times))
    if device.fabric is not None:
        fit["fabric.die_port_bytes_per_s"] = number(
            device.fabric.die_port_bytes_per_s.value * draw(scale)
        )
        fit["fabric.io_ingress_bytes_per_s"] = number(
            device.fabric.io_ingress_bytes_per_s.value * draw(scale)
        )
    device = apply_fit(device, fit)
    loaded = device.handoff.hop_s.value * draw(st.sampled_from((1.0, 3.0)))
    device = replace(device, handoff=replace(device.handoff, loaded_hop_s=number(loaded)))
    if caches and draw(st.booleans()):
        llc = Cache(
            **numbers(
                capacity_bytes=draw(st.sampled_from((1e3, 1e7))), bytes_per_s=2e12, latency_s=1e-7
            )
        )
        device = replace(device, llc=llc)
        if device.fabric is not None and draw(st.booleans()):
            rate = draw(st.sampled_from((1e8, 1e9, 1e10)))
            slices = Slices(**numbers(bytes_per_s=rate, near_s=draw(st.sampled_from((2e-8, 1e-7)))))
            device = replace(device, slices=slices)
    return device


def where_exchanged(draw: st.DrawFn, device: Device, options: Options) -> Options:
    """Copies of words on each I/O die, where the device has such."""
    kinds = list(Exchanged) if device.slices and device.llc else [Exchanged.ONCE]
    return replace(options, exchanged=draw(st.sampled_from(kinds)))


@st.composite
def nodes(
    draw: st.DrawFn,
    *,
    caches: bool = False,
    gpus: tuple[int, ...] = (1, 2, 4),
    sharing: bool = True,
    loads: tuple[float, ...] = (1.0, 3.0),
) -> Node:
    device = draw(devices(caches=caches))
    count = draw(st.sampled_from(gpus))
    topology = draw(
        st.sampled_from(("mesh", "switch", "memory") if sharing else ("mesh", "switch"))
    )
    if sharing and (topology == "memory" or draw(st.integers(0, 3)) == 0):
        device = replace(
            device, sharing=Sharing(**numbers(switch_s=draw(st.sampled_from((0.0, 2e-7)))))
        )
    hop = draw(st.sampled_from((0.0, 5e-7, 2e-6)))
    return node_of(
        device,
        count,
        topology=topology,
        hop_s=hop,
        loaded_hop_s=hop * draw(st.sampled_from(loads)),
        spread_s=draw(st.sampled_from([0.0, 3e-7])),
        peer_s=draw(st.sampled_from([0.0, 1.5e-7])),
        fence_s=draw(st.sampled_from([0.0, 2e-7])),
    )


@st.composite
def plans(draw: st.DrawFn, node: Node, **fixed: Any) -> Plan:
    """A tiny model or a probe with any options that the node allows."""
    device = node.device
    slots = draw(st.integers(1, 6))
    options = Options(
        gpus=node.gpus,
        blocks=device.blocks * draw(st.sampled_from((1, 2))) if device.sharing else device.blocks,
        slot_bytes=draw(st.sampled_from((256, 512, 2048))),
        ring_slots=slots,
        window_slots=draw(st.integers(1, slots)),
        tile_rows=draw(st.sampled_from((2, 4))),
        handoff=draw(st.sampled_from(list(HandOffKind))),
        collective=CollectiveKind.PUSH if node.gpus > 1 else CollectiveKind.NONE,
        placement=draw(st.sampled_from(list(Placement))),
        sampling=draw(st.sampled_from(list(Sampling))),
        context=draw(st.sampled_from((1, 40, 128))),
        max_context=256,
        weight_dtype=DType.BF16,
    )
    options = replace(options, **fixed)
    probe = draw(st.integers(0, 4)) if node.gpus == 1 and "collective" not in fixed else 4
    if probe == 0:
        rows, stages = options.blocks * draw(st.integers(1, 20)), draw(st.integers(1, 3))
        return stream_probe(options, limits_of(device), rows=rows, cols=64, stages=stages)
    if probe == 1:
        elements, stages = options.blocks * draw(st.integers(1, 5)), 3 * draw(st.integers(1, 2))
        return exchange_probe(options, limits_of(device), elements=elements, stages=stages)
    return plan_for(node, options)


def _value(device: Device, path: str) -> float:
    part: Any = device
    for name in path.split("."):
        part = getattr(part, name)
    return float(part.value)


LANES = Lanes(count=4, delay=1)


def fitted(device: Device, **values: float) -> Device:
    return apply_fit(
        device, {path.replace("__", "."): number(value) for path, value in values.items()}
    )


def warped(**changed: float) -> Device:
    """An ideal device whose blocks are of warps; only what is named costs anything."""
    jitter, pair = changed.pop("jitter_s", 0.0), changed.pop("pair_bytes_per_s", FAST)
    device = with_kernel(ideal(stream=FAST), warp_kernel(**changed))
    block = replace(device.block, pair_bytes_per_s=number(pair))
    return replace(device, block=block, memory=replace(device.memory, jitter_s=number(jitter)))


def with_kernel(device: Device, kernel: CoreKernel | WarpKernel) -> Device:
    return replace(device, kernel=kernel)


def warps_of(device: Device) -> WarpKernel:
    assert isinstance(device.kernel, WarpKernel)
    return device.kernel


def streamed(device: Device, *, blocks: int = 1, slot_bytes: int = 16384, rows: int = 64) -> float:
    options = Options(blocks=blocks, slot_bytes=slot_bytes, ring_slots=4, window_slots=4)
    return simulate(
        stream_probe(options, limits_of(device), rows=rows, cols=2048), node_of(device)
    ).step_s
