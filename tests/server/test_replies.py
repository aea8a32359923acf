"""Streams count every token, also those whose text came later or never."""

from __future__ import annotations

import json

import numpy as np

from twin.engine.generate import Completion, Request, Stop
from twin.engine.generation import Generation
from twin.server.expected import Expectation, Expected
from twin.server.job import Ended, Text
from twin.server.metrics import Histogram
from twin.server.replies import Reply


def parsed(stream: bytes) -> list[dict[str, object]]:
    return [
        json.loads(part.removeprefix("data: ")) for part in stream.decode().split("\n\n") if part
    ]


def test_tokens_without_text_are_counted_with_the_next_text() -> None:
    reply = Reply(chat=False, model="m", fingerprint="f", requests=[Request([1], 5)])
    assert reply.text_chunks([Text(0, "", 1), Text(0, "", 1)]) == b""
    (chunk,) = parsed(reply.text_chunks([Text(0, "é", 1), Text(0, "", 1)]))
    assert chunk["tokens"] == 4
    made = Generation([1] * 5, np.full(5, 1000), 500, "length")
    assert reply.text_chunks([Text(0, "", 1)]) == b""
    (end,) = parsed(reply.end_chunk(Ended(0, Completion("é", Stop.LENGTH, made), 5, 0.0)))
    assert end["tokens"] == 1


def test_a_histogram_adds_up() -> None:
    one, many = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    values = np.array([0.5, 1.0, 1.5, 9.0])
    for value in values:
        one.add(float(value))
    many.add_all(values)
    assert one == many
    lines = [*one.lines("x", 'm="t"')]
    assert lines[:3] == [
        'x_bucket{m="t",le="1.0"} 2',
        'x_bucket{m="t",le="2.0"} 3',
        'x_bucket{m="t",le="+Inf"} 4',
    ]


def test_measured_and_predicted_part_only_beyond_the_interval() -> None:
    expectation = Expectation()
    expectation.measured(np.full(100, 0.001), 50)
    assert expectation.parted is None, "nothing was predicted yet"
    expectation.expected = Expected(0.001, 0.002, 100, 0.9, 1.1)
    for step_s, parted in ((0.0015, False), (0.0013, True), (0.0018, True)):
        expectation.measured(np.full(100, step_s), 50)
        assert expectation.parted is parted
    assert expectation.gauges()["monotwin:prediction_parted"][0] == 1
    assert expectation.partings == 2
    expectation.measured(np.full(3, 1.0), 50)
    assert expectation.rate > 500, "three tokens say nothing"
    expectation.expected = Expected(0.001, 0.002, 100)
    assert expectation.parted is None, "no interval is on file"
