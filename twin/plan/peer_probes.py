"""Probes of several GPUs: a probe of one GPU whose publications go to all of them.

Every rank runs the same stages. What a block publishes it pushes to every rank, and what it gathers
it sums over all ranks' parts, as a model's residual does: so a hand-off becomes an all-reduce, and
a hop one between GPUs.
"""

from __future__ import annotations

from dataclasses import replace

from twin.errors import PlanError
from twin.plan.options import CollectiveKind
from twin.plan.resets import with_resets
from twin.plan.types import Parts, Plan, Stage


def over_gpus(plan: Plan, gpus: int) -> Plan:
    """The probe on `gpus` GPUs, one rank each. Raises PlanError for a plan that is no probe of one
    rank.
    """
    if plan.spec is not None or plan.ranks != 1 or gpus < 2:
        raise PlanError(
            f"over_gpus: {plan.name} on {gpus} GPUs: give a probe of one rank, and 2 GPUs or more"
        )
    made = replace(
        plan,
        name=f"{plan.name}, {gpus} GPUs",
        options=replace(plan.options, gpus=gpus, collective=CollectiveKind.PUSH),
        ranks=gpus,
        buffers=tuple(replace(buffer, parts=gpus) for buffer in plan.buffers),
        values=tuple(replace(value, pushed=True) for value in plan.values),
        stages=tuple(_of_all(stage) for stage in plan.stages),
    )
    return with_resets(made) if plan.options.handoff.resets else made


def _of_all(stage: Stage) -> Stage:
    """Resets are placed again: other ranks' readers count as well."""
    reads = tuple(replace(read, parts=Parts.ALL) for read in stage.reads)
    return replace(stage, reads=reads, resets=())
