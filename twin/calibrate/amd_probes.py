"""The questions that calibration asks of an AMD GPU: those for GPUs that its kernel, which has no
ring, can answer.
"""

from __future__ import annotations

import re
from dataclasses import replace

from twin.calibrate.gpu_formats import CHOOSING, DECODING
from twin.calibrate.gpu_probes import QUICK, gpu_probes
from twin.calibrate.probes import Probe
from twin.kernel.budget import on_chip_bytes
from twin.plan.types import Execution, Limits, Plan

WINDOW = re.compile(r"(.*)-window(\d+)")
ASKED_OF = "-b132"  # in the names of quick probes: all blocks of an H200


def amd_probes(limits: Limits, *, quick: bool) -> list[Probe]:
    """`quick` keeps one of each question.

    Without a ring all windows are alike, so of each question the widest alone is asked, as what it
    is: all that a block's memory holds is under way. Kernels are resident. What decoding costs is
    asked of NVIDIA's kernel alone, in which the twin's laws of it are read.
    """
    found = [
        replace(probe, plan=_fitting(probe.plan))
        for probe in gpu_probes(limits, quick=False)
        if probe.plan.options.execution is Execution.RESIDENT
        and probe.group not in (DECODING, CHOOSING)
    ]
    widest = {_question(p.name): p.name for p in sorted(found, key=lambda p: _window(p.name))}
    found = [p for p in found if widest[_question(p.name)] == p.name]
    asked = {_question(name.replace(ASKED_OF, f"-b{limits.blocks}")) for name in QUICK}
    return [p for p in found if not quick or _question(p.name) in asked]


def _question(name: str) -> str:
    found = WINDOW.fullmatch(name)
    return found[1] if found else name


def _window(name: str) -> int:
    found = WINDOW.fullmatch(name)
    return int(found[2]) if found else 0


def _fitting(plan: Plan) -> Plan:
    """With the ring that fits beside the vectors, which an AMD block keeps on the chip too."""
    options, room = plan.options, plan.limits.on_chip_bytes
    over = max(0, on_chip_bytes(plan) - room)
    slots = max(1, options.ring_slots - -(-over // options.slot_bytes))
    whole = options.window_slots == options.ring_slots
    window = slots if whole else min(slots, options.window_slots)
    return replace(plan, options=replace(options, ring_slots=slots, window_slots=window))
