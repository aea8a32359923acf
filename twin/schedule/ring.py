"""The ring of a block: how large its slots are, how many it has, how many of them are under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from twin.hardware.types import Device, Node
from twin.models.spec import ModelSpec
from twin.plan.catalogue import StageKind
from twin.plan.mixers import scanned_first
from twin.plan.options import Limits, Options
from twin.plan.types import Plan
from twin.schedule.block import LINE_BYTES, ROWS_AT_ONCE
from twin.schedule.choose import schedule_of
from twin.schedule.plans import build, resized
from twin.schedule.products import tensor_products, whole_products
from twin.schedule.rules import architecture_of, rule_for
from twin.schedule.strips import MOST_STRIPS, has_strips, with_strips
from twin.schedule.teams import NO_TEAM
from twin.schedule.tiles import tight_bytes

FEWEST_SLOTS = 4  # a ring of fewer slots drains while one of them is refilled
LEAST_SLOT_BYTES = 1024


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


def ringed(spec: ModelSpec, node: Node, options: Options, chosen: Mapping[str, Any]) -> Plan:
    """The plan with the ring that suits it, but for what is chosen. The plan is laid out once: how
    many slots there are changes nothing of it, and other sizes of slots only cut its tiles anew.

    Slots fill the shared memory left by everything else; they are smaller where only few would
    fit, or where no tile fills them. Where blocks share a core there is no ring to fill: the cache
    does it, and the ring only has to fit. On AMD the ring is the kernel's strips, all of them under
    way.
    """
    device, limits = node.device, limits_of(node)
    architecture = architecture_of(device)
    standard = plan = build(spec, replace(options, ring_slots=1, window_slots=1), limits)
    if "slot_bytes" not in chosen:
        while (
            plan.options.slot_bytes > LEAST_SLOT_BYTES
            and schedule_of(plan).most_slots < FEWEST_SLOTS
        ):
            plan = resized(plan, plan.options.slot_bytes // 2)
        standard = of_whole_rows(architecture, plan)
        plan = tight(architecture, standard)
    room = schedule_of(plan).most_slots
    if "scanning_block_rows" not in chosen:
        rows = scanning_block_rows(plan)
        if rows is not None:
            plan = build(spec, replace(plan.options, scanning_block_rows=rows), limits)
    in_strips = device.amd and has_strips(plan)
    slots = options.ring_slots
    if "ring_slots" not in chosen:
        slots = min(room, Options().ring_slots) if limits.oversubscribe else room
        if in_strips:
            slots = with_strips(plan, MOST_STRIPS).options.ring_slots
    window, head = options.window_slots, options.head_window_slots
    if "window_slots" not in chosen:
        window = slots
        if device.handoff.loaded_hop_s and not in_strips:
            shape = shape_of(standard, slots)
            slot_bytes = standard.options.slot_bytes
            window = min(slots, under_way(device, "under_way_s", shape, slot_bytes) or slots)
            if "head_window_slots" not in chosen:
                shape["head_fills"] = _head_bytes(plan) == slot_bytes
                own = under_way(device, "head_under_way_s", shape, slot_bytes)
                head = None if own is None or min(slots, own) == window else min(slots, own)
    return replace(
        plan,
        options=replace(
            plan.options, ring_slots=slots, window_slots=window, head_window_slots=head
        ),
    )


def shape_of(plan: Plan, slots: int) -> dict[str, float]:
    """What rules look at. `slots`: of the ring."""
    spec, matrices = plan.spec, [m for stage in plan.stages for m in stage.matrices]
    coded = [matrix for matrix in matrices if matrix.format and matrix.format.coded]
    return {
        # models of 16 or 32 bits without experts
        "dense": all(matrix.format is None for matrix in matrices) and not plan.kernel_routed,
        "alone": plan.ranks == 1,
        "lanes": spec is not None and spec.lanes is not None,
        "staggered": bool(plan.options.lane_stagger_ns) and plan.options.gpus == 1,
        "experts": plan.kernel_routed,
        "coded": bool(coded),
        "fp4": any(map(tensor_products, coded)),
        "int": bool(coded) and all(map(whole_products, coded)),
        "layer": _layer_tiles(plan) / slots,  # a block's tiles of a layer, for each slot
        "cached": _cached_bytes(plan) / max(1.0, _layer_bytes(plan)),  # for each byte of a layer
        "row_bytes": _whole_rows_bytes(plan),  # of the residual's rows that a warp takes together
        "head_fills": _head_bytes(plan) == plan.options.slot_bytes,
    }


def is_short(plan: Plan, slots: int) -> bool:
    """Is a layer so short next to a ring of so many slots that less under way is faster?"""
    rule = rule_for("hopper", "under_way_s", shape_of(plan, slots))
    return rule is not None and any(condition.startswith("layer<=") for condition in rule.when)


def under_way(
    device: Device, decision: str, shape: Mapping[str, float], slot_bytes: int
) -> int | None:
    """Slots that keep the memory busy, and no more: what is under way delays every hand-off. None
    where the decision has no row for the shape.
    """
    rule = rule_for(architecture_of(device), decision, shape)
    if rule is None:
        return None
    return slots_under_way(device, slot_bytes, float(rule.value), rule.least)


def slots_under_way(device: Device, slot_bytes: int, seconds: float, least: int) -> int:
    """Of a block: its share of so many seconds of the peak bandwidth, and `least` slots."""
    share = device.memory.peak_bytes_per_s.value / device.blocks
    return max(least, ceil(seconds * share / slot_bytes))


def of_whole_rows(architecture: str, plan: Plan) -> Plan:
    """The same with slots that take whole rows of the residual's matrices, where warps then take
    them by themselves (`folds` in tiles.py) and a rule says so.
    """
    slot = _whole_rows_bytes(plan)
    if plan.options.slot_bytes >= slot or not _decided(architecture, "whole_rows", plan):
        return plan
    larger = resized(plan, slot)
    folded = any(matrix.folded for stage in larger.stages for matrix in stage.matrices)
    return larger if folded else plan


def tight(architecture: str, plan: Plan) -> Plan:
    """The same with slots as large as its largest tile, if a ring then holds more of them, a block
    has no more tiles, and a rule says so.
    """
    if not _decided(architecture, "tight_slots", plan):
        return plan
    matrices = (matrix for stage in plan.stages for matrix in stage.matrices)
    slot = max(tight_bytes(matrix, plan.options.weight_dtype.bytes) for matrix in matrices)
    slot += -slot % LINE_BYTES
    if slot >= plan.options.slot_bytes:
        return plan
    smaller = resized(plan, slot)
    own, other = schedule_of(plan), schedule_of(smaller)
    more = other.most_slots > own.most_slots and _layer_tiles(smaller) <= _layer_tiles(plan)
    return smaller if more and own.scan.tensor == other.scan.tensor else plan


def _decided(architecture: str, decision: str, plan: Plan) -> bool:
    shape = shape_of(plan, schedule_of(plan).most_slots)
    return rule_for(architecture, decision, shape) is not None


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
    shape, team = shape_of(plan, 1), schedule_of(plan).team("heads")
    shared = team is not NO_TEAM and shape["dense"] and shape["alone"]
    if own is None or matrix is None or not shared:
        return None
    side_by_side = team.groups
    scanning = sum(lo < hi for lo, hi in scanned_first(own, 0, plan.blocks))
    turn, others = ROWS_AT_ONCE * side_by_side, plan.blocks - scanning
    if side_by_side == 1 or not others:
        return None
    turns = ceil(ceil(matrix.rows / plan.blocks) / turn)
    rows = ceil(max(0, matrix.rows - others * turns * turn) / scanning)
    return rows if ceil(rows / turn) < turns else None


def _head_bytes(plan: Plan) -> int:
    """Of a tile of the LM head."""
    head = next((s.matrix for s in plan.stages if s.kind is StageKind.LM_HEAD), None)
    return head.tile_rows * head.tile_cols * plan.options.weight_dtype.bytes if head else 0


def _whole_rows_bytes(plan: Plan) -> int:
    slot = ROWS_AT_ONCE * plan.shard.hidden * plan.options.weight_dtype.bytes
    return slot + -slot % LINE_BYTES


def _cached_bytes(plan: Plan) -> int:
    """Of a layer, at the last position."""
    each = [own.position_bytes(plan.options.kv_dtype) * own.kv_heads for own in plan.attentions]
    return max(each, default=0) * plan.options.max_context


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
