"""The same sources compile for the GPUs; whoever lacks the compiler skips with the reason."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.h200 import H200
from tests.kernel.test_on_chip import mixtral
from tests.models.codes.names import ON_EVERY_DEVICE
from twin.calibrate.gpu_probes import gpu_probes
from twin.data import data_dir
from twin.engine.cuda_build import FLAGS, HOPPER, THREADS, Entry, compile_cubin
from twin.errors import ToolchainError
from twin.hardware.load import load_node
from twin.kernel.header import header
from twin.models.feeds import DenseFeed
from twin.models.formats import format_named
from twin.models.load import load_model
from twin.models.quantized import requantized
from twin.models.spec import DType
from twin.plan.options import (
    CollectiveKind,
    Execution,
    HandOffKind,
    LateParts,
    Limits,
    Options,
    Sampling,
)
from twin.plan.types import Plan
from twin.schedule.choose import schedule_of
from twin.schedule.coded_tiles import coded_slot_bytes
from twin.schedule.options import plan_for
from twin.schedule.plans import build
from twin.toolchain import run_compiler

MI300X = Limits(
    blocks=304, dies=8, on_chip_bytes=65536, memory_bytes=192 * 10**9, oversubscribe=False
)


def planned(model: str, limits: Limits, **chosen: Any) -> Plan:
    spec = load_model(model)
    sizes = {
        "blocks": limits.blocks,
        "slot_bytes": coded_slot_bytes(spec.coded, Options().slot_bytes),
    }
    return build(spec, Options(**(sizes | chosen)), limits)


LANED: dict[str, Any] = {
    "blocks": 128,
    "collective": CollectiveKind.PUSH,
    "weight_dtype": DType.FP16,
    "kv_dtype": DType.FP16,
}
NAMES: dict[str, dict[str, Any]] = {  # of a plan: what it changes
    "defaults": {},
    "rows in folds": {"slot_bytes": 18432, "ring_slots": 11},  # of 1,152 columns, by each warp
    "lanes on four GPUs": {
        "gpus": 4,
        "collective": CollectiveKind.PUSH,
        "weight_dtype": DType.FP16,
    },
    "lanes on two GPUs": LANED | {"gpus": 2, "blocks": 132},
    "two GPUs": {"gpus": 2, "collective": CollectiveKind.PUSH},
    "eight GPUs": {"gpus": 8, "collective": CollectiveKind.PUSH},
    "two GPUs, prompts": {"gpus": 2, "collective": CollectiveKind.PUSH, "prompt_chunk": 64},
    "two GPUs, full": {"gpus": 2, "collective": CollectiveKind.PUSH, "sampling": Sampling.FULL},
    "four GPUs, counter": {
        "gpus": 4,
        "collective": CollectiveKind.PUSH,
        "handoff": HandOffKind.COUNTER,
    },
    "two GPUs, graph": {
        "gpus": 2,
        "collective": CollectiveKind.PUSH,
        "execution": Execution.GRAPH,
    },
    "lanes on one": LANED,
    "lanes, each": LANED | {"late_parts": LateParts.EACH},
    "lanes, prompts": LANED | {"prompt_chunk": 64},
    "lanes, counter": LANED | {"late_parts": LateParts.REDUCED, "handoff": HandOffKind.COUNTER},
    "lanes, graph": LANED | {"late_parts": LateParts.REDUCED, "execution": Execution.GRAPH},
    "full": {"sampling": Sampling.FULL},
    "graph": {"execution": Execution.GRAPH},
    "graph, full": {"execution": Execution.GRAPH, "sampling": Sampling.FULL},
    "counter": {"handoff": HandOffKind.COUNTER},
    "grid": {"handoff": HandOffKind.GRID},
    "small ring": {"handoff": HandOffKind.COUNTER, "ring_slots": 6, "window_slots": 4},
    "FP32": {"weight_dtype": DType.FP32, "kv_dtype": DType.FP32},
    "prompts": {"prompt_chunk": 64},
    "short passes": {"prompt_chunk": 16},
    "long passes": {"prompt_chunk": 1024},
}


def slow(model: str, *names: str) -> list[ParameterSet]:
    """Further builds, of the same stages."""
    return [pytest.param(model, name, marks=pytest.mark.slow) for name in names]


LANES = ("laneformer-2b@fp8-128x128", "lanes on four GPUs")
EXPERTS = ("gpt-oss-20b", "defaults")
# In the gate: a dense model. Each build takes five to ten seconds of a core.
BUILDS = [
    ("llama-3.2-1b", "defaults"),
    *slow(*EXPERTS),
    *slow(*LANES),
    *slow("llama-3.2-1b@fp8-128x128", "defaults"),
    *slow("laneformer-2b", "lanes on four GPUs"),
    *slow("qwen3-8b", "prompts"),
    *slow("gemma-3-1b", "rows in folds"),
    *slow("lfm2.5-1.2b", "defaults", "full", "two GPUs"),
    *slow("lfm2.5-350m", "defaults", "FP32"),
    *slow("lfm2-8b-a1b", "defaults", "full"),
    *slow("olmo-2-7b", "defaults"),  # heads normed together, and what modules add
    *slow("llama-3.2-1b", "two GPUs", "eight GPUs", "two GPUs, full", "two GPUs, graph"),
    *slow("llama-3.2-1b", "four GPUs, counter", "two GPUs, prompts"),
    *slow("qwen3-8b", "two GPUs", "eight GPUs", "two GPUs, prompts"),
    *slow("llama-3.1-8b", "two GPUs"),
    *slow("mixtral-8x7b@fp8-128x128", "small ring"),  # experts too wide for registers
    *slow("laneformer-2b", "lanes on two GPUs"),
    *slow("llama-3.2-1b", "full", "graph, full", "grid", "FP32", "prompts", "short passes"),
    *slow("qwen3-8b", "defaults", "full", "graph", "small ring", "FP32"),
    *slow(
        "laneformer-2b",
        "lanes on one",
        "lanes, each",
        "lanes, prompts",
        "lanes, counter",
        "lanes, graph",
    ),
    *slow("qwen2.5-coder-1.5b", "graph, full"),
    *slow("qwen3-30b-a3b", "defaults"),
    *slow("qwen1.5-moe-a2.7b", "defaults"),
    *slow("qwen1.5-moe-a2.7b@fp8-128x128", "defaults", "two GPUs", "full"),
    *slow("qwen1.5-moe-a2.7b@mxfp4", "defaults"),
    *slow("qwen3-coder-next@fp8-128x128", "defaults", "full", "counter"),
    *slow("qwen3-coder-next", "defaults", "two GPUs", "eight GPUs"),
    *slow("qwen3-coder-next@mxfp4", "defaults"),
    *slow("gpt-oss-20b@bf16", "defaults", "FP32"),
    *slow("gpt-oss-120b", "defaults"),
    *slow("gpt-oss-20b", "long passes"),
    *slow("qwen3-30b-a3b", "long passes", "short passes"),
    *slow("qwen3-30b-a3b@fp8-128x128", "long passes"),
    *slow("mixtral-8x7b@fp8", "long passes"),
    *(case for name in ON_EVERY_DEVICE for case in slow(f"qwen3-30b-a3b@{name}", "defaults")),
    *slow("llama-3.1-8b", "counter", "defaults"),
    *(
        case
        for name in ON_EVERY_DEVICE
        if name != "fp8-128x128"
        for case in slow(f"llama-3.2-1b@{name}", "defaults")
    ),
    *(case for name in ON_EVERY_DEVICE for case in slow(f"qwen3-8b@{name}", "defaults")),
    *slow("llama-3.1-8b@int4-g128-zp", "defaults"),
]


@pytest.mark.parametrize(("model", "name"), BUILDS)
def test_the_kernel_compiles_for_hopper_without_spills(model: str, name: str) -> None:
    plan = planned(model, H200, **NAMES[name])
    try:
        # as test_scoreboards.py needs it: one compile for both
        report = compile_cubin(plan, lines=True)
    except ToolchainError as error:
        if "installed" not in str(error) and "loaded" not in str(error):
            raise
        pytest.skip(str(error))
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)
    assert report.registers <= 65536 // THREADS
    assert report.shared_bytes <= H200.on_chip_bytes
    assert report.cubin.startswith(b"\x7fELF")


SHORT = ("llama-3.2-1b", "short passes")
PASSES = [
    build
    for build in BUILDS
    if isinstance(build, ParameterSet)
    and build.values != SHORT
    and "prompt_chunk" in NAMES[str(build.values[1])]
]


def test_prompt_passes_are_code_of_hopper() -> None:
    translated(planned(SHORT[0], H200, **NAMES[SHORT[1]]), "-DTWIN_PASSES")


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "name"), [EXPERTS, LANES])
def test_low_bit_weights_of_lanes_and_of_experts_are_code_of_hopper(model: str, name: str) -> None:
    translated(planned(model, H200, **NAMES[name]))


@pytest.mark.parametrize(("model", "name"), [*slow(*SHORT), *PASSES])
def test_prompt_passes_compile_for_hopper(model: str, name: str) -> None:
    plan = planned(model, H200, **NAMES[name])
    try:
        passes = compile_cubin(plan, entry=Entry.PASSES)
    except ToolchainError as error:
        if "installed" not in str(error) and "loaded" not in str(error):
            raise
        pytest.skip(str(error))
    assert passes.registers <= 65536 // THREADS


def headed(head_dim: int) -> Plan:
    """Heads that no tensor core scans: what it demands of heads is demanded of none of these."""
    base = load_model("llama-3.2-1b")
    spec = replace(base, layers=1, hidden=512, heads=4, kv_heads=2, head_dim=head_dim, ffn=512)
    plan = build(spec, Options(blocks=4, ring_slots=6, window_slots=3), H200)
    assert not schedule_of(plan).scan.tensor
    return plan


def test_kernels_whose_heads_no_tensor_core_scans_are_code_of_hopper() -> None:
    translated(headed(8))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [8, 80])
def test_kernels_whose_heads_no_tensor_core_scans_compile(head_dim: int) -> None:
    without_spills(headed(head_dim))


def translated(plan: Plan, *defined: str) -> None:
    """Compiles the kernel to PTX, without the assembler and in a tenth of the optimiser's time
    where nvcc offers that: what both say of registers, the slow tests look at.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    platform = data_dir("native") / "platform"
    defined = (f"-DTWIN_SHARED_BYTES={schedule_of(plan).block_bytes}", *defined)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.h").write_text(header(plan, trace=False), encoding="utf-8")
        made = Path(folder) / "kernel.ptx"
        target = [f"-arch={HOPPER.replace('sm_', 'compute_')}", "-ptx", "-o", str(made)]
        source = [f"-I{folder}", str(platform / "cuda_main.cu")]
        fast = ["-Ofc=max"] if "--Ofast-compile" in run_compiler([nvcc, "--help"]) else []
        run_compiler([nvcc, *FLAGS, *fast, *defined, *target, *source])
        assert ".entry" in made.read_text()


# Hidden size, heads, KV heads, feed-forward: columns that fill no whole teams. Such steps had up to
# 347 spilled loads and stores.
RAGGED = ((3584, 28, 4, 18944), (2048, 16, 2, 11008), (5120, 40, 40, 13824))


@pytest.mark.slow
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_columns_that_fill_no_whole_teams_spill_nothing(shape: tuple[int, int, int, int]) -> None:
    hidden, heads, kv_heads, ffn = shape
    base = load_model("qwen2.5-coder-1.5b")
    spec = replace(base, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn)
    plan = build(spec, Options(blocks=132, ring_slots=11, window_slots=3, max_context=168), H200)
    try:
        report = compile_cubin(plan)
    except ToolchainError as error:
        if "installed" not in str(error) and "loaded" not in str(error):
            raise
        pytest.skip(str(error))
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)


def without_spills(plan: Plan) -> None:
    try:
        report = compile_cubin(plan)
    except ToolchainError as error:
        if "installed" not in str(error) and "loaded" not in str(error):
            raise
        pytest.skip(str(error))
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)


# Hidden size, heads, KV heads, feed-forward, format: of families whose heads are normed or biased.
TURNED = (
    ("qwen2", (1536, 16, 2, 7168), "fp8-128x128"),
    ("qwen3", (1280, 16, 16, 5376), "int4-g128"),
    ("qwen3", (3008, 16, 4, 7808), "int8"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shape", "name"), TURNED, ids=str)
def test_low_bit_weights_with_normed_or_biased_heads_spill_nothing(
    family: str, shape: tuple[int, int, int, int], name: str
) -> None:
    hidden, heads, kv_heads, ffn = shape
    base = load_model({"qwen2": "qwen2.5-coder-1.5b", "qwen3": "qwen3-8b"}[family])
    sized = replace(base, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, head_dim=128)
    spec = requantized(sized, format_named(name))
    slot = coded_slot_bytes(spec.coded, Options().slot_bytes)
    options = Options(blocks=132, ring_slots=11, window_slots=3, max_context=168, slot_bytes=slot)
    without_spills(build(spec, options, H200))


# The same without norms and biases, of hidden vectors that leave threads without columns; these
# had up to 520 bytes of spills.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "name"),
    [((1792, 14, 2, 6144), "int4-g128"), ((1600, 12, 4, 2816), "int8")],
    ids=str,
)
def test_few_bits_of_threads_without_columns_spill_nothing(
    shape: tuple[int, int, int, int], name: str
) -> None:
    hidden, heads, kv_heads, ffn = shape
    base = load_model("llama-3.1-8b")
    sized = replace(base, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, head_dim=128)
    without_spills(plan_for(requantized(sized, format_named(name)), load_node("1xh200")))


# Hidden size, heads, KV heads, feed-forward, format, type of other weights: what is too wide for
# registers lies in shared memory. Such steps had up to 2,700 bytes of spills.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "name", "dtype"),
    [
        ((5120, 40, 8, 17_408), "int8", DType.BF16),
        ((5120, 40, 10, 17_920), "fp8", DType.BF16),
        ((5120, 64, 8, 25_600), "int4-g128", DType.BF16),
        ((5120, 40, 8, 13_824), "nvfp4", DType.BF16),
        ((3584, 28, 4, 18_944), "int4-g128", DType.BF16),
        ((8192, 64, 8, 28_672), "int8", DType.BF16),
        ((3264, 24, 8, 10_240), "nvfp4", DType.FP16),
    ],
    ids=str,
)
def test_wide_feed_forwards_in_few_bits_spill_nothing(
    shape: tuple[int, int, int, int], name: str, dtype: DType
) -> None:
    hidden, heads, kv_heads, ffn = shape
    base = load_model("llama-3.1-8b")
    sized = replace(base, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, head_dim=128)
    spec = requantized(sized, format_named(name))
    without_spills(plan_for(spec, load_node("1xh200"), weight_dtype=dtype, kv_dtype=dtype))


# Experts of a step and their width, hidden size: in 16 bits, of which threads keep what they have
# registers for. Such steps had up to 1,240 bytes of spills.
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 14_336, 4096), (3, 6272, 2432), (3, 11_136, 2432)], ids=str)
def test_wide_experts_in_16_bits_spill_nothing(shape: tuple[int, int, int]) -> None:
    top_k, width, hidden = shape
    spec = mixtral(top_k, width, hidden=hidden)
    without_spills(plan_for(spec, load_node("1xh200"), prompt_chunk=1))


# GPUs, hidden size, heads, KV heads, feed-forward, format: parts of ranks are read in turn. Such
# steps had up to 1,870 bytes of spills.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((2, 8192, 64, 8, 28_672), "fp8"),
        ((2, 5120, 32, 8, 14_336), "int8"),
        ((2, 5120, 40, 8, 13_824), "int4-g128"),
        ((4, 5120, 40, 8, 17_408), "fp8-128x128"),
        ((4, 5120, 32, 8, 14_336), "int4-g128"),
        ((4, 3584, 28, 4, 18_944), "mxfp4"),
        ((8, 8192, 64, 8, 28_672), None),
    ],
    ids=str,
)
def test_steps_of_several_gpus_spill_nothing(
    shape: tuple[int, int, int, int, int], name: str | None
) -> None:
    gpus, hidden, heads, kv_heads, ffn = shape
    base = load_model("llama-3.1-8b")
    spec = replace(base, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, head_dim=128)
    spec = requantized(spec, format_named(name)) if name else spec
    without_spills(plan_for(spec, load_node(f"{gpus}xh200"), prompt_chunk=1))


# Columns of an expert, experts of a token, format: their input lies in shared memory. Such steps
# had up to 4,464 bytes of spills.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "chosen", "name"),
    [(5888, 3, "fp8-128x128"), (10_368, 2, "int4-g128"), (14_336, 3, "int8")],
)
def test_wide_experts_spill_nothing(width: int, chosen: int, name: str) -> None:
    base = load_model("mixtral-8x7b")
    assert base.experts
    feed = replace(base.experts, top_k=chosen, width=width)
    layers = tuple(replace(layer, feed=feed) for layer in base.layout[:2])
    sized = replace(base, layers=2, windows=base.windows[:2], ffn=width, layout=layers)
    without_spills(plan_for(requantized(sized, format_named(name)), load_node("1xh200")))


# Columns of the dense layer, format: its warps are divided otherwise than those of experts.
@pytest.mark.slow
@pytest.mark.parametrize(("width", "name"), [(6144, None), (6144, "fp8-128x128"), (4096, "mxfp4")])
@pytest.mark.parametrize("model", ["qwen1.5-moe-a2.7b", "qwen3-30b-a3b"])
def test_dense_layers_among_experts_spill_nothing(model: str, width: int, name: str | None) -> None:
    base = load_model(model)
    layers = (replace(base.layout[0], feed=DenseFeed(width=width)), *base.layout[1:3])
    spec = replace(base, layers=3, windows=base.windows[:3], layout=layers)
    spec = requantized(spec, format_named(name)) if name else spec
    without_spills(plan_for(spec, load_node("1xh200")))


# Nine probes did not compile once, when a GPU was waiting to measure them.
@pytest.mark.slow
def test_every_kind_of_probe_compiles_for_hopper() -> None:
    """Those that differ in columns, tiles, types or protocols; the others differ in numbers
    alone.
    """
    kinds: dict[Any, Plan] = {}
    for plan in (probe.plan for probe in gpu_probes(H200, quick=False)):
        matrices = frozenset(
            (s.kind, s.matrix.cols, s.matrix.tile_cols, s.matrix.tile_rows)
            for s in plan.stages
            if s.matrix
        )
        kinds.setdefault(
            (matrices, plan.shard, plan.attention, plan.options.weight_dtype, plan.options.handoff),
            plan,
        )
    for plan in kinds.values():
        try:
            compile_cubin(plan)
        except ToolchainError as error:
            if "installed" not in str(error) and "loaded" not in str(error):
                raise
            pytest.skip(str(error))
