"""What all matrices of a plan with coded weights have in common, those of its weight type too."""

from __future__ import annotations

from collections.abc import Collection

from twin.errors import PlanError
from twin.frozen import frozen
from twin.models.formats import PACK, Format
from twin.plan.options import Options

BYTE_BITS = 8
COLUMN_STEP = 8  # a thread loads 8 values (16 bytes of a 16-bit type) at once


@frozen
class Coding:
    """A thread of a GPU holds PACK elements of a stage's input in a row, whatever the matrix's
    format. So a stage's input is laid out once for all matrices that multiply it.
    """

    narrowest: Format
    grain: int  # columns that no tile divides
    ranks: int
    blocks: Format | None = None  # the widest of GGUF's, where it has some

    @property
    def share(self) -> int:
        """Columns of a matrix are a multiple of it: whole loads; of a rank's part of a larger one,
        whole blocks.
        """
        return self.grain if self.ranks > 1 else PACK

    def rows_at_once(self, form: Format | None, options: Options) -> int:
        """Rows of a matrix in this format (None: the plan's weight type) whose weights a thread
        loads together. Raises PlanError where that is no even number.
        """
        if self.blocks:
            return (form.interleaved if form else 0) or COLUMN_STEP
        bits = form.bits if form else BYTE_BITS * options.weight_dtype.bytes
        rows = options.tile_rows * BYTE_BITS // bits
        if rows % 2 or not rows:
            raise PlanError(
                f"tile_rows={options.tile_rows}: with {self.narrowest.name} weights a tile of "
                f"{bits} bits has {options.tile_rows * BYTE_BITS / bits:g} rows, and these are "
                f"even: use tile_rows={Options().tile_rows}"
            )
        return rows


def coding_of(forms: Collection[Format], ranks: int) -> Coding | None:
    """Of a plan with weights in these coded formats; None without any."""
    if not forms:
        return None
    in_blocks = [form for form in forms if form.interleaved]
    return Coding(
        min(forms, key=lambda form: form.bits),
        max(form.grain for form in forms),
        ranks,
        max(in_blocks, key=lambda form: form.bytes(1, form.grain) / form.grain, default=None),
    )
