"""A slice of `python -m tests.server.fuzz`: whatever is sent, answers are whole and valid, and
streams go on. How long they wait is measured by that command, on a quiet computer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.draws import scaled
from tests.server import fuzz

SEED = 1


def test_whatever_is_sent_answers_are_valid_and_streams_go_on(tmp_path: Path) -> None:
    outcomes, defects, streams = fuzz.run(
        range(scaled(50)), SEED, clients=4, readers=1, log=tmp_path / "log"
    )
    assert not defects, "\n".join(defects)
    assert streams.count
    kinds = {outcome.partition(" ")[0] for outcome in outcomes}
    assert len(kinds) > 8, "the fuzzer has lost its edge"
    assert {"whole 200", "whole 400"} <= {*outcomes}


@pytest.mark.slow
def test_whatever_schemas_and_tools_are_sent_time_and_memory_are_bounded(tmp_path: Path) -> None:
    outcomes, defects, streams = fuzz.run(
        range(5000), SEED, clients=6, readers=1, log=tmp_path / "log", only="constrained"
    )
    assert not defects, "\n".join(defects)
    assert streams.count
    assert {"constrained 200", "constrained 400"} <= {*outcomes}


@pytest.mark.parametrize(
    "said",
    [
        b'data: {"choices": [{"index": 0, "finish_reason": null}]}\n\ndata: [DONE]\n\n',
        b'data: {"choices": [{"index": 0, "finish_reason": "stop"}]}\n\n',
        b"data: {\n\ndata: [DONE]\n\n",
        b'{"error": {}}',
    ],
)
def test_the_fuzzer_sees_a_stream_that_is_not_whole(said: bytes) -> None:
    with pytest.raises(fuzz.Defect):
        fuzz.check(fuzz.Answer(200, "text/event-stream", said))


@pytest.mark.parametrize(
    "found",
    [
        fuzz.Answer(500, "application/json", b"{}"),
        fuzz.Answer(400, "text/plain", b"Bad Request"),
        fuzz.Answer(400, "application/json", b'{"error": "x"}'),
        fuzz.Answer(200, "application/json", b"{"),
    ],
)
def test_the_fuzzer_sees_an_answer_that_is_not_valid(found: fuzz.Answer) -> None:
    with pytest.raises(fuzz.Defect):
        fuzz.check(found)
