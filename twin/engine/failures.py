"""Why a run of the kernel failed, as an error that says what to do."""

from __future__ import annotations

from twin.errors import EngineError
from twin.kernel.header import (
    BIAS_GIVEN,
    LOGITS_TAKEN,
    PASS_BARRIER,
    START_BARRIER,
    Control,
    Request,
    Status,
)
from twin.plan.types import Plan


def status_of(control: Control) -> Status:
    return tuple(Status)[int(control.status)]


def raise_failure(plan: Plan, control: Control, request: Request, *, cancelled: bool) -> None:
    """Of a run that has ended. Raises EngineError where its status is one of failure."""
    # of a step that the caller ended, blocks may leave before its logits are whole
    if status_of(control) is Status.NO_TOKEN and not cancelled:
        raise EngineError(
            "the largest logit is not finite, no token can be chosen; check the weights"
        )
    if status_of(control) is not Status.HUNG:
        return
    if control.hung_value == START_BARRIER:
        raise EngineError(_start(plan, control, request))
    if control.hung_value == LOGITS_TAKEN:
        raise EngineError(
            f"the kernel waited {request.watchdog_ns / 2e9:g} s for the logits of "
            f"{request.logit_rows} tokens to be taken; let on_logits and on_token return "
            "sooner, or raise watchdog_s"
        )
    if control.hung_value == BIAS_GIVEN:
        raise EngineError(
            f"the kernel waited {request.watchdog_ns / 2e9:g} s for the bias of the next "
            "token; let Bias.write and on_token return sooner, or raise watchdog_s"
        )
    raise EngineError(
        f"watchdog: Rank[{control.hung_rank}].Block[{control.hung_block}] waited "
        f"{request.watchdog_ns / 1e9:g} s in {plan.stages[control.hung_stage].name} at step "
        f"{control.hung_step} for {_awaited(plan, control)}; validate the plan, or raise "
        "watchdog_s on a slow computer"
    )


def _start(plan: Plan, control: Control, request: Request) -> str:
    if plan.gpu_of_rank(control.hung_rank) == control.hung_part:
        return (
            f"block {control.hung_element} of GPU {control.hung_part} did not say within "
            f"{request.watchdog_ns / 1e9:g} s on which die it runs; end other programs on "
            "that GPU, or plan with placement=flat"
        )
    return (
        f"GPU {plan.gpu_of_rank(control.hung_rank)} of this plan waited "
        f"{request.watchdog_ns / 2e9:g} s for GPU {control.hung_part} of it to start; end "
        "other programs on that one, and look at it with nvidia-smi"
    )


def _awaited(plan: Plan, control: Control) -> str:
    if control.hung_value == PASS_BARRIER:
        return f"the barrier of prompt pass {control.hung_part}"
    if control.hung_value < 0:
        return "the grid barrier"
    part = f"{plan.values[control.hung_value].name}, part {control.hung_part}"
    if control.hung_element < 0:
        return f"{part}, its counter"
    return f"{part}, element {control.hung_element}"
