"""How many GPUs the default takes, and why."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from tests.engine.small_engine import LANED, LLAMA
from twin.commands import run as run_command
from twin.plan.options import Options
from twin.study.case import Case
from twin.study.gpus import MARGIN, Offer, as_if_delayed, default_gpus, offers, said
from twin.study.hardware import node_on_file

TINY = dataclasses.replace(
    LLAMA, heads=32, kv_heads=8, head_dim=16, hidden=512, ffn=512, windows=(0,) * 3
)
FEW = {"blocks": 16}


def steps(*seconds: float | None) -> tuple[Offer, ...]:
    return tuple(Offer(2**n, step) for n, step in enumerate(seconds))


@pytest.mark.parametrize(
    ("found", "taken"),
    [
        (steps(1.0, 0.6, 0.4, 0.3), 8),
        (steps(1.0, 1.1, 1.2, 1.3), 1),
        (steps(1.0, 0.6, 0.59, 0.6), 2),  # four gain less than the twin errs
        (steps(1.0, 0.99, 0.5), 4),
        (steps(None, None, 0.5, 0.3), 8),  # one and two do not hold the model
        (steps(None, None), 2),
    ],
)
def test_the_default_takes_the_fewest_gpus_that_no_more_beat_by_more_than_the_twin_errs(
    found: tuple[Offer, ...], taken: int
) -> None:
    assert default_gpus(found) == taken
    assert said(found).startswith(f"{taken}: ")
    assert ("gain less" in said(found)) == (taken < found[-1].gpus)


def test_a_tiny_model_is_predicted_slower_on_two_gpus_and_keeps_one() -> None:
    """Its step is exchanges alone."""
    found = offers(TINY, node_on_file("2xh200"), FEW)
    assert [one.gpus for one in found] == [1, 2]
    assert found[1].step_s > found[0].step_s  # type: ignore[operator]
    assert found[0].exchange == 0 < found[1].exchange < 1
    assert default_gpus(found) == 1


def test_what_cannot_be_divided_says_why() -> None:
    odd = dataclasses.replace(TINY, ffn=24, layers=1, windows=(0,))
    (_, two) = offers(odd, node_on_file("2xh200"), FEW)
    assert two.step_s is None
    assert two.refusal


def test_somebody_who_names_all_gpus_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    node = node_on_file("2xh200")
    names = {field.name: None for field in dataclasses.fields(Options)}
    names |= FEW
    wanted = SimpleNamespace(**names | {"gpus": 2})
    assert run_command.settled_node(wanted, node, TINY) == node  # type: ignore[arg-type]
    heard: list[str] = []
    monkeypatch.setattr(run_command, "say", heard.append)
    fewer = run_command.settled_node(SimpleNamespace(**names), node, TINY)  # type: ignore[arg-type]
    assert (fewer.gpus, fewer.device.name) == (1, node.device.name)
    assert heard == [
        f"GPUs of 2xh200-sxm: 1: more GPUs gain less than {MARGIN:.0%} or lose "
        "(predicted); --gpus takes more"
    ]


def test_a_delay_that_nobody_trained_is_for_the_twin_alone() -> None:
    node = node_on_file("2xh200")
    made = as_if_delayed(Case(TINY, node, {"delay": 1}))
    assert made.spec.lanes is not None
    assert (made.spec.lanes.count, made.spec.lanes.delay) == (2, 1)
    assert made.spec.name == "llama as if trained with delay 1 (in the twin only)"
    for kept in (Case(TINY, node, {}), Case(LANED, node, {"delay": 1})):
        assert as_if_delayed(kept) is kept
