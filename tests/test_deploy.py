"""The examples in deploy/ start what they say, by options that there are."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from twin.cli import build_parser

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
UNIT = (DEPLOY / "monotwin.service").read_text()
CONTAINER = (DEPLOY / "Containerfile").read_text()
ANALYZE = shutil.which("systemd-analyze")


def started() -> str:
    found = re.search(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    assert found
    return found[1]


def test_the_unit_starts_a_server_with_a_key() -> None:
    program, *words = shlex.split(started())
    assert Path(program).name == "twin"
    args = build_parser(["serve"]).parse_args(words)
    assert args.api_key_file
    assert args.host == "127.0.0.1"


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "monotwin.service"
    file.write_text(UNIT.replace(shlex.split(started())[0], "/bin/true"))  # one that is here
    done = subprocess.run(
        [str(ANALYZE), "verify", str(file)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def command() -> list[str]:
    (words,) = (json.loads(found) for found in re.findall(r"^CMD (\[.*\])$", CONTAINER, re.M))
    return list(words)


def test_the_container_starts_a_server_that_asks_for_a_key() -> None:
    words = command()
    args = build_parser(["serve"]).parse_args(words)
    assert args.host == "0.0.0.0"
    assert f"EXPOSE {args.port}" in CONTAINER
    assert f"http://127.0.0.1:{args.port}/health" in CONTAINER
    extras = re.search(r"^ARG EXTRAS=(.*)$", CONTAINER, re.MULTILINE)
    assert extras
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras[1].split(","))


def test_the_container_s_command_and_its_check_work(checkpoint: Path) -> None:
    joined = CONTAINER.replace("\\\n", "")
    found = re.search(r"^HEALTHCHECK .*CMD (\[.*\])$", joined, re.MULTILINE)
    assert found
    check = json.loads(found[1])
    program, *words = check
    assert program == "python"

    def checked(port: int) -> int:
        code = [word.replace(":8000/", f":{port}/") for word in words]
        return subprocess.run(
            [sys.executable, *code], stderr=subprocess.DEVNULL, check=False
        ).returncode

    serve = [word.replace("/model", str(checkpoint)) for word in command()]
    start = [sys.executable, "-m", "twin", *serve, "--port", "0", "--blocks", "1", "--json"]
    env = {name: value for name, value in os.environ.items() if name != "MONOTWIN_API_KEY"}
    bare = subprocess.run(start, env=env, capture_output=True, text=True, check=False)
    assert bare.returncode == 2
    assert "MONOTWIN_API_KEY" in bare.stderr
    server = subprocess.Popen(
        start, env=env | {"MONOTWIN_API_KEY": "x" * 32}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout
        printed = ""
        while "}" not in printed:
            line = server.stdout.readline()
            assert line
            printed += line
        port = int(json.loads(printed)["url"].rsplit(":", 1)[1])
        assert checked(port) == 0
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 130
        assert checked(port) == 1
    finally:
        server.kill()
        server.communicate()
