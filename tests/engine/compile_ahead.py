"""Compiles the kernels of the GPU tests on all cores, so that the tests find them in the cache: one
after the other they take minutes.

    python tests/engine/compile_ahead.py [--workers N] [-k EXPRESSION]

Needs no GPU. As a pytest plugin it takes one share of the tests, and ends each where its kernel has
been compiled.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    f"tests/engine/test_{of}.py"
    for of in (
        *("cuda_engine", "cuda_codes", "cuda_recurrent"),
        *("prompt_chunks", "coded_prompts", "routed_prompts", "cached_fp8"),
    )
]
SHARE = "TWIN_COMPILE_SHARE"  # "2/16": the third of sixteen


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    part, parts = map(int, os.environ[SHARE].split("/"))
    items[:] = items[part::parts]


def pytest_configure(config: pytest.Config) -> None:
    from tests.engine.fake_driver import FakeDriver
    from twin.engine import cuda
    from twin.engine.driver import ADVICE, Driver
    from twin.errors import EngineError

    # of the plugin that is left out: it would skip all without a GPU
    for mark in ("skipif", "skip", "xfail"):
        config.addinivalue_line("markers", f"{mark}: not heeded here")
    compiled = cuda.compile_kernels

    def compile_only(*args: Any, **options: Any) -> None:
        compiled(*args, **options)
        pytest.skip("compiled")

    cuda.compile_kernels = compile_only  # type: ignore[assignment]
    # the engine would query a GPU first
    cuda.open_driver = lambda: Driver(FakeDriver(), EngineError, ADVICE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "-k", default="", help="only tests that pytest would take with this expression"
    )
    args = parser.parse_args()
    plugins = ["-p", "no:cacheprovider", "-p", "no:skipping", "-p", "tests.engine.compile_ahead"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-k",
        args.k,
        *plugins,
        *FILES,
    ]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    running = []
    for part in range(args.workers):
        env = {**os.environ, SHARE: f"{part}/{args.workers}", "PYTHONPATH": path}
        running.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    failed = 0
    for one in running:
        said = one.communicate()[0]
        if " failed" in said or " error" in said:
            failed += 1
            print(said, file=sys.stderr)
    print(f"{len(running)} workers, {failed} with failures")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
