"""Nodes that reach a speed: those without room are counted, and what ran stands next to it."""

from __future__ import annotations

from collections.abc import Sequence

from twin.study.fit_for import fit_for, on_record
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
