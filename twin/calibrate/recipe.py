"""How a kind of device is calibrated: its probes, the numbers that each group of them settles, how
its steps are read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.calibrate.amd_probes import amd_probes
from twin.calibrate.gpu_formats import CHOOSING, DECODING
from twin.calibrate.gpu_layers import CHAIN
from twin.calibrate.gpu_mixers import CHOICE, STATES
from twin.calibrate.gpu_probes import gpu_probes
from twin.calibrate.node import OF_MORE, OF_TWO
from twin.calibrate.peer_probes import FENCES, GROUP, lane_probes, peer_probes
from twin.calibrate.probes import Probe, host_probes
from twin.calibrate.published import is_published
from twin.calibrate.reading import quiet, steady
from twin.calibrate.starts import Starts, gpu_starts, host_starts
from twin.calibrate.store import Run
from twin.engine.choose import amd_conditions, gpu_conditions
from twin.errors import CalibrationError
from twin.hardware.kernel import Unpacking
from twin.hardware.types import HOST, Device, Node
from twin.plan.options import Limits

Groups = dict[str, tuple[str, ...]]
MOST_MISFIT = 0.25


@dataclass(frozen=True, slots=True)
class Recipe:
    probes: Callable[[Limits, bool], list[Probe]]  # limits, quick
    # numbers by group of probes, in the order in which they are fitted; a group that is not here is
    # only compared
    groups: Groups
    starts: Starts
    read: Callable[[NDArray[np.floating[Any]]], float]
    conditions: Callable[[], dict[str, Any]]  # of the device, next to the computer's
    repeats: int
    quick_repeats: int
    # relative change of all numbers, or of the misfit, at which a fit ends: samples without noise
    # deserve a close one
    enough: float
    # |log(simulated / measured)| from which a probe pulls less and less: the twin lacks something
    # that it measures
    outlier: float
    # root mean square of |log(simulated / measured)| of a group, from which a fit says nothing
    most_misfit: float = MOST_MISFIT
    quieter: bool = False  # do only the quieter rounds count? Others use the device too
    most_s: float = math.inf  # no further round after so many seconds


HOST_GROUPS: Groups = {
    "stream": (
        "kernel.bf16_bytes_per_s",
        "kernel.fp16_bytes_per_s",
        "kernel.fp32_bytes_per_s",
        "kernel.row_s",
        "block.load_bytes_per_s",
        "memory.stream_bytes_per_s",
        "llc.block_bytes_per_s",
        "llc.block_bytes",
        "llc.bytes_per_s",
        "llc.capacity_bytes",
        "l2.bytes_per_s",
    ),
    "codes": tuple(
        f"kernel.{field.name.removesuffix('_ratio')}_bytes_per_s"
        for field in dataclasses.fields(Unpacking)
    ),
    "exchange": ("handoff.hop_s", "handoff.atomic_s", "kernel.element_s", "kernel.stage_s"),
    "attention": ("kernel.kv_bytes_per_s", "kernel.item_s"),
    "layers": ("kernel.merged_s", "kernel.gate_s"),
    "launch": ("launch.graph_edge_s", "launch.stream_s"),  # distinguished by execution
    "sample": ("kernel.sample_element_s",),
    "turns": ("sharing.switch_s",),
}
# what all cores share: of one core, its own rates and its part of the cache say the same
OF_SEVERAL_CORES = ("memory.stream_bytes_per_s", "llc.bytes_per_s", "llc.capacity_bytes")
GPU_GROUPS: Groups = {
    "consumer": (  # with the loader, which is what a small tile shows
        "kernel.bf16_bytes_per_s",
        "kernel.fp16_bytes_per_s",
        "kernel.fp32_bytes_per_s",
        "kernel.row_s",
        "kernel.copy_s",
        "kernel.slice_s",
        "kernel.reduction_s",
        "kernel.tile_s",
        "kernel.leave_s",
        "kernel.stage_s",
    ),
    "memory": (
        "memory.stream_bytes_per_s",
        "memory.under_way_s",
        "memory.latency_s",
        "block.load_bytes_per_s",
        "block.pair_bytes_per_s",
        "kernel.watch_s",
    ),
    "exchange": (
        "handoff.hop_s",
        "handoff.atomic_s",
        "handoff.fence_s",
        "kernel.element_s",
        "l2.latency_s",
    ),
    # a loaded hop too: where blocks march in step (turns, hops) it grows more than between layers,
    # whose last block is late; and scans, whose probes by themselves say little of a round
    CHAIN: (
        "kernel.item_s",
        "kernel.round_s",
        "kernel.unit_s",
        "handoff.loaded_hop_s",
        "kernel.gather_bytes_per_s",
        "kernel.crowd_s",
        "kernel.split_s",
        "kernel.vector_s",
        "kernel.prefetch_s",
        "kernel.group_s",
        "kernel.heads_s",
        "memory.jitter_s",
        "kernel.by_fours_s",
    ),
    DECODING: (
        "kernel.int8_bytes_per_s",
        "kernel.fp8_bytes_per_s",
        "kernel.int4_bytes_per_s",
        "kernel.fp4_bytes_per_s",
        "kernel.quantise_s",
        "kernel.settle_s",
    ),
    CHOOSING: ("kernel.step_s",),
    STATES: ("kernel.state_s", "kernel.state_element_s"),
    CHOICE: ("kernel.compare_s",),
    # distinguished by the probes with matrices and with layers
    "launch": ("launch.graph_edge_s", "launch.restart_s", "kernel.border_s"),
    "sample": ("kernel.sample_element_s",),
}

HOST_RECIPE = Recipe(
    probes=lambda limits, quick: host_probes(limits, limits.blocks, quick=quick),
    groups=HOST_GROUPS,
    starts=host_starts,
    read=quiet,
    conditions=dict,
    repeats=10,
    quick_repeats=8,
    enough=1e-3,
    outlier=math.inf,
    quieter=True,
    most_s=240.0,
)
GPU_RECIPE = Recipe(
    probes=lambda limits, quick: gpu_probes(limits, quick=quick),
    groups=GPU_GROUPS,
    starts=gpu_starts,
    read=steady,
    conditions=gpu_conditions,
    repeats=3,
    quick_repeats=3,
    enough=1e-5,
    outlier=0.05,
)
AMD_RECIPE = replace(
    GPU_RECIPE,
    probes=lambda limits, quick: amd_probes(limits, quick=quick),
    conditions=amd_conditions,
)


def link_groups(gpus: int) -> Groups:
    """Of a link; all others are the device's, whose fit a node of one has. A hop and a further rank
    cost probes of more than two GPUs the same, so these take the hop of two.
    """
    return {GROUP: OF_TWO if gpus == 2 else OF_MORE, FENCES: ("link.fence_s",)}


# what figures of others settle; hops and latencies are read off by themselves (hwmodels), and only
# compared
PUBLISHED_GROUPS: Groups = {
    "memory": ("memory.stream_bytes_per_s", "block.load_bytes_per_s"),
    "exchange": ("handoff.atomic_s",),
    "launch": ("launch.stream_s",),
}
PUBLISHED_RECIPE = Recipe(
    probes=lambda limits, quick: [],  # a record's own: twin.calibrate.published_plans
    groups=PUBLISHED_GROUPS,
    starts=lambda group, probes, seconds, device: {},
    read=steady,
    conditions=dict,
    repeats=0,
    quick_repeats=0,
    enough=1e-5,
    outlier=math.inf,
    most_misfit=math.inf,  # of another kernel, on a system of others
)


def fitted_by(run: Run, node: Node) -> Recipe:
    """How a run is fitted: figures of others by their own recipe, on any device."""
    return PUBLISHED_RECIPE if is_published(run.meta) else recipe_of(node.device, node.gpus)


def recipe_of(device: Device, gpus: int = 1) -> Recipe:
    """How a device is measured, or the links between so many of it. Raises CalibrationError for one
    that no engine runs on.
    """
    if gpus > 1:
        return _link_recipe(device, gpus)
    if device.isa == HOST:
        several = device.blocks > 1
        return replace(
            HOST_RECIPE,
            groups=HOST_GROUPS if several else _without(HOST_GROUPS, OF_SEVERAL_CORES),
            probes=lambda limits, quick: host_probes(limits, limits.blocks, device, quick=quick),
        )
    if device.nvidia:
        return GPU_RECIPE
    if device.amd:
        return AMD_RECIPE
    raise CalibrationError(
        f"{device.name}: no engine runs on it yet, so nothing can be measured; calibrate host or "
        "a GPU (h200, mi300x), or fit and compare what others published with --from "
        "(calibration/runs)"
    )


def _without(groups: Groups, paths: tuple[str, ...]) -> Groups:
    return {
        group: tuple(path for path in known if path not in paths) for group, known in groups.items()
    }


def _link_recipe(device: Device, gpus: int) -> Recipe:
    if not device.nvidia:
        raise CalibrationError(
            f"{gpus}x{device.name}: links are probed between NVIDIA GPUs; calibrate 1x{device.name}"
        )
    return replace(
        GPU_RECIPE,
        probes=lambda limits, quick: [*peer_probes(limits, gpus), *lane_probes(limits, gpus)],
        groups=link_groups(gpus),
        starts=lambda group, probes, seconds, device: {},
    )
