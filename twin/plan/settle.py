"""What options leave to the model, and to each other: the one place that fills it in.

What they leave to the node (blocks, ring, prompt passes) is `twin/kernel/defaults.py`'s, for a plan
knows no hardware.
"""

from __future__ import annotations

from dataclasses import replace

from twin.models.feeds import ExpertFeed
from twin.models.mixers import GroupedAttention, NoMixer
from twin.models.spec import DType, ModelSpec
from twin.plan.options import CollectiveKind, Common, LateParts, Limits, Options, Residual
from twin.plan.types import MOST_ADDING

# In the twin, against a replicated residual: Llama-3.1-8B on an H200 (4,096 elements a token) 0.3 %
# slower with one token, 0.5, 5 and 90 % faster with 2, 4 and 16; DeepSeek-V4-Flash on eight (16,384
# elements) 16 % faster.
SLICED_FROM = 8192  # elements of all tokens' residuals


def settled(spec: ModelSpec, options: Options, limits: Limits) -> Options:
    """The options with nothing left open."""
    delay = delay_of(spec, options)
    elements = options.tokens * (spec.hyper.residuals if spec.hyper else 1) * spec.hidden
    large = not on_kernel(spec, options, limits) and elements >= SLICED_FROM and not spec.lanes
    residual = options.residual or (Residual.SLICED if large else Residual.REPLICATED)
    pushed = options.collective is CollectiveKind.PUSH
    # 0.3 to 9 % faster in the twin for MoE models on 8 H200; the kernel's ranks make latents alone
    alone = spec.hyper is not None and on_kernel(spec, options, limits)
    shared = pushed and not alone
    common = options.common or (Common.SHARDED if shared else Common.REPLICATED)
    late = options.late_parts or _late_parts(spec, options, delay)
    # they have no code for what Gemma 4 has: heads of several shapes, normed values, layers'
    # factors
    odd = len(spec.head_shapes) > 1 or spec.value_norm or spec.variant.layer_scalar
    passes = on_kernel(spec, options, limits) and not odd
    chunk = options.prompt_chunk if passes else 1
    return replace(
        options,
        delay=delay,
        residual=residual,
        common=common,
        late_parts=late,
        prompt_chunk=chunk,
    )


def not_by_own_rows(spec: ModelSpec, options: Options, limits: Limits) -> str | None:
    """Why blocks cannot multiply a router with what each of them makes of the residual; None: they
    can.
    """
    kind, variant = spec.experts, spec.variant
    if kind is None or not on_kernel(spec, options, limits):
        return f"{spec.name} has no chosen experts that the kernel multiplies"
    if not limits.teams:
        return "only NVIDIA's blocks have code for it"
    if options.gpus > 1 or spec.lanes:
        return "the residual is the sum of several ranks' rows"
    if not options.polled:
        return "sums are added up only where blocks poll them, in a resident kernel with sentinels"
    if options.blocks > MOST_ADDING:
        return f"blocks={options.blocks}: a sum counts up to {MOST_ADDING}"
    if options.weight_dtype is DType.FP32:
        return "weight_dtype=fp32: the router's columns go two to a word"
    if variant.norms.after or not variant.norms.before or variant.layer_scalar:
        return f"{spec.name} norms what modules add, so a row alone says nothing of the residual"
    layers = map(spec.layer, range(spec.layers))
    if any(isinstance(one.feed, ExpertFeed) and isinstance(one.mixer, NoMixer) for one in layers):
        return f"{spec.name} has layers of experts alone, behind which no rows of a block are known"
    if kind.shared_width and not spec.shared_like_routed:
        return f"{spec.name} has shared experts next to its router"
    return None


def delay_of(spec: ModelSpec, options: Options) -> int:
    """Layers until a lane hears of the others; 0 without lanes."""
    if options.delay is not None:
        return options.delay
    return spec.lanes.delay if spec.lanes else 0


def on_kernel(spec: ModelSpec, options: Options, limits: Limits) -> bool:
    """Has the kernel code for all layers, and is a step one token? Their attention is then the
    kernel's.

    The same before and after options are settled: only other plans' residuals are sliced by
    default.
    """
    several = options.tokens > 1 or options.expert_ranks > 1 or options.residual is Residual.SLICED
    return runs_on(spec, limits) and not several and not norms_divided(spec, options)


def runs_on(spec: ModelSpec, limits: Limits) -> bool:
    """Has such a machine's kernel code for the model? GPUs have none for compressed attention."""
    return spec.runnable_reason() is None and (spec.hyper is None or limits.oversubscribe)


def norms_divided(spec: ModelSpec, options: Options) -> bool:
    """Would GPUs divide heads that are normed together? The kernel exchanges no squares."""
    return spec.whole_qk_norm and options.gpus > 1


def as_stored(spec: ModelSpec, options: Options, limits: Limits) -> bool:
    """Are weights laid out as the kernel has them? Neither a slice of the residual nor further
    tokens change that: whoever verifies drafts reads the weights that a step of one token reads.
    """
    return runs_on(spec, limits) and options.expert_ranks == 1


def windows_of(spec: ModelSpec) -> set[int]:
    """Of the layers that attend to no more than so many positions."""
    mixers = (spec.layer(layer).mixer for layer in range(spec.layers))
    return {m.window for m in mixers if isinstance(m, GroupedAttention) and m.window}


def _late_parts(spec: ModelSpec, options: Options, delay: int) -> LateParts:
    """By the bytes of one addition to the residual: own part and others' parts, or own part, sums,
    and a slice of the others' parts.

    Polled hand-offs only: the block's scheduler warp makes the sums next to its other work. A
    kernel, or a barrier, for them would cost more.
    """
    if not spec.lanes or not delay or not options.polled:
        return LateParts.EACH
    ranks, blocks = spec.lanes.count, options.blocks * options.gpus // spec.lanes.count
    slice_of = -(-spec.hidden // blocks)
    each, reduced = ranks * spec.hidden, 2 * spec.hidden + ranks * slice_of
    return LateParts.REDUCED if reduced < each else LateParts.EACH
