"""The cache of compiled kernels, where several processes fill it at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from twin.engine.hip_build import clang
from twin.errors import ToolchainError
from twin.toolchain import cached


def test_a_folder_that_another_process_made_meanwhile_stays(tmp_path: Path) -> None:
    target = tmp_path / "kernel"

    def make(folder: Path) -> Path:
        for at in (folder / "made", target):  # the other process is faster
            at.mkdir()
            (at / "kernel.cubin").write_bytes(b"code")
        return folder / "made"

    assert cached(target, make) == target
    assert (target / "kernel.cubin").read_bytes() == b"code"
    assert [path.name for path in tmp_path.iterdir()] == ["kernel"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolchainError, match="cannot be written"):
        cached(tmp_path / "file" / "kernel", lambda folder: folder)


def test_a_clang_that_does_not_know_the_chip_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "clang"
    old.write_text("#!/bin/sh\necho Debian clang version 14.0.6\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="no clang from 17 on"):
        clang()
