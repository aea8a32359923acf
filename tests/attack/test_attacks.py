"""A few seconds of every attack; `python -m tests.attack` runs them for hours."""

from __future__ import annotations

import importlib

import pytest

from tests.attack.defect import Defect
from tests.attack.runner import Case, attacks, run, run_case
from tests.draws import scaled

SEED = 1
CASES = 15  # of an attack that says no number, half of them in the gate: less than a second


@pytest.mark.parametrize("name", attacks())
def test_no_case_breaks_a_law(name: str) -> None:
    module = importlib.import_module(f"tests.attack.{name}")
    cases = scaled(getattr(module, "CASES", CASES))
    first, jobs = getattr(module, "FIRST", 0), getattr(module, "JOBS", 1)
    tally = run([name], seed=SEED, first=first, cases=cases, jobs=jobs)[name]
    assert not tally.defects, "\n".join(
        f"python -m tests.attack --case {case}: {what}" for case, what in tally.defects
    )
    assert sum(tally.outcomes.values()) == cases
    assert len(tally.outcomes) > 1, "everything ends alike: the attack has lost its edge"


def test_what_a_case_does_to_its_process_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:  # type: ignore[no-untyped-def]
    from tests.attack import plans

    def broken(chance: object, folder: object) -> str:
        raise Defect("a law")

    monkeypatch.setattr(plans, "attack", broken)
    assert run_case(Case("plans", 1, 1), tmp_path / "case").defect == "a law"
    monkeypatch.setattr(plans, "attack", lambda chance, folder: 1 // 0)
    assert "ZeroDivisionError" in (run_case(Case("plans", 1, 1), tmp_path / "case").defect or "")
