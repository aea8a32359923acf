"""The probes of several GPUs: a hop between them, and an all-reduce by its size,
idle and while all of them stream.

They are plans of the resident kernel, as those of one GPU are (gpu_probes.py). The time of an
all-reduce under stream is what an exchange adds to a matrix of STREAMED KiB a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from twin.calibrate.gpu_layers import PROMPT, TOKENS, chain_plan, chain_spec
from twin.calibrate.gpu_probes import COLS, KIB, LANED, STAGES, WIDE_RING, _idle, _options, steps_of
from twin.calibrate.probes import Probe
from twin.models.spec import Lanes, ModelSpec
from twin.plan.options import CollectiveKind, HandOffKind, Limits
from twin.plan.peer_probes import over_gpus
from twin.plan.types import Plan
from twin.schedule.probe import exchange_probe, hop_probe, stream_probe, turns_probe

GROUP = "link"
FENCES = "fences"  # of all GPUs, which counters and barriers wait for
COMPARED = "lanes"  # settles no number
LANES = 8
HOPS = 12
SIZES = (2, 6, 8, 12, 16)  # KiB of FP32 that all blocks of a rank publish together
COUNTED = (2, 16)  # of these, with counters and barriers
# KiB of weights a block and exchange: less than the ring holds, so that the stream goes on while
# the exchange is waited for, and hides none of it
STREAMED = 64
WINDOW = 3  # slots in flight, as a model's kernel has


def peer_probes(limits: Limits, gpus: int) -> list[Probe]:
    """All probes of `gpus` GPUs."""
    found = [*_hops(limits), *_reductions(limits)]
    probes = [(f"peer-{name}-g{gpus}", over_gpus(plan, gpus)) for name, plan in found]
    probes += [(f"peer-{name}-g{gpus}", alone) for name, alone in _alone(limits)]
    counted = [(f"peer-{name}-g{gpus}", over_gpus(plan, gpus)) for name, plan in _counted(limits)]
    return [
        Probe(name, group, plan, steps_of(plan))
        for group, some in ((GROUP, probes), (FENCES, counted))
        for name, plan in some
    ]


def lane_probes(limits: Limits, gpus: int) -> list[Probe]:
    """Layers of eight lanes over `gpus` GPUs, narrow and wide, after few and many positions. Their
    stages are timed too, and no number is fitted to them: they ask what the twin lacks with lanes.
    """
    few = limits.blocks // (LANES // gpus) * (LANES // gpus)
    return [
        Probe(
            f"{LANED}-{hidden}-{positions}-g{gpus}",
            COMPARED,
            chain_plan(
                limits,
                _laned(hidden, heads),
                positions=positions,
                blocks=few,
                gpus=gpus,
                collective=CollectiveKind.PUSH,
            ),
            TOKENS,
        )
        for hidden, heads in ((1024, 16), (3072, 32))
        for positions in (PROMPT, 1500)
    ]


def _laned(hidden: int, heads: int) -> ModelSpec:
    spec = chain_spec(
        f"lanes-{hidden}",
        layers=8,
        hidden=hidden,
        heads=heads,
        kv_heads=LANES,
        head_dim=64,
        ffn=4 * hidden,
    )
    return replace(spec, family="laneformer", lanes=Lanes(LANES, 2))


def elements_of(kib: int) -> int:
    return kib * KIB // 4


def _hops(limits: Limits) -> Iterator[tuple[str, Plan]]:
    """One word of each rank goes to all ranks, and the next one back."""
    last, every = limits.blocks - 1, limits.blocks
    yield "hop", hop_probe(_idle(every), limits, pair=(0, last), hops=HOPS)
    rows = 40 * (every - 2)
    yield (
        "hop-loaded",
        hop_probe(
            _options(every, window_slots=WINDOW), limits, pair=(0, last), hops=HOPS, rows=rows
        ),
    )


def _reductions(limits: Limits) -> Iterator[tuple[str, Plan]]:
    for kib in SIZES:
        yield f"reduce-{kib}K", idle_exchange(limits, elements_of(kib))
    for kib in SIZES:
        yield f"reduce-loaded-{kib}K", loaded_exchange(limits, elements_of(kib))


def _counted(limits: Limits) -> Iterator[tuple[str, Plan]]:
    """The same with counters and barriers, whose publications wait for a fence of all GPUs and for
    each rank's arrival behind it. Under stream with counters alone: a barrier's stage that streams
    meets once more.
    """
    for handoff in (HandOffKind.COUNTER, HandOffKind.GRID):
        for kib in COUNTED:
            plan = idle_exchange(limits, elements_of(kib), handoff)
            yield f"reduce-{handoff.value}-{kib}K", plan
    for kib in COUNTED:
        plan = loaded_exchange(limits, elements_of(kib), HandOffKind.COUNTER)
        yield f"reduce-loaded-counter-{kib}K", plan


def idle_exchange(
    limits: Limits, elements: int, handoff: HandOffKind = HandOffKind.SENTINEL
) -> Plan:
    """STAGES exchanges of `elements` FP32 and nothing else, of one GPU (see `over_gpus`)."""
    options = _idle(limits.blocks, handoff=handoff)
    return exchange_probe(options, limits, elements=elements, stages=STAGES)


def loaded_exchange(
    limits: Limits, elements: int, handoff: HandOffKind = HandOffKind.SENTINEL
) -> Plan:
    """The same while every block streams."""
    return turns_probe(
        _options(limits.blocks, window_slots=WINDOW, ring_slots=WIDE_RING, handoff=handoff),
        limits,
        elements=elements,
        rows=_rows(limits),
        cols=COLS,
        stages=STAGES,
    )


def stream_alone(limits: Limits) -> Plan:
    """The matrices of `loaded_exchange` without an exchange."""
    options = _options(limits.blocks, window_slots=WINDOW, ring_slots=WIDE_RING)
    return stream_probe(options, limits, rows=_rows(limits), cols=COLS, stages=STAGES)


def _alone(limits: Limits) -> Iterator[tuple[str, Plan]]:
    """On one GPU: no GPU waits for another."""
    yield "stream", stream_alone(limits)


def _rows(limits: Limits) -> int:
    return limits.blocks * STREAMED * KIB // (2 * COLS)


def reduce_seconds(medians: dict[str, float], gpus: int, kib: int, *, loaded: bool) -> float:
    """Seconds of one all-reduce, from the medians of a step of each probe, by name."""
    if not loaded:
        return medians[f"peer-reduce-{kib}K-g{gpus}"] / STAGES
    both, stream = medians[f"peer-reduce-loaded-{kib}K-g{gpus}"], medians[f"peer-stream-g{gpus}"]
    return (both - stream) / STAGES
