"""GGUF's blocks mean what the package gguf says they mean, also where several types share a
matrix.
"""

from __future__ import annotations

import numpy as np
import pytest

from twin.models.codes.gguf import BLOCK_CODES, BlockCode, Blocks, as_format, common_format
from twin.models.formats import GGUF, MIXED_32, MIXED_256

gguf = pytest.importorskip("gguf", reason="gguf is not installed (extra 'gguf')")
OF = {code.format.name: code for code in BLOCK_CODES}
NAMES = [form.name for form in GGUF]
SMALL = [form.name for form in GGUF if form.block[1] == 32]
LARGE = [form.name for form in GGUF if form.block[1] == 256]
# of blocks in FP16: the largest, the smallest, a subnormal one, none, and below zero
SCALES = (65504.0, 2.0**-14, 2.0**-24, 0.0, -3.5, 0.01)


def drawn(code: BlockCode, rows: int, blocks: int, seed: int = 1) -> Blocks:
    """Blocks of any bits, whose numbers in FP16 are those of SCALES."""
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows * blocks, code.block_bytes), dtype=np.uint8)
    for field in code.fields:
        if field.unit == 2:
            chosen = random.choice(np.array(SCALES, np.float16), len(data))
            data[:, field.at : field.at + 2] = chosen.view(np.uint8).reshape(-1, 2)
    return Blocks(code, data.reshape(rows, -1))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_decode_as_ggml_decodes_them(name: str) -> None:
    found = drawn(OF[name], 24, 3)
    expected = gguf.dequantize(found.blocks, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(found.astype(np.float32), expected)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_not_finite_are_found(name: str) -> None:
    found = drawn(OF[name], 2, 2)
    assert all(np.isfinite(part).all() for part in OF[name].numbers(found.blocks))
    for field in OF[name].fields:
        if field.unit == 2:
            spoilt = found.blocks.copy()
            spoilt[1, field.at : field.at + 2] = np.array([np.inf], np.float16).view(np.uint8)
            assert not all(np.isfinite(part).all() for part in OF[name].numbers(spoilt))


@pytest.mark.parametrize(
    ("names", "mixed"), [(SMALL, MIXED_32), (LARGE, MIXED_256)], ids=["small", "large"]
)
def test_types_that_share_a_matrix_are_not_rounded(names: list[str], mixed: object) -> None:
    form = common_format(names)
    assert form is not None
    assert form.block == getattr(mixed, "block", None)
    for seed, name in enumerate(names):
        found = drawn(OF[name], 16, 2, seed)
        shared = Blocks(OF[form.name], as_format(found.blocks, name, form))
        assert np.array_equal(shared.astype(np.float64), found.astype(np.float64)), name


def test_types_of_different_blocks_share_no_matrix() -> None:
    assert common_format(["q4_1", "q6_k"]) is None
    assert common_format(["f16"]) is None
    assert common_format(["q4_k"]) == OF["q4_k"].format


@pytest.mark.parametrize("name", sorted(OF))
def test_a_tile_holds_every_bit_of_the_file_once(name: str) -> None:
    """Each byte of a block turned over changes exactly as many bits of the tile."""
    code = OF[name]
    found = drawn(code, 16, 2)
    before = found.interleaved()
    assert before.size == code.format.bytes(16, 2 * code.format.block[1])
    assert np.unpackbits(found.blocks).size == np.unpackbits(before).size
    for at in range(found.blocks.shape[1]):
        turned = found.blocks.copy()
        turned[5, at] ^= 0b1001
        after = Blocks(code, turned).interleaved()
        assert np.unpackbits(before ^ after).sum() == 2, at


@pytest.mark.parametrize("name", sorted(OF))
def test_made_up_weights_are_near_the_given_ones(name: str) -> None:
    weights = np.random.default_rng(3).standard_normal((8, 512)).astype(np.float32)
    error = OF[name].quantise(weights).astype(np.float32) - weights
    steps = {4: 0.1, 5: 0.05, 6: 0.02, 8: 0.01}
    assert np.sqrt(np.mean(error**2)) < steps[OF[name].format.bits]


def test_rows_and_columns_beyond_a_matrix_are_zero() -> None:
    for code in BLOCK_CODES:
        wide = code.format.block[1]
        filled = drawn(code, 3, 1).filled(5, 2 * wide).astype(np.float32)
        assert filled.shape == (5, 2 * wide)
        assert not filled[3:].any()
        assert not filled[:, wide:].any()
