"""How the CUDA engine waits: the first token and the end are seen at once, tokens between them
within a longer nap, and the driver is not queried while they come. Time is the test's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.fake_driver import CUresult, FakeDriver
from tests.engine.test_cuda_driver import PROMPT, Installs, install, opened
from twin.engine import cuda
from twin.engine.cuda import LONG_NAP_S, NAP_S, Pace
from twin.kernel.header import Control, Status
from twin.plan.options import Execution

__all__ = ["install"]

FIRST_S, MOST = 0.0161, 50
SOON_S = 1e-9  # what sums of naps round to


class Timed(FakeDriver):
    """A kernel that hands out a token each `step_s`, and the clock that it goes by."""

    def __init__(self, step_s: float, ends_after: int = MOST) -> None:
        super().__init__(kernel=self.begin)
        self.step_s, self.ends_after = step_s, ends_after
        self.now_s, self.queries = 100.0, 0

    def begin(self, launch: Any, control: Control) -> None:
        request = launch.request
        self.control, self.begun_s = control, self.now_s
        self.made = request.steps - request.forced + 1
        control.started = 1

    def due_s(self, token: int) -> float:
        return self.begun_s + FIRST_S + token * self.step_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        most = min(self.made, self.ends_after)
        self.control.emitted = sum(self.due_s(n) <= self.now_s for n in range(most))
        if self.control.emitted == self.ends_after < self.made:
            self.control.status = tuple(Status).index(Status.STOP)

    def cuStreamQuery(self, stream: Any) -> tuple[CUresult, None]:
        self.queries += 1
        most = min(self.made, self.ends_after)
        ended = self.control.emitted == most
        return (CUresult.CUDA_SUCCESS if ended else CUresult.CUDA_ERROR_NOT_READY, None)


def lags(
    fake: Timed, install: Installs, monkeypatch: pytest.MonkeyPatch, **chosen: Any
) -> list[float]:
    """How late each token is taken."""
    install(fake)
    clock = SimpleNamespace(monotonic=lambda: fake.now_s, sleep=fake.sleep)
    monkeypatch.setattr(cuda, "time", clock)
    taken = list[float]()
    with opened(**chosen) as engine:
        engine.generate(PROMPT, max_tokens=MOST, on_token=lambda _: taken.append(fake.now_s))
    return [at - fake.due_s(n) for n, at in enumerate(taken)]


@pytest.mark.parametrize("step_s", [0.0001, 0.0005, 0.0035, 0.05])
def test_the_first_token_is_seen_at_once_the_last_one_soon_others_within_a_long_nap(
    step_s: float, install: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Timed(step_s)
    late = lags(fake, install, monkeypatch)
    assert len(late) == MOST
    assert late[0] <= NAP_S + SOON_S
    assert max(late) <= LONG_NAP_S + SOON_S
    soon_s = min(LONG_NAP_S, max(NAP_S, step_s / 2))
    assert late[-1] <= soon_s + SOON_S
    assert fake.now_s - fake.due_s(MOST - 1) <= soon_s + SOON_S


def test_a_stop_token_is_seen_within_a_long_nap(
    install: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Timed(0.0005, ends_after=20)
    assert len(lags(fake, install, monkeypatch)) == 20
    assert fake.now_s - fake.due_s(19) <= LONG_NAP_S + SOON_S


def test_the_driver_is_not_queried_while_tokens_come(
    install: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = round(FIRST_S / NAP_S) + 2  # looks until the first token
    quick, slow = Timed(0.0005), Timed(0.0035)
    lags(quick, install, monkeypatch)
    assert quick.queries <= before + 5
    lags(slow, install, monkeypatch)
    assert slow.queries <= before + MOST * 4


def test_a_kernel_that_is_fed_step_by_step_is_looked_at_often(
    install: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = lags(Timed(0.0005), install, monkeypatch, execution=Execution.GRAPH)
    assert max(late) <= NAP_S + SOON_S


def test_a_nap_ends_before_the_last_token_is_due() -> None:
    pace = Pace(10)
    assert pace.nap_s(0, 5.0) == NAP_S
    assert pace.nap_s(1, 6.0) == NAP_S  # no rate yet
    assert pace.nap_s(2, 6.0005) == pytest.approx(LONG_NAP_S)
    assert pace.nap_s(9, 6.004) == pytest.approx(0.00025)
    assert pace.nap_s(10, 6.0045) == NAP_S
