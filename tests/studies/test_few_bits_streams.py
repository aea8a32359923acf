"""Streams of stored formats: what was predicted of them, told beside the read ceiling."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.studies.scripts import loaded
from twin.calibrate.drawn_kinds import FORMATS
from twin.calibrate.node import calibrated_node

FOLDER = Path(__file__).resolve().parents[2] / "studies" / "few-bits"


@pytest.fixture(scope="module")
def streams() -> ModuleType:
    return loaded("few-bits/streams.py")


@pytest.mark.parametrize("name", ["1xh200", "1xh100"])
def test_every_format_was_predicted_and_is_told_beside_the_ceiling(
    streams: ModuleType, name: str
) -> None:
    node = calibrated_node(name)
    said = json.loads((FOLDER / f"streamed-{node.name}.json").read_text(encoding="utf-8"))
    rows = said["rows"]
    assert {row.split()[0] for row in rows} == {"bf16", *FORMATS}
    rows = {**rows, "bf16 4096": {"predicted_us": 1000.0, "us": 500.0}}
    told = [line.split() for line in streams.table(node, rows, said["asked"]).splitlines()]
    plan = streams.plans(node, said["asked"])["bf16 4096"]
    part = streams.share(node, plan, 5e-4)
    assert ["bf16", "4,096", "1000.0", "500.0", f"{part:.2f}"] in told


def test_predictions_are_written_once_and_before_a_measurement(
    streams: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["streams.py", "1xh200", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", asked)
    assert streams.main() == 2
    assert "predict first" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*asked, "--predict", "--megabytes", "100"])
    assert streams.main() == 0
    assert "of the ceiling" in capsys.readouterr().out
    assert streams.main() == 2
    assert "written once" in capsys.readouterr().err


def test_a_format_streams_and_multiplies_on_this_computer(streams: ModuleType) -> None:
    node = calibrated_node("1xhost")
    assert streams.measured(node, streams.plan_of(node, "mxfp4", 4096, 0.5)) > 0
