"""A GPU that is not there: its seconds come from the simulator, with numbers that the fit does not
know.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from twin.calibrate import engine_runs, gpu_probes, measure, store, tracing
from twin.calibrate.probes import Probe
from twin.calibrate.simulated import STEPS, simulated
from twin.engine.generation import Generation
from twin.errors import EngineError
from twin.hardware.load import load_node
from twin.hardware.number import Kind, Number
from twin.hardware.override import apply_fit
from twin.hardware.types import Device, Node
from twin.plan.types import Plan
from twin.schedule.ring import limits_of
from twin.sim.machine import Machine
from twin.sim.run import simulate

HIDDEN = {
    "memory.stream_bytes_per_s": 4.4e12,
    "memory.latency_s": 7e-7,
    "block.load_bytes_per_s": 5.2e10,
    "kernel.bf16_bytes_per_s": 1.2e11,
    "kernel.fp16_bytes_per_s": 1.3e11,
    "kernel.fp32_bytes_per_s": 1.5e11,
    "kernel.row_s": 5e-9,
    "kernel.copy_s": 1.8e-7,
    "block.pair_bytes_per_s": 7.8e10,
    "kernel.slice_s": 9e-8,
    "kernel.reduction_s": 3.3e-7,
    "kernel.item_s": 1.4e-6,
    "kernel.round_s": 9.5e-7,
    "kernel.unit_s": 4.6e-7,
    "kernel.crowd_s": 2e-7,
    "kernel.split_s": 9e-8,
    "kernel.vector_s": 3e-7,
    "kernel.by_fours_s": 4e-7,
    "kernel.prefetch_s": 6e-7,
    "kernel.group_s": 5e-7,
    "kernel.tile_s": 3e-7,
    "kernel.watch_s": 9e-8,
    "kernel.heads_s": 8e-7,
    "kernel.gather_bytes_per_s": 6e10,
    "memory.jitter_s": 3e-7,
    "kernel.leave_s": 2e-7,
    "kernel.int8_bytes_per_s": 9e10,
    "kernel.fp8_bytes_per_s": 6e10,
    "kernel.int4_bytes_per_s": 8e10,
    "kernel.fp4_bytes_per_s": 4e10,
    "kernel.quantise_s": 2.5e-7,
    "kernel.step_s": 1.2e-7,
    "kernel.state_s": 2e-6,
    "kernel.state_element_s": 2e-8,
    "kernel.compare_s": 5e-9,
    "kernel.settle_s": 5e-7,
    "kernel.stage_s": 7e-7,
    "handoff.hop_s": 6e-7,
    "handoff.loaded_hop_s": 2.1e-6,
    "l2.loaded_latency_s": 7e-7,
    "handoff.fence_s": 9e-7,
    "l2.latency_s": 2.4e-7,
    "kernel.element_s": 2.2e-10,
    "launch.graph_edge_s": 1.2e-6,
    "kernel.sample_element_s": 4e-10,
}
NOISE = 0.002  # of a step
NAME = "h200-sxm"


def hidden_node() -> Node:
    numbers = {path: Number(value, Kind.MEASURED, "hidden") for path, value in HIDDEN.items()}
    node = load_node(f"1x{NAME}")
    return Node(node.name, apply_fit(node.device, numbers), 1, node.link)


@cache
def probes_of(name: str, *, quick: bool) -> list[Probe]:
    """Of a node's GPU: all of them are some hundred plans, the quick ones some of these."""
    if quick:
        return [one for one in probes_of(name, quick=False) if one.name in gpu_probes.QUICK]
    return gpu_probes.gpu_probes(limits_of(load_node(name)), quick=False)


class Pretended:
    """What measuring asks of an engine."""

    def __init__(self, plan: Plan, *, trace: bool = False) -> None:
        self.plan, self.trace = plan, trace
        self.random = np.random.default_rng(len(plan.name))
        self.step_s = simulate(plan, hidden_node()).step_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def fill_random(self, seed: int) -> None:
        pass

    def step_seconds(self, *, steps: int, warmup: int) -> NDArray[np.float64]:
        return self.step_s * (1 + NOISE * self.random.standard_normal(steps))

    def generate(self, prompt: list[int], *, max_tokens: int) -> Generation:
        step_ns = np.round(self.step_seconds(steps=max_tokens, warmup=0) * 1e9).astype(np.int64)
        marks = self._marks(len(prompt) - 1 + max_tokens) if self.trace else None
        return Generation([0] * max_tokens, step_ns, 0, "length", marks)

    def _marks(self, steps: int) -> NDArray[np.int64]:
        """The last simulated step, over and over: [steps][ranks][blocks][stages][2] in ns."""
        machine = Machine(self.plan, hidden_node(), steps=STEPS, keep_all=True)
        machine.run()
        before = max(block.ended[-2] for block in machine.blocks)
        ends = (
            np.array([[log[-1][0] for log in block.log[-1]] for block in machine.blocks]) - before
        )
        period = self.step_s * 1e9
        ns = (ends / 1000)[None] + (np.arange(steps) * period)[:, None, None]
        shaped = ns.reshape(steps, self.plan.ranks, self.plan.blocks, len(self.plan.stages))
        return np.stack([shaped, shaped], axis=-1).astype(np.int64)


def pretend(monkeypatch: pytest.MonkeyPatch, *, broken: str = "") -> None:
    """Make `measure` and `engine_runs` see the GPU; the plan whose name holds `broken` does not
    run.
    """

    def open_engine(device: Device, plan: Plan, weights: Any) -> Pretended:
        if broken and broken in plan.name:
            raise EngineError("no room on this multiprocessor")
        return Pretended(plan)

    for module in (measure, engine_runs, tracing):
        monkeypatch.setattr(module, "compile_all", lambda *args, **chosen: {})
        monkeypatch.setattr(
            module,
            "open_random",
            lambda device, plan, seed, trace=False: Pretended(plan, trace=trace),
        )
    monkeypatch.setattr(measure, "check_present", lambda device, gpus=1: None)
    monkeypatch.setattr(measure, "open_engine", open_engine)


def step_s(node: Node, probe: Probe) -> float:
    """Seconds that the twin gives one step of a probe."""
    return simulated(probe.plan, node, stages=False, reading=probe.reading).step_s


def stored_run(node: str, name: str, meta: dict[str, Any], samples: store.Samples) -> store.Run:
    """On file, in a folder that begins now."""
    return store.save_run(store.new_folder(node, name), meta, samples)
