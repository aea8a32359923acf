"""What a wave issues for a strip of weights, counted as the interpreter executes the kernel's
machine code, and how fast a CU consumes weights by its issue rules:

    python -m tests.gfx942.issued

prints the numbers of calibration/kernels/stated/mi300x.yaml that follow from them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from tests.engine.small_engine import TOKENS
from tests.gfx942.emulated import Emulated
from tests.gfx942.small import SPEC, small, strips
from twin.models.spec import DType
from twin.schedule.strips import STRIP_BYTES, THREADS

CLOCK_HZ = 2.1e9
WAVES = THREADS // 64
# Of a CU (CDNA 3 ISA, white paper): each of four SIMDs has a turn in every four cycles, in which it
# takes one instruction of a wave, of each kind one at most. 16 lanes work on a vector instruction,
# so that it keeps its SIMD for the four cycles.
SIMDS, TURN = 4, 4
SHARED_BYTES, LOADED_BYTES = 128, 64  # a cycle: local memory, first-level cache
KINDS = {"v": "vector", "s": "scalar", "ds": "shared", "global": "load", "buffer": "load"}
# Of what issue allows: the low-bit formats of an H200 reach 0.71 to 0.88 of theirs where threads
# decode (calibration/kernels/stated/h200-sxm.yaml, high ends, next to the fit)
REACHED = 0.8

HIDDEN = (1024, 2048)  # columns of the LM head, of one tile: two strips of a row, and four
ROWS = (64, 320)  # of the LM head: the second less the first are whole row groups of all waves


@dataclass(frozen=True, slots=True)
class Issued:
    """Of a wave, for one strip."""

    vector: float
    scalar: float  # branches and waits included
    shared: float
    load: float

    @property
    def all(self) -> float:
        return self.vector + self.scalar + self.shared + self.load

    def bytes_per_cycle(self) -> float:
        """Of a CU at most."""
        waves = WAVES // SIMDS
        vectors = waves * self.vector * TURN  # of a SIMD's waves behind each other
        turns = self.all * TURN  # of each of its waves, next to the other
        strip = STRIP_BYTES / WAVES
        return min(SIMDS * waves * strip / max(vectors, turns), LOADED_BYTES, SHARED_BYTES)

    def alone(self) -> float:
        """Bytes a cycle where no wave issues next to another."""
        return SIMDS * STRIP_BYTES / WAVES / (self.all * TURN)


def issued(dtype: DType) -> Issued:
    """The difference of runs with more rows, and of these the one of wider rows, so without what
    rows and stages take. Of weights of 16 bits: a tile has all columns then.
    """
    narrow, wide = (_of_rows(hidden, dtype) for hidden in HIDDEN)
    counts = {kind: wide[kind] - narrow[kind] for kind in set(KINDS.values())}
    strip_bytes = STRIP_BYTES / WAVES
    more = (ROWS[1] - ROWS[0]) * (HIDDEN[1] - HIDDEN[0]) * dtype.bytes / strip_bytes
    return Issued(**{kind: count / more for kind, count in counts.items()})


def _of_rows(hidden: int, dtype: DType) -> Counter[str]:
    few, many = (_run(hidden, rows, dtype) for rows in ROWS)
    many.subtract(few)
    return many


def _run(hidden: int, rows: int, dtype: DType) -> Counter[str]:
    """Instructions of one token by kind."""
    spec = replace(SPEC, layers=1, windows=(0,), hidden=hidden, vocab=rows)
    plan = small(spec, blocks=1, slot_bytes=2**15, weight_dtype=dtype, kv_dtype=dtype, **strips(4))
    running = Emulated(plan, seed=2, most=10**9)
    running.logits(TOKENS[:1])
    found: Counter[str] = Counter()
    for one, times in running.counted():
        found[KINDS[one.name.partition("_")[0]]] += times
    return found


def main() -> None:
    for dtype in (DType.FP16, DType.BF16):
        found = issued(dtype)
        most, least = (b * CLOCK_HZ / 1e9 for b in (found.bytes_per_cycle(), found.alone()))
        print(
            f"{dtype.value}: {found.vector:.0f} vector, {found.scalar:.0f} scalar, "
            f"{found.shared:.0f} shared, {found.load:.0f} load; at most {most:.0f} GB/s, "
            f"{REACHED * most:.0f} taken, one wave at a time {least:.0f}"
        )


if __name__ == "__main__":
    main()
