"""Several GPUs of one computer as one session's: are they there and alike, and do they reach each
other's memory?

Peer access is plain: each context is given the other GPUs' allocations. Nothing of multicast or of
NVLink's own collectives is used, so nothing outlives the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from twin.engine.driver import Driver
from twin.engine.gpu import Gpu
from twin.errors import EngineError
from twin.plan.types import Plan

TOPOLOGY = "`nvidia-smi topo -p2p rw` shows which GPUs do"


def find(driver: Driver, first: int, count: int) -> list[Gpu]:
    """GPUs first..first+count-1, all of one kind. Nothing is held yet. Raises EngineError."""
    if count > 1:
        here = int(driver.call("cuDeviceGetCount"))
        if first + count > here:
            raise EngineError(
                f"gpus={count} from GPU {first} on: this computer has {here}; plan with fewer "
                "GPUs, or look for a missing one with nvidia-smi and CUDA_VISIBLE_DEVICES"
            )
    gpus = [Gpu(driver, first + n) for n in range(count)]
    kinds = [(gpu.name, gpu.capability, gpu.multiprocessors) for gpu in (gpus if count > 1 else ())]
    for n, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise EngineError(
                f"GPU {first} is {_said(*kinds[0])} and GPU {first + n} {_said(*kind)}: all of a "
                "plan's GPUs run the same kernel; name GPUs of one kind in CUDA_VISIBLE_DEVICES"
            )
    return gpus


def _said(name: str, capability: tuple[int, int], multiprocessors: int) -> str:
    return f"{name} with {multiprocessors} multiprocessors of {capability[0]}.{capability[1]}"


def check_reach(plan: Plan, gpus: Sequence[Gpu]) -> None:
    """Raises EngineError unless every GPU may write every other one's memory, and count there
    where the plan has counters.
    """
    counted = not plan.options.handoff.resets or plan.options.prompt_chunk > 1
    for one, other in permutations(gpus, 2):
        if not one.reaches(other):
            raise EngineError(
                f"GPU {one.index} cannot reach the memory of GPU {other.index} (no peer access), "
                f"and a plan of {len(gpus)} GPUs needs that of every pair; {TOPOLOGY}: plan with "
                "fewer GPUs"
            )
        if counted and not one.counts_at(other):
            raise EngineError(
                f"GPU {one.index} has no atomic operations in the memory of GPU {other.index}, "
                "which counters and prompt passes need: plan with handoff=sentinel and "
                "prompt_chunk=1"
            )


def connect(gpus: Sequence[Gpu]) -> None:
    """Gives every held GPU the others' memory."""
    for one in gpus:
        one.use()
        for other in gpus:
            if other is not one:
                one.reach(other)
