"""The questions that calibration asks of an AMD GPU: those for GPUs that its kernel can answer,
whose ring lies in registers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from twin.calibrate.gpu_formats import CHOOSING, DECODING
from twin.calibrate.gpu_mixers import CHOICE, STATES
from twin.calibrate.gpu_probes import QUICK, SLOT, gpu_probes
from twin.calibrate.probes import Probe
from twin.plan.build import dies
from twin.plan.options import Execution, Limits, Placement
from twin.schedule.strips import MOST_STRIPS, STRIP_BYTES, strips_of, with_strips

WINDOW = re.compile(r"(.*)-window(\d+)")
BLOCKS_OF = "-b132"  # in the names of quick probes: all blocks of an H200


def amd_probes(limits: Limits, *, quick: bool) -> list[Probe]:
    """`quick` keeps one of each question, and its windows.

    A window is a number of strips here, which the kernel has under way; without one it has as many
    as it can. Windows of as many strips are one question. Kernels are resident. What decoding,
    states and choices cost is probed on NVIDIA's kernel alone, in which the twin's laws of them are
    read.
    """
    wanted = {_key(name.replace(BLOCKS_OF, f"-b{limits.blocks}")) for name in QUICK}
    found: dict[tuple[str, int], Probe] = {}
    for probe in gpu_probes(limits, quick=False):
        if probe.group in (DECODING, CHOOSING, STATES, CHOICE):
            continue
        if probe.plan.options.execution is Execution.RESIDENT:
            key = _key(probe.name)
            if not quick or key in wanted:
                found.setdefault(key, probe)
    return list(_named(found))


def _named(found: dict[tuple[str, int], Probe]) -> Iterator[Probe]:
    """Probes by question and strips, with the window that they have in their name."""
    for (question, strips), probe in found.items():
        plan = with_strips(probe.plan, strips or MOST_STRIPS)
        # blocks where the hardware deals them, weights where it has room
        options = replace(plan.options, placement=Placement.FLAT)
        plan = replace(plan, options=options, die_of_block=dies(options, plan.limits.dies))
        window = f"-window{plan.options.window_slots}" if strips else ""
        if not strips or strips_of(plan) == strips:  # else it is probed with fewer
            yield replace(probe, name=f"{question}{window}", plan=plan)


def _key(name: str) -> tuple[str, int]:
    """A question, and the strips of its window; 0: it has none."""
    found = WINDOW.fullmatch(name)
    if not found:
        return name, 0
    return found[1], min(MOST_STRIPS, max(1, round(int(found[2]) * SLOT / STRIP_BYTES)))
