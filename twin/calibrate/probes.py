"""What calibration measures of a device, each as a plan that the engine runs and the twin
can run too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twin.calibrate.gpu_layers import chain_spec
from twin.calibrate.reading import Reading
from twin.cost.formats import family, rate_of
from twin.hardware.host import detect_host
from twin.hardware.types import Device
from twin.models.formats import DECODED, Format
from twin.models.spec import DType
from twin.plan.options import Execution, HandOffKind, Limits, Options, Sampling
from twin.plan.types import Plan
from twin.schedule.plans import build
from twin.schedule.probe import (
    attention_probe,
    exchange_probe,
    sample_probe,
    stream_probe,
    turns_probe,
)

MB = 10**6
SHORTEST = 4 * MB  # of the streams that no core's own cache holds
LEAST_LARGEST = 384 * MB  # and the longest one at least, whatever the system says of its caches
BEYOND = 3  # times the last cache: of a longer stream it keeps 6 % or less
MEMORY_PART = 2  # of the memory at most, all probes together
FURTHER_LARGEST = 2  # the largest footprint once more in each other type
MOST_BLOCKS = 64  # the smallest exchange has that many elements, and every block publishes one
COPIES = 5  # of what blocks exchange: four at least (exchange_probe), and they divide 15 stages
CODE_ROWS = 16  # of a tile whose blocks are interleaved
CODES_STEPS = 20  # a Xeon's core takes 14 ms for a megabyte of MXFP4
STAGES = 15  # of an exchange probe
LAYERS, LAYERS_CONTEXT = 4, 32  # of a chain, and positions in the middle of its steps
CROWD = 4  # blocks per core in the probe of taking turns


@dataclass(frozen=True, slots=True)
class Probe:
    """One question. `group` names the numbers that it settles (see fit.GROUPS)."""

    name: str
    group: str
    plan: Plan
    steps: int
    reading: Reading = Reading.STEP


def host_probes(
    limits: Limits, cores: int, device: Device | None = None, *, quick: bool
) -> list[Probe]:
    """All probes of a CPU with `cores` cores of `device`. `quick` keeps every question and thins
    out its samples.
    """
    most = min(cores, MOST_BLOCKS)
    # alone, the first hand-off, and what memory gives to all cores together
    blocks = sorted({1, min(2, most), most})
    return [
        *_streams(limits, sorted({1, most}) if quick else blocks, device or detect_host(), quick),
        *_rows(limits, quick),
        *_codes(limits, device or detect_host()),
        *_exchanges(limits, blocks, quick),
        *_attention(limits, blocks, quick),
        *_layers(limits),
        *_launches(limits, blocks),
        *_samples(limits),
        *_turns(limits, most),
    ]


def _options(blocks: int, **changes: object) -> Options:
    return replace(Options(blocks=blocks, copies=COPIES), **changes)  # type: ignore[arg-type]


def _streams(limits: Limits, blocks: list[int], device: Device, quick: bool) -> list[Probe]:
    """Weights of several footprints: from cache (the consumer's own speed) to memory (the
    ceiling).
    """
    ladder = footprints(device, quick=quick, engines=len(blocks))
    small, large = ladder[0], ladder[-1]
    own = device.block.on_chip_bytes.value
    probes = []
    for dtype in (DType.BF16, DType.FP16, DType.FP32):
        for size in ladder if dtype is DType.BF16 else (small, large):
            for count in blocks:
                if own * count / 2 < size < 2 * own * count and size != small:
                    continue  # as large as the cores' own caches: neither in them nor beyond
                rows = size // (2048 * dtype.bytes)
                plan = stream_probe(
                    _options(count, weight_dtype=dtype), limits, rows=rows, cols=2048
                )
                name = f"stream-{dtype.value}-{size / MB:g}MB-b{count}"
                probes.append(Probe(name, "stream", plan, _steps(size)))
    return probes


def footprints(device: Device, *, quick: bool, engines: int) -> list[int]:
    """Bytes of the streams, ascending: one that a core's own cache holds, then by factors of two up
    to three times what the system says of the last cache, so that the last ones come from memory;
    all of them together, each for so many `engines`, in at most a part of the memory.
    """
    own = device.block.on_chip_bytes.value
    llc = device.llc.capacity_bytes.value if device.llc else 0.0
    room = device.memory.capacity_bytes.value / MEMORY_PART
    largest = max(LEAST_LARGEST, round(BEYOND * llc / MB) * MB)
    while largest > 2 * SHORTEST and (2 + FURTHER_LARGEST) * largest * engines > room:
        largest //= 2
    first = MB if own >= MB else MB // 4
    step = 2 if quick else 1
    halves = [round(SHORTEST * 2 ** (at / 2)) // MB * MB for at in range(0, 64, step)]
    return [first, *(size for size in halves if size < 0.75 * largest), largest]


def _rows(limits: Limits, quick: bool) -> list[Probe]:
    """Narrow matrices, where the fixed cost of a row shows."""
    widths = (64, 512) if quick else (64, 128, 256, 512)
    return [
        Probe(
            f"rows-{cols}",
            "stream",
            stream_probe(_options(1), limits, rows=MB // (2 * cols), cols=cols),
            _steps(MB),
        )
        for cols in widths
    ]


def _codes(limits: Limits, device: Device) -> list[Probe]:
    """Low-bit weights that a core's own cache holds, one format of each kind that it decodes."""
    own = device.block.on_chip_bytes.value
    kinds: dict[str, Format] = {}
    for form in DECODED.values():
        if rate_of(device.kernel, form) is not None:
            kinds.setdefault(family(form.name), form)
    size = MB if own >= 2 * MB else MB // 4
    probes = []
    for kind, form in kinds.items():
        rows = size * 8 // (form.bits * 2048) // CODE_ROWS * CODE_ROWS
        plan = stream_probe(_options(1), limits, rows=rows, cols=2048, form=form)
        probes.append(Probe(f"codes-{kind}", "codes", plan, CODES_STEPS))
    return probes


def _exchanges(limits: Limits, blocks: list[int], quick: bool) -> list[Probe]:
    """Hand-offs by protocol and size. One block alone shows the work of a stage without any
    waiting.
    """
    sizes = (64, 4096) if quick else (64, 1024, 4096)
    return [
        Probe(
            f"exchange-{kind.value}-{elements}-b{count}",
            "exchange",
            exchange_probe(_options(count, handoff=kind), limits, elements=elements, stages=STAGES),
            200,
        )
        for kind in HandOffKind
        for elements in sizes
        for count in blocks
    ]


def _attention(limits: Limits, blocks: list[int], quick: bool) -> list[Probe]:
    contexts = (64, 1024) if quick else (64, 256, 1024, 2048)
    return [
        Probe(
            f"attention-{context}-b{count}",
            "attention",
            attention_probe(
                _options(count, context=context, max_context=2048, attention_splits=1),
                limits,
                heads=8,
                kv_heads=4,
                head_dim=64,
                stages=4,
            ),
            50,
        )
        for context in contexts
        for count in blocks
    ]


def _layers(limits: Limits) -> list[Probe]:
    """Chains of layers (gpu_layers.py) on one block, small enough for its own cache: mostly gates,
    mostly heads, with keys of their own or shared ones.
    """
    chains = {"gates": (1, 1, 4096), "heads": (16, 16, 64), "groups": (24, 6, 64)}
    return [
        Probe(
            f"layers-{name}",
            "layers",
            build(
                chain_spec(
                    name,
                    layers=LAYERS,
                    hidden=64,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=64,
                    ffn=ffn,
                    vocab=256,
                ),
                _options(
                    1,
                    context=LAYERS_CONTEXT,
                    max_context=2 * LAYERS_CONTEXT,
                    attention_splits=1,
                ),
                limits,
            ),
            LAYERS_CONTEXT,
        )
        for name, (heads, kv_heads, ffn) in chains.items()
    ]


def _launches(limits: Limits, blocks: list[int]) -> list[Probe]:
    """The same empty stages, each as a launch of its own. A single block has nobody to start and to
    join.
    """
    return [
        Probe(
            f"{execution.value}-b{count}",
            "launch",
            exchange_probe(
                _options(count, execution=execution), limits, elements=64, stages=STAGES
            ),
            50,
        )
        for execution in (Execution.GRAPH, Execution.LAUNCHES)
        for count in blocks[-1:]
    ]


def _samples(limits: Limits) -> list[Probe]:
    plans = {
        vocab: sample_probe(_options(1, sampling=Sampling.FULL), limits, vocab=vocab)
        for vocab in (4096, 32768)
    }
    return [Probe(f"sample-{vocab}", "sample", plan, 20) for vocab, plan in plans.items()]


def _turns(limits: Limits, cores: int) -> list[Probe]:
    """More blocks than cores: every hand-off waits for the neighbours' turns, which leave the
    core's caches cold.
    """
    crowd = CROWD * cores
    plans = {
        rows: turns_probe(_options(crowd), limits, elements=1024, rows=rows, cols=512)
        for rows in (512, 1024)
    }
    return [Probe(f"turns-{rows}x512-b{crowd}", "turns", plan, 50) for rows, plan in plans.items()]


def _steps(footprint_bytes: int) -> int:
    """Enough steps for about 50 ms at 40 GB/s, at least 4."""
    return max(4, min(2000, int(0.05 * 40e9 / footprint_bytes)))
