"""Prompts of plans with low-bit weights in passes: what token by token gives.

    pytest tests/engine/test_coded_prompts.py -m gpu

runs all of it that an NVIDIA GPU has to show.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine import test_cuda_engine as on_gpu
from tests.engine.families import AROUND, TOGETHER
from tests.engine.small_engine import LANED, QWEN2
from tests.engine.test_coded import NARROW, ODD, WIDE, coded
from tests.engine.test_prompt_chunks import (
    CHUNK,
    LENGTHS,
    ON_GPU,
    PROMPT,
    error,
    error_after,
    needs_gpu,
)
from tests.models.codes.names import ON_EVERY_DEVICE, coded_names
from twin.cost.prompt import prompt_time
from twin.engine.cuda import CudaEngine
from twin.hardware.load import load_node
from twin.kernel.prompt import prompt_of
from twin.kernel.room import check_room
from twin.kernel.tables import layout
from twin.models.formats import format_named
from twin.models.load import load_model
from twin.models.quantized import requantized
from twin.models.spec import DType, ModelSpec
from twin.plan.options import Execution
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.choose import schedule_of
from twin.schedule.options import plan_for
from twin.schedule.plans import build
from twin.schedule.ring import limits_of

FEW = ("int4-g32-zp", "mxfp4", "nvfp4")
GPU_CHUNK = 32
GPU_LENGTHS = (1, 2, 31, 32, 33, 40)


# ---- on a CPU ------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("name", coded_names(FEW))
def test_passes_of_few_bit_weights_fill_the_cache_as_steps_do(name: str) -> None:
    assert error(coded(name, prompt_chunk=CHUNK), LENGTHS) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("chosen", [ODD, NARROW, {"execution": Execution.GRAPH}], ids=str)
@pytest.mark.parametrize("name", ["fp8-128x128", "mxfp4"])
def test_few_bits_in_passes_do_not_depend_on_the_plan(name: str, chosen: dict[str, Any]) -> None:
    assert error(coded(name, prompt_chunk=CHUNK, **chosen), (20,)) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "spec", [QWEN2, replace(LANED, ffn=128), AROUND, TOGETHER], ids=lambda s: s.name
)
def test_families_of_few_bits_are_read_in_passes(spec: ModelSpec) -> None:
    blocks = {"blocks": 4} if spec.lanes else {}
    assert error(coded("int8", spec, prompt_chunk=CHUNK, **blocks), (7, 33)) < 1e-5


# ---- the plan and the prediction -----------------------------------------------------------------


def test_decoded_rows_of_the_largest_stages_fit_at_the_same_time() -> None:
    node = load_node("1xh200")
    plan = plan_for(load_model("qwen3-8b@fp8-128x128"), node)
    spec = plan.spec
    assert spec is not None
    assert plan.options.prompt_chunk == 1024
    # gate_up's and down's rows in 16 bits; blocks without as many rows as others have room for them
    least = 2 * 3 * spec.hidden * spec.ffn
    assert least <= prompt_of(schedule_of(plan)).decoded_bytes < 1.02 * least
    sizes = layout(plan).sizes
    rows = plan.blocks * (sizes["prompt_normed_floats"] + sizes["prompt_summed_floats"])
    assert 4 * rows == prompt_of(schedule_of(plan)).decoded_bytes
    assert sizes["prompt_decoded"] + rows == sizes["prompt_floats"]


def test_plans_of_16_bits_and_of_steps_and_cpus_keep_no_decoded_rows() -> None:
    node = load_node("1xh200")
    few = load_model("llama-3.2-1b@fp8")
    assert prompt_of(schedule_of(plan_for(few, node))).decoded_bytes > 0
    assert prompt_of(schedule_of(plan_for(few, node, prompt_chunk=1))).decoded_bytes == 0
    assert prompt_of(schedule_of(plan_for(load_model("llama-3.2-1b"), node))).decoded_bytes == 0
    assert prompt_of(schedule_of(plan_for(few, load_node("1xhost")))).decoded_bytes == 0


def test_decoded_rows_count_as_memory() -> None:
    node = load_node("1xh200")
    plan = plan_for(load_model("llama-3.2-1b@fp8"), node)
    full = plan.memory_bytes() + prompt_of(schedule_of(plan)).decoded_bytes
    check_room(plan, node, free_bytes=full)
    with pytest.raises(Exception, match="1 B too few"):
        check_room(plan, node, free_bytes=full - 1)


def test_passes_of_few_bits_stream_them_and_take_longer_than_16_bits_by_decoding() -> None:
    node = load_node("1xh200")
    times, sizes = {}, {}
    for name in ("llama-3.2-1b", "llama-3.2-1b@fp8"):
        plan = plan_for(load_model(name), node)
        times[name] = [prompt_time(plan, node, n).seconds for n in (1, 2, 300, 1000)]
        sizes[name] = schedule_of(plan).of_passes().weight_bytes()
    assert sizes["llama-3.2-1b@fp8"] == pytest.approx(sizes["llama-3.2-1b"] / 2, rel=0.01)
    few = times["llama-3.2-1b@fp8"]
    assert few == sorted(few)
    assert few[-1] > times["llama-3.2-1b"][-1]
    # and far less than the steps of so many tokens
    assert few[-1] < 1000 * sizes["llama-3.2-1b@fp8"] / node.device.memory.peak_bytes_per_s.value


# ---- on a GPU ------------------------------------------------------------------------------------


def gpu_plan(spec: ModelSpec, dtype: DType = DType.BF16, **chosen: Any) -> Plan:
    plan = on_gpu.planned(
        spec,
        **(
            {
                "slot_bytes": 4096,
                "blocks": 7,
                "prompt_chunk": GPU_CHUNK,
                "weight_dtype": dtype,
                "kv_dtype": dtype,
            }
            | chosen
        ),
    )
    prove(plan)
    assert plan.options.prompt_chunk > 1
    return plan


def agree(plan: Plan, bound: float | None = None) -> None:
    """After prompts of several chunks, the last one ragged: the reference's logits, and the same
    tokens every time.
    """
    wanted = on_gpu.expected(plan, PROMPT[:42])
    with CudaEngine(plan, on_gpu.weights_of(plan)) as running:
        found = error_after(running, wanted, GPU_LENGTHS, PROMPT)
        made = [running.generate(PROMPT[:40], max_tokens=12).tokens for _ in range(3)]
    assert found < (bound or ON_GPU[plan.options.weight_dtype])
    assert made[1:] == made[:1] * 2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("name", ON_EVERY_DEVICE)
def test_gpu_every_format_is_read_in_passes(name: str, dtype: DType) -> None:
    agree(gpu_plan(requantized(WIDE, format_named(name)), dtype))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("int8", {"weight_dtype": DType.FP32, "kv_dtype": DType.FP32}),
        ("mxfp4", {"weight_dtype": DType.FP32, "kv_dtype": DType.FP32}),
        ("fp8-128x128", {"slot_bytes": 1168}),
        ("mxfp4", {"slot_bytes": 1168, "prompt_chunk": 16}),
        ("nvfp4", {"execution": Execution.GRAPH}),
    ],
    ids=str,
)
def test_gpu_types_slices_and_executions_of_few_bits(name: str, chosen: dict[str, Any]) -> None:
    plan = gpu_plan(requantized(WIDE, format_named(name)), **chosen)
    # steps multiply whole numbers of 16 bits, also in FP32
    agree(plan, 1e-3 if plan.options.weight_dtype is DType.FP32 else None)


def long(name: str, chunk: int, layers: int = 2) -> Plan:
    """A real model's matrices on all blocks, in few layers, with a small vocabulary."""
    spec, node = load_model(name), load_node("1xh200")
    few = replace(spec, layers=layers, windows=spec.windows[:layers], vocab=8192)
    if spec.layout:
        few = replace(few, layout=spec.layout[:layers])
    plan = plan_for(few, node, max_context=1100)
    return build(few, replace(plan.options, prompt_chunk=chunk), limits_of(node))


def long_prompt_error(name: str) -> float:
    """Logits after prompts in passes: their difference from those after steps, of the largest."""
    found = []
    lengths = (64, 129, 200, 600, 1000)
    for chunk in (1, 512):
        plan = long(name, chunk)
        assert plan.spec is not None
        prompt = [int(t) for t in np.random.default_rng(2).integers(0, plan.spec.vocab, 1002)]
        with CudaEngine(plan, on_gpu.weights_of(plan)) as running:
            found.append([running.logits(prompt[n : n + 2], after=prompt[:n]) for n in lengths])
    steps, passes = found
    return max(
        float(np.abs(made - wanted).max() / np.abs(wanted).max())
        for wanted, made in zip(steps, passes, strict=True)
    )


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["qwen3-8b@fp8-128x128", "qwen3-8b@int4", "llama-3.2-1b@nvfp4"])
def test_gpu_long_prompts_of_few_bits_are_those_read_by_steps(name: str) -> None:
    assert long_prompt_error(name) < ON_GPU[DType.BF16]
