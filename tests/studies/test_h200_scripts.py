"""The H200 studies' scripts run from end to end on this computer's CPU, with small stand-ins; a GPU
machine runs them unchanged.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ON_GPU = {"ml_dtypes", "msgspec", "numpy", "pyyaml", "tokenizers"}


def script(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "studies" / name, *words]
    return subprocess.run(
        [str(w) for w in command],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=ROOT,
    )


@pytest.mark.slow  # it waits for watchdogs
def test_acceptance_passes_on_the_host_engine(tmp_path: Path) -> None:
    quick = ("--device", "host", "--tokens", 100, "--soak-tokens", 500, "--seconds", 0.2)
    names = ("repeats", "soak", "cancel", "requests", "broken", "sanitizer")
    done = script("h200-acceptance/acceptance.py", *quick, "--out", tmp_path, *names)
    parts: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())["parts"]
    results = {name: part["result"] for name, part in parts.items()}
    assert results.pop("sanitizer") == "not run"
    assert set(results.values()) == {"passed"}, parts
    assert done.returncode == 1  # a part that was not run is not shown
    assert "5 passed, 0 FAILED, 1 not run" in done.stdout
    assert {name: list(windows) for name, windows in parts["repeats"]["facts"].items()} == {
        name: ["2 of 4 slots in flight", "4 of 4 slots in flight"]
        for name in ("llama-3.2-1b", "laneformer-2b")
    }
    assert parts["soak"]["facts"]["small"]["tokens"] == 500
    assert len(parts["broken"]["facts"]) == 5
    assert all("watchdog: Rank[" in fact["watchdog"] for fact in parts["broken"]["facts"].values())


def test_acceptance_knows_its_parts(tmp_path: Path) -> None:
    done = script("h200-acceptance/acceptance.py", "--device", "host", "--out", tmp_path, "soaks")
    assert done.returncode == 2
    assert "no part 'soaks'; choose from repeats, soak" in done.stderr


@pytest.mark.slow
def test_recorded_steps_can_be_compared(tmp_path: Path) -> None:
    done = script("h200-traces/record.py", "--device", "host", "--out", tmp_path, "laneformer-2b")
    assert done.returncode == 0, done.stderr
    recording = tmp_path / "laneformer-2b.npz"
    compared = subprocess.run(
        [
            sys.executable,
            "-m",
            "twin.cli",
            "trace",
            str(recording),
            "1xhost",
            "--out",
            str(tmp_path / "both.json"),
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert compared.returncode == 0, compared.stderr
    result = json.loads(compared.stdout)
    assert result["positions"] == [112, 143]
    assert result["measured_step_us"] > 0
    assert {row["kind"] for row in result["stages"]} >= {"qkv", "attention", "down", "sample"}
    assert "measured Gpu[0]" in (tmp_path / "both.json").read_text()


def test_gpu_scripts_import_no_simulator() -> None:
    """A GPU machine has of our dependencies only ON_GPU."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[<>=]", one)[0] for one in project["dependencies"]}
    assert names > ON_GPU
    scripts = {
        "few-bits": ["run"],
        "h200-acceptance": ["acceptance", "studies.common.acceptance.sanitizer"],
        "h200-history": ["tune"],
        "h200-traces": ["record"],
        "many-gpus": ["run"],
        "zoo": ["measure"],
    }
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({sorted(names - ON_GPU)}))
for folder, modules in {scripts}.items():
    sys.path.insert(0, f"studies/{{folder}}")
    for module in modules:
        importlib.import_module(module)
    del sys.path[0]
    for name, module in list(sys.modules.items()):  # scripts of other folders have the same names
        if "studies/" in (getattr(module, "__file__", "") or ""):
            del sys.modules[name]
print("imported")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout == "imported\n", done.stderr
