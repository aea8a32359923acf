"""The record's result: what was measured, over what the plan counts and the datasheet says."""

from __future__ import annotations

import dataclasses
import platform
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from twin.bench import peers, timing
from twin.bench.measure import CEILING, RESIDENT, Measured, Settings
from twin.bench.plans import Plans, mean_bytes
from twin.bench.source import Source
from twin.hardware.types import Node


def build(
    measured: Measured,
    source: Source,
    plans: Plans,
    settings: Settings,
    node: Node,
    *,
    clocks: dict[str, Any],
    driver: str,
    commit: str,
) -> dict[str, Any]:
    """result.json: the fields of `record.FIELDS`, and what a later reader needs to judge them."""
    bytes_per_step = mean_bytes(plans.resident, context=settings.context, tokens=settings.tokens)
    by_variant = {name: timing.summary(measured.samples, name) for name in measured.about}
    ceiling = plans.ceiling.bytes_per_step() / by_variant[CEILING]["us_per_token"] * 1e6
    variants = {
        name: _variant(name, about, by_variant[name]) for name, about in measured.about.items()
    }
    engine = by_variant[RESIDENT]
    bytes_per_s = bytes_per_step * engine["tokens_per_s"]
    return {
        "model": source.spec.name,
        "node": node.name,
        "context": settings.context,
        "tokens_per_s": engine["tokens_per_s"],
        "us_per_token": engine["us_per_token"],
        "bytes_per_step": bytes_per_step,
        "ceiling_bytes_per_s": ceiling,
        "stream_fraction": bytes_per_s / ceiling,
        "mbu": bytes_per_s / float(node.device.memory.peak_bytes_per_s.value),
        "fidelity": measured.fidelity,
        "clocks": clocks,
        "driver": driver,
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "weights": source.about,
        "tokens": settings.tokens,
        "repeats": settings.repeats,
        "variants": variants,
        "left_out": measured.left_out,
        "notes": measured.notes,
        "options": {
            name: _plain(value)
            for name, value in dataclasses.asdict(plans.resident.options).items()
        },
        "versions": {
            "python": platform.python_version(),
            **(peers.versions() if settings.peers else {}),
        },
    }


def shortfalls(result: dict[str, Any]) -> list[str]:
    """What the measured outputs do not keep of what is promised of them, in words."""
    found, fidelity = [], result["fidelity"]
    if not fidelity.get("kl_not_worse", True):
        found.append(
            f"mean KL {fidelity['kl_engine']['mean']:.3g} of the engine, "
            f"{fidelity['kl_peer']['mean']:.3g} of the peer"
        )
    if not fidelity.get("greedy_agrees", True):
        found.append(
            f"{fidelity['decided_mismatches']} of {fidelity['decided_positions']} decided greedy "
            "tokens differ from the reference"
        )
    if not fidelity.get("determinism", {}).get("bitwise_equal", True):
        found.append(
            f"{fidelity['determinism']['runs']} runs of {fidelity['determinism']['tokens']} "
            "tokens were not bitwise equal"
        )
    return found


def _variant(name: str, about: str, summary: dict[str, Any]) -> dict[str, Any]:
    """A probe makes no tokens: its steps are only steps."""
    if name != CEILING:
        return {"about": about, **summary}
    renamed = {"us_per_token": "us_per_step", "repeats_us_per_token": "repeats_us_per_step"}
    return {
        "about": about,
        **{renamed.get(key, key): value for key, value in summary.items() if key != "tokens_per_s"},
    }


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value
