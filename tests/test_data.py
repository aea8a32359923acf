"""YAML is read alike with libyaml and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.hardware.test_load import HOSTILE
from twin.data import _parsed, data_dir, read_yaml
from twin.errors import ConfigError


def outcome(path: Path) -> object:
    try:
        return read_yaml(path)
    except ConfigError as error:
        return str(error)


def test_what_a_file_means_needs_no_libyaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(data_dir("hwmodels").rglob("*.yaml"))[::6]
    short = {name: text for name, (text, _) in HOSTILE.items() if len(text) < 10**5}
    for name, text in short.items():
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(text)
    fast = [outcome(path) for path in files]
    monkeypatch.delattr(yaml, "cyaml", raising=False)
    _parsed.cache_clear()
    for path, before in zip(files, fast, strict=True):
        now = outcome(path)
        if "not valid YAML" in str(before):  # libyaml says otherwise which word is wrong
            assert "not valid YAML" in str(now), path
        else:
            assert now == before, path
