"""Plans with low-bit weights on the CPU engine: the numbers of the reference, from the same
dequantised weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.small_engine import LANED, LLAMA, QWEN2, SEED, TOKENS, error, expected, planned
from tests.models.codes.names import coded_names
from twin.engine.weights import random_weights
from twin.models.formats import BF16, INT8, Formats, Role, format_named
from twin.models.quantized import requantized
from twin.models.spec import DType, ModelSpec
from twin.plan.options import Execution, HandOffKind, Sampling
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.reference.step import Reference

ODD: dict[str, Any] = {"gpus": 2, "blocks": 3, "attention_splits": 2, "sampling": Sampling.FULL}
NARROW: dict[str, Any] = {"slot_bytes": 1168}  # several column slices
FEW = ("int4-g32-zp", "mxfp4", "nvfp4")


# ranks share whole blocks of 128 columns
WIDE = replace(LLAMA, name="wide", heads=32, kv_heads=16, ffn=512, hidden=256)


def coded(name: str, spec: ModelSpec = WIDE, **chosen: Any) -> Plan:
    plan = planned(requantized(spec, format_named(name)), **({"slot_bytes": 4096} | chosen))
    prove(plan)
    return plan


@pytest.mark.few(2)
@pytest.mark.parametrize("name", coded_names(()))
@pytest.mark.parametrize(
    "chosen",
    [{}, ODD, NARROW, {"execution": Execution.GRAPH}, {"handoff": HandOffKind.COUNTER}],
    ids=str,
)
def test_coded_plans_match_the_reference(name: str, chosen: dict[str, Any]) -> None:
    assert error(coded(name, **chosen)) < 1e-5


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["q4_1", "q8_0"])
@pytest.mark.parametrize("chosen", [{}, ODD, {"execution": Execution.GRAPH}], ids=str)
def test_blocks_of_gguf_match_the_reference(name: str, chosen: dict[str, Any]) -> None:
    """To what inputs of 16 bits leave."""
    assert error(coded(name, **({"slot_bytes": 32768} | chosen))) < 1e-4


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FEW)
def test_four_bits_in_column_slices_match_the_reference(name: str) -> None:
    assert error(coded(name, **NARROW)) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["int8", "mxfp4"])
@pytest.mark.usefixtures("as_users_compile")
def test_a_short_slice_behind_full_ones_matches_the_reference(name: str) -> None:
    plan = coded(name, replace(WIDE, hidden=1088, ffn=1344), slot_bytes=4352)
    assert {s.matrix.tile_cols for s in plan.stages if s.matrix and s.matrix.cols > 1024} == {512}
    assert error(plan) < 1e-5


def test_kinds_of_matrices_in_different_formats_match_the_reference() -> None:
    chosen = ((Role.ATTENTION, INT8), (Role.DENSE, format_named("int4-g64-zp")))
    mixed = planned(
        replace(WIDE, stored=Formats(BF16, chosen)), slot_bytes=4096, weight_dtype=DType.BF16
    )
    prove(mixed)
    assert error(mixed) < 1e-5


@pytest.mark.parametrize("spec", [QWEN2, replace(LANED, ffn=128)], ids=lambda s: s.name)
def test_families_match_the_reference(spec: ModelSpec) -> None:
    blocks = {"blocks": 4} if spec.lanes else {}
    assert error(coded("int8", spec, **blocks)) < 1e-5


@pytest.mark.parametrize("name", coded_names(()))
def test_the_reference_multiplies_the_weights_that_the_parts_mean(name: str) -> None:
    """The same plan without formats, on the decoded weights, gives the same numbers to rounding."""
    plan = coded(name)

    class Decoded:
        spec, dtype = WIDE, DType.FP32
        own = random_weights(plan.spec or WIDE, SEED, DType.FP32)

        def __getitem__(self, tensor: str) -> Any:
            return self.own[tensor]

    plain = Reference(planned(WIDE, slot_bytes=4096), Decoded())
    found = np.stack([plain.step(token).copy() for token in TOKENS])
    assert np.abs(found - expected(plan, TOKENS)).max() < 1e-5 * np.abs(found).max()


def test_embedding_norms_and_head_stay_in_the_weight_type() -> None:
    plan = coded("int8", weight_dtype=DType.BF16)
    named = {stage.kind.value: stage.matrix.format for stage in plan.stages if stage.matrix}
    assert named["lm_head"] is None
    assert {form.name for kind, form in named.items() if kind != "lm_head" and form} == {"int8"}
