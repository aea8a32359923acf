"""The cache of compiled code: whole, as it was made, and nobody else's, whoever fills it at the
same time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from twin.engine.hip_build import clang
from twin.errors import ToolchainError
from twin.sim.compiled import library
from twin.toolchain import cached, host_compiler, run_compiler, unsealed


def made_of(content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "made").write_bytes(content)
        return folder / "made"

    return make


def never(folder: Path) -> Path:
    raise AssertionError("made again")


def test_what_is_whole_is_not_made_again(tmp_path: Path) -> None:
    target = tmp_path / "kernel"
    assert cached(target, made_of(b"code")) == cached(target, never) == target
    assert unsealed(target) == b"code"


def test_of_two_processes_that_make_it_at_once_each_gets_a_whole_one(tmp_path: Path) -> None:
    target = tmp_path / "kernel"

    def make(folder: Path) -> Path:
        cached(target, made_of(b"the other's"))  # it is faster
        return made_of(b"this one's")(folder)

    assert unsealed(cached(target, make)) == b"this one's"
    assert [path.name for path in tmp_path.iterdir()] == ["kernel"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: b"k" + data[1:],
        lambda data: data + b"x",
    ],
)
def test_a_damaged_file_is_made_again(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    target = cached(tmp_path / "kernel", made_of(b"code"))
    target.write_bytes(damage(target.read_bytes()))
    assert unsealed(cached(target, made_of(b"code"))) == b"code"


def test_a_file_that_others_could_write_is_made_again(tmp_path: Path) -> None:
    target = cached(tmp_path / "kernel", made_of(b"planted"))
    target.chmod(0o666)
    assert unsealed(cached(target, made_of(b"own"))) == b"own"
    assert target.stat().st_mode & 0o022 == 0


def test_another_users_file_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = cached(tmp_path / "kernel", made_of(b"planted"))
    real = os.fstat

    def planted(descriptor: int) -> os.stat_result:
        about = list(real(descriptor))
        about[4] += 1  # st_uid
        return os.stat_result(about)

    monkeypatch.setattr("twin.toolchain.os.fstat", planted)
    assert unsealed(target) is None


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twin.toolchain.os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ToolchainError, match=r"belongs to user .* XDG_CACHE_HOME"):
        cached(tmp_path / "kernel", never)


def test_a_folder_that_others_could_write_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    cached(folder / "kernel", made_of(b"code"))
    assert folder.stat().st_mode & 0o022 == 0


def test_what_a_killed_compiler_left_is_removed(tmp_path: Path) -> None:
    for name, age_s in ((".making-old", 7200), ("tmpolder1", 7200), (".making-now", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.h").write_text("")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    cached(tmp_path / "kernel", made_of(b"code"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".making-now", "kernel"]


@pytest.fixture
def compiled_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulator of which only its file matters."""
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-O0"))


@pytest.mark.usefixtures("compiled_fast")
def test_a_damaged_simulator_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_compiler()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = library.build(tmp_path)
    kept.write_bytes(kept.read_bytes()[:1000])
    assert unsealed(library.build(tmp_path)) is not None


@pytest.mark.usefixtures("compiled_fast")
def test_a_planted_simulator_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    planted = library.target()
    planted.parent.mkdir(parents=True)
    planted.write_bytes(b"planted")
    # as of another user's folder
    monkeypatch.setattr("twin.sim.compiled.library._usable", lambda folder: False)
    (tmp_path / "own").mkdir()
    assert library.build(tmp_path / "own").parent == tmp_path / "own"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolchainError, match="cannot be written"):
        cached(tmp_path / "file" / "kernel", lambda folder: folder)


def test_a_clang_that_does_not_know_the_chip_is_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "clang"
    old.write_text("#!/bin/sh\necho Debian clang version 14.0.6\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="no clang from 17 on"):
        clang()


def test_a_failure_shows_the_error_behind_all_warnings() -> None:
    script = "import sys\nprint('warning\\n' * 99 + 'error: no such name')\nsys.exit(1)"
    with pytest.raises(ToolchainError, match="no such name"):
        run_compiler([sys.executable, "-c", script])
