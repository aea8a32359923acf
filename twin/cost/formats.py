"""What stored weights cost a block: unpacked, and multiplied with one token or several."""

from __future__ import annotations

import dataclasses

from twin.cost import terms
from twin.errors import HardwareError
from twin.frozen import frozen
from twin.hardware.kernel import CoreKernel, KernelCosts, Unpacking, WarpKernel
from twin.hardware.number import Number
from twin.hardware.types import Device
from twin.models.formats import INT8, Format
from twin.models.spec import WEIGHT_TYPES, DType
from twin.plan.matrix import Matrix
from twin.schedule.products import TENSOR, tensor_products, whole_products
from twin.units import picoseconds

PLAIN = {dtype.value for dtype in WEIGHT_TYPES}
# of a device's warps, bytes of codes a second
RATES = {name: f"{name}_bytes_per_s" for name in ("int8", "fp8", "int4", "fp4")}
TENSOR_TOKENS = 16  # activations that tensor cores take together
FRAGMENT_TOKENS = 8  # and next to weights that threads decode into their fragments


@frozen
class Tile:
    """One ring slot of weights, in shared memory."""

    form: Format | None  # as stored; None: the plan's weight type
    size: int  # bytes that are multiplied
    weights: int
    finished: int  # rows that end with it
    ends_ps: int  # before and behind its products, once


def tile_ps(device: Device, dtype: DType, tile: Tile, tokens: int) -> int:
    """Consume a tile for `tokens` tokens: one by one, or TENSOR_TOKENS at once on tensor cores,
    whichever is sooner. What tensor cores multiply for one token (FP4) is decoded into registers
    and has columns to spare: prototypes on an H200 took 1 to 3 % longer for eight tokens of MXFP4
    than for one, 9 to 18 % of NVFP4, which is left out of account.
    """
    kernel, clock_hz = device.kernel, device.block.clock_hz.value
    ends = picoseconds(tile.finished * kernel.row_s.value) + tile.ends_ps
    once, sixteen = _multiply(kernel, dtype, tile)
    if tokens == 1 or not sixteen or device.block.loading != "ahead":
        return tokens * (once + ends)
    if tile.form is not None and tile.form.name in TENSOR:
        return -(-tokens // FRAGMENT_TOKENS) * (once + ends)
    rounds = -(-tokens // TENSOR_TOKENS)
    rate = kernel.tensor_bytes_per_cycle.value * clock_hz
    tensor = picoseconds(rounds * tile.weights * DType.BF16.bytes / rate)
    return min(tokens * (once + ends), max(once, tensor) + rounds * ends)


def _multiply(kernel: KernelCosts, dtype: DType, tile: Tile) -> tuple[int, bool]:
    """(time to unpack and multiply with one token, whether tensor cores take what is unpacked)."""
    if tile.form is None or tile.form.name in PLAIN:
        stored = dtype if tile.form is None else DType(tile.form.name)
        rate = terms.weight_rate(kernel, stored)
        return terms.transfer_ps(tile.size, rate), stored is not DType.FP32
    return picoseconds(unpacking_s(kernel, tile.form, tile.weights)), True


def unpacking_s(kernel: KernelCosts, form: Format, weights: int) -> float:
    """In which a block unpacks so many weights of a format and multiplies them with one token.
    Raises HardwareError.
    """
    if (rate := rate_of(kernel, form)) is not None:
        return weights * form.bits / 8 / rate.value
    relative = unpacking(kernel, form)
    if relative is None:
        known = ", ".join(field.name for field in dataclasses.fields(Unpacking))
        raise HardwareError(f"no cost is known of unpacking {form.name}; known: {known}")
    return weights * relative.value * DType.BF16.bytes / kernel.bf16_bytes_per_s.value


def unpacking(kernel: KernelCosts, form: Format) -> Number | None:
    """A weight of a format relative to one of BF16, which is unpacked (one operation) and
    multiplied (one).
    """
    found: Number | None = getattr(kernel.unpacking, f"{family(form.name)}_ratio", None)
    return found


def rate_of(kernel: KernelCosts, form: Format) -> Number | None:
    """By which a block decodes a format and multiplies it; None where no rate is known.

    Those of a block of warps are probed, or follow from those that are. They hold for formats that
    only plans of projections read, too: a weight is decoded alike, whether or not the engine runs
    its plan.
    """
    found: Number | None
    match kernel:
        case WarpKernel() if form.coded or unpacking(kernel, form) is not None:
            found = getattr(kernel, RATES[decoded_as(form)])
        case CoreKernel() if form.coded:
            found = getattr(kernel, f"{family(form.name)}_bytes_per_s", None)
        case _:
            found = None
    return found


def family(form: str) -> str:
    """Which formats have the same codes, and other scales."""
    if form.startswith("gguf"):
        return form.replace("-", "_")
    return form.split("-")[0]


def decoded_as(form: Format) -> str:
    """By which of RATES a block of warps decodes a format and multiplies it."""
    if form.name in TENSOR:
        return "fp4"
    if form.bits == 4:
        return "int4"
    return "int8" if family(form.name) == INT8.name else "fp8"


def quantised(matrix: Matrix, *, input_in_memory: bool) -> bool:
    """Do our kernel's threads multiply whole numbers, made of a stage's input (docs/kernel.md)? Of
    FP8 only where the input lies in shared memory.
    """
    form = matrix.format
    if form is None or not form.coded or tensor_products(matrix):
        return False
    return input_in_memory or whole_products(matrix)
