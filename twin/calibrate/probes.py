"""The questions that calibration asks of a device, each as a plan that the engine runs and the twin
can run too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twin.calibrate.reading import Reading
from twin.models.spec import DType
from twin.plan.probe import attention_probe, exchange_probe, sample_probe, stream_probe, turns_probe
from twin.plan.types import Execution, HandOffKind, Limits, Options, Plan, Sampling

MB = 10**6
MOST_BLOCKS = 64  # the smallest exchange has that many elements, and every block publishes one
COPIES = 5  # of what blocks exchange: four at least (exchange_probe), and they divide 15 stages
CROWD = 4  # blocks per core in the probe of taking turns


@dataclass(frozen=True, slots=True)
class Probe:
    """One question. `group` names the numbers that it settles (see fit.GROUPS)."""

    name: str
    group: str
    plan: Plan
    steps: int
    reading: Reading = Reading.STEP


def host_probes(limits: Limits, cores: int, *, quick: bool) -> list[Probe]:
    """All probes of a CPU. `quick` keeps every question and thins out its samples."""
    most = min(cores, MOST_BLOCKS)
    # alone, the first hand-off, and what memory gives to all cores together
    blocks = sorted({1, min(2, most), most})
    return [
        *_streams(limits, blocks, quick),
        *_rows(limits, quick),
        *_exchanges(limits, blocks, quick),
        *_attention(limits, blocks, quick),
        *_launches(limits, blocks),
        *_samples(limits),
        *_turns(limits, most),
    ]


def _options(blocks: int, **changes: object) -> Options:
    return replace(Options(blocks=blocks, copies=COPIES), **changes)  # type: ignore[arg-type]


def _streams(limits: Limits, blocks: list[int], quick: bool) -> list[Probe]:
    """Weights of several footprints: from cache (the consumer's own speed) to memory (the
    ceiling).
    """
    sizes = (1, 16, 64, 384) if quick else (1, 2, 8, 16, 32, 64, 128, 384)
    probes = []
    for dtype in (DType.BF16, DType.FP16, DType.FP32):
        for size in sizes if dtype is DType.BF16 else (1, 384):
            for count in blocks:
                rows = size * MB // (2048 * dtype.bytes)
                plan = stream_probe(
                    _options(count, weight_dtype=dtype), limits, rows=rows, cols=2048
                )
                probes.append(
                    Probe(
                        f"stream-{dtype.value}-{size}MB-b{count}", "stream", plan, _steps(size * MB)
                    )
                )
    return probes


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


def _exchanges(limits: Limits, blocks: list[int], quick: bool) -> list[Probe]:
    """Hand-offs by protocol and size. One block alone shows the work of a stage without any
    waiting.
    """
    sizes = (64, 4096) if quick else (64, 1024, 4096)
    return [
        Probe(
            f"exchange-{kind.value}-{elements}-b{count}",
            "exchange",
            exchange_probe(_options(count, handoff=kind), limits, elements=elements, stages=15),
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


def _launches(limits: Limits, blocks: list[int]) -> list[Probe]:
    """The same empty stages, each as a launch of its own. A single block has nobody to start and to
    join.
    """
    return [
        Probe(
            f"{execution.value}-b{count}",
            "launch",
            exchange_probe(_options(count, execution=execution), limits, elements=64, stages=15),
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
    """Enough steps for about 50 ms at 40 GB/s, at least 5."""
    return max(5, min(2000, int(0.05 * 40e9 / footprint_bytes)))
