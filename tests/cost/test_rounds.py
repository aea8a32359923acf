"""Rounds with drafts as the twin predicts them: next to what was measured, and laws that hold."""

from __future__ import annotations

import csv
import statistics
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.small_engine import LLAMA, TOKENS, engine, planned
from tests.engine.test_routed_prompts import FAMILIES
from twin.calibrate.node import calibrated_node
from twin.cost import rounds
from twin.cost.acceptance import (
    Acceptance,
    acceptance_for,
    curves,
    expected_tokens,
    read_acceptance,
)
from twin.cost.drafting import Drafter, drafted, drafting_s, read_drafter
from twin.cost.rounds import round_passes, round_time
from twin.engine.generation import Drafting
from twin.errors import ConfigError, PlanError
from twin.kernel.tables import layout
from twin.models.load import load_model
from twin.models.spec import ModelSpec
from twin.plan.types import Plan
from twin.schedule.block import LINE_FLOATS
from twin.schedule.options import plan_for
from twin.schedule.passes import ROUND_MEETINGS

MEASURED = Path(__file__).resolve().parents[2] / "studies" / "several-tokens" / "rows.csv"
MOST = 7
NODE = "1xh200"


@lru_cache
def plan_of(name: str, lookup: int = MOST) -> Plan:
    node = calibrated_node(NODE)
    return plan_for(load_model(name), node, context=160, max_context=5000, lookup=lookup)


@pytest.mark.parametrize("products", ["by the ring", "by hand-offs"])
def test_measured_rounds_are_explained(products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the law's numbers is fitted where blocks meet (few_bytes_per_cycle), none where they
    hand numbers on.
    """
    monkeypatch.setattr(rounds, "handed_on", lambda made: products == "by hand-offs")
    node, errors = calibrated_node(NODE), []
    with MEASURED.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["products"] != products:
                continue
            context, tokens = int(row["after"]), int(row["tokens"])
            made = round_time(plan_of(row["model"]), node, context=context, tokens=tokens)
            errors.append(abs(made.seconds * 1e6 / float(row["us"]) - 1))
    assert statistics.median(errors) < 0.03
    assert max(errors) < 0.06


def test_wider_and_later_rounds_are_never_faster() -> None:
    node, plan = calibrated_node(NODE), plan_of("llama-3.2-1b")
    seconds = [
        [round_time(plan, node, context=at, tokens=n).seconds for n in range(1, MOST + 2)]
        for at in (0, 32, 4096)
    ]
    assert all(row == sorted(row) for row in seconds)
    assert seconds[0][0] <= seconds[1][0] < seconds[2][0]
    floor = round_time(plan, node, context=32, tokens=1).floor_s
    assert seconds[0][0] > floor > 0
    with pytest.raises(PlanError, match="a round of 9"):
        round_time(plan, node, context=4992, tokens=9)


@pytest.mark.parametrize("spec", [LLAMA, FAMILIES["qwen3_moe"]], ids=lambda s: s.name)
def test_blocks_meet_as_often_as_the_schedule_says(spec: ModelSpec) -> None:
    """By the counter of the kernel's barrier, behind rounds of a generation without a prompt."""
    plan = planned(spec, prompt_chunk=16, lookup=3)
    made = layout(plan)
    stages = (one.stage for one in round_passes(plan).rounds)
    meetings = sum(made.schedule.of_passes().meetings(stage) for stage in stages)
    with engine(plan) as running:
        found = running.generate(TOKENS, max_tokens=9, drafting=Drafting(accepted=3.0))
        at = int(made.sizes["round_counter"]) * LINE_FLOATS
        arrivals = int(running._memory._counts[0][at])
    # behind the last round the one that says that there is none
    expected = len(found.round_ns) * (meetings + ROUND_MEETINGS) + 1
    assert arrivals == expected * plan.blocks


def test_curves_are_what_rounds_can_yield() -> None:
    for name, curve in curves().items():
        assert Drafter(curve.drafter)
        yields = [Acceptance(name=name).tokens(drafts) for drafts in range(9)]
        assert all(1 <= made <= drafts + 1 for drafts, made in enumerate(yields))
    assert curves()["qwen3.5-mtp"].of_drafts(2) == 2.73
    only = curves()["qwen3-8b-eagle3"]
    assert only.of_drafts(7) == 3.80
    assert only.of_drafts(3) == pytest.approx(2.82, abs=0.01)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.85, 1.0])
def test_an_acceptance_is_found_by_its_tokens(rate: float) -> None:
    for drafts in (1, 4, 7):
        found = acceptance_for(expected_tokens(rate, drafts), drafts)
        assert found == pytest.approx(rate, abs=1e-6)


def test_what_no_curve_or_drafter_is_called_is_refused() -> None:
    for text, says in (("1.5", "probability"), ("nan", "probability"), ("qwen", "a curve of")):
        with pytest.raises(ConfigError, match=says):
            read_acceptance(text)
    for text in ("eagle3", "eagle3:0", "eagle3:8", "medusa:3", "mtp:x"):
        with pytest.raises(ConfigError, match="a colon and how many"):
            read_drafter(text)
    assert read_drafter("mtp:2") == (Drafter.MTP, 2)


def test_drafts_gain_from_their_break_even_on() -> None:
    node, plan = calibrated_node(NODE), plan_of("llama-3.2-1b")
    step_s = 590e-6
    one = drafted(plan, node, Drafter.EAGLE3, Acceptance(0.5), step_s=step_s, drafts=5)
    assert one.break_even is not None
    for rate, gains in ((one.break_even + 0.01, True), (one.break_even - 0.01, False)):
        again = drafted(plan, node, Drafter.EAGLE3, Acceptance(rate), step_s=step_s, drafts=5)
        assert (again.tokens_per_s > 1 / step_s) is gains
    none = drafted(plan, node, Drafter.EAGLE3, Acceptance(0.5), step_s=step_s, drafts=0)
    assert none.tokens_per_s == pytest.approx(1 / step_s)


@pytest.mark.parametrize("drafter", [Drafter.MTP, Drafter.EAGLE3])
def test_each_draft_takes_its_time(drafter: Drafter) -> None:
    """A draft streams its layer and an LM head; hundreds of layers take longer."""
    node, plan = calibrated_node(NODE), plan_of("llama-3.2-1b")
    whole = round_time(plan, node, context=100, tokens=1).seconds
    times = [drafting_s(plan, node, drafter, drafts=n, accepted=1.0) for n in range(4)]
    each = [b - a for a, b in pairwise(times)]
    assert times[0] == 0
    assert all(0 < one < whole / 2 for one in each)
    assert each[1] == pytest.approx(each[2])
    assert drafting_s(plan, node, Drafter.LOOKUP, drafts=3, accepted=1.0) == 0


def test_models_that_no_engine_drafts_for_are_predicted_all_the_same() -> None:
    node = calibrated_node(NODE)
    for name in ("gpt-oss-20b", "qwen3.6-35b-a3b"):
        plan = plan_for(load_model(name), node, context=160, max_context=1000)
        one, two = (round_time(plan, node, context=100, tokens=n) for n in (1, 3))
        assert two.weight_bytes > one.weight_bytes  # distinct experts
        assert two.seconds > one.seconds
        assert drafting_s(plan, node, Drafter.MTP, drafts=2, accepted=2.7) > 0
