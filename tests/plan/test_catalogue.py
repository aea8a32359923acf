"""The one row of each kind of stage agrees with what the kernel has code for."""

from __future__ import annotations

import re

from twin.data import data_dir
from twin.plan.catalogue import ROWS, Input, Spent
from twin.plan.types import StageKind
from twin.sim.causes import CAUSES


def test_every_kind_of_stage_has_a_row() -> None:
    assert set(ROWS) == set(StageKind)


def test_the_engine_runs_what_the_kernel_has_code_for() -> None:
    kernel = (data_dir("native") / "monokernel" / "kernel.cuh").read_text(encoding="utf-8")
    cases = {StageKind[name] for name in re.findall(r"case StageKind::(\w+):", kernel)}
    assert cases == {kind for kind, row in ROWS.items() if row.engine}


def test_only_what_the_engine_runs_has_an_input_or_a_norm_of_it() -> None:
    assert all(row.engine for row in ROWS.values() if row.input or row.norm)
    assert {row.input for row in ROWS.values()} == {None, *Input}


def test_every_row_names_a_cause_of_the_twin() -> None:
    assert {spent.value for spent in Spent} <= set(CAUSES)
