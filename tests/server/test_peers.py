"""Peers' own suites and clients against this tree, where they are: PEER_SUITES names their folder,
whose run.sh fetches them and compares what fails with the verdicts on file.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("llamacpp", "vllm", "clients", "lmeval", "guidellm")


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_nothing_fails_that_passed_and_no_mistake_of_ours_is_new(
    suite: str, tmp_path: Path
) -> None:
    folder = os.environ.get("PEER_SUITES")
    if folder is None:
        pytest.skip("PEER_SUITES names no folder with run.sh")
    ran = subprocess.run(
        ["bash", f"{folder}/run.sh", str(ROOT), suite],
        env=os.environ | {"PEER_RESULTS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
