"""Prompts of models with experts in passes: what token by token gives.

    pytest tests/engine/test_routed_prompts.py -m gpu

runs all of it that an NVIDIA GPU has to show.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.small_engine import SEED, engine, planned, sanitized
from tests.engine.test_coded_experts import coded
from tests.engine.test_experts import FEED, Tied, routed
from tests.engine.test_gpt_oss import model as gpt_oss
from tests.engine.test_prompt_chunks import CHUNK, LENGTHS, PROMPT, error, error_after
from tests.models.codes.names import coded_names
from tests.native.test_warps import build_warps
from twin.engine import host
from twin.engine.host import HostEngine
from twin.engine.weights import random_weights
from twin.models.feeds import Scoring
from twin.models.spec import DType, ModelSpec
from twin.plan.types import (
    CollectiveKind,
    Common,
    Execution,
    HandOffKind,
    Plan,
    Sampling,
)
from twin.proof.prove import prove
from twin.reference.step import Reference

FEW = ("int4-g32-zp", "mxfp4", "nvfp4")


def mixtral() -> ModelSpec:
    spec = routed(replace(FEED, top_k=2))
    layout = [replace(one, mixer=replace(one.mixer, qk_norm=False)) for one in spec.layout]
    return replace(spec, name="mixtral", family="mixtral", qk_norm=False, layout=tuple(layout))


FAMILIES = {"qwen3_moe": routed(), "mixtral": mixtral(), "gpt_oss": gpt_oss()}


def chunked(spec: ModelSpec, **chosen: Any) -> Plan:
    plan = planned(spec, **({"prompt_chunk": CHUNK} | chosen))
    prove(plan)
    assert plan.options.prompt_chunk > 1
    return plan


# ---- on a CPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_passes_fill_the_cache_as_steps_do(name: str) -> None:
    """Prompts shorter than a pass, as long as one or several, and longer."""
    assert error(chunked(FAMILIES[name]), LENGTHS) < 1e-5


PLANS: list[dict[str, Any]] = [
    {"blocks": 5, "attention_splits": 2},
    {"blocks": 11},  # more than experts: some blocks have no rows of the router
    {"blocks": 3, "slot_bytes": 256, "tile_rows": 4},
    {"gpus": 2, "blocks": 3},
    {"gpus": 4, "blocks": 1, "handoff": HandOffKind.GRID},  # the last rank scores no expert
    {"gpus": 2, "common": Common.REPLICATED, "sampling": Sampling.FULL},
    {"handoff": HandOffKind.COUNTER, "sampling": Sampling.FULL, "prompt_chunk": 3},
    {"execution": Execution.GRAPH, "prompt_chunk": 64},
    {"gpus": 2, "execution": Execution.LAUNCHES, "collective": CollectiveKind.LIBRARY},
]


@pytest.mark.usefixtures("compiled_faster")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "more", PLANS, ids=lambda v: "-".join(str(getattr(x, "value", x)) for x in v.values())
)
def test_passes_do_not_depend_on_the_plan(more: dict[str, Any], name: str) -> None:
    assert error(chunked(FAMILIES[name], **more), (20,)) < 1e-5


@pytest.mark.parametrize("name", coded_names(FEW))
def test_experts_of_few_bits_are_read_in_passes(name: str) -> None:
    plan = coded(name, prompt_chunk=CHUNK, blocks=5)
    assert plan.options.prompt_chunk == CHUNK
    assert error(plan, (5, 20)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"width": 272, "blocks": 5, "slot_bytes": 2320},  # column slices; groups of fewer rows
        {"width": 136, "gpus": 2, "blocks": 3},  # the last rank's rows are filled up
        {"weight_dtype": DType.BF16, "blocks": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_tiles_of_few_bits_are_found_wherever_they_lie(name: str, more: dict[str, Any]) -> None:
    assert error(coded(name, prompt_chunk=CHUNK, **more), (20,)) < 1e-5


def test_layers_without_experts_stand_between() -> None:
    assert error(chunked(routed(dense=(0, 2)), gpus=2), (20,)) < 1e-5


@pytest.mark.slow  # each is a build of its own
@pytest.mark.parametrize(
    "feed",
    [
        replace(FEED, renormalise=False),
        replace(FEED, scoring=Scoring.SIGMOID, scaling=2.5),
        replace(FEED, experts=1, top_k=1),
        replace(FEED, top_k=6),
        replace(FEED, width=136),
    ],
    ids=str,
)
def test_every_way_of_weighing_is_that_of_steps(feed: Any) -> None:
    assert error(chunked(routed(feed), blocks=3), (20,)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_stored_types(dtype: DType) -> None:
    # the cache's rounding is FP32's
    assert error(chunked(gpt_oss(), weight_dtype=dtype), (20,)) < 1e-5


@pytest.mark.parametrize("other", [0, 4])
def test_experts_that_nobody_or_everybody_chooses(other: int) -> None:
    """Ties go to the lowest numbers, in a pass as in a step: the last experts have no tokens."""
    plan = chunked(routed(), blocks=4)
    weights = Tied(routed(), other)
    reference = Reference(plan, weights)
    wanted = np.stack([reference.step(token).copy() for token in PROMPT[:42]])
    with HostEngine(plan, weights) as running:
        assert error_after(running, wanted, (20, 40), PROMPT) < 1e-5


def test_a_router_without_numbers_ends_the_run_with_a_message() -> None:
    with (
        HostEngine(chunked(routed()), Tied(routed(), 1, float("inf"))) as running,
        pytest.raises(Exception, match="logit"),
    ):
        running.generate(PROMPT[:20], max_tokens=3)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_run_gives_the_same_bits_and_the_references_tokens(name: str) -> None:
    spec = FAMILIES[name]
    plan = chunked(spec, blocks=4)
    weights = random_weights(spec, SEED, DType.FP32)
    with engine(plan) as running:
        made = [running.generate(PROMPT[:20], max_tokens=8) for _ in range(3)]
        logits = [running.logits(PROMPT[33:35], after=PROMPT[:33]) for _ in range(2)]
    assert {len(one.pass_ns) for one in made} == {2}
    wanted = Reference(plan, weights).generate(PROMPT[:20], 8)
    assert all(one.tokens == wanted for one in made)
    assert np.array_equal(*logits)


def test_what_an_earlier_request_left_is_kept() -> None:
    plan = chunked(gpt_oss(), prompt_chunk=4)
    with engine(plan) as fresh, engine(plan) as running:
        first = running.generate(PROMPT[:14], max_tokens=6, reuse=True)
        second = [*PROMPT[:14], *first.tokens, 7, 8, 9, 10, 11, 12]
        again = running.generate(second, max_tokens=6, reuse=True)
        assert again.kept == 14 + len(first.tokens) - 1
        assert again.tokens == fresh.generate(second, max_tokens=6).tokens
        assert len(again.pass_ns) == 2


@pytest.mark.parametrize(
    ("name", "more"),
    [("qwen3_moe", {"gpus": 2}), pytest.param("gpt_oss", {"blocks": 3}, marks=pytest.mark.slow)],
)
def test_blocks_of_many_warps_and_threads(
    name: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "build_host", build_warps)
    plan = chunked(FAMILIES[name], slot_bytes=512, prompt_chunk=4, **more)
    assert error(plan, (6,)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitize: str) -> None:
    script = (
        "from tests.engine.test_routed_prompts import *\n"
        "for name, more in (('qwen3_moe', {'gpus': 2}), ('gpt_oss', {'blocks': 5})):\n"
        "    with engine(chunked(FAMILIES[name], **more), sanitize=SANITIZE) as e:\n"
        "        e.generate(PROMPT[:20], max_tokens=2)\n"
        "print('clean')\n"
    )
    sanitized(script, sanitize, timeout_s=300)
