"""Tuned choices as data: hwmodels/schedules/<architecture>.csv. One rule reads them: of the rows of
a decision the first one holds whose conditions all hold.

A condition is a trait (`dense`), or a measure and a limit (`layer<=2.4`). `gain` says what the row
brings, `record` where that is shown.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from functools import lru_cache

from twin.data import data_dir
from twin.errors import ConfigError
from twin.frozen import frozen
from twin.hardware.types import Device

CONDITION = re.compile(r"(?P<name>[a-z0-9_]+)(?:(?P<sign><=|>)(?P<limit>[0-9.e+-]+))?")
Shape = Mapping[str, float]  # traits (0 or 1) and measures of a plan, by name


@frozen
class Rule:
    """One row of a file."""

    decision: str
    when: tuple[str, ...]
    value: str
    least: int  # slots; 0 where the decision counts none

    def holds(self, shape: Shape) -> bool:
        return all(_holds(condition, shape) for condition in self.when)


def _holds(condition: str, shape: Shape) -> bool:
    match = CONDITION.fullmatch(condition)
    if match is None or match["name"] not in shape:
        raise ConfigError(
            f"hwmodels/schedules: the condition {condition!r} is none: give one of "
            f"{', '.join(sorted(shape))}, with <= or > and a number where it is a measure"
        )
    found = shape[match["name"]]
    if match["limit"] is None:
        return bool(found)
    limit = float(match["limit"])
    return found <= limit if match["sign"] == "<=" else found > limit


def architecture_of(device: Device) -> str:
    """The file of a device. What was measured on an H100 and an H200 stands for all of NVIDIA's,
    until one of another architecture is.
    """
    if device.teams:
        return "hopper"
    return "cdna3" if device.amd else "cpu"


def rule_for(architecture: str, decision: str, shape: Shape) -> Rule | None:
    """The row that holds; None where a decision has none."""
    rows = rules(architecture)
    return next((r for r in rows if r.decision == decision and r.holds(shape)), None)


@lru_cache(maxsize=8)
def rules(architecture: str) -> tuple[Rule, ...]:
    file = data_dir("hwmodels") / "schedules" / f"{architecture}.csv"
    with file.open(encoding="utf-8", newline="") as table:
        return tuple(
            Rule(row["decision"], tuple(row["when"].split()), row["value"], int(row["least"] or 0))
            for row in csv.DictReader(table)
        )
