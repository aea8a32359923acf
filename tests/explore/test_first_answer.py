"""How soon the explorer says something, held loosely: this computer may be busy."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.patience import PATIENCE_S

COLD_S, WARM_S = 3.0, 1.0  # on an idle computer
PATIENCE = 20  # times as long on a busy one
SIMPLE = "llama-3.1-8b 1xh200"
# Their simulations take seconds; what a few layers say comes first.
DEEP = ("gpt-oss-120b 8xh200", "llama-3.1-70b 8xh200", "llama-3.1-405b 8xmi300x")


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[str]:
    """The address of an explorer that has just begun, with an empty store."""
    words = ["explore", "--port", "0", "--store", str(tmp_path / "store"), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "twin", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        assert process.stderr
        printed = ""
        while "}" not in printed:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            printed += line
        yield str(json.loads(printed)["url"])
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in said, "it ends quietly, whatever is under way"


def first(url: str, case: str) -> tuple[float, str]:
    """Seconds until a speed arrives, and in which part."""
    began = time.monotonic()
    with httpx.stream(
        "GET", f"{url}/answer", params={"case": case}, timeout=PATIENCE_S, verify=False
    ) as answer:
        for line in answer.iter_lines():
            part = json.loads(line[6:])["part"] if line.startswith("data: {") else "progress"
            if part != "progress":
                return time.monotonic() - began, part
    raise AssertionError("no answer")


@pytest.mark.slow
def test_the_first_answers_come_soon(fresh: str) -> None:
    seconds, part = first(fresh, DEEP[0])
    assert part in ("about", "speed")
    assert seconds < COLD_S * PATIENCE
    for case in (*DEEP[1:], SIMPLE):
        seconds, part = first(fresh, case)
        assert part in ("about", "speed")
        assert seconds < WARM_S * PATIENCE, case
