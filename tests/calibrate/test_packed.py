"""Records of older kernels in one archive a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.common import packing
from twin.calibrate import packed, store
from twin.data import data_dir
from twin.errors import CalibrationError


def run(home: Path, name: str, seconds: float = 1.0) -> Path:
    folder = home / "runs" / "h200-sxm" / name
    store.save_run(folder, {"node": "1xh200-sxm"}, {"a": [seconds]})
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "fits").mkdir()
    (tmp_path / "fits" / "h200-sxm.yaml").write_text("run: new-probes\nsource: by old-1, new.\n")
    for name in ("old-1", "old-2", "older", "new", "new-probes"):
        run(tmp_path, name, len(name))
    return tmp_path


def test_what_a_fit_names_is_not_packed(home: Path) -> None:
    assert packing.to_pack(home, "h200-sxm") == ["old-2", "older"]


def test_a_packed_record_reads_as_before_and_is_listed(home: Path) -> None:
    runs = home / "runs" / "h200-sxm"
    before, all_names = store.read_run(runs / "old-2"), packed.names(runs)
    packing.pack(runs, ["old-2"])
    assert not (runs / "old-2").exists()
    assert packed.names(runs) == all_names
    assert store.read_run(runs / "old-2") == before
    packing.pack(runs, ["older"])
    assert store.read_run(runs / "old-2") == before
    assert store.read_run(runs / "older").samples == {"a": [5.0]}
    assert packed.unpacked(runs / "new") == runs / "new"


def test_the_same_records_are_packed_to_the_same_bytes(home: Path, tmp_path: Path) -> None:
    contents = []
    for one in (("old-1", "old-2"), ("old-2", "old-1")):
        runs = home / "runs" / "h200-sxm"
        for name in one:
            run(home, name)
        (runs / packed.ARCHIVE).unlink(missing_ok=True)
        packing.pack(runs, list(one))
        contents.append((runs / packed.ARCHIVE).read_bytes())
    assert contents[0] == contents[1]


def test_a_damaged_archive_is_refused(home: Path) -> None:
    runs = home / "runs" / "h200-sxm"
    (runs / packed.ARCHIVE).write_bytes(b"nothing")
    with pytest.raises(CalibrationError, match="is damaged"):
        store.read_run(runs / "gone")


def test_every_record_that_a_fit_rests_on_lies_open() -> None:
    calibration = data_dir("calibration")
    for runs in sorted((calibration / "runs").glob("*/")):
        if runs.name != "host":
            inside = [name for name in packed.names(runs) if not (runs / name).is_dir()]
            assert not packing.words_of(calibration, runs.name) & set(inside)
