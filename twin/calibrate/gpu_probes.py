"""The questions that calibration asks of a GPU. Each takes well under half a second; the order is
that of the fit's groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from twin.calibrate.experiment import Experiment
from twin.calibrate.gpu_designed import PREFIX, designed
from twin.calibrate.gpu_formats import CODED, ROUTED, formats
from twin.calibrate.gpu_layers import CHAIN, TOKENS, chains
from twin.calibrate.gpu_mixers import CHOICE, STATES, mixers
from twin.calibrate.probes import COPIES, Probe
from twin.models.spec import DType
from twin.plan.catalogue import StageKind
from twin.plan.options import Execution, HandOffKind, Limits, Options, Sampling
from twin.plan.types import Plan
from twin.schedule.probe import (
    attention_probe,
    exchange_probe,
    hop_probe,
    sample_probe,
    stream_probe,
    turns_probe,
)

KIB, MB = 2**10, 10**6
SLOT = 16 * KIB
# what every probe's vectors leave of a block's memory, whatever the kernel keeps there besides
RING_BYTES = 160 * KIB
FROM_MEMORY = 320 * MB  # several times any L2: nothing of it is left a step later
IN_CACHE = 24 * MB  # at most half of the L2
COLS = 2048
LINE = 16  # floats of a block's share in the exchanges: 64 bytes
FEW = 8  # blocks that L2 serves as fast as they can consume
STAGES = 15
WINDOWS = (1, 2, 3, 4, 10)  # slots in flight, from what a latency needs to all of a ring
WIDE_RING = 7  # slots next to vectors of 64 elements a block
HOP_ROWS = 40  # of each block in eight hops: as many as memory delivers meanwhile

RUN_S = 0.03  # of one repeat of a probe; steps are counted for these speeds:
BYTES_PER_S = 4e12  # all blocks together
BLOCK_BYTES_PER_S = 40e9
KV_BYTES_PER_S = 10e9  # a block
STAGE_S = 3e-6
LOGIT_S = 10e-9
MOST_STEPS, FEWEST_STEPS = 2000, 20


def gpu_probes(limits: Limits, *, quick: bool) -> list[Probe]:
    """All probes of a GPU. `quick` keeps one of each question."""
    found = [
        *_memory(limits),
        *_cache(limits),
        *_consumers(limits),
        *_stages(limits),
        *_exchanges(limits),
        *_hops(limits),
        *_attention(limits),
        *_launches(limits),
        *_samples(limits),
        *_loaded(limits),
        *chains(limits),
        *designed(limits),
        *formats(limits),
        *mixers(limits),
    ]
    probes = [
        Probe(name, group, plan, steps_of(plan) if plan.spec is None else TOKENS)
        for name, group, plan in found
    ]
    return [p for p in probes if p.name in QUICK] if quick else probes


LANED = "peer-lanes"  # chains on several GPUs (peer_probes.py)
# a step's time by the kind of stage: what chains take in all does not tell a scan from the partial
# outputs behind it
TRACED = (
    "chain-small",
    "chain-middle",
    "chain-large",
    "chain-feed",
    "chain-attend",
    "chain-head128",
    "chain-group4",
    "chain-group7",
    "chain-down4",
    "chain-middle-s1",
    "chain-middle-1000-s16",
    "chain-middle-window10",
    "chain-middle-counter",
    "chain-middle-grid",
    "chain-lanes",
    "chain-ragged",
)

QUICK = (
    "short-4",
    "short-64",
    "exchange-sentinel-16-b132",
    "exchange-counter-16-b132",
    "exchange-grid-16-b132",
    "exchange-sentinel-16-b1",
    "exchange-sentinel-64-b1",
    "hop-0-1",
    "stream-slot4K",
    "stream-window3",
    "stream-b96-window3",
    "lone-window1",
    "lone-window10",
    "cached-b33",
    "rows-bf16-2048",
    "rows-fp16-2048",
    "rows-fp32-2048",
    "rows-bf16-512",
    "rows-bf16-12288",
    "rows-slot8K",
    "rows-slot32K",
    "attention-512-h64-s16",
    "attention-4096-h64-s16",
    "attention-4096-h96-s16",
    "graph-15",
    "graph-matrices",
    "sample-32000",
    "turns-sentinel-64K-window3",
    "turns-sentinel-64K-window10",
    "chain-small",
    "chain-middle",
    "chain-middle-s1",
    "decode-int8-4096",
    "decode-fp8-4096",
    "decode-int4-g128-4096",
    "decode-mxfp4-4096",
    "coded-int8-narrow",
    "coded-fp8-narrow",
    "routed-narrow-fp8",
    "states-many",
    "choice-512",
)

Question = tuple[str, str, Plan]  # name, group, plan


def traced(probes: Iterable[Probe]) -> list[Experiment]:
    """Those whose stages are timed one by one as well."""
    plans = {probe.name: probe.plan for probe in probes if _is_traced(probe)}
    return [
        Experiment(
            name, plan.spec, plan.options, plan.options.context - TOKENS // 2, TOKENS, traced=True
        )
        for name, plan in plans.items()
        if plan.spec
    ]


def _is_traced(probe: Probe) -> bool:
    """Chains that were chosen for it, those of the design with the default hand-off, and all with
    low-bit weights, with experts, with recurrent states, or with lanes on several GPUs.
    """
    drawn = probe.name.startswith(PREFIX) and probe.plan.options.handoff is HandOffKind.SENTINEL
    kinds = (CODED, ROUTED, STATES, CHOICE, LANED)
    return drawn or probe.name.startswith(kinds) or probe.name in TRACED


def steps_of(plan: Plan) -> int:
    """Steps that take about RUN_S."""
    streamed = plan.weight_bytes() / min(BYTES_PER_S, plan.blocks * BLOCK_BYTES_PER_S)
    attended = plan.kv_bytes() / (plan.blocks * KV_BYTES_PER_S)
    logits = sum(
        plan.values[r.value].elements
        for s in plan.stages
        if s.kind is StageKind.SAMPLE
        for r in s.reads
    )
    step_s = streamed + attended + STAGE_S * len(plan.stages) + LOGIT_S * logits
    return max(FEWEST_STEPS, min(MOST_STEPS, int(RUN_S / step_s)))


def _options(blocks: int, slot_bytes: int = SLOT, **changes: Any) -> Options:
    slots = RING_BYTES // slot_bytes
    return replace(
        Options(
            blocks=blocks,
            slot_bytes=slot_bytes,
            ring_slots=slots,
            window_slots=slots,
            copies=COPIES,
        ),
        **changes,
    )


def _idle(blocks: int, **changes: Any) -> Options:
    """Nothing is streamed: the ring leaves the room to what is exchanged."""
    idle = Options(blocks=blocks, slot_bytes=SLOT, ring_slots=2, window_slots=2, copies=COPIES)
    return replace(idle, **changes)


def _stages(limits: Limits) -> Iterator[Question]:
    """Stages of almost no bytes and no hand-off: a lone tile's way through the block is longer than
    its share of many.
    """
    for blocks in (1, limits.blocks):
        yield (
            f"stages-b{blocks}",
            "consumer",
            stream_probe(_idle(blocks), limits, rows=blocks, cols=256, stages=4 * STAGES),
        )


def _exchanges(limits: Limits) -> Iterator[Question]:
    """Hand-offs by protocol, by elements of a block, by blocks. One block alone shows the work of a
    stage without any waiting.
    """
    every = limits.blocks
    shapes = [(HandOffKind.SENTINEL, share, every) for share in (1, LINE, 4 * LINE)]
    shapes += [
        (HandOffKind.COUNTER, LINE, every),
        (HandOffKind.GRID, LINE, every),
        (HandOffKind.SENTINEL, LINE, FEW),
        (HandOffKind.SENTINEL, LINE, every // 2),
        (HandOffKind.COUNTER, LINE, every // 2),
        (HandOffKind.GRID, LINE, every // 2),
    ]
    for kind, share, blocks in shapes:
        plan = exchange_probe(
            _idle(blocks, handoff=kind), limits, elements=share * blocks, stages=STAGES
        )
        yield f"exchange-{kind.value}-{share}-b{blocks}", "exchange", plan
    for share in (1, LINE, 4 * LINE):  # the same vectors, all of them one block's
        plan = exchange_probe(_idle(1), limits, elements=share * every, stages=STAGES)
        yield f"exchange-sentinel-{share}-b1", "exchange", plan


def _hops(limits: Limits) -> Iterator[Question]:
    """One word between two blocks, neighbours and the first and the last (which pairs made no
    difference); then while the others stream.
    """
    last = limits.blocks - 1
    for a, b in ((0, 1), (0, last)):
        yield (
            f"hop-{a}-{b}",
            "exchange",
            hop_probe(_idle(limits.blocks), limits, pair=(a, b), hops=12),
        )
    for window in WINDOWS:
        rows, options = HOP_ROWS * (limits.blocks - 2), _options(limits.blocks, window_slots=window)
        yield (
            f"hop-loaded-window{window}",
            "checked",
            hop_probe(options, limits, pair=(0, last), hops=12, rows=rows, cols=COLS),
        )


def _stream(
    limits: Limits,
    options: Options,
    footprint: int = FROM_MEMORY,
    *,
    cols: int = COLS,
    stages: int = 1,
) -> Plan:
    rows = footprint // (cols * options.weight_dtype.bytes * stages)
    return stream_probe(options, limits, rows=max(options.blocks, rows), cols=cols, stages=stages)


def _memory(limits: Limits) -> Iterator[Question]:
    """The ceiling against slot, window and blocks; what one block loads alone, in wide numbers so
    that its consumer is out of the way.

    With all slots in flight the ceiling was measured a tenth lower, and unequal blocks
    differed more: what is fitted has a window.
    """
    every = limits.blocks
    for slot in (4, 8, 16, 32, 64):
        yield (
            f"stream-slot{slot}K",
            "memory" if slot == 4 else "checked",
            _stream(limits, _options(every, slot * KIB)),
        )
    for blocks in (FEW, every // 4, every // 2, 96, 128):
        yield f"stream-b{blocks}", "checked", _stream(limits, _options(blocks))
    for window in WINDOWS[:-1]:
        yield (
            f"stream-window{window}",
            "memory",
            _stream(limits, _options(every, window_slots=window)),
        )
    yield "stream-b96-window3", "memory", _stream(limits, _options(96, window_slots=3))
    for window in (1, 2, 4, RING_BYTES // SLOT):
        yield (
            f"lone-window{window}",
            "memory",
            _stream(limits, _options(1, window_slots=window, weight_dtype=DType.FP32)),
        )
    for slot, group in ((4, "consumer"), (64, "checked")):  # a slot of two is held by its consumer
        yield (
            f"lone-slot{slot}K",
            group,
            _stream(limits, _options(1, slot * KIB, weight_dtype=DType.FP32)),
        )


def _cache(limits: Limits) -> Iterator[Question]:
    for blocks in (1, limits.blocks // 4):
        yield (
            f"cached-b{blocks}",
            "consumer",
            _stream(limits, _options(blocks, weight_dtype=DType.FP32), IN_CACHE),
        )
    yield (
        "cached-window1",
        "checked",
        _stream(limits, _options(1, window_slots=1, weight_dtype=DType.FP32), IN_CACHE),
    )


def _consumers(limits: Limits) -> Iterator[Question]:
    """Weights that stay in L2, by type and by the tile's shape; short matrices show what a stage
    costs next to its bytes.
    """
    for dtype in (DType.BF16, DType.FP16, DType.FP32):
        # one to six slices a team
        for cols in (
            (512, 896, COLS, 3072, 4096, 6144, 8192, 12288) if dtype is DType.BF16 else (COLS,)
        ):
            yield (
                f"rows-{dtype.value}-{cols}",
                "consumer",
                _stream(limits, _options(FEW, weight_dtype=dtype), IN_CACHE, cols=cols),
            )
    for slot in (8, 32):
        yield (
            f"rows-slot{slot}K",
            "consumer",
            _stream(limits, _options(FEW, slot * KIB), IN_CACHE, cols=4096),
        )
    for rows in (4, 16, 64):  # of each block and stage
        options = _options(FEW)
        yield (
            f"short-{rows}",
            "consumer",
            stream_probe(options, limits, rows=rows * FEW, cols=COLS, stages=max(2, 512 // rows)),
        )


def _attention(limits: Limits) -> Iterator[Question]:
    """Cached keys and values by context, by splits of a head, by head size and by queries a
    head. Fitted with the chains of layers: by themselves they say 0.31 us of a round of positions,
    which takes 0.35 us in layers (an H200).
    """

    def ask(
        context: int,
        head_dim: int,
        splits: int,
        *,
        kv_heads: int = 8,
        group: int = 4,
        blocks: int = limits.blocks,
    ) -> Question:
        options = _options(blocks, context=context, max_context=context, attention_splits=splits)
        stages = 2 if context > 8192 else 8
        plan = attention_probe(
            options,
            limits,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=head_dim,
            stages=stages,
        )
        alone = f"-kv{kv_heads}g{group}-b{blocks}" if (kv_heads, group) != (8, 4) else ""
        return f"attention-{context}-h{head_dim}-s{splits}{alone}", CHAIN, plan

    for head_dim in (64, 128):
        for context in (512, 4096, 32768):
            yield ask(context, head_dim, 16)
    for context, head_dim, splits in (
        (4096, 96, 16),
        (4096, 64, 1),
        (4096, 128, 4),
        (128, 64, 8),
        (1024, 64, 8),
        (1024, 128, 8),
    ):
        yield ask(context, head_dim, splits)
    for context in (1024, 4096):
        yield ask(context, 64, 16, kv_heads=2, group=7)
    yield ask(4096, 64, 16, group=1)
    yield ask(4096, 128, 1, kv_heads=1, blocks=1)


def _launches(limits: Limits) -> Iterator[Question]:
    """Tiny stages and short streams, each a kernel of its own."""
    for stages in (STAGES, 3 * STAGES):
        plan = exchange_probe(
            _idle(limits.blocks, execution=Execution.GRAPH),
            limits,
            elements=limits.blocks,
            stages=stages,
        )
        yield f"graph-{stages}", "launch", plan
    yield (
        "graph-matrices",
        "launch",
        _stream(limits, _options(limits.blocks, execution=Execution.GRAPH), stages=16),
    )


def _samples(limits: Limits) -> Iterator[Question]:
    for vocab in (32000, 128256):
        yield (
            f"sample-{vocab}",
            "sample",
            sample_probe(_idle(1, sampling=Sampling.FULL), limits, vocab=vocab),
        )
    yield "sample-greedy", "checked", sample_probe(_idle(1), limits, vocab=2 * limits.blocks)


def _loaded(limits: Limits) -> Iterator[Question]:
    """Hand-offs while the loaders stream: from a ring that the hand-off outlasts to one that never
    dries, and by the bytes in flight.
    """
    shapes = [(HandOffKind.SENTINEL, 64, LINE, window) for window in WINDOWS]
    shapes += [(HandOffKind.SENTINEL, size, LINE, 3) for size in (32, 128, 256)] + [
        (HandOffKind.SENTINEL, 256, LINE, 10)
    ]
    shapes += [(HandOffKind.SENTINEL, size, 4 * LINE, 3) for size in (64, 128)] + [
        (HandOffKind.SENTINEL, 64, 4 * LINE, 7)
    ]
    shapes += [
        (HandOffKind.COUNTER, 64, LINE, 3),
        (HandOffKind.GRID, 64, LINE, 3),
        (HandOffKind.COUNTER, 64, LINE, 10),
    ]
    # KiB of weights a block and hand-off, elements a block, slots in flight
    for kind, size, share, window in shapes:
        rows = limits.blocks * size * KIB // (2 * COLS)
        options = _options(limits.blocks, handoff=kind, window_slots=window)
        if share > LINE:  # what is gathered takes a part of the ring
            options = replace(options, ring_slots=WIDE_RING)
        plan = turns_probe(
            options, limits, elements=share * limits.blocks, rows=rows, cols=COLS, stages=STAGES
        )
        wide = f"-{share}" if share != LINE else ""
        yield f"turns-{kind.value}-{size}K{wide}-window{window}", "checked", plan
