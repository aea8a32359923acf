"""`twin serve` as a user starts and ends it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.command_line import Twin
from tests.refusals import refused_command
from twin.commands import serve


def test_it_says_where_it_is_answers_and_ends_with_ctrl_c(checkpoint: Path) -> None:
    words = [sys.executable, "-m", "twin", "serve", str(checkpoint), "--blocks", "1", "--json"]
    child = subprocess.Popen(
        [*words, "--port", "0", "--greedy", "--served-name", "small", "--max-context", "64"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        lines = []
        while not lines or lines[-1] != "}\n":
            lines.append(child.stdout.readline())
            assert lines[-1], child.communicate()[1]
        said = json.loads("".join(lines))
        assert (said["model"], said["context"]) == ("small", 64)
        with httpx.Client(base_url=said["url"], verify=False, timeout=30) as client:
            body = {"model": "small", "prompt": "x", "max_tokens": 4}
            answer = client.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 4
            hot = client.post("/v1/completions", json=body | {"temperature": 1})
            assert "--greedy" in hot.json()["error"]["message"]
            twin = client.get("/twin").json()
            assert not twin["chat"]
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=20)
        assert child.returncode == 130
        assert "Traceback" not in err
        assert "no chat template" in err
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
    "template": (("--chat-template", "gone.jinja"), ("gone.jinja",)),
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
