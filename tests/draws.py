"""How many random cases a test draws: half of what it says in the gate, twenty times as many in
`make slow`.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("MONOTWIN_DRAWS", "1"))


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
