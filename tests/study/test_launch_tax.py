"""Caps from launches, against arithmetic done by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from twin.errors import ConfigError
from twin.study.kinds import module_of, read_study
from twin.study.runner import Runner

HEAD = "kind: launch-tax\ntitle: t\nquestion: q\nprediction: p\n"
BODY = (
    "layers: 25\nkernels: [5, 10]\nlaunch_s: 4.5 us\ngoal_tokens_per_s: 3000\n"
    "devices: [mi300x, h200]\n"
)
PUBLISHED = "published:\n  - {kernels: 10, tokens_per_s: 890}\n"


def study(folder: Path, body: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(HEAD + body)
    return path


def test_the_published_caps_follow() -> None:
    tax = module_of("launch-tax").Tax(layers=25, launch_s=4.5e-6)
    assert tax.seconds(10) == pytest.approx(1125e-6)
    assert tax.cap(10) == pytest.approx(890, rel=0.002)
    assert tax.cap(5) == pytest.approx(1800, rel=0.015)
    assert tax.kernels_at(tax.cap(7)) == pytest.approx(7)


def test_caps_next_to_published_ones_and_each_device(tmp_path: Path) -> None:
    outcome = read_study(study(tmp_path, BODY + PUBLISHED)).body.run(Runner.inline())
    caps, devices = outcome.tables()
    assert [row[3] for row in caps.rows] == pytest.approx([1777.8, 888.9], abs=0.1)
    assert [row[4] for row in caps.rows] == [None, 890]
    assert [row[0] for row in devices.rows] == ["mi300x", "mi300x", "h200-sxm", "h200-sxm"]
    assert devices.rows[2][2] == pytest.approx(2.47e-6)


def test_launches_of_a_simulated_step(tmp_path: Path) -> None:
    outcome = read_study(
        study(tmp_path, BODY + "simulate:\n  - {model: llama-3.2-1b, node: 1xh200}\n")
    ).body.run(Runner.inline())
    rows = outcome.tables()[-1].rows
    launches = [row[4] for row in rows]
    assert launches == sorted(launches, reverse=True)
    assert launches[-1] == 0
    assert rows[-1][6] > rows[0][6]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (BODY.replace("[5, 10]", "[10, 5]"), "kernels: .*ascending"),
        (BODY.replace("4.5 us", "0 us"), "launch_s: '0 us' is out of range; give 1 ps"),
        (BODY.replace("4.5 us", "-1 us"), "launch_s: .*out of range"),
        (BODY.replace("h200", "h2000"), r"devices\[1\]: unknown device"),
        (BODY + "published:\n  - {kernels: 7, tokens_per_s: 1}\n", "7 is not among"),
        (BODY + "simulate:\n  - {model: nobody, node: 1xh200}\n", "is neither a model"),
        (BODY + "speed: 3\n", "speed: unknown key"),
    ],
)
def test_bad_studies_are_refused(tmp_path: Path, body: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_study(study(tmp_path, body))
