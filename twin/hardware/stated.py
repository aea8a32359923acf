"""What our kernel costs on a device on file before any fit: calibration/kernels/stated."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from twin.data import data_dir, read_yaml
from twin.hardware.kernel import CoreKernel
from twin.hardware.schema import read
from twin.hardware.types import HOST


def stated_file(device: str) -> Path:
    return data_dir("calibration") / "kernels" / "stated" / f"{device}.yaml"


@lru_cache(maxsize=1)
def of_a_core() -> CoreKernel:
    """Of a CPU that nobody has probed."""
    file = stated_file(HOST)
    return read(read_yaml(file), CoreKernel, file)
