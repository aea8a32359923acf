"""GGUF's blocks as a file stores them: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 of 32 neighbours of a row,
Q4_K, Q5_K and Q6_K of 256. A CPU multiplies them; a tile holds the file's own numbers.

A row group is `Format.interleaved` rows of a tile. For each block of columns it has the words of
these rows' codes and narrow scales, [word][row], then their numbers in FP16, [number][row]: a
vector takes a word, four codes, of as many rows as it has lanes (native/platform/host_blocks.h).

Rows of one stage that a file stores in several of these types (Q4_K_M has values in Q6_K next to
queries and keys in Q4_K, in half of the layers) lie in a type that holds both without rounding:
MIXED_32 has bytes, and a scale and an addend in FP16; MIXED_256 is Q6_K with what is taken off.

Source of the types: ggml's quants (ggml-common.h, ggml-quants.c).

Error of what the kernel computes: inputs are whole numbers of 16 bits, scaled by the largest of 32
neighbours, so each is off by at most 1 in 65,000 of that one. Products and sums of a group are
exact, the rest is FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from twin.frozen import frozen
from twin.models.codes.coded import Floats
from twin.models.formats import DECODED, MIXED_32, MIXED_256, ON_GPUS, STORED, Format

Bytes = NDArray[np.uint8]
WORD, HALF = 4, 2  # bytes of four codes, of a number in FP16
SMALLEST = np.float32(2.0**-14)  # scale of a group of zeros: no subnormal in FP16
WIDE = 256  # columns of the larger blocks
SIX_BITS, SIGNED = 63, 127  # largest of a scale


@frozen
class Field:
    """Part of a block in the file: `bytes` from `at` on, in units of `unit` bytes."""

    at: int
    bytes: int
    unit: int
    turned: Callable[[Bytes], Bytes] | None = None  # as a tile has it


@frozen
class BlockCode:
    """What a type's blocks mean, and how a tile holds them."""

    format: Format  # as the engine streams it
    fields: tuple[Field, ...]  # in a tile's order
    decode: Callable[[Bytes], Floats]  # [blocks, bytes] to [blocks, columns]
    quantise_blocks: Callable[[Floats], Bytes]  # the way back, to near weights

    parts = ("blocks",)  # what a matrix of it consists of

    @property
    def block_bytes(self) -> int:
        return self.format.block[1] * self.format.bits // 8 + self.format.scale_bytes

    def matrix(self, *parts: Bytes) -> Blocks:
        """A matrix of `parts`: of its blocks."""
        (blocks,) = parts
        return Blocks(self, blocks)

    def quantise(self, weights: Floats) -> Blocks:
        """Weights near these, for models without a checkpoint; a row's last block is filled up."""
        rows, cols = weights.shape
        wide = self.format.block[1]
        filled = np.zeros((rows, -(-cols // wide) * wide), np.float32)
        filled[:, :cols] = weights
        return Blocks(self, self.quantise_blocks(filled.reshape(-1, wide)).reshape(rows, -1))

    def numbers(self, blocks: Bytes) -> Iterable[NDArray[np.float16]]:
        """What must be finite: scales and addends in FP16."""
        each = blocks.reshape(-1, self.block_bytes)
        for field in self.fields:
            if field.unit == HALF:
                yield _halves(each, field.at)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Weights [rows, cols] as blocks of a GGUF file, [rows, bytes of a row]."""

    code: BlockCode
    blocks: Bytes

    @property
    def shape(self) -> tuple[int, int]:
        rows, size = self.blocks.shape
        return rows, size // self.code.block_bytes * self.code.format.block[1]

    def rows(self, chosen: slice | NDArray[np.intp]) -> Blocks:
        return Blocks(self.code, self.blocks[chosen])

    def columns(self, lo: int, hi: int) -> Blocks:
        """Columns of whole blocks."""
        wide, size = self.code.format.block[1], self.code.block_bytes
        return Blocks(self.code, self.blocks[:, lo // wide * size : -(-hi // wide) * size])

    def filled(self, rows: int, cols: int) -> Blocks:
        """Zeros beyond it: a block of them stands for zeros in every type."""
        has, size = self.blocks.shape
        wanted = -(-cols // self.code.format.block[1]) * self.code.block_bytes
        return Blocks(self.code, np.pad(self.blocks, ((0, rows - has), (0, wanted - size))))

    def astype(self, dtype: DTypeLike) -> NDArray[Any]:
        """The weights themselves."""
        each = np.ascontiguousarray(self.blocks).reshape(-1, self.code.block_bytes)
        return self.code.decode(each).reshape(self.shape).astype(dtype, copy=False)

    def interleaved(self) -> Bytes:
        """[row groups, bytes of one], of rows filled up with zeros."""
        high, size = self.code.format.interleaved, self.code.block_bytes
        rows = self.blocks.shape[0]
        source = self.blocks
        if rows % high:
            source = np.zeros((rows + -rows % high, self.blocks.shape[1]), np.uint8)
            source[:rows] = self.blocks
        each = source.reshape(-1, high, source.shape[1] // size, size)
        out = np.empty((each.shape[0], each.shape[2], high * size), np.uint8)
        at = 0
        for field in self.code.fields:
            part = np.ascontiguousarray(each[..., field.at : field.at + field.bytes])
            if field.turned is not None:
                part = field.turned(part)
            units = part.view(f"<u{field.unit}").transpose(0, 2, 3, 1)
            to = out[..., at : at + high * field.bytes]
            to[:] = np.ascontiguousarray(units).reshape(*units.shape[:2], -1).view(np.uint8)
            at += high * field.bytes
        return out.reshape(len(out), -1)


def _halves(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """[blocks] numbers in FP16."""
    return np.ascontiguousarray(blocks[:, at : at + HALF]).view("<f2").reshape(-1)


def _number(blocks: Bytes, at: int) -> Floats:
    """The same as FP32, [blocks, 1]."""
    return _halves(blocks, at).astype(np.float32).reshape(-1, 1)


def _stored(*parts: NDArray[Any]) -> Bytes:
    """[blocks, bytes] of what blocks consist of, FP16 or bytes."""
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)


def _nibbles(codes: Bytes, wide: int) -> Bytes:
    """[blocks, n]: of each 2 * `wide` neighbours element i and i + `wide` in byte i."""
    pairs = codes.reshape(len(codes), -1, 2, wide)
    return (pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)).reshape(len(codes), -1)


def _codes(nibbles: Bytes, wide: int) -> Bytes:
    """The way back."""
    bytes_ = nibbles.reshape(len(nibbles), -1, 1, wide)
    return np.concatenate([bytes_ & np.uint8(15), bytes_ >> np.uint8(4)], axis=2).reshape(
        len(nibbles), -1
    )


# ---- 32 neighbours -------------------------------------------------------------------------------


@frozen
class _Small:
    """Blocks of a scale and, with `addend`, what is added; then fifth bits, then codes."""

    bits: int
    addend: bool
    zero: int  # the code that stands for nothing

    @property
    def at(self) -> int:
        """Where fifth bits or codes begin."""
        return 2 * HALF if self.addend else HALF

    def fields(self) -> tuple[Field, ...]:
        fifths = WORD * (self.bits == 5)
        biased = _turned_sign if self.bits == 8 and not self.addend else None
        codes = Field(self.at + fifths, 32 if self.bits == 8 else 16, WORD, biased)
        return (
            codes,
            *((Field(self.at, WORD, WORD, _by_quads),) if fifths else ()),
            Field(0, HALF, HALF),
            *((Field(HALF, HALF, HALF),) if self.addend else ()),
        )

    def whole(self, blocks: Bytes) -> Bytes:
        """[blocks, 32] codes."""
        if self.bits == 8:
            return blocks[:, self.at :] ^ np.uint8(0 if self.addend else 128)
        codes = _codes(blocks[:, -16:], 16)
        if self.bits == 5:
            fifths = np.unpackbits(blocks[:, self.at : self.at + WORD], axis=1, bitorder="little")
            codes |= fifths << np.uint8(4)
        return codes

    def decode(self, blocks: Bytes) -> Floats:
        values = self.whole(blocks).astype(np.float32) - np.float32(self.zero)
        values *= _number(blocks, 0)
        return values + _number(blocks, HALF) if self.addend else values

    def quantise(self, weights: Floats) -> Bytes:
        most = 2**self.bits - 1
        low = weights.min(axis=1, keepdims=True)
        if self.addend:
            size = (weights.max(axis=1, keepdims=True) - low) / np.float32(most)
            addend = [(low + np.float32(self.zero) * size).astype(np.float16)]
            taken = addend[0].astype(np.float32)
        else:
            size = np.abs(weights).max(axis=1, keepdims=True) / np.float32(most - self.zero)
            addend, taken = [], np.float32(0)
        scale = np.maximum(size, SMALLEST).astype(np.float16)
        near = np.rint((weights - taken) / scale.astype(np.float32)) + self.zero
        codes = np.clip(near, 0, most).astype(np.uint8)
        if self.bits == 8:
            return _stored(scale, *addend, codes ^ np.uint8(0 if self.addend else 128))
        bits = np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")
        fifths = [bits] if self.bits == 5 else []
        return _stored(scale, *addend, *fifths, _nibbles(codes & np.uint8(15), 16))


def _turned_sign(codes: Bytes) -> Bytes:
    """Signed bytes as unsigned ones, 128 more."""
    return codes ^ np.uint8(128)


def _by_quads(fifths: Bytes) -> Bytes:
    """Bit 4 * k + j of a word becomes bit k of byte j."""
    bits = np.unpackbits(fifths, axis=-1, bitorder="little")
    turned = bits.reshape(*fifths.shape[:-1], 8, WORD).swapaxes(-1, -2)
    packed: Bytes = np.packbits(turned, axis=-1, bitorder="little")
    return packed.reshape(fifths.shape)


# ---- 256 neighbours ------------------------------------------------------------------------------


def _six_bits(blocks: Bytes) -> tuple[Floats, Floats]:
    """([blocks, 8] scales, what is taken off) out of twelve bytes from 2 * HALF on."""
    parts = blocks[:, 4:16].reshape(-1, 3, 4)
    first, second, rest = parts[:, 0], parts[:, 1], parts[:, 2]
    high = np.uint8(4)
    scales = np.concatenate(
        [first & SIX_BITS, (rest & np.uint8(15)) | (first >> np.uint8(6)) << high], axis=1
    )
    taken = np.concatenate(
        [second & SIX_BITS, rest >> high | (second >> np.uint8(6)) << high], axis=1
    )
    return scales.astype(np.float32), taken.astype(np.float32)


def _twelve_bytes(scales: Bytes, taken: Bytes) -> Bytes:
    high = np.uint8(4)
    first = scales[:, :4] | (scales[:, 4:] >> high) << np.uint8(6)
    second = taken[:, :4] | (taken[:, 4:] >> high) << np.uint8(6)
    rest = (scales[:, 4:] & np.uint8(15)) | (taken[:, 4:] & np.uint8(15)) << high
    return np.concatenate([first, second, rest], axis=1)


@frozen
class _SixBits:
    """Q4_K, Q5_K: two numbers, twelve bytes of scales of groups of 32, fifth bits, codes."""

    bits: int

    def fields(self) -> tuple[Field, ...]:
        fifths = 32 * (self.bits == 5)
        return (
            Field(16 + fifths, 128, WORD),
            *((Field(16, fifths, WORD),) if fifths else ()),
            Field(4, 12, WORD),
            Field(0, HALF, HALF),
            Field(HALF, HALF, HALF),
        )

    def whole(self, blocks: Bytes) -> Bytes:
        """[blocks, 256] codes."""
        codes = _codes(blocks[:, -128:], 32)
        if self.bits == 5:
            fifths = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
            codes |= fifths.reshape(-1, WIDE) << np.uint8(4)
        return codes

    def decode(self, blocks: Bytes) -> Floats:
        scales, taken = _six_bits(blocks)
        by = (_number(blocks, 0) * scales)[:, :, None]
        off = (_number(blocks, HALF) * taken)[:, :, None]
        values = self.whole(blocks).reshape(-1, 8, 32).astype(np.float32)
        return (by * values - off).reshape(-1, WIDE)

    def quantise(self, weights: Floats) -> Bytes:
        groups = weights.reshape(-1, 8, 32)
        most = np.float32(2**self.bits - 1)
        low = np.minimum(groups.min(axis=2), 0)
        number, scales = _shared((groups.max(axis=2) - low) / most, SIX_BITS)
        least, taken = _shared(-low, SIX_BITS)
        by = np.maximum(number.astype(np.float32) * scales, SMALLEST)[:, :, None]
        off = (least.astype(np.float32) * taken)[:, :, None]
        codes = np.clip(np.rint((groups + off) / by), 0, most).astype(np.uint8).reshape(-1, WIDE)
        upper = (codes >> np.uint8(4)).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
        fifths = [np.bitwise_or.reduce(upper, axis=1)] if self.bits == 5 else []
        return _stored(
            number,
            least,
            _twelve_bytes(scales.astype(np.uint8), taken.astype(np.uint8)),
            *fifths,
            _nibbles(codes & np.uint8(15), 32),
        )


def _shared(sizes: Floats, most: int) -> tuple[NDArray[np.float16], Floats]:
    """[blocks, groups] as multiples, up to `most`, of a number in FP16 [blocks, 1]."""
    number = np.maximum(sizes.max(axis=1, keepdims=True) / np.float32(most), SMALLEST)
    half = number.astype(np.float16)
    return half, np.clip(np.rint(sizes / half.astype(np.float32)), 0, most)


@frozen
class _Sixteen:
    """Q6_K: lower four bits, upper two, scales of groups of 16, a number; MIXED_256: behind the
    scales what is taken off, and behind the number its own.
    """

    taken: bool

    def fields(self) -> tuple[Field, ...]:
        common = (Field(0, 128, WORD), Field(128, 64, WORD), Field(192, 16, WORD))
        if self.taken:
            return (*common, Field(208, 16, WORD), Field(224, HALF, HALF), Field(226, HALF, HALF))
        return (*common, Field(208, HALF, HALF))

    def decode(self, blocks: Bytes) -> Floats:
        lower = _codes(blocks[:, :128], 64)
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
        codes = lower | upper.reshape(-1, WIDE) << np.uint8(4)
        values = (codes.astype(np.float32) - np.float32(32)).reshape(-1, 16, 16)
        scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
        number = _number(blocks, 224 if self.taken else 208)
        values = (number * scales)[:, :, None] * values
        if self.taken:
            values = values - (_number(blocks, 226) * blocks[:, 208:224])[:, :, None]
        return values.reshape(-1, WIDE)

    def quantise(self, weights: Floats) -> Bytes:
        groups = weights.reshape(-1, 16, 16)
        number, scales = _shared(np.abs(groups).max(axis=2) / np.float32(31), SIGNED)
        by = np.maximum(number.astype(np.float32) * scales, SMALLEST)[:, :, None]
        codes = (np.clip(np.rint(groups / by), -32, 31) + 32).astype(np.uint8)
        kept = scales.astype(np.uint8)
        if self.taken:
            nothing = np.zeros_like(kept)
            none = np.zeros_like(number)
            return _stored(*_six(codes.reshape(-1, WIDE)), kept, nothing, number, none)
        return _stored(*_six(codes.reshape(-1, WIDE)), kept, number)


def _six(codes: Bytes) -> tuple[Bytes, Bytes]:
    """Lower four bits and upper two of codes [blocks, 256], as Q6_K has them."""
    upper = (codes >> np.uint8(4)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    two = np.bitwise_or.reduce(upper << shifts, axis=2).reshape(-1, 64)
    return _nibbles(codes & np.uint8(15), 64), two


# ---- types ---------------------------------------------------------------------------------------

_SMALL = {
    "q4_0": _Small(4, addend=False, zero=8),
    "q4_1": _Small(4, addend=True, zero=0),
    "q5_0": _Small(5, addend=False, zero=16),
    "q5_1": _Small(5, addend=True, zero=0),
    "q8_0": _Small(8, addend=False, zero=128),
    MIXED_32.name: _Small(8, addend=True, zero=128),
}
_LARGE: dict[str, _SixBits | _Sixteen] = {
    "q4_k": _SixBits(4),
    "q5_k": _SixBits(5),
    "q6_k": _Sixteen(taken=False),
    MIXED_256.name: _Sixteen(taken=True),
}
_KINDS: dict[str, _Small | _SixBits | _Sixteen] = {**_SMALL, **_LARGE}
BLOCK_CODES = tuple(
    BlockCode(DECODED[name], kind.fields(), kind.decode, kind.quantise)
    for name, kind in _KINDS.items()
)
_OF: Mapping[str, BlockCode] = {code.format.name: code for code in BLOCK_CODES}


def common_format(names: Iterable[str]) -> Format | None:
    """The format in which rows of these types lie in one matrix, none of them rounded; None where
    there is none.
    """
    found = set(names)
    if len(found) == 1:
        name = found.pop()
        return DECODED[name] if name in _OF else None
    for kinds, mixed in ((_SMALL, MIXED_32), (_LARGE, MIXED_256)):
        if found <= kinds.keys():
            return DECODED[mixed.name]
    return None


def as_format(blocks: Bytes, name: str, format: Format) -> Bytes:
    """[rows, bytes] of type `name` in a format that `common_format` gave for it."""
    if name == format.name:
        return blocks
    each = np.ascontiguousarray(blocks).reshape(-1, _OF[name].block_bytes)
    made = _in_mixed_32(each, _SMALL[name]) if name in _SMALL else _in_mixed_256(each, name)
    return made.reshape(len(blocks), -1)


def as_coded(blocks: Bytes, name: str, part: str) -> NDArray[Any]:
    """[rows, bytes] of a type of ON_GPUS as its format has "codes" [rows, cols] or "scales"
    [rows, blocks].
    """
    kind = _SMALL[name]
    each = np.ascontiguousarray(blocks).reshape(-1, _OF[name].block_bytes)
    if part == "scales":
        return _halves(each, 0).astype(np.float32).reshape(len(blocks), -1)
    codes = kind.whole(each)
    if STORED[ON_GPUS[name]].bits == 8:
        codes -= np.uint8(kind.zero)  # to whole numbers with a sign
    return codes.reshape(len(blocks), -1)


def _in_mixed_32(blocks: Bytes, kind: _Small) -> Bytes:
    codes = kind.whole(blocks) + np.uint8(128 - kind.zero)
    addend = _halves(blocks, HALF) if kind.addend else np.zeros(len(blocks), np.float16)
    return _stored(_halves(blocks, 0).reshape(-1, 1), addend.reshape(-1, 1), codes)


def _in_mixed_256(blocks: Bytes, name: str) -> Bytes:
    if name == "q6_k":
        nothing = np.zeros((len(blocks), 16), np.uint8)
        none = np.zeros((len(blocks), 1), np.float16)
        return _stored(blocks[:, :208], nothing, blocks[:, 208:], none)
    kind = _LARGE[name]
    assert isinstance(kind, _SixBits)
    scales, taken = (np.repeat(part, 2, axis=1).astype(np.uint8) for part in _six_bits(blocks))
    lower, upper = _six(kind.whole(blocks) + np.uint8(32))
    return _stored(
        lower,
        upper,
        scales,
        taken,
        _halves(blocks, 0).reshape(-1, 1),
        _halves(blocks, HALF).reshape(-1, 1),
    )
