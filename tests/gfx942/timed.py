"""An MI300X that is not there, under the unmodified driver: its kernels take the time that the twin
gives them, with numbers that the fit does not know.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine import code_object
from tests.engine.hip_runtime import Runtime, Started, answers_at_once, arguments_after
from twin.calibrate import engine_runs, measure, tracing
from twin.calibrate.simulated import STEPS
from twin.engine import hip
from twin.engine.cuda import new_launch
from twin.engine.hip import HipEngine
from twin.engine.hip_build import HipReport, check_runs
from twin.errors import ToolchainError
from twin.hardware.number import Kind, Number
from twin.hardware.override import apply_fit
from twin.hardware.types import Device, Node
from twin.plan.types import Plan
from twin.sim.machine import Machine
from twin.sim.run import simulate

NOISE = 0.002  # of a step


class Timed(Runtime):
    """A step of a plan takes the twin's seconds on `node`, a little noise and no more."""

    def __init__(self, node: Node) -> None:
        super().__init__(kernel=self._take, contents=False)
        self._node = node
        self._plans: dict[int, Plan] = {}  # by where the first rank's weights lie
        self._seconds: dict[int, float] = {}
        self._random = np.random.default_rng(1)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No kernel is compiled; those that the platform refuses are refused."""

        def compiled(plan: Plan, arch: str, *, trace: bool = False) -> HipReport:
            check_runs(plan)
            code = code_object.pretended(arguments_after(type(new_launch(plan.options))))
            return HipReport(
                arch, vgprs=1, vgpr_spills=0, scratch_bytes=0, lds_bytes=1, code_object=code
            )

        def refused(
            device: Device, plans: Sequence[Plan], progress: Any, *, trace: bool = False
        ) -> dict[int, str]:
            said = {}
            for at, plan in enumerate(plans):
                try:
                    check_runs(plan)
                except ToolchainError as error:
                    said[at] = str(error)
            return said

        prepare = HipEngine._prepare

        def noted(engine: HipEngine, weights: Any, random_streams: int | None) -> None:
            prepare(engine, weights, random_streams)
            self._plans[int(engine._launch.ranks[0].stream)] = engine.plan

        monkeypatch.setattr(hip, "cached_code_object", compiled)
        monkeypatch.setattr(HipEngine, "_prepare", noted)
        for module in (measure, engine_runs, tracing):
            monkeypatch.setattr(module, "compile_all", refused)

    def _take(self, started: Sequence[Started]) -> int:
        answers_at_once(started)
        request = started[0].launch.request
        at = int(started[0].launch.ranks[0].stream)
        plan = self._plans[at]
        if at not in self._seconds:
            self._seconds[at] = simulate(plan, self._node, steps=STEPS).step_s
        took = self._seconds[at] * (1 + NOISE * self._random.standard_normal(request.steps))
        ends = 1000 + np.cumsum(np.round(took * 1e9)).astype(np.uint64)
        if request.block_stamps:
            words(request.block_stamps, (request.steps, plan.ranks * plan.blocks))[:] = ends[
                :, None
            ]
        if request.stamps:
            words(request.stamps, (request.steps,))[:] = ends
        if request.trace:
            marked = (request.steps, plan.ranks, plan.blocks, len(plan.stages), 2)
            words(request.trace, marked)[:] = self._marks(plan, self._seconds[at], request.steps)
        return 0

    def _marks(self, plan: Plan, step_s: float, steps: int) -> NDArray[np.uint64]:
        """The last simulated step, over and over, in ns."""
        machine = Machine(plan, self._node, steps=STEPS, keep_all=True)
        machine.run()
        before = max(block.ended[-2] for block in machine.blocks)
        ends = (
            np.array([[log[-1][0] for log in block.log[-1]] for block in machine.blocks]) - before
        )
        ns = 1e6 + (ends / 1000)[None] + (np.arange(steps) * step_s * 1e9)[:, None, None]
        shaped = ns.reshape(steps, plan.ranks, plan.blocks, len(plan.stages))
        return np.stack([shaped, shaped], axis=-1).astype(np.uint64)


def words(at: int, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    count = int(np.prod(shape))
    return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(at)).reshape(shape)


def otherwise(node: Node, numbers: dict[str, float]) -> Node:
    """The node with other numbers."""
    found = {path: Number(value, Kind.MEASURED, "hidden") for path, value in numbers.items()}
    return Node(node.name, apply_fit(node.device, found), 1, node.link)
