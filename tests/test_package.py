"""What is installed without a checkout can do what a checkout can."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_a_wheel_carries_every_data_folder_and_every_study_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    carried = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert carried == {name: f"twin/_data/{name}" for name in carried}
    studies = {f"studies/{file.parent.name}" for file in ROOT.glob("studies/*/study.yaml")}
    fits = {name for name in carried if name.startswith("calibration/")}
    assert set(carried) == {"hwmodels", "native"} | fits | studies


def test_a_wheel_carries_every_fit_on_file_and_its_errors_but_not_its_computer_s_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    carried = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"])
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"calibration/fits/host.yaml", "calibration/held-out/host.yaml"} <= set(ignored)
    fits = {
        f"calibration/{folder}/{file.name}"
        for folder in ("fits", "held-out")
        for file in (ROOT / "calibration" / folder).iterdir()
    }
    # what runs on record came to, and the kernels that records ran
    fits |= {"calibration/measured.csv", "calibration/kernels.csv"}
    kernels = ROOT / "calibration" / "kernels"  # a folder of each that was probed, one of people's
    fits |= {"calibration/kernels/README.md", "calibration/kernels/stated"}
    fits |= {
        f"calibration/{file.relative_to(kernels.parent)}"
        for file in kernels.glob("*/*.yaml")
        if file.parent.name != "stated"
    }
    assert {name for name in carried if name.startswith("calibration")} == fits - set(ignored)


def test_what_is_advised_to_be_installed_is_published_under_that_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [one for extra in project["optional-dependencies"].values() for one in extra]
    packages = {re.split(r"[<>=\[;]", one)[0] for one in wanted}
    for file in sorted((ROOT / "twin").rglob("*.py")):
        for advised in re.findall(r"pip install ([\w \"'\[\].-]+)", file.read_text()):
            assert set(advised.strip("\"'").split()) <= packages, f"{file}: {advised}"


def test_what_others_made_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["license-files"] == ["LICENSE", "NOTICE"]
    assert "Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES" in (ROOT / "NOTICE").read_text()
