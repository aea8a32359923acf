"""How many random cases a test draws: few in the gate, twenty times as many in `make slow`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("MONOTWIN_DRAWS", "1"))


def drawn(examples: int) -> settings:
    """Settings for `examples` cases in the gate, the same ones in every run."""
    return settings(
        max_examples=examples * TIMES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
