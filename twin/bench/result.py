"""The record's result: what was measured, over what the plan counts and the datasheet says.

On several GPUs the ceiling is one GPU's probe. The floor of a step is then the bytes of all GPUs
over as many such ceilings, as in twin/hardware/floor.py.
"""

from __future__ import annotations

import dataclasses
import platform
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from twin.bench import nccl, peers, timing
from twin.bench.measure import CEILING, RESIDENT, Measured, Settings
from twin.bench.plans import IDLE, LOADED, UNDISTURBED, Plans
from twin.bench.several import NCCL
from twin.bench.source import Source
from twin.hardware.types import Node

# variants that make no tokens, by what their samples are of
UNITS = {
    CEILING: "step",
    nccl.EDGE: "kernel",
    LOADED: "stage",
    UNDISTURBED: "stage",
} | dict.fromkeys((IDLE, *NCCL), "all_reduce")


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
    """result.json: the fields of `record.Fields`, and what a later reader needs to judge them."""
    bytes_per_step = plans.resident.mean_bytes(context=settings.context, tokens=settings.tokens)
    by_variant = {name: timing.summary(measured.samples, name) for name in measured.about}
    ceiling = plans.ceiling.bytes_per_step() / by_variant[CEILING]["us_per_token"] * 1e6
    variants = {
        name: _variant(name, about, by_variant[name]) for name, about in measured.about.items()
    }
    engine = by_variant[RESIDENT]
    bytes_per_s = bytes_per_step * engine["tokens_per_s"] / plans.gpus  # of a GPU
    return {
        "model": source.spec.name,
        "node": node.name,
        "gpus": plans.gpus,
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
        **({"all_reduce": _all_reduce(by_variant, source)} if plans.gpus > 1 else {}),
        "left_out": measured.left_out,
        "notes": measured.notes,
        "options": {
            name: _plain(value)
            for name, value in dataclasses.asdict(plans.resident.options).items()
        },
        "versions": {
            "python": platform.python_version(),
            **(peers.versions() if settings.peers else {}),
            **measured.versions,
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
    """A probe makes no tokens: its samples are of something else."""
    if name not in UNITS:
        return {"about": about, **summary}
    unit = UNITS[name]
    renamed = {"us_per_token": f"us_per_{unit}", "repeats_us_per_token": f"repeats_us_per_{unit}"}
    if unit != "step":
        renamed |= {"step_us": f"{unit}_us", "steps": f"{unit}s"}
    return {
        "about": about,
        **{renamed.get(key, key): value for key, value in summary.items() if key != "tokens_per_s"},
    }


def _all_reduce(by_variant: dict[str, dict[str, Any]], source: Source) -> dict[str, Any]:
    """us of one all-reduce of the model's size, each way that was measured."""
    us = {name: found["us_per_token"] for name, found in by_variant.items() if name in UNITS}
    if LOADED in us:
        us[LOADED] -= us[UNDISTURBED]
    made = {name: us[name] for name in (IDLE, LOADED, *NCCL, nccl.EDGE) if name in us}
    return {"elements": source.spec.hidden, "us": made}


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value
