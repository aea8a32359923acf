"""Where simulated time ends, and what is raised beyond."""

from __future__ import annotations

from twin.errors import HardwareError, TwinError

# Limits that both executors keep, so that compiled code never leaves its 64 bits: a sum of a few
# times, each at most the first or LONGEST_PS, and every product with its own check
# (native/simulator/events.h).
LAST_PS = 2**55  # 10 hours: where the clock ends; busy times of 128 pipes together still fit
FASTEST = 2**62  # bytes/s of a pipe


class SimulationError(TwinError):
    """The simulated machine cannot go on: a mistake in the plan or in the twin."""


def in_time(ps: int) -> int:
    """The time itself. Raises HardwareError where the clock has ended before."""
    if ps > LAST_PS:
        raise beyond(ps)
    return ps


def beyond(ps: int) -> HardwareError:
    return HardwareError(
        f"{ps / 1e12:.6g} s of simulated time would be needed, and the clock ends at "
        f"{LAST_PS / 1e12:.6g} s: raise the lowest rate, lower the longest time, or simulate fewer "
        "steps"
    )
