"""What a node costs by the hour and draws, from hwmodels/prices.yaml or as the user says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from twin.batching.economics import HOUR_S, KWH_J, MILLION
from twin.data import data_dir, read_yaml
from twin.errors import ConfigError
from twin.hardware.schema import check_keys, number
from twin.hardware.types import Kind, Node, Number

FILE = "prices.yaml"
USER = "what-if: as the user says"
MOST_USD, MOST_W = 10_000.0, 100_000.0  # of one GPU


@dataclass(frozen=True, slots=True)
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
    devices, host_w = _on_file()
    found = devices.get(node.device.name, {})
    cents, busy_w = found.get("cents_per_hour"), found.get("busy_w", node.device.power.tdp_w)
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
    return Rates(cents, busy_w, host_w)


@lru_cache(maxsize=1)
def _on_file() -> tuple[dict[str, dict[str, Number]], Number]:
    path = data_dir("hwmodels") / FILE
    data = check_keys(
        read_yaml(path), path, "", required=["devices", "host_w"], allowed=["devices", "host_w"]
    )
    devices = {str(name): _of(name, item, path) for name, item in data["devices"].items()}
    return devices, number(data["host_w"], path, "host_w")


def _of(name: Any, item: Mapping[str, Any], path: Path) -> dict[str, Number]:
    keys = ["cents_per_hour", "busy_w"]
    found = check_keys(item, path, f"devices.{name}", required=keys[:1], allowed=keys)
    return {key: number(leaf, path, f"devices.{name}.{key}") for key, leaf in found.items()}
