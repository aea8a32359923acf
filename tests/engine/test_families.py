"""What families do otherwise than Llama: the kernel's numbers are the reference's, whatever the
plan, and the proof knows their reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.families import AROUND, FACTORS, TOGETHER, TURNED
from tests.engine.small_engine import engine, expected
from tests.engine.test_host_engine import error, planned
from tests.engine.test_prompt_chunks import PROMPT as PASSED
from tests.engine.test_prompt_chunks import error_after
from tests.native.test_warps import build_warps
from twin.engine import host
from twin.errors import InvalidPlan, PlanError
from twin.kernel.header import header
from twin.models.spec import ModelSpec
from twin.plan.catalogue import StageKind
from twin.plan.options import Execution, HandOffKind, Sampling
from twin.plan.types import Parts, Plan, Read, Stage
from twin.proof.prove import prove


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        (AROUND, {"blocks": 3, "attention_splits": 2}),
        (AROUND, {"gpus": 2, "handoff": HandOffKind.COUNTER, "sampling": Sampling.FULL}),
        (AROUND, {"gpus": 4, "blocks": 1, "handoff": HandOffKind.GRID}),
        (AROUND, {"gpus": 2, "execution": Execution.GRAPH}),
        (TOGETHER, {"blocks": 3, "attention_splits": 2}),
        # more than items: some blocks read no heads
        (TOGETHER, {"blocks": 12, "handoff": HandOffKind.COUNTER}),
        (TOGETHER, {"handoff": HandOffKind.GRID, "sampling": Sampling.FULL}),
        (TOGETHER, {"execution": Execution.GRAPH}),
        (FACTORS, {"gpus": 2, "blocks": 3}),
        (TURNED, {"gpus": 2, "blocks": 3, "attention_splits": 2}),
    ],
    ids=lambda v: (
        getattr(v, "name", None) or "-".join(str(getattr(x, "value", x)) for x in v.values())
    ),
)
def test_logits_do_not_depend_on_the_plan(spec: ModelSpec, chosen: dict[str, Any]) -> None:
    plan = planned(spec, **chosen)
    prove(plan)
    assert error(plan) < 1e-5


@pytest.mark.slow  # of others in the gate: tests/native/test_warps.py
@pytest.mark.parametrize("spec", [AROUND, TOGETHER], ids=lambda s: s.name)
def test_blocks_of_many_warps_and_threads(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "build_host", build_warps)
    # every row costs three barriers of threads
    small = replace(spec, layers=2, windows=(0, 5), ffn=64, ropes=spec.ropes[1:])
    assert error(planned(small, slot_bytes=512)) < 1e-5


# ---- passes --------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("spec", [AROUND, TOGETHER, FACTORS, TURNED], ids=lambda s: s.name)
@pytest.mark.parametrize("chosen", [{}, {"blocks": 3, "attention_splits": 2}], ids=["", "3"])
def test_passes_fill_the_cache_as_steps_do(spec: ModelSpec, chosen: dict[str, Any]) -> None:
    plan = planned(spec, prompt_chunk=16, **chosen)
    assert plan.options.prompt_chunk == 16
    wanted = expected(plan, PASSED)
    with engine(plan) as running:
        assert error_after(running, wanted, (1, 15, 16, 17, 33), PASSED) < 1e-5


@pytest.mark.parametrize("gpus", [2, 4])
def test_parts_of_ranks_are_added_up_before_they_are_normed(gpus: int) -> None:
    plan = planned(AROUND, prompt_chunk=16, gpus=gpus, blocks=2)
    with engine(plan) as running:
        assert error_after(running, expected(plan, PASSED), (20,), PASSED) < 1e-5


# ---- the header ----------------------------------------------------------------------------------


def test_what_llama_does_not_use_is_a_constant() -> None:
    text = header(planned())
    for line in ("NORMS_AFTER = false", "post_norm = -1", "rope = -1"):
        assert f"static constexpr {'bool' if 'NORMS' in line else 'int'} {line};" in text


@pytest.mark.parametrize(
    ("spec", "says", "fields"),
    [
        (
            AROUND,
            (
                "GATE = Gate::GELU",
                "NORMS_AFTER = true",
                "ROPE_BY_LAYER = true",
                "SCORE_CAP = 1.5f",
                "LOGIT_CAP = 2.5f",
            ),
            "post_norm rope",
        ),
        (
            TOGETHER,
            ("NORMS_BEFORE = false", "QK_NORMED_TOGETHER = true", "SCORE = 0.0f"),
            "post_norm",
        ),
        (FACTORS, ("EMBEDDING = 12.0f", "NORMS_AFTER = false"), ""),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_the_header_of_a_family_says_what_it_does(
    spec: ModelSpec, says: tuple[str, ...], fields: str
) -> None:
    text = header(planned(spec))
    assert all(one in text for one in says)
    stage = (
        text.partition("struct Stage {")[2]
        .partition("static")[0]
        .replace("int ", "")
        .replace(";", "")
        .split()
    )
    assert stage[stage.index("next") + 1 :] == fields.split()


# ---- the proof -----------------------------------------------------------------------------------


def changed(
    plan: Plan, kind: StageKind, change: Callable[[tuple[Read, ...]], tuple[Read, ...]]
) -> Plan:
    """The plan with the reads of the last stage of a kind changed."""
    stage: Stage = [s for s in plan.stages if s.kind is kind][-1]
    made = replace(stage, reads=change(stage.reads))
    return replace(plan, stages=tuple(made if s is stage else s for s in plan.stages))


@pytest.mark.parametrize(
    "change",
    [
        lambda reads: reads[:1],  # nobody awaits the heads whose squares are summed
        lambda reads: (
            reads[0],
            replace(
                reads[1],
                spans=tuple(tuple((lo, hi - 8) for lo, hi in spans) for spans in reads[1].spans),
            ),
        ),
        lambda reads: (reads[1], reads[1]),
    ],
)
def test_heads_that_are_normed_together_are_all_awaited(
    change: Callable[[tuple[Read, ...]], tuple[Read, ...]],
) -> None:
    plan = planned(TOGETHER)
    prove(plan)
    with pytest.raises(InvalidPlan, match=r"attention|qkv"):
        prove(changed(plan, StageKind.ATTENTION, change))


def test_what_a_module_adds_has_the_familys_factor() -> None:
    plan = planned(FACTORS)
    assert {read.scale for stage in plan.stages for read in stage.reads if read.residual} == {0.22}
    with pytest.raises(InvalidPlan, match=r"scale=1\.0, not 0\.22"):
        prove(changed(plan, StageKind.GATE_UP, lambda reads: (replace(reads[0], scale=1.0),)))
    with pytest.raises(InvalidPlan, match=r"scale=0\.5, not 1\.0"):
        prove(changed(planned(), StageKind.GATE_UP, lambda reads: (replace(reads[0], scale=0.5),)))


def test_ranks_do_not_divide_what_is_normed_together() -> None:
    with pytest.raises(
        PlanError,
        match="q and k are normed over all heads, which 2 ranks would divide: use one GPU",
    ):
        planned(TOGETHER, gpus=2)
    assert all(
        read.parts is Parts.OWN
        for s in planned(TOGETHER).stages
        if s.kind is StageKind.ATTENTION
        for read in s.reads
    )
