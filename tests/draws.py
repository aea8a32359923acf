"""How many random cases a test draws: half of what it says in the gate, twenty times as many in
`make slow`.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TIMES = int(os.environ.get("MONOTWIN_DRAWS", "1"))

# Texts of any characters. Those that Hypothesis draws by itself begin with a table of Unicode,
# which takes two seconds in every process of a clean checkout.
CHARACTERS = (st.integers(0, 0xD7FF) | st.integers(0xE000, 0x10FFFF)).map(chr)


def scaled(examples: int) -> int:
    return examples * TIMES if TIMES > 1 else (examples + 1) // 2


def drawn(examples: int) -> settings:
    """Settings for so many cases, the same ones in every run."""
    return settings(
        max_examples=scaled(examples),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
