"""Engine options that suit a model on a node: what a user gets without choosing anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import ceil, gcd
from typing import Any

from twin.errors import ConfigError, PlanError
from twin.hardware.types import Device, Node
from twin.kernel.budget import on_chip
from twin.kernel.prompt import TOKENS, fitting_chunk
from twin.kernel.strips import MOST_STRIPS, has_strips, with_strips
from twin.models.formats import format_named
from twin.models.spec import ModelSpec
from twin.plan.mixers import scanned_first
from twin.plan.ranges import check_least
from twin.plan.types import (
    CollectiveKind,
    Execution,
    HandOffKind,
    Limits,
    Options,
    Placement,
    Plan,
    StageKind,
)
from twin.schedule.block import LINE_BYTES, ROWS_AT_ONCE
from twin.schedule.choose import schedule_of
from twin.schedule.coded_tiles import coded_slot_bytes
from twin.schedule.plans import build
from twin.schedule.products import tensor_products, whole_products
from twin.schedule.splits import attention_of
from twin.schedule.tiles import tight_bytes

SETTLED = (  # fields whose default depends on the model or the node
    "gpus",
    "blocks",
    "slot_bytes",
    "ring_slots",
    "window_slots",
    "head_window_slots",
    "collective",
    "placement",
    "weight_dtype",
    "kv_dtype",
    "max_context",
    "prompt_chunk",
    "lane_stagger_ns",
    "scanning_block_rows",
)
DEFAULT = Options()
FIELDS = {field.name: field for field in dataclasses.fields(Options)}
# of the blocks must stay in use before equal shares are preferred over all blocks (judged, not
# measured)
EVEN_SHARE = 0.8
# On an H200 48 KiB under way to each SM stream 4.54 of at most 4.70 TB/s, and a poll then takes
# 1,305 cycles; with all of a 208 KiB ring it takes 4,900, because requests wait in the second-level
# cache behind those before them (studies/h200-history).
UNDER_WAY_S = 1.35e-6  # of the peak bandwidth: 48 KiB for each of an H200's 132 SMs
# Where a layer is short, the memory is idle while blocks wait for each other, and what is under way
# only delays them. Where a block has up to 2.3 tiles of a layer a slot of its ring, two slots, not
# three, take an H100 4 to 8 % less time, an H200 0 to 4, two H200 1 to 5. With 2.7 and more it is
# 1 % less to 6 % more on an H100, 2 % more on two H200 and 5 to 13 % more on one. Four instead of
# three take 1 to 3 % more, also where tiles do not fill their slots.
SHORT_UNDER_WAY_S, SHORT_LAYER = 0.9e-6, 2.4
# Where a block has more tiles of a layer a slot of its ring, slots as large as tiles take an H200
# 4.4 % (Qwen2.5-1.5B, 17 slots for 13) to 0.4 % less time, one of twelve shapes 0.9 % more. Where
# it has fewer, 2.8 % less to 2.2 % more, six of seven shapes more (studies/h200-history/tried.md).
LONG_LAYER = 4.4
# Of a layer's weights, cached bytes at the last position beside which slots are as large as tiles:
# cached keys then come in smaller copies. At 4,000 positions Qwen3-4B (8 %) takes an H200 0.7 %
# less time with them, Qwen2.5-7B (2 %) 1.2 % less; at 16,000 3.5 % (33 %) and 0.9 % (7 %) more.
CACHED_MOST = 0.2
# An H100 streams INT8 and INT4 faster than its blocks decode them: with two slots Llama-3.2-1B in
# INT8 takes 5 % less, Qwen3-8B in INT4 6. An H200 takes 0 to 1 % less.
WHOLE_UNDER_WAY_S = 1.2e-6
# Experts' tiles are smaller than slots: with two under way GPT-OSS-20B takes an H100 4 % and an
# H200 8 % longer than with three, Qwen3-30B-A3B an H200 8 %. Slots of FP4 are larger, but dense
# models of FP4 take an H200 1 to 3 % and an H100 2 % longer with two, of FP8 an H100 1 % less to
# 2 % more.
FEWEST_UNDER_WAY = 3
# Laneformer-2B's 8 lanes on one H200 took 1,062 us side by side with 48 KiB under way, 1,075 with
# 80. Apart, some lanes always have room for what the others leave: each 3 us after the one before
# 1,051 and 1,040 us. On a slower H200, with 80 KiB: so 1,055, in four groups 5, 7 or 10 us apart
# 1,048 to 1,049, side by side with 48 KiB 1,072 (studies/h200-history). Four lanes each on two H200
# take 559 us with 48 KiB, 566 with 64 and 571 with 80.
LANE_STAGGER_NS = 7000
STAGGERED_UNDER_WAY_S = 2.2e-6
# In the LM head no hand-off waits. With five slots there instead of two Qwen3-0.6B takes an H200
# 2.0 % less time, with three 1.4 %; with five instead of three Qwen2.5-3B 1.0 % less, Qwen3-1.7B
# 0.7, Llama-3.2-1B 0.1, Qwen3-8B as much. Where tiles do not fill 16 KiB, Qwen2.5-1.5B takes 3 %
# more.
HEAD_UNDER_WAY_S = 2.2e-6
# Slots in which rows of 1,152 columns lie whole, 18 KiB, take Gemma-3-1B an H200 14 % less time.
# Nobody has timed larger ones, of which a ring has fewer.
MOST_WHOLE_BYTES = 18432
BESIDE_BYTES = 2048  # of an NVIDIA block: mbarriers and what its warps tell each other take less
FEWEST_SLOTS = 4  # a ring of fewer slots drains while one of them is refilled


def limits_of(node: Node) -> Limits:
    """What one device of the node allows."""
    device = node.device
    return Limits(
        blocks=device.blocks,
        dies=int(device.structure.dies.value),
        on_chip_bytes=int(device.block.on_chip_bytes.value),
        memory_bytes=device.memory.usable_bytes,
        oversubscribe=device.sharing is not None,
        teams=device.teams,
    )


def plan_for(spec: ModelSpec, node: Node, **chosen: Any) -> Plan:
    """The plan of a model on a node with default options, except those given. It still has to pass
    `validate`.
    """
    spec = as_multiplied(spec, node, chosen)
    options = _node_options(spec, node, chosen)
    plan, ring = _ringed(spec, node, options, chosen)
    return dataclasses.replace(plan, options=dataclasses.replace(plan.options, **ring))


def as_multiplied(spec: ModelSpec, node: Node, chosen: Mapping[str, Any]) -> ModelSpec:
    """The model as the node's engine multiplies it: a GGUF file's blocks become the weight type but
    on a CPU, and there too where somebody chose that type. Raises ConfigError for blocks of no
    file on another node.
    """
    on_cpu = multiplies_blocks(node.device)
    if spec.stored is None or (on_cpu and "weight_dtype" not in chosen):
        return spec
    if spec.stored.layers:
        plain = format_named(spec.dtype.value)
        return dataclasses.replace(spec, stored=spec.stored.turned(plain))
    blocks = [form.name for form in spec.coded if form.interleaved]
    if blocks and not on_cpu:
        raise ConfigError(
            f"{spec.name}: {node.device.name} does not multiply {blocks[0]}, only CPUs do; a GGUF "
            f"file's weights become {spec.dtype.value} there: leave out @{blocks[0]}"
        )
    return spec


def multiplies_blocks(device: Device) -> bool:
    """Does its engine multiply GGUF's blocks as a file stores them? Emulated GPUs are CPUs."""
    return device.sharing is not None


def default_options(spec: ModelSpec, node: Node, **chosen: Any) -> Options:
    """Options of a node: all its devices, one block per SM, CU or core, and a ring that fills the
    on-chip memory.

    `chosen` holds values of Options fields and always wins. Raises PlanError for a context beyond
    the model's.
    """
    spec = as_multiplied(spec, node, chosen)
    options = _node_options(spec, node, chosen)
    return dataclasses.replace(options, **_ringed(spec, node, options, chosen)[1])


def _node_options(spec: ModelSpec, node: Node, chosen: dict[str, Any]) -> Options:
    """All options but the ring's, whose size follows from the plan."""
    reaches = min(spec.context, chosen.get("max_context", spec.context))
    options = Options(
        weight_dtype=spec.dtype,
        kv_dtype=spec.dtype,
        gpus=node.gpus,
        context=max(1, min(DEFAULT.context, reaches)),
    )
    options = dataclasses.replace(
        options, **{"slot_bytes": coded_slot_bytes(spec.coded, DEFAULT.slot_bytes), **chosen}
    )
    check_least(options)
    ranks = spec.lanes.count if spec.lanes else options.gpus
    settled: dict[str, Any] = {
        "max_context": _max_context(spec, options),
        "blocks": _blocks(spec, node, options, ranks),
        "collective": _collective(options, ranks),
        "placement": _placement(node, options, ranks),
        "lane_stagger_ns": LANE_STAGGER_NS if _lanes_share(spec, node, options) else 0,
    }
    options = dataclasses.replace(
        options, **{name: value for name, value in settled.items() if name not in chosen}
    )
    if "prompt_chunk" not in chosen:
        options = dataclasses.replace(
            options, prompt_chunk=_prompt_chunk(spec, node, options, ranks)
        )
    return options


def _max_context(spec: ModelSpec, options: Options) -> int:
    if options.context > spec.context:
        raise PlanError(
            f"context={options.context}: {spec.name} reaches {spec.context} positions; choose at "
            "most that many"
        )
    return min(spec.context, max(DEFAULT.max_context, options.context))


def _collective(options: Options, ranks: int) -> CollectiveKind:
    """Between kernels a library does what a resident kernel has to do itself."""
    if ranks == 1:
        return CollectiveKind.NONE
    # lanes of one GPU need no library
    between_kernels = options.execution is not Execution.RESIDENT and options.gpus > 1
    return CollectiveKind.LIBRARY if between_kernels else CollectiveKind.PUSH


def _placement(node: Node, options: Options, ranks: int) -> Placement:
    """On AMD what the kernel can do: nobody knows in which stack a page lies. Numbers by die are
    predicted to gain something only where lanes share a GPU, each of them then on one die.
    """
    if not node.device.amd:
        return options.placement
    return Placement.BY_DIE if ranks > options.gpus else Placement.FLAT


def _lanes_share(spec: ModelSpec, node: Node, options: Options) -> bool:
    """Do several lanes take turns at one NVIDIA GPU's memory? Other devices' lanes are not measured
    apart.
    """
    resident = options.execution is Execution.RESIDENT and options.handoff is HandOffKind.SENTINEL
    return (
        spec.lanes is not None
        and spec.lanes.count > options.gpus
        and limits_of(node).teams
        and resident
    )


def _prompt_chunk(spec: ModelSpec, node: Node, options: Options, ranks: int) -> int:
    """As many tokens as the tensor cores and an NVIDIA block's shared memory take.

    A CPU takes any number; 16 were 3.6 times faster than one.
    """
    limits, blocks = limits_of(node), max(1, options.blocks // max(1, ranks // options.gpus))
    own = attention_of(spec, options, limits, ranks=ranks, blocks=blocks)
    if own is None:  # what the kernel does not run reads prompts by ordinary steps
        return 1
    if not limits.teams:
        return TOKENS
    return fitting_chunk(
        spec,
        own,
        blocks=blocks,
        room=limits.on_chip_bytes - BESIDE_BYTES,
        dtype=options.weight_dtype,
        kv_bytes=options.kv_dtype.bytes,
    )


def _blocks(spec: ModelSpec, node: Node, options: Options, ranks: int) -> int:
    """One per SM, CU or core; on several dies a few less where that gives every block the same
    share of every matrix.

    The MI300X has 304 CUs: Laneformer's 768, 1,536 and 3,072 outputs divide over 256 of them; such
    a grid was measured elsewhere to stream 4.09 of 4.82 TB/s, so equal shares are judged, not
    measured, to be worth it. On an H200 they were worth nothing: Llama-3.2-1B took 1,347 us on 132
    blocks and 1,338 us on 128; lanes divide its SMs anyway.
    """
    device = node.device
    emulated = device.sharing is not None  # then all GPUs share this computer's cores
    most = max(1, device.blocks // options.gpus) if emulated else device.blocks
    lanes = max(1, ranks // options.gpus)
    per_rank = max(1, most // lanes)
    if limits_of(node).teams and spec.lanes is None:
        return most
    even = _largest_divisor(_common_outputs(spec, ranks), per_rank)
    return lanes * (even if even >= EVEN_SHARE * per_rank else per_rank)


def _common_outputs(spec: ModelSpec, ranks: int) -> int:
    """Greatest common divisor of the outputs of a layer's matrices on one rank."""
    # Of a layout the sizes that it shows: no kernel of ours runs it, so which blocks suit it is
    # judged.
    heads, kv_heads = (
        max(1, spec.heads // ranks),
        1 if spec.layout else max(1, spec.kv_heads // ranks),
    )
    return gcd(
        (heads + 2 * kv_heads) * spec.head_dim,
        spec.hidden,
        spec.ffn if spec.layout else spec.ffn // ranks,
    )


def _largest_divisor(number: int, most: int) -> int:
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def _ringed(
    spec: ModelSpec, node: Node, options: Options, chosen: dict[str, Any]
) -> tuple[Plan, dict[str, Any]]:
    """The plan with a ring of one slot, and what its ring should be. A plan is built once for each
    size of a slot that is tried: how many there are changes neither its tiles nor its splits.

    Slots fill the on-chip memory left by everything else; they are smaller where only few would
    fit, or where no tile fills them (`tight`). Where blocks share a core there is no ring to fill:
    the cache does it, and the ring only has to fit. On AMD the ring is the kernel's strips, all of
    them under way.
    """
    limits = limits_of(node)
    plan = _of_one_slot(spec, options, options.slot_bytes, limits)
    room = most_slots(plan)
    while "slot_bytes" not in chosen and plan.options.slot_bytes > 1024 and room < FEWEST_SLOTS:
        plan = _of_one_slot(spec, options, plan.options.slot_bytes // 2, limits)
        room = most_slots(plan)
    if "slot_bytes" not in chosen:
        plan, room = of_whole_rows(spec, options, plan, room)
    standard = plan
    if "slot_bytes" not in chosen:
        plan, room = tight(spec, options, standard, room)
    rows = options.scanning_block_rows
    if "scanning_block_rows" not in chosen:
        rows = scanning_block_rows(plan)
        if rows is not None:
            settled = dataclasses.replace(options, scanning_block_rows=rows)
            plan = _of_one_slot(spec, settled, plan.options.slot_bytes, limits)
    slot, slots = plan.options.slot_bytes, options.ring_slots
    in_strips = node.device.amd and has_strips(plan)
    if "ring_slots" not in chosen:
        slots = min(room, DEFAULT.ring_slots) if limits.oversubscribe else room
        if in_strips:
            slots = with_strips(plan, MOST_STRIPS).options.ring_slots
    window, head = options.window_slots, options.head_window_slots
    if "window_slots" not in chosen:
        ahead = node.device.handoff.loaded_hop_s and not in_strips
        window = min(slots, _window(node, standard, slots) if ahead else slots)
        if "head_window_slots" not in chosen and ahead:
            head = _head_window(node, plan, standard, slots)
            head = None if head == window else head
    return plan, {
        "slot_bytes": slot,
        "ring_slots": slots,
        "window_slots": window,
        "head_window_slots": head,
        "scanning_block_rows": rows,
    }


def scanning_block_rows(plan: Plan) -> int | None:
    """Rows of the output projection for each block that scans: as few as the others leave when none
    of them takes a further turn of its teams. None: as many as the others have.

    A block that has scanned begins its rows 0.4 us later than the others. Where several teams take
    rows of a narrow projection side by side, the others have room for its rows: with none of its
    own SmolLM2-360M takes an H200 1.4 % less time, Qwen2.5-0.5B 0.7, Gemma-3-1B 0.1. Where all
    teams share a row, 0.5 % less to 2.8 % more (studies/h200-history/tried.md).
    """
    own = plan.attention
    matrix = next((s.matrix for s in plan.stages if s.kind is StageKind.O_PROJ), None)
    if own is None or matrix is None or not _plain(plan):
        return None
    side_by_side = schedule_of(plan).of_warps().teams["heads"].groups
    scanners = sum(lo < hi for lo, hi in scanned_first(own, 0, plan.blocks))
    turn, others = ROWS_AT_ONCE * side_by_side, plan.blocks - scanners
    if side_by_side == 1 or not others:
        return None
    turns = ceil(ceil(matrix.rows / plan.blocks) / turn)
    rows = ceil(max(0, matrix.rows - others * turns * turn) / scanners)
    return rows if ceil(rows / turn) < turns else None


def of_whole_rows(spec: ModelSpec, options: Options, plan: Plan, room: int) -> tuple[Plan, int]:
    """The same with slots that take whole rows of the residual's matrices, where warps then take
    them by themselves (`folds` in partition.py); and how many a ring holds.
    """
    slot = ROWS_AT_ONCE * plan.shard.hidden * options.weight_dtype.bytes
    slot += -slot % LINE_BYTES
    if not _plain(plan) or not plan.options.slot_bytes < slot <= MOST_WHOLE_BYTES:
        return plan, room
    larger = _of_one_slot(spec, options, slot, plan.limits)
    folded = any(matrix.folded for stage in larger.stages for matrix in stage.matrices)
    return (larger, most_slots(larger)) if folded else (plan, room)


def tight(spec: ModelSpec, options: Options, plan: Plan, room: int) -> tuple[Plan, int]:
    """The same with slots as large as its largest tile, if a ring then holds more of them than
    `room`, and a block has no more tiles; and how many a ring holds.

    What is not measured keeps slots of one size: few-bit weights, experts, several GPUs. So does
    a ring that holds much of a layer anyway, and one that brings much of a cache.
    """
    if not _plain(plan) or _layer_tiles(plan) <= LONG_LAYER * room:
        return plan, room
    if _cached_bytes(plan) > CACHED_MOST * _layer_bytes(plan):
        return plan, room
    matrices = (matrix for stage in plan.stages for matrix in stage.matrices)
    slot = max(tight_bytes(matrix, options.weight_dtype.bytes) for matrix in matrices)
    slot += -slot % LINE_BYTES
    if slot >= plan.options.slot_bytes:
        return plan, room
    smaller = _of_one_slot(spec, options, slot, plan.limits)
    slots = most_slots(smaller)
    more = slots > room and _layer_tiles(smaller) <= _layer_tiles(plan)
    scans = {schedule_of(one).scan.tensor for one in (plan, smaller)}
    return (smaller, slots) if more and len(scans) == 1 else (plan, room)


def _of_one_slot(spec: ModelSpec, options: Options, slot_bytes: int, limits: Limits) -> Plan:
    return build(
        spec,
        dataclasses.replace(options, slot_bytes=slot_bytes, ring_slots=1, window_slots=1),
        limits,
    )


def _window(node: Node, plan: Plan, slots: int) -> int:
    """Slots under way that keep the memory busy, and no more: what is under way delays every
    hand-off.
    """
    seconds, least = UNDER_WAY_S, 2
    if plan.options.lane_stagger_ns and plan.options.gpus == 1:
        seconds = STAGGERED_UNDER_WAY_S
    elif plan.spec is not None and plan.spec.lanes is None and plan.limits.teams:
        seconds, least = _under_way(plan, slots)
    return slots_under_way(node, plan.options.slot_bytes, seconds, least)


def slots_under_way(
    node: Node, slot_bytes: int, seconds: float = UNDER_WAY_S, least: int = FEWEST_UNDER_WAY
) -> int:
    """Of a block: its share of so many seconds of the peak bandwidth, and `least` slots."""
    share = node.device.memory.peak_bytes_per_s.value / node.device.blocks
    return max(least, ceil(seconds * share / slot_bytes))


def _under_way(plan: Plan, slots: int) -> tuple[float, int]:
    """NVIDIA, of models without lanes: seconds of the peak bandwidth, and slots at least."""
    matrices = [matrix for stage in plan.stages for matrix in stage.matrices]
    coded = [matrix for matrix in matrices if matrix.format and matrix.format.coded]
    if plan.kernel_routed or any(map(tensor_products, coded)):
        return UNDER_WAY_S, FEWEST_UNDER_WAY
    if coded:
        return WHOLE_UNDER_WAY_S if all(map(whole_products, coded)) else UNDER_WAY_S, 2
    return SHORT_UNDER_WAY_S if is_short(plan, slots) else UNDER_WAY_S, 2


def is_short(plan: Plan, slots: int) -> bool:
    """Is a layer so short beside a ring of so many slots that less under way is faster?"""
    return _layer_tiles(plan) <= SHORT_LAYER * slots


def _head_window(node: Node, plan: Plan, standard: Plan, slots: int) -> int | None:
    """Slots under way in the LM head: more where tiles fill standard ones. None: as elsewhere."""
    head = next((s.matrix for s in plan.stages if s.kind is StageKind.LM_HEAD), None)
    if head is None or not _plain(plan):
        return None
    bytes_ = head.tile_rows * head.tile_cols * plan.options.weight_dtype.bytes
    slot = standard.options.slot_bytes
    seconds = HEAD_UNDER_WAY_S if bytes_ == slot else UNDER_WAY_S
    return min(slots, slots_under_way(node, slot, seconds))


def _plain(plan: Plan) -> bool:
    """Is it of the kind that such rings were measured with: a dense model of 16 or 32 bits, without
    lanes, on one NVIDIA GPU?
    """
    matrices = [matrix for stage in plan.stages for matrix in stage.matrices]
    dense = all(matrix.format is None for matrix in matrices) and not plan.kernel_routed
    alone = plan.ranks == 1 and plan.limits.teams
    return dense and alone


def _cached_bytes(plan: Plan) -> int:
    """Of a layer, at the last position."""
    own = plan.attention
    position = own.position_bytes(plan.options.kv_dtype) * own.kv_heads if own else 0
    return position * plan.options.max_context


def _layer_bytes(plan: Plan) -> float:
    """Of a layer's weights; the mean of all layers."""
    assert plan.spec is not None
    matrices = (m for stage in plan.stages if stage.layer >= 0 for m in stage.matrices)
    elements = sum(matrix.rows * matrix.cols for matrix in matrices)
    return elements * plan.options.weight_dtype.bytes / plan.spec.layers


def _layer_tiles(plan: Plan) -> float:
    """Of a layer's weights for a block, the first one; the mean of all layers."""
    assert plan.spec is not None
    matrices = (m for stage in plan.stages if stage.layer >= 0 for m in stage.matrices)
    shares = ((m, hi - lo) for m in matrices for lo, hi in m.owned[:1])
    return sum(-(-rows // m.tile_rows) * m.slices for m, rows in shares) / plan.spec.layers


def most_slots(plan: Plan) -> int:
    """The largest ring that a block has room for, at least one slot."""
    return on_chip(plan).most_slots(plan.limits.on_chip_bytes)
