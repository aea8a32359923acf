"""Numbers of the kernel that do not depend on a plan, for C++: `python -m twin.kernel.facts` prints
native/platform/facts.h.

Native code uses these constants, or asserts that its own agree (`static_assert`), so a disagreement
does not compile. The file is kept in the repository; tests/native/test_facts.py compares it with
what is generated.
"""

from __future__ import annotations

from twin.kernel.coded import NUMBERS
from twin.kernel.draft_head import HEAD_FIRST
from twin.kernel.header import BIAS_GIVEN, LOGITS_TAKEN, PASS_BARRIER, SENTINEL_WORD, START_BARRIER
from twin.kernel.prompt import CANDIDATE_FLOATS, PART_ENDS, ROUND_FIRST
from twin.kernel.streams import PAGE_BYTES
from twin.kernel.tables import STATE_ALIGNED
from twin.models.formats import BLOCK_ROWS, GGUF, INT4, INT8_G32, SCALED_ROWS, UNIT_BYTES
from twin.plan.attention import PARTIAL_EXTRA
from twin.plan.matrix import CONV_UNIT
from twin.plan.types import SUMS_PITCH, SUMS_TOGETHER
from twin.schedule import pass_memory, passes, scan
from twin.schedule.block import FOLDED_ROWS, LINE_FLOATS, ROWS_AT_ONCE
from twin.schedule.homes import BANKS, SKEW_FLOATS, WIDE_AT_ONCE
from twin.schedule.memory import (
    BARRIER_BYTES,
    CONTEST,
    FOUND_FLOATS,
    KEPT_FIRST,
    LEVEL_FLOATS,
    LOGITS_FIRST,
    MEETING_FLOATS,
    PROBED_FLOATS,
    PROGRESS_BYTES,
    SAMPLE_BUCKETS,
    SAMPLE_HELD,
    SAMPLE_LISTED,
    SHARE_FLOATS,
    STATE_EXTRA,
    SUMMARY_FLOATS,
)
from twin.schedule.splits import KEPT_HEAD, SPLITS_AT_ONCE, TENSOR_HEADS, TENSOR_POSITIONS
from twin.schedule.teams import LATE_AT_ONCE

FACTS: dict[str, tuple[int, str]] = {  # name -> (value, what it counts)
    "PAGE_BYTES": (PAGE_BYTES, "streams of blocks start on a page"),
    "UNIT_BYTES": (UNIT_BYTES, "of StageStart"),
    "LINE_FLOATS": (LINE_FLOATS, "exchange rows and counters never share a line"),
    "BARRIER_BYTES": (BARRIER_BYTES, "of an mbarrier"),
    "PROGRESS_BYTES": (PROGRESS_BYTES, "of Progress"),
    "STATE_EXTRA": (STATE_EXTRA, "floats that a block keeps between kernels besides its residual"),
    "STATE_ALIGNED": (STATE_ALIGNED, "bytes: where states begin behind the cache"),
    "CONV_UNIT": (CONV_UNIT, "rows of a channel of a short convolution: b, c, x"),
    "PARTIAL_EXTRA": (PARTIAL_EXTRA, "of a softmax partial: its maximum, its sum"),
    "SUMS_TOGETHER": (SUMS_TOGETHER, "of 64 bits, in a sector of exchange memory"),
    "SUMS_PITCH": (SUMS_PITCH, "words from one such sector to the next"),
    "PASS_BARRIER": (PASS_BARRIER, "Control.hung_value: the barrier of a prompt pass"),
    "START_BARRIER": (START_BARRIER, "Control.hung_value: the start of GPUs and of their blocks"),
    "LOGITS_TAKEN": (LOGITS_TAKEN, "Control.hung_value: the host has not taken logits"),
    "BIAS_GIVEN": (BIAS_GIVEN, "Control.hung_value: the host has not given a token's bias"),
    "ROWS_AT_ONCE": (ROWS_AT_ONCE, "of a tile: their loads are under way together"),
    "FOLDED_ROWS": (FOLDED_ROWS, "the same of a tile that a warp takes in folds"),
    "SKEW_FLOATS": (SKEW_FLOATS, "between first and second fours of threads in shared memory"),
    "BANKS": (BANKS, "of shared memory, a float each"),
    "WIDE_AT_ONCE": (
        WIDE_AT_ONCE,
        "slices of an input in shared memory that are gathered together",
    ),
    "CODE_INT8": (NUMBERS["int8"], "Stage.code of such weights"),
    "CODE_INT8_GROUPS": (NUMBERS[INT8_G32.name], "with an FP16 scale for each 32 columns of a row"),
    "CODE_FP8": (NUMBERS["fp8"], "E4M3 with a scale for each row"),
    "CODE_FP8_BLOCKS": (NUMBERS["fp8-128x128"], "for each 128 columns of a row"),
    "CODE_INT4": (NUMBERS[INT4[0].name], "by group width, zero points and scales: coded.h"),
    "INT4_CODES": (len(INT4), "from there on"),
    "CODE_MXFP4": (NUMBERS["mxfp4"], "E2M1 with a power of two for each 32 columns of a row"),
    "CODE_NVFP4": (NUMBERS["nvfp4"], "with E4M3 scales for each 16, and one for the row"),
    "CODE_GGUF": (NUMBERS[GGUF[0].name], "the first of GGUF's blocks; the others follow"),
    "BLOCK_ROWS": (BLOCK_ROWS, "of a tile of them, which are interleaved"),
    "CODE_KINDS": (len(NUMBERS), "the last of these numbers"),
    "SCALED_ROWS": (SCALED_ROWS, "of a tile of codes: their scales are filled up to so many"),
    "CONTEST": (CONTEST, "experts that a block compares with each other, at most"),
    "KEPT_FIRST": (KEPT_FIRST, "words before what a block keeps of shared experts"),
    "LATE_AT_ONCE": (LATE_AT_ONCE, "elements of a thread whose late parts are loaded together"),
    "SPLITS_AT_ONCE": (SPLITS_AT_ONCE, "of a head, looked at together"),
    "NARROW_HEAD": (scan.NARROW_HEAD, "up to so many elements 8 threads share a cached position"),
    "MIDDLE_HEAD": (scan.MIDDLE_HEAD, "up to so many 16 threads do; beyond, 32"),
    "TENSOR_WARPS": (scan.TENSOR_WARPS, "that share an item's positions on tensor cores"),
    "TENSOR_WARPS_OF_8_BITS": (scan.TENSOR_WARPS_OF_8_BITS, "of such caches, but for wide sets"),
    "TENSOR_POSITIONS": (TENSOR_POSITIONS, "of a product on tensor cores"),
    "TENSOR_HEADS": (TENSOR_HEADS, "query heads of one, as columns twice"),
    "WIDE_PARTIALS": (scan.WIDE_PARTIALS, "of a set of twice as many, in shared memory at once"),
    "KEPT_HEAD": (KEPT_HEAD, "elements of a head, at most, whose queries stay in registers"),
    "SAMPLE_BUCKETS": (SAMPLE_BUCKETS, "of logits, the full sampler's"),
    "SAMPLE_LISTED": (SAMPLE_LISTED, "logits that it compares one by one"),
    "SAMPLE_HELD": (SAMPLE_HELD, "of a bucket, in shared memory"),
    "LOGITS_FIRST": (LOGITS_FIRST, "words of a block's buffer before its logits"),
    "SUMMARY_FLOATS": (SUMMARY_FLOATS, "that a block publishes of its logits"),
    "LEVEL_FLOATS": (LEVEL_FLOATS, "that it keeps of a bucket"),
    "MEETING_FLOATS": (MEETING_FLOATS, "of the sampler's scratch: a number of each warp"),
    "SHARE_FLOATS": (SHARE_FLOATS, "of one block of one rank"),
    "FOUND_FLOATS": (FOUND_FLOATS, "which logit is the last one kept"),
    "PROBED_FLOATS": (PROBED_FLOATS, "what threads found in the buckets wanted"),
    "ROUND_FIRST": (ROUND_FIRST, "words of a round of drafts before its tokens"),
    "CANDIDATE_FLOATS": (CANDIDATE_FLOATS, "that a block leaves of its logits of a token there"),
    "HEAD_FIRST": (HEAD_FIRST, "floats of a head that drafts before its norms' weights"),
    "FEW_COLUMNS": (pass_memory.FEW_COLUMNS, "of a warp's load in a round"),
    "FEW_SUMS_BYTES": (pass_memory.FEW_SUMS_BYTES, "of a batch's sums there"),
    "FEW_INPUT_BYTES": (pass_memory.FEW_INPUT_BYTES, "of a stage's inputs there"),
    "FEW_TOKENS": (pass_memory.FEW_TOKENS, "of a round, at most"),
    "PART_ENDS": (PART_ENDS, "behind a part of a head's outputs in a round: maximum, sum"),
    "PASS_STEP_COLUMNS": (passes.STEP_COLUMNS, "of a step of a pass's product"),
    "PASS_TILE_TOKENS": (passes.TILE_TOKENS, "of a block at a time"),
    "PASS_BEGINS_BYTES": (pass_memory.BEGINS_BYTES, "where a thread's rows of 16 bits begin"),
    "CODED_STEP_ROWS": (passes.EIGHT_BIT_ROWS, "of an expert that a block decodes by steps"),
    "STATE_TOKENS": (pass_memory.STATE_TOKENS, "that carry a recurrent state on together"),
    "STATE_ROWS": (pass_memory.STATE_ROWS, "of a product of such states"),
    "PASS_MOST_STEPS": (pass_memory.MOST_STEPS, "of a product in shared memory"),
    "PASS_ROOM_BYTES": (pass_memory.ROOM_BYTES, "of steps in shared memory"),
    "PASS_ROWS_BYTES": (
        pass_memory.ROWS_BYTES,
        "of what a block knows of the rows that it multiplies",
    ),
    "PASS_SCAN_POSITIONS": (
        passes.SCAN_POSITIONS,
        "of a tile of cached keys and values on tensor cores",
    ),
    "PASS_WIDE_POSITIONS": (passes.WIDE_POSITIONS, "of heads beyond KEPT_HEAD elements"),
    "PASS_SCAN_TILES": (pass_memory.SCAN_TILES, "of these in shared memory"),
    "PASS_PITCH_BYTES": (
        pass_memory.PITCH_BYTES,
        "between keys and values of neighbouring positions in shared memory",
    ),
    "PASS_TILE_BYTES": (pass_memory.TILE_BYTES, "of a column of a tile of cached keys"),
    "PASS_TILES": (pass_memory.TILES, "of cached keys and values in shared memory"),
}


def facts(changed: dict[str, int] | None = None) -> str:
    """The text of facts.h. `changed`: other values of some, to see the compiler refuse them."""
    values = {name: value for name, (value, _) in FACTS.items()} | (changed or {})
    rows = [
        _row(f"constexpr int {name} = {values[name]};", why) for name, (_, why) in FACTS.items()
    ]
    lines = [
        "// Generated by `make generated` from twin/kernel/facts.py; do not edit.",
        "#pragma once",
        "",
        "namespace twin {",
        "namespace facts {",
        f"constexpr unsigned SENTINEL = {SENTINEL_WORD:#X}u;  // an exchanged word that "
        "is not yet written".replace("0X", "0x"),
        *rows,
        "}  // namespace facts",
        "}  // namespace twin",
        "",
    ]
    return "\n".join(lines)


def _row(code: str, why: str) -> str:
    """A line of code with its reason behind it, or above it where a line would be too long."""
    line = f"{code}  // {why}"
    return line if len(line) <= 100 else f"// {why}\n{code}"


if __name__ == "__main__":
    print(facts(), end="")
