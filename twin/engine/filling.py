"""Random weights for streams of low-bit matrices, whose numbers do not matter.

Bytes at random are no such weights: among them are scales of 2^100 and codes that are no numbers.
So some rows of each kind of matrix are made and packed as those of a checkpoint are. All blocks and
layers repeat them, and all experts of a stage are copies of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twin.kernel import experts
from twin.kernel.packing import pack_tiles, tile
from twin.kernel.streams import PAGE_BYTES
from twin.kernel.tables import layout
from twin.models.codes import Encoded, code_of
from twin.models.formats import UNIT_BYTES
from twin.plan.matrix import Matrix, tiles_of
from twin.plan.types import Plan, Stage

DIFFERENT = 512  # rows of a matrix: an expert of 14,336 rows took four seconds to quantise


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of a rank's stream: `content` is repeated until `size` bytes are full."""

    at: int
    content: NDArray[np.uint8]
    size: int


def coded_pieces(plan: Plan, seed: int) -> Iterator[Piece]:
    """What the stream of a rank holds next to a pattern of plain weights. Nothing, where all
    weights are plain.
    """
    if not plan.coded:
        return
    made = layout(plan).weights
    starts = [int(row[0]) * PAGE_BYTES for row in made.blocks]
    random = np.random.default_rng(seed)
    contents: dict[tuple[Matrix, int], NDArray[np.uint8]] = {}
    sources: dict[Matrix, Encoded] = {}  # experts
    for stage in plan.stages:
        if stage.matrix is None:
            continue
        matrix = replace(stage.matrix, owned=())
        if stage.routed:
            place, key = made.experts[stage.index], (stage.matrix, 0)
            size = place.units * UNIT_BYTES * stage.routed.experts
            if matrix.format is not None:
                if matrix not in sources:
                    sources[matrix] = _coded(matrix, matrix.rows, random)
                if key not in contents:
                    contents[key] = _expert(plan, stage, place, sources[matrix])
                yield Piece(place.page * PAGE_BYTES, contents[key], size)
            continue
        for block, (lo, hi) in enumerate(stage.matrix.owned):
            key = matrix, hi - lo
            if key not in contents:
                contents[key] = _rows(plan, matrix, hi - lo, random)
            if matrix.format is not None and hi > lo:
                yield Piece(starts[block], contents[key], contents[key].size)
            starts[block] += contents[key].size


def _rows(plan: Plan, matrix: Matrix, count: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """The tiles of so many rows; of a plain matrix zeros."""
    parts = list(tiles_of(matrix, 0, count))
    sizes = [plan.stored_bytes(matrix, hi - lo, right - left) for (lo, hi), (left, right) in parts]
    out, at = np.zeros(sum(sizes), np.uint8), 0
    source = _coded(matrix, count, random) if matrix.format is not None and count else None
    for (rows, cols), size in zip(parts if source else (), sizes, strict=False):
        assert source is not None
        found = tile(plan, matrix, source, rows, cols)
        out[at : at + len(found)] = found
        at += size
    return out


def _expert(plan: Plan, stage: Stage, place: experts.Place, source: Encoded) -> NDArray[np.uint8]:
    """One expert of a routed stage."""
    assert stage.matrix is not None
    out = np.zeros(place.units * UNIT_BYTES, np.uint8)
    pack_tiles(plan, stage.matrix, place, source, out)
    return out


def _coded(matrix: Matrix, rows: int, random: np.random.Generator) -> Encoded:
    """Random rows in the matrix's format, whose products with inputs of size one are of size one;
    from DIFFERENT rows on they repeat.
    """
    assert matrix.format is not None
    values = random.standard_normal((min(rows, DIFFERENT), matrix.cols), np.float32)
    some = code_of(matrix.format).quantise(values * np.float32(matrix.cols**-0.5))
    return some if rows <= DIFFERENT else some.rows(np.arange(rows) % DIFFERENT)
