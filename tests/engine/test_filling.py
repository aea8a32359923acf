"""Streams of random weights are weights: every format's codes and scales lie where the kernel looks
for them, in all layers, blocks and experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from tests.engine import test_gpt_oss
from tests.engine.small_engine import SEED, TOKENS, engine, planned
from tests.engine.test_coded import coded
from tests.engine.test_coded_experts import model
from tests.engine.test_experts import routed
from tests.models.codes.names import ON_EVERY_DEVICE
from twin.engine.filling import DIFFERENT, _coded, coded_pieces
from twin.kernel.streams import PAGE_BYTES
from twin.kernel.tables import layout
from twin.models.formats import DECODED, UNIT_BYTES, format_named
from twin.models.quantized import requantized
from twin.plan.matrix import Matrix
from twin.plan.types import Plan


def spread(plan: Plan) -> float:
    """Of logits by streams of random weights, whose rows have length one."""
    with engine(plan) as running:
        before = running.logits(TOKENS)
        running.fill_random(SEED)
        logits = running.logits(TOKENS)
    assert np.isfinite(logits).all()
    assert not np.array_equal(before, logits)
    return float(logits.std())


def some(*names: str) -> list[ParameterSet]:
    """All formats; those that are not named are slow."""
    return [
        pytest.param(name, marks=() if name in names else pytest.mark.slow)
        for name in ON_EVERY_DEVICE
    ]


@pytest.mark.parametrize("name", ["fp8-128x128", "int4-g32-zp", "nvfp4"])
def test_rows_beyond_the_different_ones_repeat(name: str) -> None:
    """Expanding what is drawn is quick; an expert has tens of thousands of rows."""
    matrix = Matrix(2 * DIFFERENT + 3, 256, 1, 8, 256, (), DECODED[name])
    made = _coded(matrix, matrix.rows, np.random.default_rng(SEED))
    values = made.astype(np.float32)
    assert made.shape == (matrix.rows, matrix.cols)
    assert np.array_equal(values[:DIFFERENT], values[DIFFERENT : 2 * DIFFERENT])
    assert np.array_equal(values[:3], values[2 * DIFFERENT :])
    assert 0.9 < values.std() * 16 < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"gpus": 2, "blocks": 3}, {"slot_bytes": 1168}], ids=str)
@pytest.mark.parametrize("name", ON_EVERY_DEVICE)
def test_streams_of_other_plans_are_weights(name: str, more: dict[str, Any]) -> None:
    assert 0.01 < spread(coded(name, **more)) < 100


@pytest.mark.parametrize("name", some("fp8-128x128", "mxfp4"))
def test_dense_streams_are_weights(name: str) -> None:
    assert 0.01 < spread(coded(name)) < 100


@pytest.mark.parametrize("name", some("mxfp4"))
def test_streams_of_experts_are_weights(name: str) -> None:
    assert 0.01 < spread(planned(model(name), blocks=5, slot_bytes=4096)) < 100


@pytest.mark.slow
def test_streams_of_gpt_oss_are_weights() -> None:
    spec = requantized(test_gpt_oss.model(), format_named("mxfp4"))
    assert 0.01 < spread(planned(spec, blocks=5, slot_bytes=4096)) < 100


def test_pieces_fill_all_experts_and_no_byte_beyond() -> None:
    plan = planned(model("int8"), blocks=5, slot_bytes=4096)
    made = layout(plan)
    size = int(made.sizes["stream_pages"]) * PAGE_BYTES
    marks = np.zeros(size, np.uint8)
    for piece in coded_pieces(plan, SEED):
        assert piece.at + piece.size <= size
        assert not marks[piece.at : piece.at + piece.size].any()
        marks[piece.at : piece.at + piece.size] = 1
    for index, place in made.weights.experts.items():
        routed_stage = plan.stages[index].routed
        assert routed_stage
        at = place.page * PAGE_BYTES
        assert marks[at : at + routed_stage.experts * place.units * UNIT_BYTES].all()


def test_plain_weights_need_none() -> None:
    assert list(coded_pieces(planned(routed()), SEED)) == []
