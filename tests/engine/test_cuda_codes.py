"""Low-bit weights, experts and GPT-OSS's additions on an NVIDIA GPU: the reference's numbers,
and the same bits every time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine import test_coded_experts, test_gpt_oss
from tests.engine.small_engine import QWEN2, TOKENS
from tests.engine.test_coded import WIDE
from tests.engine.test_cuda_engine import (
    EXECUTIONS,
    TOLERANCE,
    expected,
    gpu,
    planned,
    typed,
    weights_of,
)
from tests.engine.test_experts import FEED, routed
from tests.models.codes.names import ON_EVERY_DEVICE
from twin.engine.cuda import CudaEngine
from twin.models.feeds import Scoring
from twin.models.formats import format_named
from twin.models.quantized import requantized
from twin.models.spec import DType, ModelSpec
from twin.plan.options import HandOffKind, RouterInput, Sampling
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.choose import schedule_of

pytestmark = gpu

RUNS = 3


def checked(spec: ModelSpec, **chosen: Any) -> Plan:
    plan = planned(spec, **({"slot_bytes": 4096} | chosen))
    prove(plan)
    return plan


def agree(plan: Plan) -> None:
    """Logits and tokens of the reference, bitwise equal in every run."""
    wanted = expected(plan, TOKENS)
    with CudaEngine(plan, weights_of(plan)) as running:
        logits = running.logits(TOKENS)
        assert all(np.array_equal(logits, running.logits(TOKENS)) for _ in range(RUNS))
        made = running.generate(TOKENS[:5], max_tokens=30)
        assert running.generate(TOKENS[:5], max_tokens=30).tokens == made.tokens
    error = np.abs(logits - wanted).max() / np.abs(wanted).max()
    assert error < TOLERANCE[plan.options.weight_dtype]


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("name", ON_EVERY_DEVICE)
def test_every_format_matches_the_reference(name: str, dtype: DType) -> None:
    agree(
        checked(requantized(WIDE, format_named(name)), weight_dtype=dtype, kv_dtype=dtype, blocks=7)
    )


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("handoff", HandOffKind)
@pytest.mark.parametrize("name", ["int8", "int4-g128", "mxfp4"])
def test_few_bits_do_not_depend_on_hand_off_and_execution(
    name: str, handoff: HandOffKind, execution: Any
) -> None:
    agree(checked(requantized(WIDE, format_named(name)), handoff=handoff, execution=execution))


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        (WIDE, {"slot_bytes": 1168}),  # several column slices
        (replace(QWEN2, heads=16, kv_heads=8, hidden=128, ffn=256), {"blocks": 5}),
    ],
    ids=["slices", "biases"],
)
@pytest.mark.parametrize("name", ["int8", "fp8-128x128", "int4-g32-zp", "mxfp4", "nvfp4"])
def test_column_slices_and_biases_match_the_reference(
    name: str, spec: ModelSpec, chosen: dict[str, Any]
) -> None:
    agree(checked(requantized(spec, format_named(name)), **chosen))


@pytest.mark.parametrize(
    ("feed", "chosen"),
    [
        (FEED, {"blocks": 5, "attention_splits": 2}),
        (FEED, {"blocks": 11}),
        (FEED, {"blocks": 3, "slot_bytes": 512, "tile_rows": 4}),
        (FEED, {"handoff": HandOffKind.COUNTER, "sampling": Sampling.FULL}),
        (FEED, {"handoff": HandOffKind.GRID}),
        (replace(FEED, scoring=Scoring.SIGMOID, scaling=2.5), {"weight_dtype": DType.BF16}),
        (replace(FEED, experts=64, top_k=8, width=136), {"blocks": 40}),
    ],
    ids=str,
)
def test_experts_match_the_reference(feed: Any, chosen: dict[str, Any]) -> None:
    agree(checked(routed(feed), **({"slot_bytes": 1024} | chosen)))


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        (test_gpt_oss.model(), 5),
        (routed(replace(FEED, experts=64, top_k=8)), 40),
        (routed(replace(FEED, experts=36, scoring=Scoring.SIGMOID)), 7),
        (routed(replace(FEED, experts=300, top_k=8)), 9),  # threads take several logits
    ],
    ids=["biased", "64", "36", "300"],
)
def test_routers_of_own_rows_match_the_reference(
    spec: ModelSpec, blocks: int, dtype: DType
) -> None:
    agree(checked(spec, blocks=blocks, router_input=RouterInput.OWN, **typed(dtype)))


@pytest.mark.parametrize("width", [64, 384])
@pytest.mark.parametrize("name", ON_EVERY_DEVICE)
def test_experts_of_every_format_match_the_reference(name: str, width: int) -> None:
    agree(checked(test_coded_experts.model(name, width=width), blocks=5))


@pytest.mark.parametrize("handoff", HandOffKind)
@pytest.mark.parametrize("name", ["fp8", "fp8-128x128", "int8", "int4-g32-zp", "mxfp4", "nvfp4"])
def test_feed_forwards_too_wide_for_registers_match_the_reference(
    name: str, handoff: HandOffKind
) -> None:
    plan = checked(
        requantized(replace(WIDE, ffn=8448), format_named(name)),
        weight_dtype=DType.BF16,
        slot_bytes=1168,
        handoff=handoff,
    )
    assert schedule_of(plan).warps.ffn.in_memory
    agree(plan)


@pytest.mark.parametrize("handoff", HandOffKind)
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16, DType.FP32])
@pytest.mark.parametrize(
    "spec",
    [
        replace(WIDE, ffn=9216),
        routed(replace(FEED, width=2568)),  # more than registers hold
        routed(replace(FEED, width=2112)),  # a few slices at a time, all in registers
    ],
    ids=["dense", "experts", "narrower"],
)
def test_inputs_that_are_gathered_in_rounds_match_the_reference(
    spec: ModelSpec, dtype: DType, handoff: HandOffKind
) -> None:
    plan = checked(spec, slot_bytes=256 * dtype.bytes, blocks=5, handoff=handoff, **typed(dtype))
    warps = schedule_of(plan).warps
    assert warps.ffn.at_once < warps.teams["ffn"].portions
    agree(plan)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", ["fp8", "int8", "int4-g32", "mxfp4"])
def test_inputs_of_several_portions_match_the_reference(name: str, execution: Any) -> None:
    """Of threads that lack columns."""
    spec = replace(WIDE, hidden=1600, heads=200, kv_heads=40)
    plan = checked(
        requantized(spec, format_named(name)),
        weight_dtype=DType.BF16,
        slot_bytes=1168,
        execution=execution,
    )
    teams = schedule_of(plan).warps.teams
    assert min(teams["hidden"].portions, teams["heads"].portions) > 1
    assert not teams["hidden"].full
    agree(plan)


@pytest.mark.parametrize(
    ("name", "slot_bytes"), [("fp8", 4352), ("int8", 4352), ("int4-g32", 4736), ("mxfp4", 4352)]
)
def test_short_slices_behind_full_ones_match_the_reference(name: str, slot_bytes: int) -> None:
    """All threads have columns but some of the last slice."""
    spec = requantized(replace(WIDE, hidden=1600, ffn=2688), format_named(name))
    plan = checked(spec, weight_dtype=DType.BF16, slot_bytes=slot_bytes)
    teams = schedule_of(plan).warps.teams
    assert teams["hidden"].full
    assert teams["ffn"].full
    assert teams["ffn"].cols % teams["ffn"].tile
    agree(plan)


@pytest.mark.parametrize(("name", "width", "slot_bytes"), test_coded_experts.UNEVEN)
def test_slices_of_experts_match_the_reference(name: str, width: int, slot_bytes: int) -> None:
    spec = test_coded_experts.model(name, width=width)
    agree(checked(spec, blocks=5, slot_bytes=slot_bytes, weight_dtype=DType.BF16))


@pytest.mark.parametrize("handoff", HandOffKind)
@pytest.mark.parametrize(("name", "width", "slot_bytes"), test_coded_experts.ON_CHIP)
def test_experts_too_wide_for_registers_match_the_reference(
    name: str, width: int, slot_bytes: int, handoff: HandOffKind
) -> None:
    spec = test_coded_experts.model(name, width=width)
    chosen = {"blocks": 5, "slot_bytes": slot_bytes, "handoff": handoff}
    agree(checked(spec, weight_dtype=DType.BF16, **chosen))


@pytest.mark.parametrize(
    "chosen",
    [
        {"blocks": 5, "attention_splits": 2},
        {"blocks": 11, "weight_dtype": DType.BF16},
        {"handoff": HandOffKind.COUNTER, "sampling": Sampling.FULL},
        {"handoff": HandOffKind.GRID},
    ],
    ids=str,
)
def test_gpt_oss_matches_the_reference(chosen: dict[str, Any]) -> None:
    agree(checked(test_gpt_oss.model(), **({"slot_bytes": 1024} | chosen)))


@pytest.mark.parametrize("name", ["mxfp4", "fp8", "int4-g32"])
def test_gpt_oss_in_few_bits_matches_the_reference(name: str) -> None:
    spec = test_gpt_oss.model(replace(test_gpt_oss.FEED, width=64))
    wide = [replace(layer, mixer=replace(layer.mixer, head_dim=16)) for layer in spec.layout]
    spec = replace(spec, head_dim=16, layout=tuple(wide))
    agree(checked(requantized(spec, format_named(name)), blocks=5))
