"""What serving costs: money for the hours that GPUs are held, energy for the time that they work
and idle.
"""

from __future__ import annotations

from twin.batching.prices import HOUR_S, KWH_J, MILLION
from twin.frozen import frozen
from twin.hardware.number import Number


@frozen
class Prices:
    """Of one GPU, with its share of the host. Watts are drawn at the wall of the server."""

    cents_per_hour: Number  # US cents
    busy_w: Number
    idle_w: Number
    host_w: Number  # CPUs, fans, network: drawn always


@frozen
class Bill:
    """Of a group of GPUs while it generated `tokens`."""

    tokens: float
    gpus: int
    elapsed_s: float
    busy_s: float  # GPU-seconds with work

    def usd_per_million(self, usd_per_hour: float) -> float:
        """Held GPUs are paid whether they work or not."""
        return self.gpus * self.elapsed_s / HOUR_S * usd_per_hour / self.tokens * MILLION

    def kwh_per_million(self, prices: Prices) -> float:
        held_s = self.gpus * self.elapsed_s
        idle_s = held_s - self.busy_s
        joules = (
            self.busy_s * prices.busy_w.value
            + idle_s * prices.idle_w.value
            + held_s * prices.host_w.value
        )
        return joules / KWH_J / self.tokens * MILLION
