"""`twin serve` as a user starts and ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.command_line import Twin
from tests.patience import PATIENCE_S
from tests.refusals import refused_command
from twin.commands import serve


def started(*words: object, **more: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """`twin serve` on a free port, and what it said of itself. `more`: of its environment."""
    child = subprocess.Popen(
        [sys.executable, "-m", "twin", "serve", *map(str, words), "--json", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | more,
    )
    assert child.stdout is not None
    lines = list[str]()
    while not lines or lines[-1] != "}\n":
        lines.append(child.stdout.readline())
        assert lines[-1], child.communicate()[1]
    return child, json.loads("".join(lines))


def test_it_says_where_it_is_answers_and_ends_with_ctrl_c(checkpoint: Path) -> None:
    words = ("--blocks", 1, "--greedy", "--served-name", "small", "--max-context", 64)
    child, said = started(checkpoint, *words)
    try:
        assert (said["model"], said["context"]) == ("small", 64)
        with httpx.Client(base_url=said["url"], verify=False, timeout=PATIENCE_S) as client:
            body = {"model": "small", "prompt": "x", "max_tokens": 4}
            answer = client.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 4
            hot = client.post("/v1/completions", json=body | {"temperature": 1})
            assert "--greedy" in hot.json()["error"]["message"]
            twin = client.get("/twin").json()
            assert not twin["chat"]
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 130
        assert "Traceback" not in err
        assert "no chat template" in err
    finally:
        child.kill()
        child.communicate()


def test_it_serves_random_weights_and_predicts_without_what_pages_and_tables_need(
    checkpoint: Path, tmp_path: Path
) -> None:
    """A GPU machine may lack these, and SimPy, without which compiled code simulates."""
    without = ("simpy", "pandas", "plotly", "scipy", "pyarrow", "distributed")
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({without}))\n"
    )
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 512}))
    child, said = started(tmp_path, "--random", 1, "--blocks", 1, PYTHONPATH=str(tmp_path))
    try:
        with httpx.Client(base_url=said["url"], verify=False, timeout=PATIENCE_S) as client:
            body = {"prompt": " aaaa aaab", "max_tokens": 8, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["usage"]["prompt_tokens"] == 3  # of which the first begins every text
            assert answer["usage"]["completion_tokens"] == 8
            while "computing" in (said_of := client.get("/twin").json()["twin"])["reason"]:
                time.sleep(0.05)
            assert said_of["expected"], said_of["reason"]
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in err
    finally:
        child.kill()
        child.communicate()


WRONG: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "port": (("--port", 70000), ("70000", "65535")),
    "queue": (("--queue", -1), ("-1", "10000")),
    "open to all": (("--host", "0.0.0.0"), ("--api-key-file",)),
    "no address": (("--host", "256.1.1.1", "--api-key-file", "KEY"), ("256.1.1.1",)),
    "no key": (("--api-key-file", "gone.txt"), ("gone.txt",)),
    "short key": (("--api-key-file", "SHORT"), ("at least 16",)),
    "origin": (("--cors-origin", "*"), ("https://",)),
    "name of the host": (("--allow-host", "a.example:80"), ("without scheme and port",)),
    "name that breaks lines": (("--served-name", "a\nb"), ("--served-name", "printed")),
    "name without end": (("--served-name", "n" * 201), ("at most 200",)),
    "template": (("--chat-template", "gone.jinja"), ("gone.jinja",)),
    "values": (("--chat-template-kwargs", "[1]"), ("must be a JSON object",)),
    "own values": (("--chat-template-kwargs", '{"messages": []}'), ("messages", "leave it out")),
    "model": ((), ("nowhere",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_served_is_refused(
    case: str, checkpoint: Path, tmp_path: Path, twin: Twin
) -> None:
    files = {"KEY": tmp_path / "key", "SHORT": tmp_path / "short"}
    files["KEY"].write_text("0123456789abcdef")
    files["SHORT"].write_text("short")
    words, says = WRONG[case]
    model: object = checkpoint if case != "model" else tmp_path / "nowhere"
    named = [files.get(str(word), word) for word in words]
    refused_command(twin, "serve", model, "--port", 0, *named, "--blocks", 1, says=says)


def test_a_missing_library_is_named_with_how_to_install_it(
    checkpoint: Path, twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "NEEDED", ("no_such_library",))
    says = ("no_such_library", "monotwin[serve]", "pip install")
    refused_command(twin, "serve", checkpoint, says=says)
    refused_command(twin, "chat", checkpoint, says=says)
