"""The page of two trees in turn says what its record and the twin's answers hold."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import ModuleType

from tests.studies.scripts import loaded

FOLDER = Path(__file__).resolve().parents[2] / "studies" / "filled-splits"


def script() -> ModuleType:
    return loaded("filled-splits/measure.py")


def test_the_page_has_the_records_numbers() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    record = json.loads((FOLDER / "measured-h100-sxm.json").read_text(encoding="utf-8"))
    told = json.loads((FOLDER / "told-h100-sxm.json").read_text(encoding="utf-8"))
    rows = script().ROWS
    for number, contexts in record["rows"].items():
        row = rows[int(number)]
        for context, made in contexts.items():
            base, ours = (statistics.median(made[name]) for name in ("base_us", "us"))
            twin = told[number][context]
            cells = (
                row.model,
                f"{row.room:,}",
                f"{int(context):,}",
                f"{base:,.0f}",
                f"{ours:,.0f}",
                change(ours / base),
                change(twin["us"] / twin["base_us"]),
            )
            assert f"| {' | '.join(cells)} |" in page
    assert max(record["checks"].values()) < 4.2e-4


def change(ratio: float) -> str:
    said = f"{100 * (ratio - 1):+.1f} %"
    return "0.0 %" if said in ("+0.0 %", "-0.0 %") else said
