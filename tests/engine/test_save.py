"""A checkpoint is written whole: whoever is killed leaves no file under its final name that is
not.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.test_weights import SPEC
from twin.engine import safetensors
from twin.engine.save import CONFIG, INDEX, save_checkpoint
from twin.engine.weights import open_checkpoint, random_weights
from twin.errors import CheckpointError
from twin.models.spec import DType

SHARDS = 2
# in the order in which they are written
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX, CONFIG)
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.engine.test_save import SHARDS, SPEC, DType, random_weights, save_checkpoint
left = [int(sys.argv[2])]
def fsync(descriptor):
    left[0] -= 1
    if not left[0]:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = fsync
save_checkpoint(Path(sys.argv[1]), random_weights(SPEC, 2, DType.BF16), shards=SHARDS)
"""


def killed(folder: Path, file: int) -> None:
    """A process that writes a checkpoint and is killed when half of its file of this number is on
    the disk.
    """
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.mark.few(2)
@pytest.mark.parametrize("file", range(1, len(FILES) + 1))
def test_a_killed_writer_leaves_no_checkpoint_and_no_half_file(file: int, tmp_path: Path) -> None:
    killed(tmp_path, file)
    named = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert named == set(FILES[: min(file - 1, 2)])  # the two texts get their names together
    for name in named:
        assert safetensors.read_header(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"no {CONFIG}"):
        open_checkpoint(tmp_path)


def test_a_killed_writer_leaves_the_files_that_were_there(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, random_weights(SPEC, 1, DType.BF16), shards=SHARDS)
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    killed(tmp_path, 1)
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == before


def test_what_is_written_after_an_interrupted_one_is_whole(tmp_path: Path) -> None:
    killed(tmp_path, 2)
    save_checkpoint(tmp_path, random_weights(SPEC, 1, DType.BF16), shards=SHARDS)
    assert open_checkpoint(tmp_path).spec.layers == SPEC.layers
