"""Small models of today's families: run, and judged next to transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.hybrids import families


@pytest.mark.slow
def test_a_family_is_run_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time its rows take the place of the first ones; those of other nodes stay."""
    pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
    for name, value in {"PROMPT": 20, "JUDGED": 8, "EQUAL_TOKENS": 8, "CHECKED": 12}.items():
        monkeypatch.setattr(families, name, value)
    table, choices = tmp_path / "families.csv", tmp_path / "choices.csv"
    monkeypatch.setattr(families, "TABLE", table)
    monkeypatch.setattr(families, "CHOICES", choices)
    other = ("minimax_m2", "elsewhere", *["1"] * (len(families.HEAD) - 2))
    table.write_text("\n".join(map(",".join, (families.HEAD, other))) + "\n", encoding="utf-8")
    families.run(tmp_path, "1xhost", 16, ["minimax_m2"])
    for _ in range(2):
        families.judge(tmp_path)
    head, kept, made = families._lines(table)
    assert head == families.HEAD
    assert kept == other
    row = dict(zip(head, made, strict=True))
    assert (row["node"], row["tokens_soaked"], row["equal_runs"]) == ("1xhost", "16", "5")
    assert (row["not_worse"], row["mismatches"], row["positions"]) == ("True", "0", "8")
    assert float(row["difference"]) < 2e-2
    assert families._lines(choices)[0] == families.CHOICES_HEAD
