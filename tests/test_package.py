"""What is installed without a checkout can do what a checkout can."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_a_wheel_carries_every_data_folder_and_every_study_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    carried = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert carried == {name: f"twin/_data/{name}" for name in carried}
    studies = {f"studies/{file.parent.name}" for file in ROOT.glob("studies/*/study.yaml")}
    assert set(carried) == {"hwmodels", "native", "calibration/fits"} | studies


def test_what_others_made_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["license-files"] == ["LICENSE", "NOTICE"]
    assert "Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES" in (ROOT / "NOTICE").read_text()
