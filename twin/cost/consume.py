"""What consuming stored weights and scanning caches costs a block, beyond dense weights in 16 or 32
bits and one token.

Where a number is not a hardware number it is judged: no kernel of ours does these things, or none
did on such a device. `judged` names those a plan rests on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from twin.cost import attend, terms
from twin.errors import HardwareError
from twin.hardware.types import Codes, Device, Number, Warps
from twin.models.formats import INT4, INT8, Format
from twin.models.spec import DType
from twin.plan.types import Matrix, Plan, Scan, StageKind
from twin.schedule.block import TEAM_WARPS, WARP
from twin.schedule.choose import schedule_of
from twin.schedule.products import TENSOR, tensor_products, whole_products
from twin.schedule.splits import TENSOR_POSITIONS
from twin.units import picoseconds

# Time of one weight relative to BF16's, which is unpacked (one operation) and multiplied (one). FP8
# converts two at once; four-bit types take a look-up or two conversions, and their scales come
# every 16 or 32 weights. A lower bound of the truth for NVFP4 is known: B200's library kernels
# stream it at 4.8 TB/s, 58 G weights/s per SM (AIC: B200 GEMV table), so factors far above 2 would
# be wrong.
PLAIN = {dtype.value for dtype in DType}
# GGUF's blocks, which only CPUs multiply: weights in the second-level cache of one core of a
# Sapphire Rapids at 2.0 GHz (AVX-512 VNNI, 2026-11-28), next to 18.6 G weights/s of FP16, whose
# unpacking is an instruction as BF16's is.
BLOCKS = {
    "q4_0": 0.49,
    "q4_1": 0.5,
    "q5_0": 0.66,
    "q5_1": 0.67,
    "q8_0": 0.48,
    "gguf-mixed-32": 0.55,
    "q4_k": 0.5,
    "q5_k": 0.66,
    "q6_k": 0.65,
    "gguf-mixed-256": 0.99,
}
# INT8: our prototype took 0.027 cycles a byte (dp4a), that of BF16 0.021; eight warps of an H200,
# fed from shared memory.
UNPACK = {
    "int8": 0.64,
    "fp8": 1.0,
    "fp8-128x128": 1.0,
    "fp8-128x128-e8m0": 1.0,
    "mxfp4": 1.5,
    "nvfp4": 1.5,
    **{form.name: 1.5 for form in INT4},
    **BLOCKS,
}
# of a device's warps, bytes of codes a second
RATES = {name: f"{name}_bytes_per_s" for name in ("int8", "fp8", "int4", "fp4")}
# 16-bit weights that tensor cores take from shared memory beside the activations of TENSOR_TOKENS
# tokens, or a scan's entries beside so many query heads
TENSOR_BYTES_PER_CYCLE = 32
TENSOR_TOKENS = 16
TENSOR_QUERIES = 8  # more query heads than this on one entry are multiplied by tensor cores
# over a recurrent state where no threads keep it: it meets the key and the query, and is written
# anew
STATE_PASSES = 2


@dataclass(frozen=True, slots=True)
class Tile:
    """One ring slot of weights, on the chip."""

    form: Format | None  # as stored; None: the plan's weight type
    size: int  # bytes that are multiplied
    weights: int
    finished: int  # rows that end with it
    ends_ps: int  # before and behind its products, once


def tile_ps(device: Device, dtype: DType, tile: Tile, tokens: int) -> int:
    """Consume a tile for `tokens` tokens: one by one, or TENSOR_TOKENS at once on tensor cores,
    whichever is sooner.
    """
    costs = device.block
    ends = picoseconds(tile.finished * costs.row_s.value) + tile.ends_ps
    once, sixteen = _multiply(device, dtype, tile)
    if tokens == 1 or not sixteen or costs.loading != "ahead":
        return tokens * (once + ends)
    rounds = -(-tokens // TENSOR_TOKENS)
    tensor = picoseconds(
        rounds * tile.weights * DType.BF16.bytes / (TENSOR_BYTES_PER_CYCLE * costs.clock_hz.value)
    )
    return min(tokens * (once + ends), max(once, tensor) + rounds * ends)


def _multiply(device: Device, dtype: DType, tile: Tile) -> tuple[int, bool]:
    """(time to unpack and multiply with one token, whether tensor cores take what is unpacked)."""
    costs = device.block
    if tile.form is None or tile.form.name in PLAIN:
        stored = dtype if tile.form is None else DType(tile.form.name)
        return terms.transfer_ps(
            tile.size, terms.weight_rate(costs, stored)
        ), stored is not DType.FP32
    return picoseconds(unpacking_s(device, tile.form, tile.weights)), True


def unpacking_s(device: Device, form: Format, weights: int) -> float:
    """In which a block unpacks so many weights of a format and multiplies them with one token.
    Raises HardwareError.
    """
    if _probed(device, form):
        rate: Number = getattr(device.warps, RATES[decoded_as(form)])
        return weights * form.bits / 8 / rate.value
    if (of_core := core_rate(device, form)) is not None:
        return weights * form.bits / 8 / of_core.value
    if form.name not in UNPACK:
        raise HardwareError(
            f"no cost is known of unpacking {form.name}; known: {', '.join(UNPACK)}"
        )
    return weights * UNPACK[form.name] * DType.BF16.bytes / device.block.bf16_bytes_per_s.value


def _probed(device: Device, form: Format) -> bool:
    """Does a rate of the device say it? Those of a block of warps are probed, or follow from those
    that are. They hold for formats that only plans of projections read, too: a weight is decoded
    alike, whether or not the engine runs its plan.
    """
    return device.warps is not None and (form.coded or form.name in UNPACK)


def _measured(device: Device, form: Format) -> bool:
    """Does a number of the device say it, of its warps or of its cores?"""
    return _probed(device, form) or core_rate(device, form) is not None


def core_rate(device: Device, form: Format) -> Number | None:
    """By which rate a core decodes a coded format; None where the device has none of it."""
    if device.codes is None or not form.coded:
        return None
    found: Number | None = getattr(device.codes, f"{core_kind(form.name)}_bytes_per_s", None)
    return found


def core_kind(form: str) -> str:
    """Which formats a core decodes alike: those with other scales of the same codes."""
    if form.startswith("gguf"):
        return form.replace("-", "_")
    return form.split("-")[0]


def decoded_as(form: Format) -> str:
    """By which of RATES a block of warps decodes a coded format and multiplies it."""
    if form.name in TENSOR:
        return "fp4"
    if form.bits == 4:
        return "int4"
    return "int8" if form.name == INT8.name else "fp8"


def untouched(plan: Plan, device: Device) -> list[str]:
    """Numbers of decoding, of states and of choices that a plan's time does not rest on."""
    forms = {m.format for s in plan.stages for m in s.matrices if m.format}
    rates = {decoded_as(form) for form in forms if _probed(device, form)}
    used = {decoded_as(form) for form in forms if form.coded}
    cores = {core_kind(form.name) for form in forms if core_rate(device, form) is not None}
    idle = [rate for name, rate in RATES.items() if name not in rates]
    idle += [] if used & {"int8", "int4"} or (used and plan.kernel_routed) else ["whole_s"]
    idle += [] if used - {"fp4"} and plan.kernel_routed else ["step_s"]
    idle += [] if used else ["settle_s"]
    idle += [] if not plan.without_code() and schedule_of(plan).by_fours else ["quads_s"]
    kinds = {stage.kind for stage in plan.stages}
    idle += [] if StageKind.DELTA in kinds else ["state_s", "state_element_s"]
    idle += [] if StageKind.ROUTE in kinds else ["compare_s"]
    codes = [
        field.name
        for field in dataclasses.fields(Codes)
        if device.codes and field.name.removesuffix("_bytes_per_s") not in cores
    ]
    return [*(f"warps.{name}" for name in idle), *(f"codes.{name}" for name in codes)]


def as_whole_numbers(matrix: Matrix, *, input_in_memory: bool) -> bool:
    """Do our kernel's threads multiply whole numbers, made of a stage's input (docs/kernel.md)? Of
    FP8 only where the input lies on the chip.
    """
    form = matrix.format
    if form is None or not form.coded or tensor_products(matrix):
        return False
    return input_in_memory or whole_products(matrix)


def scan_requests(
    device: Device, plan: Plan, kind: StageKind, scan: Scan, item: int
) -> Iterator[tuple[int, int]]:
    """(bytes, consumer time) of the requests in which a block scans an item's entries."""
    size, queries = scan.item_bytes(item), scan.group * (plan.options.draft + 1)
    if device.warps is None:
        passes = STATE_PASSES if kind is StageKind.DELTA else 1
        turns = passes * -(-queries // TENSOR_TOKENS)
        for request in terms.requests(size, plan.options.slot_bytes):
            yield request, turns * attend.kv_cost(device.block, request)
    elif kind is StageKind.DELTA:
        # all of it is on its way before the inputs are there, and stays in the threads' registers
        yield size, queries * picoseconds(_state_s(device.warps, scan, size))
    else:
        yield from _rounds(device.warps, plan, scan, size, queries)


def _state_s(warps: Warps, scan: Scan, size: int) -> float:
    """A block's work for an item of a recurrent state and one token."""
    elements = (size - scan.extra_bytes) // terms.FP32_BYTES
    each = -(-elements // (TEAM_WARPS * WARP))
    return warps.state_s.value + each * warps.state_element_s.value


def _rounds(
    warps: Warps, plan: Plan, scan: Scan, size: int, queries: int
) -> Iterator[tuple[int, int]]:
    """Rounds of a block's threads as our attention takes them. More query heads, and wider entries,
    are multiplied by tensor cores: each warp takes a unit of entries in turn, with TENSOR_TOKENS
    query heads at once. That is twice the products of a unit of our attention, whose time was
    probed; no kernel of ours multiplies such entries.
    """
    fixed = picoseconds(warps.item_s.value)
    if _by_tensor_cores(scan, queries):
        at_once = TENSOR_POSITIONS * TEAM_WARPS
        turn_s = attend.turn_s(warps, 2 * scan.dim) * -(-queries // TENSOR_TOKENS)
    else:
        at_once = attend.entries_at_once(scan.dim, queries, plan.options.kv_dtype)
        turn_s = warps.round_s.value
    for number, request in enumerate(terms.requests(size, scan.entry_bytes * at_once)):
        yield request, picoseconds(turn_s) + (0 if number else fixed)


def _by_tensor_cores(scan: Scan, queries: int) -> bool:
    return queries > TENSOR_QUERIES or scan.dim > attend.WIDEST_HEAD


def scans(plan: Plan, *, by_tensor_cores: bool) -> bool:
    """Has a plan a stage with a scan of its own that a block of warps makes so?"""
    return any(
        _by_tensor_cores(stage.scan, stage.scan.group * (plan.options.draft + 1)) == by_tensor_cores
        for stage in plan.stages
        if stage.scan and stage.kind is not StageKind.DELTA
    )


def judged(plan: Plan, device: Device) -> list[str]:
    """Numbers of this file that a plan's time rests on."""
    formats = {
        m.format.name
        for s in plan.stages
        for m in s.matrices
        if m.format and m.format.name in UNPACK and not _measured(device, m.format)
    }
    found = [f"consume.unpack.{name}" for name in sorted(formats)]
    found += ["consume.tensor_bytes_per_cycle"] if plan.tokens > 1 else []
    if device.warps is not None:
        return found
    grouped = any(s.scan and s.scan.group > 1 for s in plan.stages)
    found += ["consume.tensor_tokens"] if grouped else []
    found += ["consume.state_passes"] if any(s.kind is StageKind.DELTA for s in plan.stages) else []
    return found
