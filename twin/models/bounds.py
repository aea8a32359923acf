"""The lowest and highest value of every number in a configuration, each with its reason
(hwmodels/configurations/ranges.csv). No reader has a limit of its own.

Where zero switches something off, the lowest value is 0; a reader that needs the field requires at
least 1 (`Config.count`).
"""

from __future__ import annotations

from twin.data import cell, read_table
from twin.frozen import frozen

# the normal numbers of FP32: smaller ones may be flushed to zero
FP32_SMALLEST, FP32_LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
LARGEST_VOCABULARY = 2**24
MOST_LAYERS = 256
# of a model's matrices or caches: FP64, in which times are computed from them, counts exactly up to
# here
MOST_BYTES = 2**53


@frozen
class Range:
    """What a field may be, both ends included."""

    lowest: float
    highest: float
    reason: str

    def holds(self, value: float) -> bool:
        """False for NaN, too; an integer of any size is compared exactly."""
        return self.lowest <= value <= self.highest


def _read() -> dict[str, Range]:
    named = {
        "FP32_SMALLEST": FP32_SMALLEST,
        "FP32_LARGEST": FP32_LARGEST,
        "LARGEST_VOCABULARY": LARGEST_VOCABULARY,
        "MOST_LAYERS": MOST_LAYERS,
    }

    def number(text: str) -> float:
        """A whole number stays one."""
        return named[text] if text in named else cell(text)

    return {
        key: Range(number(row["lowest"]), number(row["highest"]), row["reason"])
        for row in read_table("hwmodels", "configurations", "ranges.csv")
        for key in row["keys"].split()
    }


FIELDS = _read()
MOST_LISTED = 4 * MOST_LAYERS  # numbers in a list: those of every layer, with room for drafts
MOST_TEXTS = 2**16  # texts in a list: modules that a quantization leaves out
LONGEST_TEXT = 512  # characters of one of them


def quantity(number: float) -> str:
    """A limit as people write it: 1024, 2^20, 1e+15."""
    if isinstance(number, int):
        return (
            f"2^{number.bit_length() - 1}"
            if number >= 2**14 and not number & (number - 1)
            else str(number)
        )
    return f"{number:g}"


def whole(value: object) -> bool:
    """Whether a value is an integer, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)
