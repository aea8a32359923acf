"""Short models stand for deep ones: the time of a step grows with its layers, and a change of the
hardware changes both alike.
"""

from __future__ import annotations

import pytest

from twin.errors import ConfigError
from twin.models.depth import first_layers
from twin.models.load import load_model
from twin.study.depth import Depths, repeating, times
from twin.study.point import Point, compute
from twin.study.runner import Runner

# Few blocks make it cheap; Qwen3-30B-A3B routes experts, Qwen2.5 is dense.
POINTS = (
    Point("qwen2.5-coder-1.5b", "1xh200").with_options(blocks=8),
    Point("qwen3-30b-a3b", "1xh200").with_options(blocks=16),
)
CHANGES = (
    (),
    (("memory.stream", "x0.5"), ("kernel.stage", "x2")),
    (("handoff.hop", "x3"), ("clock", "x0.6")),
)


@pytest.mark.few(1)
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.model)
def test_extension_meets_the_full_simulation_within_a_percent(point: Point) -> None:
    points = [point.with_settings(*change) for change in CHANGES]
    runner = Runner.inline()
    whole, short = (times(points, runner, depths, "") for depths in (None, Depths(4, 8)))
    ratios = [
        (one.step_s / whole[0].step_s, other.step_s / short[0].step_s)
        for one, other in zip(whole, short, strict=True)
    ]
    for full, extended in ratios:
        assert extended == pytest.approx(full, rel=0.01)
    assert short[0].step_s == pytest.approx(whole[0].step_s, rel=0.02)


def test_a_model_that_is_no_deeper_is_simulated_whole() -> None:
    point = Point("laneformer-2b", "8xh200")
    assert Depths(4, 15).short(point) == (point,)
    assert len(Depths(4, 8).short(point)) == 2


@pytest.mark.parametrize(
    ("name", "depths"),
    [
        ("llama-3.1-70b", Depths(1, 2)),
        ("gpt-oss-120b", Depths(2, 4)),  # every other layer has a window
        ("gemma-3-1b", Depths(6, 12)),  # one layer in six has none
        ("deepseek-v3", Depths(4, 5)),  # its first three layers are dense
        ("qwen3-coder-next", Depths(4, 8)),
        ("laneformer-2b", None),
    ],
)
def test_what_repeats_is_found(name: str, depths: Depths | None) -> None:
    assert repeating(load_model(name)) == depths


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["qwen2.5-coder-1.5b", "gpt-oss-20b", "gemma-3-1b"])
def test_two_depths_tell_the_speed_of_all_layers(name: str) -> None:
    # blocks draw when the memory answers, in a deep model otherwise than twice in a short one
    point = Point(name, "1xh200").with_options(blocks=8).with_settings(("memory.jitter", "0 s"))
    depths = repeating(point.spec())
    assert depths
    whole, *short = compute([point, *depths.short(point)])
    assert depths.extended(point, tuple(short)) == pytest.approx(whole.step_s, rel=0.001)


def test_first_layers_keep_what_each_layer_is() -> None:
    spec = load_model("gpt-oss-20b")
    short = first_layers(spec, 4)
    assert [short.layer(i) for i in range(4)] == [spec.layer(i) for i in range(4)]
    assert short.end_weights() == spec.end_weights()
    with pytest.raises(ConfigError, match=r"layers=25: gpt-oss-20b has 24"):
        first_layers(spec, 25)
