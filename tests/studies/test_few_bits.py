"""The runs of experts and low-bit weights on a GPU, tried on a CPU with small models; and what was
predicted of their rows.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import few_bits
import pytest
from few_bits import Row, cells, run_rows, study

from studies.common.predicted import read_cells
from tests.engine.small_engine import LLAMA
from tests.engine.test_coded_experts import model
from tests.studies.scripts import loaded
from twin.hardware.load import load_node
from twin.models.formats import format_named
from twin.models.quantized import requantized
from twin.models.spec import ModelSpec


def test_every_row_was_predicted_with_an_interval() -> None:
    found = {
        (row, node, int(prompt)): cell
        for row, nodes in read_cells(study()).items()
        for node, prompts in nodes.items()
        for prompt, cell in prompts.items()
    }
    assert set(found) == set(cells())
    predicted = [cell for cell in found.values() if "refused" not in cell]
    assert len(predicted) >= 28
    for cell in predicted:
        assert cell["p10"] <= cell["p50"] <= cell["p90"]
        assert cell["nominal"] <= cell["without_decoding"] <= cell["floor"]


def test_a_row_is_stated_next_to_its_prediction_and_a_refusal_with_its_reason() -> None:
    rows = {
        "small": {
            "check": {"logit_difference": 2e-4, "bitwise_equal": True},
            "32": {"tokens_per_s": 900.0},
            "4096": {"failed": "no room"},
        },
        "large": {"failed": "no plan"},
    }
    cell = {"p10": 980.0, "p50": 990.0, "p90": 1000.0}
    said = stated(load_node("1xh200"), rows, {"small": {"1xh200-sxm": {"32": cell}}})
    lines = [line.split() for line in said.splitlines()]
    assert ["small", "32", "900", "990", "(980-1,000)", "+10.0%", "2.0e-04", "yes"] in lines
    assert ["small", "4096", "not", "run", "2.0e-04", "yes"] in lines
    assert ["large", "32", "not", "run"] in lines
    assert said.endswith("small, after 4096: no room\n\nlarge: no plan")


RUN = loaded("few-bits/run.py")
main, stated = RUN.main, RUN.stated
SMALL: dict[str, ModelSpec] = {
    "experts": replace(model("mxfp4"), context=64, vocab=101),
    "dense": requantized(replace(LLAMA, head_dim=16), format_named("int4-g32")),
}


@pytest.mark.slow
def test_rows_are_measured_and_checked_in_one_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(few_bits, "ROWS", [Row(name, name, {}) for name in SMALL])
    monkeypatch.setattr(few_bits, "spec_of", SMALL.__getitem__)
    for name, value in {
        "PROMPTS": (4, 8),
        "TOKENS": 12,
        "WARM_UP": 2,
        "CHECKED_CONTEXT": 32,
    }.items():
        monkeypatch.setattr(few_bits, name, value)
    out, said = tmp_path / "made.json", list[str]()
    run_rows(load_node("1xhost"), out, said.append)
    made: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert set(made) == set(SMALL)
    for found in made.values():
        assert found["check"]["bitwise_equal"] is True
        assert found["check"]["logit_difference"] < 2e-2
        for prompt in ("4", "8"):
            assert set(found[prompt]) == {"tokens_per_s", "samples", "bytes", "prompt_s"}
            assert found[prompt]["tokens_per_s"] > 0
            assert len(found[prompt]["samples"]) == 3
    before = len(said)
    run_rows(load_node("1xhost"), out, said.append)  # everything is there already
    assert len(said) == before


def test_the_table_of_the_changes_is_that_of_the_records() -> None:
    folder = study()
    made = loaded("few-bits/page.py").traces(read_cells(folder))
    assert made == (folder / "traces.md").read_text(encoding="utf-8"), "run `make studies`"


def test_the_readme_says_what_was_measured() -> None:
    root = Path(__file__).resolve().parents[2]
    text = " ".join((root / "README.md").read_text(encoding="utf-8").split())
    record = json.loads((study() / "changed-h200-sxm.json").read_text(encoding="utf-8"))["rows"]
    small, large = (
        record[f"gpt-oss-{size} MXFP4"]["32"]["tokens_per_s"] for size in ("20b", "120b")
    )
    said = f"{small:.0f} tokens/s of GPT-OSS-20B and {large:.0f} of GPT-OSS-120B"
    assert said in text


def test_rows_may_follow_the_options_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """A word that is no row is refused as one, not as a word too many."""
    for words in (["1xh200", "--out", "f", "no row"], ["--out", "f", "1xh200", "no row"]):
        with pytest.raises(SystemExit):
            main(words)
        assert "no row 'no row': choose from" in capsys.readouterr().err
