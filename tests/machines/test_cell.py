"""Machines with weights on chip: laws of the prediction, and how far it is from what was
published.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from twin.errors import HardwareError
from twin.hardware.number import Kind, Number
from twin.machines.cell import Cell, cell, error, terms, units_for
from twin.machines.load import load_machine, machine_names
from twin.machines.types import Machine, Published, Spread, Use
from twin.models.load import load_model

NAMES = machine_names()
PUBLISHED = [(name, row) for name in NAMES for row in load_machine(name).published]
# Relative errors of the predictions that nothing was fitted to, as they are. They change only with
# a reason.
CHECKED = {
    ("cerebras-cs3", "gpt-oss-120b"): +0.53,  # and 13 % under the 3,000 that were claimed
    ("cerebras-cs3", "qwen3-235b-a22b"): -0.34,
    ("cerebras-cs3", "llama-3.1-405b"): -0.26,
    ("groq-lp30", "gemma-4-31b", 1024): +0.33,
    # the rack leaves long caches to GPUs, which are not modelled
    ("groq-lp30", "gemma-4-31b", 100000): +0.73,
    ("groq-lpu-v1", "llama-3.1-8b"): 0.0,
    ("groq-lpu-v1", "mixtral-8x7b"): +0.33,
    ("groq-lpu-v1", "gpt-oss-120b"): +0.20,
    ("sambanova-sn40l", "gpt-oss-120b"): -0.03,
}


def rows(use: Use) -> list[Any]:
    return [
        pytest.param(name, row, id=f"{name}-{row.model}-{row.context}")
        for name, row in PUBLISHED
        if row.use is use
    ]


def changed(machine: Machine, name: str, factor: float) -> Machine:
    number: Number = machine.numbers()[name]
    return dataclasses.replace(
        machine, **{name: dataclasses.replace(number, value=number.value * factor)}
    )  # type: ignore[arg-type]


def test_the_machines_of_the_comparison_are_there() -> None:
    assert NAMES == [
        "cerebras-cs3",
        "cerebras-cs4",
        "groq-lp30",
        "groq-lpu-v1",
        "sambanova-sn40l",
        "taalas-hc1",
    ]


@pytest.mark.parametrize(("name", "row"), rows(Use.FIT))
def test_the_fitted_number_is_the_one_that_its_figure_gives(name: str, row: Published) -> None:
    assert error(load_machine(name), row) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("name", "row"), rows(Use.CHECK))
def test_the_error_of_a_prediction_is_the_written_one(name: str, row: Published) -> None:
    known = CHECKED.get((name, row.model), CHECKED.get((name, row.model, row.context)))
    assert known is not None, "write the error down"
    assert error(load_machine(name), row) == pytest.approx(known, abs=0.01)


@pytest.mark.parametrize(("name", "row"), rows(Use.CHECK))
def test_the_interval_is_wide_enough_for_the_figures_on_file(name: str, row: Published) -> None:
    """The ranges of step_s were drawn with these figures in view: consistency of the files; how
    good the law is, CHECKED says.
    """
    found = cell(load_machine(name), row.model, row.context)
    assert found.low_tokens_per_s <= row.tokens_per_s <= found.high_tokens_per_s * 1.01


@pytest.mark.parametrize("name", NAMES)
def test_every_machine_says_what_was_not_modelled(name: str) -> None:
    machine = load_machine(name)
    assert machine.not_modelled
    if not any(row.use is Use.CHECK for row in machine.published):
        assert any("nothing is checked" in text for text in machine.not_modelled)


def cells(context: int = 1024) -> list[Cell]:
    found = []
    for name in NAMES:
        for model in ("llama-3.1-8b", "gpt-oss-120b", "qwen3-coder-next"):
            try:
                found.append(cell(load_machine(name), model, context))
            except HardwareError:
                continue  # hard-wired for another model, or too small
    return found


def test_terms_add_up_and_the_interval_holds_the_prediction() -> None:
    found = cells()
    assert len(found) >= 14
    for one in found:
        t = one.terms
        assert one.step_s == pytest.approx(t.weights_s + t.caches_s + t.steps_s + t.crossings_s)
        assert one.low_tokens_per_s <= one.tokens_per_s * (1 + 1e-9)
        assert one.tokens_per_s <= one.high_tokens_per_s * (1 + 1e-9)
        assert getattr(t, f"{one.binding}_s") == max(dataclasses.astuple(t))


@drawn(20)
@given(st.sampled_from(["step_s", "crossing_s"]), st.floats(1.01, 8))
def test_a_longer_time_is_never_faster(name: str, factor: float) -> None:
    spec = load_model("gpt-oss-120b")
    for machine in map(load_machine, NAMES):
        if not machine.only and name in machine.numbers():
            assert (
                terms(changed(machine, name, factor), spec, 4096).total_s
                >= terms(machine, spec, 4096).total_s
            )


@drawn(20)
@given(st.floats(1.01, 8))
def test_more_bandwidth_is_never_slower(factor: float) -> None:
    spec = load_model("gpt-oss-120b")
    for machine in map(load_machine, NAMES):
        if not machine.only:
            assert (
                terms(changed(machine, "bytes_per_s", factor), spec, 4096).total_s
                <= terms(machine, spec, 4096).total_s
            )


@drawn(20)
@given(st.integers(0, 100_000), st.integers(1, 30_000))
def test_a_longer_context_is_never_faster(context: int, more: int) -> None:
    for name in NAMES:
        if not load_machine(name).only:
            machine, spec = load_machine(name), load_model("gpt-oss-120b")
            assert (
                terms(machine, spec, context).caches_s
                <= terms(machine, spec, context + more).caches_s
            )


def test_no_token_is_faster_than_its_weights_are_read_by_all_units() -> None:
    for name in NAMES:
        machine, spec = load_machine(name), load_model("gpt-oss-120b")
        if machine.bytes_per_s:
            units = units_for(machine, spec, 1024)
            assert terms(machine, spec, 1024).weights_s >= spec.streamed_bytes / (
                units * machine.bytes_per_s.value
            ) * (1 - 1e-9)


def test_all_units_together_are_faster_than_layer_by_layer() -> None:
    machine, spec = load_machine("groq-lp30"), load_model("gemma-4-31b")
    together = dataclasses.replace(machine, spread=Spread.TOGETHER)
    assert terms(together, spec, 1024).weights_s < terms(machine, spec, 1024).weights_s / 10


def test_as_many_units_as_the_weights_need() -> None:
    machine = load_machine("groq-lpu-v1")
    # the published number of chips
    assert cell(machine, "llama-3.1-70b", 1024).units == pytest.approx(576, rel=0.01)
    assert cell(load_machine("cerebras-cs3"), "llama-3.1-8b", 1024).units == 1
    assert cell(load_machine("sambanova-sn40l"), "llama-3.1-8b", 1024).units == 16  # installed


@pytest.mark.parametrize(
    ("name", "model", "context", "message"),
    [
        ("taalas-hc1", "gpt-oss-120b", 1024, "hard-wired: it runs llama-3.1-8b"),
        ("groq-lp30", "kimi-k2.6", 1024, "has at most 256"),
        ("sambanova-sn40l", "deepseek-v4-pro@bf16", 1024, "has at most 16"),
        ("cerebras-cs3", "llama-3.1-8b", 1 << 20, "context 1048576 is outside 0 to 131072"),
        ("cerebras-cs3", "llama-3.1-8b", -1, "context -1"),
    ],
)
def test_what_a_machine_cannot_hold_is_refused(
    name: str, model: str, context: int, message: str
) -> None:
    with pytest.raises(HardwareError) as refused:
        cell(load_machine(name), model, context)
    assert message in str(refused.value)


def test_a_cell_carries_what_it_rests_on() -> None:
    found = cell(load_machine("cerebras-cs4"), "kimi-k2.6", 1024)
    assert "step_s" in found.assumed
    assert found.published == ()
    other = cell(load_machine("cerebras-cs3"), "gpt-oss-120b", 1024)
    assert {row.tokens_per_s for row in other.published} == {1706, 3000}


@pytest.mark.parametrize(
    ("name", "row"),
    [pytest.param(n, r, id=f"{n}-{r.model}-{r.tokens_per_s:g}") for n, r in PUBLISHED],
)
def test_a_reference_says_why_it_is_one(name: str, row: Published) -> None:
    assert row.kind in (Kind.MEASURED, Kind.VENDOR)
    assert row.conditions or row.use is not Use.REFERENCE
