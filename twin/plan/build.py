"""From a model, options and the node's limits to a plan: what each block computes, waits for and
publishes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from twin.errors import PlanError
from twin.models.bounds import LARGEST_VOCABULARY
from twin.models.feeds import ExpertFeed
from twin.models.mixers import LatentAttention
from twin.models.spec import WEIGHT_TYPES, LaneHead, ModelSpec
from twin.plan.attention import Attention
from twin.plan.builder import Builder
from twin.plan.catalogue import ROWS, InPass
from twin.plan.coding import coding_of
from twin.plan.options import (
    CollectiveKind,
    Common,
    LatentCache,
    LateParts,
    Limits,
    Options,
    Placement,
    Residual,
    RouterInput,
)
from twin.plan.ranges import GPUS, RANGES, check_least, pages_of
from twin.plan.resets import with_resets
from twin.plan.settle import (
    as_stored,
    delay_of,
    norms_divided,
    not_by_own_rows,
    settled,
    windows_of,
)
from twin.plan.step import step
from twin.plan.types import Plan, Shard

HEAD_STEP = 4  # elements of a head that a thread gathers at once


class Attend(Protocol):
    """How a rank's blocks divide the kernel's attention of each of `ModelSpec.head_shapes`, which
    the schedule chooses; empty where a model's layers need caches that the kernel does not know.
    """

    def __call__(
        self, spec: ModelSpec, options: Options, *, ranks: int, blocks: int
    ) -> tuple[Attention, ...]: ...


def outline(spec: ModelSpec, options: Options, limits: Limits, attend: Attend) -> Plan:
    """One decode step, but for the tiles of its matrices, which are the schedule's.

    Raises PlanError when the options do not fit the model.
    """
    ranks = spec.lanes.count if spec.lanes else options.gpus
    _check(spec, options, ranks)
    options = settled(spec, options, limits)
    _check_router(spec, options, limits)
    _check_latent_cache(spec, options, ranks)
    ranks_per_gpu = ranks // options.gpus
    blocks = options.blocks // ranks_per_gpu
    shard = Shard(spec.hidden, -(-spec.vocab // ranks))
    attentions = attend(spec, options, ranks=ranks, blocks=blocks)
    coding = coding_of(spec.coded, ranks) if as_stored(spec, options, limits) else None
    builder = Builder(spec, options, ranks, blocks, shard, attentions, coding=coding)
    step(builder)
    if any(ROWS[stage.kind].in_pass is InPass.NO_CODE for stage in builder.stages):
        options = replace(options, prompt_chunk=1)
    _check_lookup(spec, options)
    plan = Plan(
        name=f"{spec.name} on {options.gpus} x {options.blocks} blocks",
        spec=spec,
        options=options,
        limits=limits,
        ranks=ranks,
        ranks_per_gpu=ranks_per_gpu,
        blocks=blocks,
        shard=shard,
        attentions=attentions,
        buffers=tuple(builder.buffers.values()),
        values=tuple(builder.values),
        stages=tuple(builder.stages),
        die_of_block=dies(options, limits.dies),
    )
    return with_resets(plan) if options.handoff.resets else plan


def dies(options: Options, count: int) -> tuple[int, ...]:
    """Die of each block of a GPU: runs of neighbours, or round-robin as the hardware deals them."""
    if options.placement is Placement.FLAT:
        return tuple(block % count for block in range(options.blocks))
    return tuple(block * count // options.blocks for block in range(options.blocks))


def _check(spec: ModelSpec, options: Options, ranks: int) -> None:
    if options.gpus not in GPUS:
        degrees = ", ".join(map(str, GPUS))
        raise PlanError(f"gpus={options.gpus}: the tensor-parallel degree is one of {degrees}")
    if options.blocks < RANGES["blocks"][0]:
        raise PlanError(f"blocks={options.blocks}: at least {RANGES['blocks'][0]} block per GPU")
    check_least(options)
    if options.weight_dtype not in WEIGHT_TYPES:
        raise PlanError(
            f"weight_dtype={options.weight_dtype.value}: a type of caches alone; weights have "
            f"{', '.join(dtype.value for dtype in WEIGHT_TYPES)}, or the format that the model is "
            "stored in (NAME@FORMAT)"
        )
    if ranks % options.gpus:
        raise PlanError(
            f"{spec.name} has {ranks} lanes, which do not divide over {options.gpus} GPUs"
        )
    if options.blocks % (ranks // options.gpus):
        raise PlanError(
            f"blocks={options.blocks}: {ranks // options.gpus} lanes per GPU need a multiple of "
            "that many blocks"
        )
    if ranks > 1 and options.collective is CollectiveKind.NONE:
        raise PlanError(
            f"collective=none with {ranks} ranks: their partial sums must meet; use push or library"
        )
    if options.collective is CollectiveKind.LIBRARY and options.resident and ranks > 1:
        raise PlanError(
            "collective=library cannot run inside a resident kernel: use push, or execution graph "
            "or stream"
        )
    between_gpus = not options.resident and options.gpus > 1
    if between_gpus and options.collective is CollectiveKind.PUSH and options.handoff.meets:
        raise PlanError(
            f"handoff={options.handoff.value} polls nothing, so kernels of several GPUs cannot "
            "push: use sentinel or counter, or a library"
        )
    if options.delay and not spec.lanes:
        raise PlanError(
            f"delay={options.delay}: {spec.name} was not trained with delayed tensor parallelism, "
            "its delay is 0"
        )
    delay = delay_of(spec, options)
    if not 0 <= delay < spec.layers:
        message = (
            f"delay={delay}: a later layer must hear of this one's output; {spec.name} has "
            f"{spec.layers} layers"
        )
        raise PlanError(f"{message}, choose 0 to {spec.layers - 1}")
    if not 1 <= options.context < options.max_context + 1:
        raise PlanError(
            f"context={options.context}: must lie between 1 and max_context={options.max_context}"
        )
    if spec.vocab > LARGEST_VOCABULARY and spec.runnable_reason() is None:
        raise PlanError(
            f"{spec.name}: {spec.vocab} tokens: their numbers travel as FP32, exact up to "
            f"{LARGEST_VOCABULARY}; use a smaller vocabulary"
        )
    if norms_divided(spec, options) and not spec.layout:
        raise PlanError(
            f"{spec.name}: q and k are normed over all heads, which {ranks} ranks would divide: "
            "use one GPU"
        )
    pages_of(options)
    _check_windows(spec, options)
    _check_lanes(spec, options)
    _check_several(spec, options, ranks)
    for dim in (spec.head_dim, *(shape.head_dim for shape in spec.head_shapes)):
        if dim % HEAD_STEP:
            raise PlanError(
                f"{spec.name}: head_dim={dim}: the kernel exchanges heads {HEAD_STEP} elements at "
                "a time"
            )
    if options.slot_bytes % 16:
        raise PlanError(
            f"slot_bytes={options.slot_bytes}: must be a multiple of 16, the bulk copy's grain"
        )
    if options.tile_rows % 2:
        raise PlanError(
            f"tile_rows={options.tile_rows}: must be even, a gate row and its up row stay together"
        )


def _check_windows(spec: ModelSpec, options: Options) -> None:
    if options.window_splits and not windows_of(spec):
        raise PlanError(
            f"window_splits={options.window_splits}: {spec.name} has no layer with a window; use "
            "attention_splits"
        )


def _check_lanes(spec: ModelSpec, options: Options) -> None:
    lanes = spec.lanes
    reduced = options.late_parts is LateParts.REDUCED
    least, most = RANGES["lane_stagger_ns"]
    if not least <= options.lane_stagger_ns <= most:
        raise PlanError(
            f"lane_stagger_ns={options.lane_stagger_ns}: must lie between {least} and {most}"
        )
    if not lanes:
        if options.lane_stagger_ns:
            raise PlanError(
                f"lane_stagger_ns={options.lane_stagger_ns}: {spec.name} has no lanes; use 0"
            )
        if reduced:
            raise PlanError(
                f"late_parts=reduced: {spec.name} has no lanes, so no part arrives late; use "
                "late_parts=each"
            )
        return
    if lanes.count < 2:
        raise PlanError(
            f"{spec.name} has {lanes.count} lane: a model of one lane is an ordinary one, "
            "describe it without lanes"
        )
    delay = delay_of(spec, options)
    if reduced and delay == 0:
        raise PlanError(
            "late_parts=reduced with delay=0: all parts are needed at once, none is late; use "
            "late_parts=each or a delay"
        )
    if options.lane_stagger_ns and lanes.count <= options.gpus:
        raise PlanError(
            f"lane_stagger_ns={options.lane_stagger_ns}: each lane has a GPU of its own, nothing "
            "is shared; use 0"
        )
    if options.lane_stagger_ns and not options.resident:
        raise PlanError(
            f"lane_stagger_ns={options.lane_stagger_ns}: between kernels all lanes meet again; "
            "use 0 or execution=resident"
        )
    late = lanes.head is LaneHead.VOCABULARY and options.handoff.resets
    if late and 0 < spec.layers <= 2 * delay:
        raise PlanError(
            f"delay={delay}: half of the {spec.layers} layers leaves no time for resets before "
            "the next step; use counters"
        )


def _check_lookup(spec: ModelSpec, options: Options) -> None:
    """Drafts are verified by passes, whose rejected tokens leave nothing but keys and values."""
    if not options.lookup:
        return
    if options.lookup > RANGES["lookup"][1]:
        raise PlanError(f"lookup={options.lookup}: at most {RANGES['lookup'][1]} drafted tokens")
    reason = None
    if spec.recurrence or spec.convolution:
        reason = f"{spec.name} has recurrent states, which a rejected draft would leave changed"
    elif spec.lanes:
        reason = f"{spec.name} has lanes, whose heads passes have no code for"
    elif options.tokens > 1:
        reason = f"a step of batch={options.batch} and draft={options.draft} is simulated only"
    elif not options.resident:
        reason = f"execution={options.execution.value} ends each step on the host"
    elif options.prompt_chunk <= options.lookup:
        reason = (
            f"passes verify drafts, and this plan's take {options.prompt_chunk} "
            f"token{'s' * (options.prompt_chunk > 1)}"
        )
    elif spec.draft_head and options.gpus > 1:
        reason = f"a head drafts on one GPU, and this plan has gpus={options.gpus}"
    if reason:
        raise PlanError(f"lookup={options.lookup}: {reason}; use lookup=0")


def _check_router(spec: ModelSpec, options: Options, limits: Limits) -> None:
    if options.router_input is not RouterInput.OWN:
        return
    if reason := not_by_own_rows(spec, options, limits):
        raise PlanError(f"router_input=own: {reason}; use router_input=whole")


def _check_latent_cache(spec: ModelSpec, options: Options, ranks: int) -> None:
    if options.latent_cache is not LatentCache.SPLIT:
        return
    latent = any(isinstance(layer.mixer, LatentAttention) for layer in spec.layout)
    compressed = all(
        layer.mixer.q_rank for layer in spec.layout if isinstance(layer.mixer, LatentAttention)
    )
    reason = None
    if not latent:
        reason = f"{spec.name} has no latent cache"
    elif ranks == 1:
        reason = "one rank keeps all positions"
    elif options.common is not Common.SHARDED:
        reason = "ranks exchange what they need alike only with common=sharded"
    elif not compressed:
        reason = f"{spec.name} has no compressed queries, which all ranks need"
    if reason:
        raise PlanError(f"latent_cache=split: {reason}; use latent_cache=replicated")


def _check_several(spec: ModelSpec, options: Options, ranks: int) -> None:
    """Several tokens a step, and experts."""
    if spec.lanes and (options.tokens > 1 or options.residual is Residual.SLICED):
        raise PlanError(
            f"{spec.name} has lanes, which are planned for one token and a replicated residual: "
            "use batch=1 and draft=0"
        )
    feeds = [layer.feed for layer in spec.layout if isinstance(layer.feed, ExpertFeed)]
    if options.expert_ranks > 1 and not feeds:
        raise PlanError(
            f"expert_ranks={options.expert_ranks}: {spec.name} has no routed experts; use "
            "expert_ranks=1"
        )
    if ranks % options.expert_ranks:
        raise PlanError(f"expert_ranks={options.expert_ranks} groups do not divide {ranks} ranks")
    for feed in feeds:
        if feed.experts % options.expert_ranks:
            raise PlanError(
                f"expert_ranks={options.expert_ranks}: {spec.name} has {feed.experts} experts, "
                "which do not divide over them"
            )
