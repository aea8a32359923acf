"""Routed experts of low-bit weights: the CPU engine gives the reference's numbers, and each tile
lies with its scales where the kernel looks for it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from _pytest.mark import ParameterSet
from numpy.typing import NDArray

from tests.engine.hf_cases import FAMILIES
from tests.engine.small_engine import LIMITS, SEED, TOKENS, error, planned, sanitized
from tests.engine.test_experts import routed
from tests.engine.test_packed_experts import write_safetensors
from tests.models.codes.names import ON_EVERY_DEVICE
from twin.engine.weights import Checkpoint, format_of, open_checkpoint, random_weights
from twin.kernel import experts
from twin.kernel.header import header
from twin.kernel.packing import pack, tile
from twin.kernel.streams import PAGE_BYTES
from twin.kernel.tables import layout
from twin.models.feeds import DenseFeed, ExpertFeed
from twin.models.formats import UNIT_BYTES, format_named
from twin.models.load import from_config, tensors
from twin.models.quantized import requantized
from twin.models.spec import DType, ModelSpec
from twin.plan.catalogue import StageKind
from twin.plan.matrices import expert_matrix
from twin.plan.matrix import tiles_of
from twin.plan.options import CollectiveKind, Execution, HandOffKind, Sampling
from twin.plan.types import Plan
from twin.proof.kernel_rules import check_kernel
from twin.proof.prove import prove, violations
from twin.reference import experts as reference_experts
from twin.reference.experts import Choice, chosen
from twin.reference.step import Reference
from twin.schedule.block import WARP
from twin.schedule.choose import schedule_of
from twin.schedule.homes import REGISTER_PORTIONS
from twin.schedule.plans import build
from twin.schedule.products import TENSOR

# of the largest logit: what the last chosen expert is ahead of the next one; sums of a GPU are off
# by less
DECIDED = 2e-4


def model(name: str = "fp8", *, width: int = 64) -> ModelSpec:
    spec = routed(ExpertFeed(experts=6, top_k=3, width=width))
    wide = [replace(layer, mixer=replace(layer.mixer, head_dim=16)) for layer in spec.layout]
    return requantized(replace(spec, head_dim=16, layout=tuple(wide)), format_named(name))


def coded(name: str = "fp8", *, width: int = 64, **more: Any) -> Plan:
    return planned(model(name, width=width), **({"slot_bytes": 4096} | more))


PLANS: list[dict[str, Any]] = [
    {"blocks": 5, "attention_splits": 2},
    # column slices, the last one of each expert narrower; groups of fewer rows
    {"width": 272, "blocks": 5, "slot_bytes": 2048},
    {"gpus": 2, "blocks": 3},
    {"width": 136, "gpus": 2, "blocks": 3},  # the last rank's rows are filled up
    {"gpus": 4, "blocks": 1, "handoff": HandOffKind.GRID},
    {"handoff": HandOffKind.COUNTER, "sampling": Sampling.FULL},
    {"execution": Execution.GRAPH},
    {"gpus": 2, "execution": Execution.LAUNCHES, "collective": CollectiveKind.LIBRARY},
    {"weight_dtype": DType.BF16, "blocks": 7},
]


# of a GPU, (format, width, slot_bytes): slices whose last one is narrower, in registers; more than
# a thread's registers hold, even and uneven
UNEVEN = [
    ("fp8", 400, 1168),
    ("int4-g32", 416, 1168),
    ("int4-g32", 400, 1168),  # the last group of a row is half a one
    # three experts have scales that fill no whole load
    ("mxfp4", 416, 1168),
    ("nvfp4", 400, 1168),
    ("int4-g32-zp", 416, 1168),
]
ON_CHIP = [
    ("fp8", 4208, 1168),
    ("int8", 4208, 1168),
    ("fp8-128x128", 4224, 1168),
    ("fp8-128x128", 4224, 2336),
    ("int4-g128", 4224, 2336),
    ("int4-g32-zp", 4240, 2336),
    ("mxfp4", 4224, 1168),
    ("nvfp4", 4208, 1168),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", PLANS, ids=lambda v: "-".join(str(getattr(x, "value", x)) for x in v.values())
)
def test_logits_do_not_depend_on_the_plan(more: dict[str, Any]) -> None:
    plan = coded(**more)
    prove(plan)
    assert plan.simulation_only() is None
    assert error(plan) < 1e-5


def every_code(*quick: str) -> list[ParameterSet]:
    """All codes; those that are not `quick` are slow."""
    marks = {name: () if name in quick else (pytest.mark.slow,) for name in ON_EVERY_DEVICE}
    return [pytest.param(name, marks=marks[name]) for name in ON_EVERY_DEVICE]


@pytest.mark.parametrize("name", every_code("mxfp4"))
def test_routed_tiles_of_every_format(name: str) -> None:
    assert error(coded(name, blocks=5)) < 1e-5


def shared(name: str, **more: Any) -> Plan:
    """Gated shared experts in every layer but one."""
    base = model(name)
    feed = ExpertFeed(experts=6, top_k=3, width=64, shared_width=128, shared_gate=True)
    layers = [replace(layer, feed=feed) for layer in base.layout]
    layers[1] = replace(layers[1], feed=DenseFeed(width=256))
    return planned(replace(base, layout=tuple(layers)), **({"slot_bytes": 4096} | more))


@pytest.mark.parametrize("name", every_code("mxfp4"))
def test_shared_experts_and_dense_layers_of_every_format(name: str) -> None:
    plan = shared(name, blocks=5)
    prove(plan)
    assert error(plan) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ON_EVERY_DEVICE if not name.endswith("-fp16")])
def test_wide_experts_of_every_format(name: str) -> None:
    assert error(coded(name, width=384, blocks=5)) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["int4-g32", "mxfp4"])
def test_the_last_slice_of_an_expert_may_end_within_a_group(name: str) -> None:
    plan = coded(name, width=272, blocks=5, slot_bytes=2048)
    down = next(stage for stage in plan.stages if stage.kind is StageKind.ROUTED_DOWN)
    assert down.matrix
    assert (down.matrix.tile_cols, down.matrix.slices) == (160, 2)
    prove(plan)
    assert error(plan) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4-g32", "int4-g32-zp"])
def test_four_bit_experts_whose_last_ranks_part_is_filled_up(name: str) -> None:
    """Weights beyond the matrix are zero, also where a scale is a power of two."""
    assert error(coded(name, width=160, gpus=2, blocks=3)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitize: str) -> None:
    script = (
        "from tests.engine.test_coded_experts import *\n"
        "from tests.engine.small_engine import TOKENS, engine\n"
        "for more in ({'gpus': 2}, {'width': 272, 'blocks': 5, 'slot_bytes': 2048}):\n"
        "    with engine(coded(**more), sanitize=SANITIZE) as e:\n"
        "        e.generate(TOKENS[:3], max_tokens=4)\n        e.logits(TOKENS[:3])\n"
        "print('clean')\n"
    )
    sanitized(script, sanitize)


# ---- where tiles lie -----------------------------------------------------------------------------


def looked_for(plan: Plan, place: experts.Place, stage: Any, block: int, first: int) -> Any:
    """`coded_place` in choice.cuh: bytes from an expert's first to a tile of rows and columns."""
    high, shared = stage.matrix.tile_rows, stage.kind is StageKind.ROUTED_UP
    start = 0 if shared else first
    home = -(-start * place.group // high) + block * place.gap

    def at(rows: tuple[int, int], cols: tuple[int, int]) -> int:
        size = plan.stored_bytes(stage.matrix, rows[1] - rows[0], stage.matrix.tile_cols)
        slices = cols[0] // stage.matrix.tile_cols * size
        return (home + (rows[0] - start) // high * place.group) * UNIT_BYTES + slices

    return at


@pytest.mark.parametrize("slot_bytes", [4096, 2048])
@pytest.mark.parametrize("name", ["fp8", "int8", "fp8-128x128"])
def test_each_tile_lies_where_the_kernel_looks(name: str, slot_bytes: int) -> None:
    plan = coded(name, width=272, blocks=5, slot_bytes=slot_bytes)
    prove(plan)
    made, table = layout(plan), random_weights(model(name, width=272), SEED, DType.FP32)
    out = np.zeros(int(made.sizes["stream_pages"]) * PAGE_BYTES, np.uint8)
    pack(plan, made.weights, table, 0, out)
    for stage in (s for s in plan.stages if s.routed and s.matrix and s.layer == 1):
        assert stage.matrix
        place = made.weights.experts[stage.index]
        for expert in (0, 5):
            source = expert_matrix(plan, stage, 0, table, expert)
            start = place.page * PAGE_BYTES + expert * place.units * UNIT_BYTES
            for block, (lo, hi) in enumerate(stage.matrix.owned or ((0, stage.matrix.rows),)):
                at = looked_for(plan, place, stage, block, lo)
                for rows, cols in tiles_of(stage.matrix, lo, hi):
                    wanted = tile(plan, stage.matrix, source, rows, cols)
                    found = out[start + at(rows, cols) :][: len(wanted)]
                    assert np.array_equal(found, wanted), (stage.name, expert, rows, cols)


def test_no_slice_has_columns_of_two_experts() -> None:
    plan = coded(width=272, blocks=5, slot_bytes=2048)
    down = next(stage for stage in plan.stages if stage.kind is StageKind.ROUTED_DOWN)
    wide = schedule_of(plan).matrices[down.index]
    assert down.matrix
    assert wide
    assert (down.matrix.tile_cols, down.matrix.slices) == (144, 2)
    assert (wide.cols, wide.slices) == (3 * 272, 3 * 2)
    assert wide.sharers >= wide.slices


def test_blocks_share_whole_tiles() -> None:
    plan = coded(blocks=5)
    up = next(stage for stage in plan.stages if stage.kind is StageKind.ROUTED_UP)
    assert up.matrix
    assert up.publishes is not None
    value = plan.values[up.publishes]
    assert {2 * lo % up.matrix.tile_rows for lo, _ in value.owned} == {0}
    moved = replace(value, owned=tuple((lo + bool(lo), hi + (hi < 192)) for lo, hi in value.owned))
    values = tuple(moved if v is value else v for v in plan.values)
    broken = replace(plan, values=values)
    assert any("divide tiles of 8" in str(found) for found in check_kernel(broken))
    assert violations(broken)


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_blocks_beyond_the_last_tile_have_no_rows(name: str) -> None:
    plan = coded(name, blocks=30 if name == "mxfp4" else 64)
    up = next(stage for stage in plan.stages if stage.kind is StageKind.ROUTED_UP)
    assert up.publishes is not None
    assert any(lo == hi for lo, hi in plan.values[up.publishes].owned)
    prove(plan)
    assert error(plan) < 1e-5


def of_a_gpu(name: str, width: int, slot_bytes: int) -> Plan:
    chosen = {"blocks": 5, "slot_bytes": slot_bytes}
    options = replace(coded(**chosen).options, weight_dtype=DType.BF16, kv_dtype=DType.BF16)
    plan = build(model(name, width=width), options, replace(LIMITS, teams=True))
    prove(plan)
    return plan


@pytest.mark.parametrize(("name", "width", "slot_bytes"), UNEVEN)
def test_warps_share_uneven_slices(name: str, width: int, slot_bytes: int) -> None:
    plan = of_a_gpu(name, width, slot_bytes)
    team = schedule_of(plan).warps.teams["ffn"]
    assert width % team.tile
    assert team.slices == 3 * -(-width // team.tile)
    # two slices of FP8 lie in shared memory, as those of FP4 do from three on
    assert schedule_of(plan).warps.ffn.in_memory == (name == "fp8")


@pytest.mark.parametrize(
    ("name", "width", "slot_bytes"), [one for one in UNEVEN if one[0] in TENSOR]
)
def test_zeros_behind_an_input_of_tensor_cores_are_aligned(
    name: str, width: int, slot_bytes: int
) -> None:
    plan = of_a_gpu(name, width, slot_bytes)
    units = layout(plan).sizes["whole_units"]
    assert 3 * width / 16 < units  # whose scales a load of zeros follows
    assert 4 * units % UNIT_BYTES == 0


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "width", "slot_bytes"), UNEVEN + ON_CHIP)
def test_choices_are_decided(
    name: str, width: int, slot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a GPU, whose sums are ordered otherwise, may choose another expert than the reference:
    logits of `int4-g32-zp` with 4,224 columns were then off by 2 %.
    """
    gaps = []

    def seen(kind: ExpertFeed, logits: NDArray[np.float32], bias: None) -> Choice:
        ordered = np.sort(logits)[::-1]
        gaps.append((ordered[kind.top_k - 1] - ordered[kind.top_k]) / np.abs(logits).max())
        return chosen(kind, logits, bias)

    monkeypatch.setattr(reference_experts, "chosen", seen)
    plan = coded(name, width=width, blocks=5, slot_bytes=slot_bytes, weight_dtype=DType.BF16)
    assert plan.spec is not None
    reference = Reference(plan, random_weights(plan.spec, SEED, DType.BF16))
    for token in TOKENS:
        reference.step(token)
    assert min(gaps) > DECIDED


@pytest.mark.parametrize(("name", "width", "slot_bytes"), ON_CHIP)
def test_a_wide_input_lies_in_the_blocks_memory(name: str, width: int, slot_bytes: int) -> None:
    plan = of_a_gpu(name, width, slot_bytes)
    team = schedule_of(plan).warps.teams["ffn"]
    assert team.portions > REGISTER_PORTIONS
    assert schedule_of(plan).warps.ffn.in_memory
    scratch = schedule_of(plan).memory.scratch
    words = scratch.whole
    if name not in TENSOR:  # of a thread's columns of a slice
        assert words == team.portions * team.warps * WARP * (8 + 2)
    sizes = layout(plan).sizes
    assert sizes["whole"] + words + scratch.choice == sizes["scratch_floats"]


def test_a_device_knows_the_shape_of_all_layers() -> None:
    spec = model()
    gpu = build(
        spec,
        replace(coded().options, weight_dtype=DType.BF16, kv_dtype=DType.BF16),
        replace(LIMITS, teams=True),
    )
    rows = next(s.matrix.rows for s in gpu.stages if s.kind is StageKind.ROUTED_DOWN and s.matrix)

    def known(text: str) -> str:
        return text.partition("struct RoutedDown {")[2].partition("}")[0]

    assert f"expert_rows = {rows};" in known(header(gpu))
    assert "expert_rows = 0;" in known(header(gpu, embedded=False))
    assert "expert_rows = 0;" in known(header(planned(routed())))


# ---- checkpoints ---------------------------------------------------------------------------------


def test_experts_of_a_checkpoint_in_fp8_blocks_are_read(tmp_path: Path) -> None:
    """Each matrix with its `weight_scale_inv`, as Qwen ships them; routers stay in 16 bits."""
    read_in_blocks(tmp_path, "qwen3-moe-plain", {})


@pytest.mark.parametrize("name", ["glm4-moe", "minimax-m2"])
def test_biases_of_the_choice_stay_in_fp32_and_drafts_are_left_alone(
    tmp_path: Path, name: str
) -> None:
    """Routers in FP32 are rounded, which a note says."""
    draft = f"model.layers.{FAMILIES[name]['num_hidden_layers']}"
    more = {
        f"{draft}.eh_proj.weight": np.zeros((4, 8), ml_dtypes.bfloat16),
        f"{draft}.mlp.up_proj.weight": np.zeros((4, 4), ml_dtypes.float8_e4m3fn),
        f"{draft}.mlp.up_proj.weight_scale_inv": np.zeros((1, 1), np.float32),
    }
    opened = read_in_blocks(tmp_path, name, more, exact=("choice_bias", "router"))
    assert opened.note == "routers are stored in FP32 and rounded to BF16"
    assert opened.weights["layers.1.choice_bias"].dtype == np.float32
    assert opened.weights["layers.1.router"].dtype == ml_dtypes.bfloat16


def read_in_blocks(
    tmp_path: Path, family: str, more: dict[str, np.ndarray[Any, Any]], exact: tuple[str, ...] = ()
) -> Checkpoint:
    """A checkpoint in blocks of FP8, with `more` tensors; those of the names `exact` are in FP32.
    Every quantised matrix is read as it was written.
    """
    config = FAMILIES[family] | {
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "gate", "e_score_correction_bias"],
        },
    }
    spec = from_config(config, "case")
    random, stored, meant = random_weights(spec, SEED, DType.BF16), {}, {}
    for name, tensor in tensors(spec).items():
        if format_of(spec, name).name != "fp8-128x128":
            wide = name.rpartition(".")[2] in exact
            stored[tensor.name] = random[name].astype(np.float32) if wide else random[name]
            continue
        codes, scales = random[f"{name}.codes"], random[f"{name}.scales"]
        stored[tensor.name] = codes.view(ml_dtypes.float8_e4m3fn)
        stored[f"{tensor.name}_scale_inv"] = scales[::128].astype(np.float32)
        meant[name] = random[name]
    write_safetensors(tmp_path / "model.safetensors", stored | more)
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(tmp_path)
    assert opened.spec.runnable_reason() is None
    assert "layers.1.experts.5.down" in meant
    assert "layers.1.router" not in meant
    for name, wanted in meant.items():
        assert np.array_equal(opened.weights[name], wanted), name
    return opened
