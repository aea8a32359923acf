"""Nodes that reach a speed: those without room are counted, and what ran stands next to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from twin.study.fit_for import Fit, fit_for, on_record
from twin.study.optimise import TIE
from twin.study.point import Point, Row
from twin.study.runner import Runner


class NoRoom(Runner):
    """Every node answers as for a model that it does not hold."""

    def rows(self, points: Sequence[Point], what: str = "points") -> list[Row]:
        return [Row(key=point.node, problem="no room") for point in points]


def test_nodes_without_room_are_counted() -> None:
    runner = NoRoom(lambda batches: iter(()), workers=1, store=None, progress=lambda said: None)
    found = fit_for("llama-3.1-70b", 30.0, (), runner, draws=0)
    assert not found.fits
    assert found.missed["have no plan or no room"] > 40


def test_a_row_with_a_problem_has_no_speed() -> None:
    row = Row("key", problem="no room")
    assert (row.tokens_per_s, row.total_tokens_per_s, row.stream_fraction) == (0.0, 0.0, 0.0)


def test_a_run_on_record_stands_next_to_its_prediction() -> None:
    """GPT-OSS-20B on an H100 ran at 592 tokens/s, where nine of ten were predicted above 602."""
    assert on_record(Point("gpt-oss-20b", "1xh100")) == 592.1
    assert on_record(Point("gpt-oss-20b", "1xh100", (("handoff", "grid"),))) is None
    assert (
        on_record(Point("gpt-oss-20b", "1xh100", (("context", 60000), ("max_context", 60100))))
        is None
    )
    assert on_record(Point("gpt-oss-20b", "1xmi300x")) is None


@pytest.mark.slow
def test_the_best_plan_of_a_node_is_taken_where_default_options_do_not_reach_the_speed(
    checkpoint: Path,
) -> None:
    """The same nodes by default options, by the best plans, and by these where they may decide."""
    runner, options = Runner.inline(), (("blocks", 8), ("context", 64))
    (two,) = runner.rows([Point(str(checkpoint), "2xh200", options)])

    def speeds(plans: bool | None) -> dict[str, Fit]:
        found = fit_for(
            str(checkpoint), two.tokens_per_s, options, runner, draws=0, every=True, plans=plans
        )
        return {fit.node: fit for fit in found.fits}

    fixed, best, usual = speeds(False), speeds(True), speeds(None)
    assert not any(fit.plan for fit in fixed.values())
    assert fixed.keys() <= usual.keys() <= best.keys()
    for node, fit in fixed.items():
        assert best[node].tokens_per_s >= fit.tokens_per_s * (1 - TIE)
        assert usual[node] == fit, "it reaches the speed"
