"""The best plan: what a search promises, whatever it finds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.command_line import Twin
from tests.studies.scripts import loaded
from twin.cost.model_floor import model_bytes
from twin.errors import PlanError
from twin.plan.options import Options
from twin.study.optimise import (
    TIE,
    Found,
    Way,
    axes,
    found_by,
    search,
    searched,
    together,
    ways,
)
from twin.study.point import Point, Row
from twin.study.runner import Runner

SMALL = (("blocks", 4), ("context", 64))
RUN = loaded("best-plans/run.py")


@pytest.fixture(scope="module")
def dense(checkpoint: Path) -> Point:
    return Point(str(checkpoint), "4xh200", SMALL)


def found(point: Point, **how: bool) -> Found:
    return found_by(search(point, **how), Runner.inline(), "plans")


@pytest.fixture(scope="module")
def answer(dense: Point) -> Found:
    return found(dense)


def test_a_search_ends_within_one_percent_of_everything(dense: Point, answer: Found) -> None:
    best = found_by(RUN.everything(dense), Runner.inline(), "all").best
    assert answer.best.step_s <= best.step_s * 1.01


def test_the_best_plan_is_not_slower_than_default_options_and_simulates_as_it_is_ranked(
    dense: Point, answer: Found
) -> None:
    standard = answer.of(answer.standard)
    assert standard is not None
    assert answer.best.step_s <= standard.step_s * (1 + TIE)
    assert answer.best.whole
    (row,) = Runner.inline().rows([answer.best.way.of(dense)])
    assert row.step_s == answer.best.step_s


def test_what_is_named_stays_and_what_is_searched_is_not_named_twice(dense: Point) -> None:
    point = dense.with_options(residual="sliced")
    assert not searched(point)
    assert searched(dense)
    assert not searched(dataclasses.replace(dense, node="1xh200"))
    named = {name for axis in axes(point) for value in axis for name, _ in value}
    assert "residual" not in named
    answer = found(point)
    assert {dict(one.way.of(point).options)["residual"] for one in answer.ranking} == {"sliced"}
    assert all(one.only_simulated for one in answer.ranking)


def test_all_gpus_are_used_where_fewer_are_not_allowed(dense: Point) -> None:
    assert {one.way.gpus for one in found(dense, gpus=False).ranking} == {4}
    assert {way.gpus for way in ways(dense)} == {1, 2, 4}


def test_options_that_make_the_same_stages_are_not_tried_twice() -> None:
    """A dense model has nothing that ranks compute alike, and one GPU no groups of experts."""
    names = {
        n for axis in axes(Point("llama-3.2-1b", "8xh200")) for value in axis for n, _ in value
    }
    assert names == {"residual", "attention_splits", "split_positions"}
    names = {n for axis in axes(Point("gpt-oss-20b", "2xh200")) for value in axis for n, _ in value}
    assert {"common", "residual", "expert_ranks"} <= names
    names = {n for axis in axes(Point("gpt-oss-20b", "1xh200")) for value in axis for n, _ in value}
    assert "expert_ranks" not in names


class Alike(Runner):
    """Every plan takes the same time."""

    def rows(self, points: Sequence[Point], what: str = "points") -> list[Row]:
        return [Row(key=point.node, step_s=1e-3, step_times_s=(1e-3,)) for point in points]


def test_of_equal_plans_the_one_that_the_engine_runs_is_taken_with_the_fewest_options() -> None:
    runner = Alike(lambda batches: iter(()), workers=1, store=None, progress=lambda said: None)
    answer = found_by(search(Point("llama-3.2-1b", "8xh200")), runner, "plans")
    assert answer.best.way == Way(8)
    assert not answer.best.only_simulated


def test_a_model_without_any_plan_is_refused_as_its_default_plan_is() -> None:
    with pytest.raises(PlanError, match="too few"):
        found(Point("llama-3.1-405b", "2xh200"))


def test_searches_side_by_side_find_what_each_finds_and_a_mistake_stands_in_its_place(
    dense: Point, answer: Found
) -> None:
    hopeless = Point("llama-3.1-405b", "2xh200")
    found, mistake = together([search(dense), search(hopeless)], Runner.inline(), "plans")
    assert isinstance(found, Found)
    assert found.best == answer.best
    assert isinstance(mistake, PlanError)


def test_a_search_that_begins_with_the_best_plan_ends_with_it(dense: Point, answer: Found) -> None:
    again = found_by(search(dense, starts=[answer.best.way.options]), Runner.inline(), "plans")
    assert again.best.step_s <= answer.best.step_s * (1 + TIE)


@pytest.mark.few(4)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt-oss-20b", "qwen3-coder-next", "kimi-k2.6"])
def test_a_model_moves_no_more_than_its_plan(name: str, batch: int) -> None:
    """Tensor parallelism replicates, splits read again; nothing makes it less."""
    point = Point(name, "8xh200").with_options(context=4096, batch=batch, layers=8)
    plan = point.case().plan()
    assert plan.spec is not None
    assert 0 < model_bytes(plan.spec, plan.options) <= 1.001 * plan.bytes_per_step()


def test_the_floor_of_a_latent_cache_reads_it_once() -> None:
    """Kimi-K2.6 at 130k positions: its plan reads the cache once a rank."""
    point = Point("kimi-k2.6", "8xh200").with_options(context=131072, max_context=131072, layers=4)
    plan = point.case().plan()
    assert plan.spec is not None
    cached = plan.spec.traffic(131072, 2).read_bytes
    assert model_bytes(plan.spec, plan.options) < plan.bytes_per_step() - 6 * cached


def test_more_tokens_of_a_step_choose_more_experts_but_never_more_than_there_are() -> None:
    spec = Point("gpt-oss-20b", "1xh200").spec()

    def bytes_of(batch: int) -> float:
        return model_bytes(spec, Options(batch=batch, context=1))

    assert bytes_of(1) < bytes_of(2) < 2 * bytes_of(1)
    assert bytes_of(1000) < spec.stored_bytes + 1000 * bytes_of(1)


def test_the_command_says_what_is_best_what_binds_and_what_runs(
    twin: Twin, checkpoint: Path
) -> None:
    line = ("optimise", checkpoint, "2xh200", "--blocks", "8", "--workers", "1")
    said = twin(*line)
    assert said.code == 0, said.err
    assert {"plan", "binds", "floor"} <= {line.split("  ")[0] for line in said.out.splitlines()}
    assert "runs on" in said.out
    data = json.loads(twin(*line, "--json").out)
    assert data["plan"]["step_s"] == data["step_s"] == min(p["step_s"] for p in data["plans"][:1])
    assert data["model_floor_s"] <= data["floor_s"] <= data["step_s"]
    marked = [p for p in data["plans"] if p["options"].get("residual") == "sliced"]
    assert all("residual=sliced" in p["only_simulated"] for p in marked)


def test_simulate_takes_the_best_plan_and_a_fixed_one_where_that_is_named(
    twin: Twin, checkpoint: Path
) -> None:
    line = ("simulate", checkpoint, "2xh200", "--blocks", "8", "--json")
    best = json.loads(twin(*line).out)
    fixed = json.loads(twin(*line, "--plan", "fixed").out)
    named = json.loads(twin(*line, "--residual", "replicated").out)
    one = json.loads(twin("simulate", checkpoint, "1xh200", "--blocks", "8", "--json").out)
    assert best["chosen_plan"]["taken"] == "best"
    assert best["chosen_plan"]["step_s"] == best["step_s"] <= fixed["step_s"] * (1 + TIE)
    assert fixed["chosen_plan"] == named["chosen_plan"] == one["chosen_plan"] == {"taken": "fixed"}


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        ("fp9", ("fp9", "allowed")),
        ("fp8-128x128,,int4-g32", ("a name is empty",)),
        ("fp8-128x128,fp8-128x128", ("given twice",)),
    ],
)
def test_wrong_formats_are_refused_before_anything_is_simulated(
    twin: Twin, formats: str, words: tuple[str, ...]
) -> None:
    refused = twin("optimise", "llama-3.2-1b", "2xh200", "--formats", formats)
    assert refused.code == 2
    assert all(word in refused.err for word in words)
    assert "plans:" not in refused.err
