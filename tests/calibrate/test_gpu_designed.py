"""Probes in shapes that fill space: the table is the design, and every shape runs on the GPU that
is probed.
"""

from __future__ import annotations

import pytest

from tests.calibrate.pretended import probes_of
from twin.calibrate.gpu_designed import PREFIX, shapes
from twin.calibrate.gpu_layers import RING, TOKENS
from twin.calibrate.gpu_probes import BYTES_PER_S, STAGE_S
from twin.calibrate.recipe import GPU_RECIPE
from twin.engine.cuda_build import compile_cubin
from twin.errors import ToolchainError
from twin.hardware.load import load_node
from twin.plan.options import HandOffKind
from twin.schedule.choose import schedule_of
from twin.schedule.options import plan_for

NODES = ("1xh200", "1xh100")
GPU_SECONDS = 120.0  # most that all of them may take on the GPU, compiling aside
FEW_BYTES = 64  # of a thread: 12 of its 168 registers are 48 bytes


def test_shapes_reach_all_of_what_is_wanted() -> None:
    every = shapes()
    assert len(set(every)) == len(every) == 40
    assert {shape.group for shape in every} == set(range(1, 9))
    assert min(shape.hidden for shape in every) < 600
    assert max(shape.hidden for shape in every) > 4000
    # columns that fill no whole teams
    assert sum(shape.ffn % 1024 > 0 for shape in every) > len(every) / 2
    assert {shape.head_dim for shape in every} == {64, 96, 128, 256}
    assert {shape.family for shape in every} == {"llama", "qwen2", "qwen3"}
    assert {shape.handoff for shape in every} == set(HandOffKind)
    assert sum(shape.kv_heads <= 2 for shape in every) >= 2
    assert sum(shape.positions > 500 and shape.splits > 8 for shape in every) >= 5


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NODES)
def test_all_shapes_fit_the_budget(name: str) -> None:
    """Each is proven in test_gpu.py."""
    probes = [probe for probe in probes_of(name, quick=False) if probe.name.startswith(PREFIX)]
    assert len(probes) == len(shapes())
    took = 0.0
    for probe, shape in zip(probes, shapes(), strict=True):
        # the engine's default
        assert probe.plan.options.ring_slots == schedule_of(probe.plan).most_slots > RING
        steps = (shape.positions + 2 * TOKENS) * GPU_RECIPE.repeats  # those that warm up are fewer
        took += steps * (probe.plan.weight_bytes() / BYTES_PER_S + STAGE_S * len(probe.plan.stages))
    assert took < GPU_SECONDS


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NODES)
def test_a_chain_has_the_ring_that_the_engine_chooses(name: str) -> None:
    """But for the LM head's window: a chain's head is small. Two shapes were probed before warps
    took their rows in folds, and keep the plans that are on file.
    """
    node = load_node(name)
    windows, slots, folded = set(), set(), set()
    for probe in probes_of(name, quick=False):
        if not probe.name.startswith(PREFIX):
            continue
        own, spec = probe.plan.options, probe.plan.spec
        assert spec is not None
        plan = plan_for(
            spec,
            node,
            max_context=own.max_context,
            context=own.context,
            attention_splits=own.attention_splits,
            handoff=own.handoff,
            prompt_chunk=1,
        )
        if any(matrix.folded for stage in plan.stages for matrix in stage.matrices):
            folded.add(probe.name)
            continue
        default = plan.options
        ring = (own.slot_bytes, own.ring_slots, own.window_slots)
        assert ring == (default.slot_bytes, default.ring_slots, default.window_slots), probe.name
        windows.add(own.window_slots)
        slots.add(own.slot_bytes)
    assert folded == {"shape-18", "shape-31"}
    assert windows == {2, 3}
    assert len(slots) > 2


@pytest.mark.slow
def test_every_shape_compiles_for_hopper_and_spills_hardly() -> None:
    for probe in probes_of("1xh200", quick=False):
        if not probe.name.startswith(PREFIX):
            continue
        try:
            report = compile_cubin(probe.plan)
        except ToolchainError as error:
            if "installed" not in str(error) and "loaded" not in str(error):
                raise
            pytest.skip(str(error))
        assert report.spill_bytes <= FEW_BYTES, probe.name
