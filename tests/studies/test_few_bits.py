"""The script that runs experts and few-bit weights on a GPU, tried on a CPU with small models; and
what was predicted of its rows.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.engine.small_engine import LLAMA
from tests.engine.test_coded_experts import model
from twin.hardware.load import load_node
from twin.models.formats import format_named
from twin.models.quantized import requantized
from twin.models.spec import ModelSpec

FOLDER = Path(__file__).resolve().parents[2] / "studies" / "few-bits"
MADE = ("rows", "run")


@pytest.fixture
def script() -> Iterator[ModuleType]:
    """run.py, whose neighbours are found in its folder."""
    before = {name: sys.modules.pop(name, None) for name in MADE}
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    sys.path[:] = path
    for name, old in before.items():
        sys.modules.pop(name, None)
        if old is not None:
            sys.modules[name] = old


def test_every_row_was_predicted_with_an_interval(script: ModuleType) -> None:
    rows = json.loads((FOLDER / "predictions.json").read_text(encoding="utf-8"))["rows"]
    import rows as asked

    found = {
        (row, node, int(prompt)): cell
        for row, nodes in rows.items()
        for node, prompts in nodes.items()
        for prompt, cell in prompts.items()
    }
    assert set(found) == set(asked.cells())
    told = [cell for cell in found.values() if "refused" not in cell]
    assert len(told) >= 28
    for cell in told:
        assert cell["p10"] <= cell["p50"] <= cell["p90"]
        assert cell["nominal"] <= cell["without_decoding"] <= cell["floor"]


SMALL: dict[str, ModelSpec] = {
    "experts": replace(model("mxfp4"), context=64, vocab=101),
    "dense": requantized(replace(LLAMA, head_dim=16), format_named("int4-g32")),
}


@pytest.mark.slow
def test_the_script_measures_and_checks_in_one_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import rows as asked

    monkeypatch.setattr(script, "ROWS", [asked.Row(name, name, {}) for name in SMALL])
    monkeypatch.setattr(script, "spec_of", SMALL.__getitem__)
    monkeypatch.setattr(script, "PROMPTS", (4, 8))
    for module in (script, asked):
        monkeypatch.setattr(module, "TOKENS", 12)
        monkeypatch.setattr(module, "WARM_UP", 2)
    monkeypatch.setattr(asked, "CHECKED_CONTEXT", 32)
    out, said = tmp_path / "made.json", list[str]()
    script.run_rows(load_node("1xhost"), out, said.append)
    made: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert set(made) == set(SMALL)
    for found in made.values():
        assert found["check"]["bitwise_equal"] is True
        assert found["check"]["logit_difference"] < 2e-2
        assert found["4"]["tokens_per_s"] > 0
        assert found["8"]["tokens_per_s"] > 0
    before = len(said)
    script.run_rows(load_node("1xhost"), out, said.append)  # everything is there already
    assert len(said) == before
