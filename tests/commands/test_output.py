"""What commands say while they work."""

from __future__ import annotations

import time

import pytest

from twin.commands import output


def test_work_that_takes_long_is_named_once_and_short_work_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "SOON_S", 0.2)
    with output.underway("planning"):
        time.sleep(0.6)
    said = capsys.readouterr()
    assert said.err.count("twin: planning, ") == 1
    assert not said.out
    monkeypatch.setattr(output, "SOON_S", 60.0)
    with output.underway("planning"):
        pass
    assert not capsys.readouterr().err


def test_what_is_said_ends_with_work_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SOON_S", 60.0)
    with pytest.raises(ValueError, match="broken"), output.underway("planning"):
        raise ValueError("broken")
