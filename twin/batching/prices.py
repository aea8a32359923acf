"""What a node costs by the hour and draws, from hwmodels/prices.yaml or as the user says."""

from __future__ import annotations

from functools import lru_cache

from twin.data import data_dir, read_yaml
from twin.errors import ConfigError
from twin.frozen import frozen
from twin.hardware.number import Kind, Number
from twin.hardware.schema import read
from twin.hardware.types import Node

FILE = "prices.yaml"
HOUR_S = 3600.0
MILLION = 1e6
KWH_J = 3.6e6
USER = "what-if: as the user says"
MOST_USD, MOST_W = 10_000.0, 100_000.0  # of one GPU


@frozen
class Rates:
    """Of one GPU with its share of the host. None: nobody has published it."""

    cents_per_hour: Number | None
    busy_w: Number | None
    host_w: Number

    def usd_per_million(self, node: Node, tokens_per_s: float) -> float | None:
        """Of a node that serves one request after the other, and is paid while it does."""
        if self.cents_per_hour is None:
            return None
        per_s = node.gpus * self.cents_per_hour.value / 100 / HOUR_S
        return per_s / tokens_per_s * MILLION

    def kwh_per_million(self, node: Node, tokens_per_s: float) -> float | None:
        if self.busy_w is None:
            return None
        watts = node.gpus * (self.busy_w.value + self.host_w.value)
        return watts / tokens_per_s * MILLION / KWH_J

    def usd_per_hour(self, node: Node) -> float | None:
        return None if self.cents_per_hour is None else node.gpus * self.cents_per_hour.value / 100

    def known(self) -> dict[str, Number]:
        """What the figures rest on, by name."""
        named = {
            "price": self.cents_per_hour,
            "power": self.busy_w,
            "host power": self.host_w,
        }
        return {name: value for name, value in named.items() if value is not None}


def rates_of(node: Node, usd_per_hour: float | None = None, watts: float | None = None) -> Rates:
    """`usd_per_hour` and `watts` of one GPU win over those on file. Raises ConfigError."""
    on_file = _on_file()
    found = on_file.devices.get(node.device.name)
    cents = found.cents_per_hour if found else None
    busy_w = (found and found.busy_w) or node.device.power.tdp_w
    if usd_per_hour is not None:
        if not 0 < usd_per_hour <= MOST_USD:
            raise ConfigError(
                f"--usd-per-hour {usd_per_hour:g}: of one GPU, above 0 and at most {MOST_USD:g}"
            )
        cents = Number(100 * usd_per_hour, Kind.ASSUMED, USER)
    if watts is not None:
        if not 0 < watts <= MOST_W:
            raise ConfigError(f"--watts {watts:g}: of one GPU, above 0 and at most {MOST_W:g}")
        busy_w = Number(watts, Kind.ASSUMED, USER)
    return Rates(cents, busy_w, on_file.host_w)


@frozen
class _Device:
    cents_per_hour: Number
    busy_w: Number | None = None


@frozen
class _File:
    devices: dict[str, _Device]
    host_w: Number


@lru_cache(maxsize=1)
def _on_file() -> _File:
    path = data_dir("hwmodels") / FILE
    return read(read_yaml(path), _File, path)
