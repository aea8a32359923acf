"""The examples in deploy/ start what they say, by options that there are."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

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


def test_the_container_starts_a_server_that_asks_for_a_key() -> None:
    (words,) = (json.loads(found) for found in re.findall(r"^CMD (\[.*\])$", CONTAINER, re.M))
    args = build_parser(["serve"]).parse_args(words)
    assert args.host == "0.0.0.0"
    assert f"EXPOSE {args.port}" in CONTAINER
    assert f"http://127.0.0.1:{args.port}/health" in CONTAINER
    extras = re.search(r"^ARG EXTRAS=(.*)$", CONTAINER, re.MULTILINE)
    assert extras
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras[1].split(","))
