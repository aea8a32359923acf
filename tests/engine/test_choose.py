"""Kernels that are compiled while others run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from twin.engine import choose
from twin.hardware.load import load_node

HOST, H200 = load_node("1xhost").device, load_node("1xh200").device


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, Event]:
    """In threads; "slow" waits until it may, "wrong" is refused."""
    events = {"slow": Event(), "last": Event()}

    def compiled(plan: Any, arch: str, trace: bool) -> str:
        if plan == "slow":
            assert events["slow"].wait(PATIENCE_S)
        if plan == "last":
            events["last"].set()
        return "refused" if plan == "wrong" else ""

    monkeypatch.setattr(choose, "_compile", compiled)
    monkeypatch.setattr(choose.os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(
        choose, "ProcessPoolExecutor", lambda workers, *_: ThreadPoolExecutor(workers)
    )
    return events


def test_a_kernel_is_given_as_soon_as_it_is_there_and_in_order(compiler: dict[str, Event]) -> None:
    plans: list[Any] = ["quick", "wrong", "slow", "last"]
    said: list[str] = []
    turn = choose.compiled_in_turn(H200, plans, said.append)
    assert [next(turn), next(turn)] == ["", "refused"]
    assert compiler["last"].wait(PATIENCE_S)  # while "slow" is under way and nobody asks for more
    compiler["slow"].set()
    assert list(turn) == ["", ""]
    assert all(line.startswith("compiling kernels on 3 cores") for line in said)


def test_who_stops_does_not_wait_for_what_has_not_begun(compiler: dict[str, Event]) -> None:
    plans: list[Any] = ["quick", "slow", "slow", "slow", "last"]
    turn = choose.compiled_in_turn(H200, plans, lambda _: None)
    assert next(turn) == ""
    compiler["slow"].set()
    turn.close()


def test_the_hosts_kernels_compile_when_they_are_used() -> None:
    plans: list[Any] = ["a", "b"]
    assert list(choose.compiled_in_turn(HOST, plans, lambda _: None)) == ["", ""]
    assert list(choose.compiled_in_turn(H200, [], lambda _: None)) == []
