"""Names of coded formats for tests of each: some of those of four bits at once, the rest slow."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from _pytest.mark import ParameterSet

from twin.models.codes import CODES, Code

# GGUF's blocks are multiplied by CPUs alone: test_gguf_blocks.py
ON_EVERY_DEVICE = [name for name, code in CODES.items() if isinstance(code, Code)]


def coded_names(few: Collection[str]) -> list[ParameterSet]:
    """Of those in four bits, the ones that are not `few` are marked slow."""
    return [
        pytest.param(
            name,
            marks=[pytest.mark.slow] if CODES[name].format.bits < 8 and name not in few else [],
        )
        for name in ON_EVERY_DEVICE
    ]
