"""What every refusal has in common: one short line that comes soon, says what is required, and
no traceback.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.command_line import Twin
from twin.errors import TwinError

LONGEST = 800  # characters of a message, whatever was given


def refused(
    kind: type[TwinError], act: Callable[[], object], *says: str, within_s: float = 3.0
) -> str:
    """The message with which `act` is refused: one line that a terminal shows as it is, with `says`
    in it.
    """
    began = time.process_time()  # of this process: a busy machine is no slow refusal
    with pytest.raises(kind) as error:
        act()
    assert time.process_time() - began < within_s
    message = str(error.value)
    assert len(message) < LONGEST, message[:2000]
    assert message.isprintable(), message
    for part in says:
        assert part in message, message
    return message


def refused_command(twin: Twin, *words: object, says: tuple[str, ...]) -> str:
    """The same of a command line: what it says on stderr. It prints no result."""
    outcome = twin(*words)
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    for part in says:
        assert part in outcome.err, outcome.err
    return outcome.err
