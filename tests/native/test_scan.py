"""Scans of cached keys and values on tensor cores, thread by thread on a CPU: softmax attention,
and nothing else is read.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.native.programs import built
from twin.cost.vectors import PARTS_AT_ONCE
from twin.schedule.splits import SPLITS_AT_ONCE

SOURCE = Path(__file__).resolve().parent / "scan.cpp"
MUTATIONS = {
    "rows that are not swizzled": (
        "swizzle = near ? 0u : row_swizzle<BYTES>(u32(tile.first + held));",
        "swizzle = 0u;",
    ),
    "the newest among the others": (
        "const bool near = held == tile.here;",
        "const bool near = false;",
    ),
    "numbers where nothing is held": (
        "const int held = row < tile.count ? row : 0;",
        "const int held = row;",
    ),
    "queries without what rounding loses": ("u16(packed(value, value, true))", "0"),
    "queries that are not swizzled": ("return (head + 4 * lost) & 7;", "return 0;"),
    "what rounding loses swizzled as the rounded": ("(head + 4 * lost) & 7", "head & 7"),
    "no rescaling": ("output[m][h] *= shrink, output[m][2 + h] *= shrink;", ";"),
}

WIDE_MUTATIONS = {
    "products of rounded queries alone": (
        "static constexpr int PARTS = WIDE ? 2 : 1;",
        "static constexpr int PARTS = 1;",
    ),
    "weights without what rounding loses": (
        "const bool lost = WIDE ? part > 0 : thread % 4 >= 2;",
        "const bool lost = false;",
    ),
    "warps that do not meet": (
        "part = part * mine + places.at(i) * theirs",
        "part = part * mine",
    ),
    "sums of some positions": ("total[0] = over_positions(total[0]);", ";"),
}


def run(
    head_dim: int,
    stored: str,
    source: Path = SOURCE,
    included: Iterable[Path] = (),
    *,
    wide: bool = False,
    until_wrong: bool = False,
) -> subprocess.CompletedProcess[str]:
    flags = ["-std=c++17", "-O0", "-pthread", f"-DHEADDIM={head_dim}", f"-DSTORED={stored}"]
    flags.append(f"-DWIDE_SCAN={int(wide)}")
    program = built(source, flags, included=included)
    words = [str(program), *(["until wrong"] if until_wrong else [])]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("head_dim", "stored"),
    [(64, "BF16"), (128, "FP16"), (256, "BF16"), (64, "FP8"), (192, "FP8"), (256, "FP8")],
)
def test_a_scan_is_softmax_attention(head_dim: int, stored: str) -> None:
    done = run(head_dim, stored)
    assert done.returncode == 0, done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize(("head_dim", "stored"), [(64, "FP16"), (128, "BF16"), (128, "FP8")])
def test_a_scan_of_eight_heads_a_warp_is_softmax_attention(head_dim: int, stored: str) -> None:
    """Groups of 9, 12 and 16 heads are two sets; the warps of a set meet in shared memory."""
    done = run(head_dim, stored, wide=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize("mutation", [*MUTATIONS, *WIDE_MUTATIONS])
def test_each_step_of_it_is_needed(mutation: str, tmp_path: Path) -> None:
    kernel = SOURCE.parents[2] / "native" / "platform" / "cuda_scan.cuh"
    old, new = (MUTATIONS | WIDE_MUTATIONS)[mutation]
    text = kernel.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "cuda_scan.cuh").write_text(text.replace(old, new), encoding="utf-8")
    changed = (
        SOURCE.read_text(encoding="utf-8")
        .replace("../../native/platform/cuda_scan.cuh", "cuda_scan.cuh")
        .replace("../../native", str(SOURCE.parents[2] / "native"))
    )
    copied = ("family.h", "cuda_eight_bits.cuh")
    for name in copied:
        text = (kernel.parent / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "scan.cpp").write_text(changed, encoding="utf-8")
    changed_too = [tmp_path / name for name in ("cuda_scan.cuh", *copied)]
    wide = mutation in WIDE_MUTATIONS
    source = tmp_path / "scan.cpp"
    done = run(64, "BF16", source, included=changed_too, wide=wide, until_wrong=True)
    assert done.returncode != 0


def test_plan_and_twin_mean_the_same_numbers() -> None:
    """Plan and kernel do: native/platform/facts.h."""
    assert SPLITS_AT_ONCE == PARTS_AT_ONCE
