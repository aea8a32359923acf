"""What the tests of the command line share."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.command_line import TINY, Twin
from tests.draws import TIMES, scaled
from twin import toolchain
from twin.__main__ import OBJECTS
from twin.engine.save import save_checkpoint
from twin.engine.tokenizer import make_byte_tokenizer
from twin.engine.weights import random_weights
from twin.errors import ToolchainError

ROOT = Path(__file__).resolve().parents[1]
POINTS = "MONOTWIN_POINTS"
LEFT_OUT = ("gpu", "slow")
GATE = "not gpu and not slow"  # the marks of `make test`
COMPARED, BUILDS = "compared with Hugging Face", ("tests/native", "tests/gfx942")
IMPORTED = re.compile(r"pytest\.mark\.hf|importorskip\(\"(torch|transformers)")
LONG = (COMPARED, *BUILDS, "tests/engine/", "tests/calibrate/", "tests/attack/", "tests/explore/")
USERS_COMPILER = os.environ.get("CXX")
# The compiler of the CPU engine in tests: unoptimised, a fifth of the time; of Clang's, which the
# MI300X needs anyway, half of g++'s.
FAST = ("clang++-19", "clang++-20", "clang++-21", "clang++")
COMPILER = """#!/bin/sh
for word; do
  shift
  case "$word" in --version) echo unoptimised ;; -O3) word=-O0 ;; esac
  set -- "$@" "$word"
done
exec '{compiler}' {linking} "$@"
"""
# A busy machine makes no test red. Draws of tests that say no number.
settings.register_profile(
    "gate",
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    max_examples=scaled(30),
)
settings.load_profile("gate")
# Else draws would depend on the numbers in all modules that a process has loaded: other draws with
# every change of any source, and in every process of a clean checkout three seconds to read them.
if hasattr(providers, "_get_local_constants"):  # not of every version
    providers._get_local_constants = lambda: providers._local_constants


# A shell starts what it runs in the background deaf to Ctrl-C, and so would be every program that
# the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection(session: pytest.Session) -> None:
    """Of several processes each compiles its share of the test files first, and takes the others'
    compiled: in a clean checkout each process would spend twelve seconds on all of them.
    """
    name = os.environ.get("PYTEST_XDIST_WORKER", "")
    whole = session.config.args_source is not pytest.Config.ArgsSource.ARGS
    if not name or not whole:
        return
    root, count = session.config.rootpath, int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    files = sorted(root.glob("tests/**/test_*.py"), key=lambda file: file.stat().st_size)
    for file in files[int(name.removeprefix("gw")) :: count]:
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        # whatever is wrong with a file, its collection reports
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(module)


@cache
def share(file: str) -> str:
    """What one of several processes runs: a file of tests, or more of them, where these compile the
    same kernels for a GPU, or import torch and transformers, which takes four seconds.
    """
    if IMPORTED.search((ROOT / file).read_text(encoding="utf-8")):
        return COMPARED
    folder = file.rpartition("/")[0]
    return folder if folder in BUILDS else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process a core and one more, for a fifth of the time they wait for others; at most four:
    an engine under test has a thread for each core itself.
    """
    return min(4, len(os.sched_getaffinity(0)) + 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Two processes that take tests of one file from each other compile its kernels twice."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByShare(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return share(super()._split_scope(nodeid))

    return ByShare(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Of the cases of a test marked `few(n)`, n evenly spaced ones stay in the gate and the others
    are slow. Of what the gate leaves out, a third of all cases, it makes no items in any of its
    processes.
    """
    yield
    calls, few = metafunc._calls, metafunc.definition.get_closest_marker("few")
    quick = [call for call in calls if not any(mark.name in LEFT_OUT for mark in call.marks)]
    if few:
        kept = {i * len(quick) // few.args[0] for i in range(few.args[0])}
        for at, call in enumerate(quick):
            if at not in kept:
                call.marks.append(pytest.mark.slow.mark)
        quick = [quick[at] for at in sorted(kept)]
    if metafunc.config.option.markexpr == GATE:
        metafunc._calls = quick or calls[:1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that all processes end at about the same time."""
    items.sort(key=lambda item: _turn(item.nodeid.partition("::")[0]))


def _turn(file: str) -> int:
    own = share(file)
    return next((at for at, long in enumerate(LONG) if own.startswith(long)), len(LONG))


def pytest_collection_finish() -> None:
    """What is loaded stays: the collector of garbage need not look at those hundreds of thousands
    of objects again and again, nor five times at the end. Hypothesis listens to each collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS)


@pytest.fixture(scope="session", autouse=True)
def _no_earlier_points(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Results of studies that an earlier run of the tests left in the user's cache are not found
    again.

    POINTS is twin.study.store's name for them (a test says so), not imported here: machines with a
    GPU have no simulator.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(POINTS, str(tmp_path_factory.mktemp("points")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _unoptimised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests compile dozens of CPU engines and compute a few tokens with each. Processes that they
    start compile alike. `make slow` compiles all of them as users do.
    """
    with pytest.MonkeyPatch.context() as patch:
        # without a compiler, the tests that need one say so
        with contextlib.suppress(ToolchainError):
            compiler = tmp_path_factory.mktemp("compiler") / "c++"
            named = toolchain.host_compiler()  # where there is none, nobody compiles
            fast = None if USERS_COMPILER else next(filter(None, map(shutil.which, FAST)), None)
            # half the time of the usual linker's
            lld = fast and shutil.which(Path(fast).name.replace("clang++", "ld.lld"))
            linking = "-fuse-ld=lld -Wno-unused-command-line-argument" if lld else ""
            compiler.write_text(COMPILER.format(compiler=fast or named, linking=linking))
            compiler.chmod(0o700)
            if TIMES == 1:
                patch.setenv("CXX", str(compiler))
        yield


@pytest.fixture
def as_users_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flags that users get: low-bit matrices and others in a kernel."""
    if USERS_COMPILER:
        monkeypatch.setenv("CXX", USERS_COMPILER)
    else:
        monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def twin(capsys: pytest.CaptureFixture[str]) -> Twin:
    return Twin(capsys)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real, tiny Hugging Face folder with random weights and a byte tokenizer. Copy it before
    damaging it.
    """
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_checkpoint(folder, random_weights(TINY, 1))
    make_byte_tokenizer(folder)
    return folder
