"""What the host's kernel writes: traces, probes' times, and nothing beyond its own memory."""

from __future__ import annotations

import signal
from dataclasses import replace

import numpy as np
import pytest

from tests.engine.small_engine import (
    LIMITS,
    LLAMA,
    TOKENS,
    engine,
    error,
    planned,
    probes,
    run_script,
    sanitized,
)
from twin.engine.host import HostEngine
from twin.errors import EngineError
from twin.plan.catalogue import StageKind
from twin.plan.options import Execution, HandOffKind
from twin.schedule import memory

# ---- trace and probes ----------------------------------------------------------------------------


def test_a_trace_orders_each_blocks_stages() -> None:
    with engine(planned(), trace=True) as running:
        trace = running.generate([1, 2], max_tokens=3).trace
    assert trace is not None
    assert trace.shape == (4, 1, 2, len(running.plan.stages), 2)
    # [blocks][steps, stages, (ready, finished)]
    flat = trace.transpose(1, 2, 0, 3, 4).reshape(2, -1)
    inner = flat[:, :-2]  # the second block may leave before it marks its last stage
    assert (inner > 0).all()
    assert (np.diff(inner, axis=1) >= 0).all()


@pytest.mark.few(3)
@pytest.mark.parametrize("execution", list(Execution))
@pytest.mark.parametrize("handoff", list(HandOffKind))
def test_every_probe_runs(execution: Execution, handoff: HandOffKind) -> None:
    for probe in probes(LIMITS, execution, handoff, blocks=2, vocab=1000):
        with HostEngine(probe, None) as running:
            seconds = running.step_seconds(steps=5, warmup=1)
        assert seconds.shape == (5,)
        assert (seconds > 0).all()


# ---- the kernel's own memory ---------------------------------------------------------------------


@pytest.mark.parametrize("slot_bytes", [256, 512, 1024])
@pytest.mark.parametrize("blocks", [2, 6, 16])
def test_thin_tiles_leave_room_for_a_whole_batch_of_sums(slot_bytes: int, blocks: int) -> None:
    """Many column slices of few rows: the kernel strides by a batch of rows, also where a block has
    fewer of them.
    """
    plan = planned(
        replace(LLAMA, hidden=32, heads=4, kv_heads=2, ffn=512),
        slot_bytes=slot_bytes,
        blocks=blocks,
    )
    down = next(stage.matrix for stage in plan.stages if stage.kind is StageKind.DOWN)
    assert down
    assert down.tile_cols < down.cols
    assert error(plan) < 1e-5


def test_a_block_that_writes_beyond_its_memory_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_stages_floats", lambda plan, half, needs: 64)
    with (
        engine(planned(LLAMA, blocks=1)) as running,
        pytest.raises(EngineError, match=r"Rank\[0\].Block\[0\] wrote beyond its memory"),
    ):
        running.generate(TOKENS[:3], max_tokens=3)


def test_the_kernel_ends_the_process_where_the_layout_leaves_no_room_for_its_sums() -> None:
    script = (
        "from tests.engine.small_engine import *\n"
        "from dataclasses import replace\n"
        "from twin.schedule import memory\n"
        "made = memory._scratch\n"
        "memory._scratch = lambda *needs: replace(made(*needs), half=32)\n"
        "engine(planned(blocks=1)).logits(TOKENS[:2])\n"
    )
    done = run_script(script)
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert "the layout breaks the kernel's law" in done.stderr


# ---- sanitizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sanitize", ["thread", pytest.param("address,undefined", marks=pytest.mark.slow)]
)
def test_sanitizers_find_nothing(sanitize: str) -> None:
    script = """
from tests.engine.small_engine import *
from twin.plan.options import HandOffKind, Sampling
# one build for all: a greedy request of a plan that can draw is what a greedy plan does
for handoff, sampling in zip(HandOffKind, (FULL, SamplingParams(), FULL)):
    plan = planned(gpus=2, sampling=Sampling.FULL, handoff=handoff)
    with engine(plan, sanitize=SANITIZE) as running:
        running.generate(TOKENS[:3], max_tokens=4, sampling=sampling)
        running.logits(TOKENS[:3])
print('clean')
"""
    sanitized(script, sanitize)
