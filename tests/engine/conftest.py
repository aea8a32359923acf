"""What the tests of engines share."""

from __future__ import annotations

from functools import partial

import pytest

from tests.engine.small_engine import LESS_OPTIMISED
from twin.engine import host
from twin.toolchain import build_host


@pytest.fixture
def compiled_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a check of the kernel's text, of which other tests compile the same family or feature
    with the flags that users get.
    """
    monkeypatch.setattr(host, "build_host", partial(build_host, extra=LESS_OPTIMISED))
