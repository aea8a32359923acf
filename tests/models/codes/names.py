"""Names of coded formats for tests of each: some of those of four bits at once, the rest slow."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from _pytest.mark import ParameterSet

from twin.models.codes import CODES


def coded_names(few: Collection[str]) -> list[ParameterSet]:
    """All formats; of those in four bits, the ones that are not `few` are marked slow."""
    return [
        pytest.param(
            name,
            marks=[pytest.mark.slow] if code.format.bits < 8 and name not in few else [],
        )
        for name, code in CODES.items()
    ]
