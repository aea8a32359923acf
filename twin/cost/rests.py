"""Which assumed numbers a plan's time rests on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from twin.cost import attention, formats
from twin.cost.under_way import enough_under_way
from twin.hardware.kernel import CoreKernel, KernelCosts, Unpacking, WarpKernel
from twin.hardware.override import assumed
from twin.hardware.types import Device, Node
from twin.models.formats import Format
from twin.plan.catalogue import StageKind
from twin.plan.options import Execution
from twin.plan.types import Plan
from twin.schedule.choose import schedule_of

ON_TENSOR_CORES = ("in_layers_ratio", "softmax_steps", "further_set_ratio")
BY_THREADS = ("position_parts", "round_parts", "sum_parts")


def rests_on(plan: Plan, node: Node) -> list[str]:
    """Paths of the node's assumed numbers, without those that this plan cannot touch."""
    idle = tuple(
        name
        for name, skip in {
            **_of_machine(plan, node.device),
            **_of_kernel(plan, node.device),
        }.items()
        if skip
    )
    return [path for path in assumed(node) if not path.removeprefix("device.").startswith(idle)]


def _of_machine(plan: Plan, device: Device) -> dict[str, bool]:
    """Beginnings of paths: does the plan leave them alone?"""
    options = plan.options
    resident = options.resident
    polls = options.handoff.resets
    enough = enough_under_way(plan, device)
    return {
        "memory.capacity_bytes": True,
        "memory.reserved_bytes": True,
        "memory.under_way_s": enough,
        "memory.shortfall_ratio": enough,
        "power.": True,
        "launch.": resident,
        "launch.stream_s": options.execution is not Execution.LAUNCHES,
        "launch.graph_edge_s": options.execution is not Execution.GRAPH,
        "link.": options.gpus == 1,
        "link.library_allreduce_s": StageKind.COLLECTIVE not in plan.kinds,
        "link.fence_s": polls or not resident,
        "block.clock_hz": True,
        "block.on_chip_bytes": True,
        "handoff.atomic_s": polls,
        "handoff.fence_s": polls or not resident,
    }


def _of_kernel(plan: Plan, device: Device) -> dict[str, bool]:
    kernel, kinds = device.kernel, plan.kinds
    attends = StageKind.ATTENTION in kinds
    scans = schedule_of(plan).scans
    tensor = attends and any(scan.tensor for scan in scans)
    threads = attends and not all(scan.tensor for scan in scans)
    # of stages with entries of their own: does a block of warps multiply these on tensor cores?
    scanned = {
        attention.by_tensor_cores(stage.scan, stage.scan.group * (plan.options.draft + 1))
        for stage in plan.stages
        if stage.scan and stage.kind is not StageKind.DELTA
    }
    samples = any(s.kind is StageKind.SAMPLE and s.publishes is not None for s in plan.stages)
    known = {
        "prompt.": True,
        "border_s": plan.options.resident,
        "tensor_bytes_per_cycle": plan.tokens == 1,
        "sample_element_s": not samples,
        "kv_bytes_per_s": not attends or isinstance(kernel, WarpKernel),
        "item_s": not attends,
        "round_s": False not in scanned and not threads,
        "unit_s": True not in scanned and not tensor,
        "state_passes": StageKind.DELTA not in kinds,
        **{
            f"{name}_bytes_per_s": plan.options.weight_dtype.value != name
            for name in ("fp16", "bf16", "fp32")
        },
        **{f"attention.{name}": not tensor for name in ON_TENSOR_CORES},
        **{f"attention.{name}": not attends or tensor for name in BY_THREADS},
        "attention.": not attends,
        **dict.fromkeys(untouched(plan, kernel), True),
    }
    return {f"kernel.{name}": skip for name, skip in known.items()}


def untouched(plan: Plan, kernel: KernelCosts) -> Iterator[str]:
    """Costs of a kernel, of decoding, states and choices, that a plan's time does not rest on."""
    forms = {m.format for s in plan.stages for m in s.matrices if m.format}
    kinds, without_rate = plan.kinds, [form for form in forms if not _rated(kernel, form)]
    ratios = {f"{formats.family(form.name)}_ratio" for form in without_rate}
    for field in dataclasses.fields(Unpacking):
        if field.name not in ratios:
            yield f"unpacking.{field.name}"
    if isinstance(kernel, CoreKernel):
        rated = {formats.family(form.name) for form in forms if _rated(kernel, form)}
        codes = (f.name.removesuffix("_ratio") for f in dataclasses.fields(Unpacking))
        yield from (f"{code}_bytes_per_s" for code in codes if code not in rated)
        return
    rates = {formats.decoded_as(form) for form in forms if _rated(kernel, form)}
    used = {formats.decoded_as(form) for form in forms if form.coded}
    idle = {
        "quantise_s": not (used & {"int8", "int4"} or (used and plan.kernel_routed)),
        "step_s": not (used - {"fp4"} and plan.kernel_routed),
        "settle_s": not used,
        "by_fours_s": plan.without_code() or not schedule_of(plan).by_fours,
        "state_s": StageKind.DELTA not in kinds,
        "state_element_s": StageKind.DELTA not in kinds,
        "compare_s": StageKind.ROUTE not in kinds,
    }
    yield from (rate for name, rate in formats.RATES.items() if name not in rates)
    yield from (name for name, skip in idle.items() if skip)


def _rated(kernel: KernelCosts, form: Format) -> bool:
    return formats.rate_of(kernel, form) is not None
