"""Numbers that Python and C++ share: a disagreement does not compile."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from twin import toolchain
from twin.data import data_dir
from twin.hardware.load import load_node
from twin.kernel.facts import FACTS, facts
from twin.kernel.header import header
from twin.models.load import load_model
from twin.schedule.options import plan_for

HERE = Path(__file__).resolve().parent
PROMPT = "twin/kernel/prompt.py is another"
HOST = {
    "PASS_TILES": f"TILES in {PROMPT}",
    "PASS_PITCH_BYTES": f"PITCH_BYTES in {PROMPT}",
    "PASS_TILE_BYTES": f"TILE_BYTES in {PROMPT}",
    "LINE_FLOATS": f"LINE_FLOATS in {PROMPT}",
    "PARTIAL_EXTRA": "PARTIAL_EXTRA in twin/plan/attention.py",
    "PROGRESS_BYTES": "PROGRESS_BYTES in twin/schedule/memory.py",
}
DEVICE = {  # what a CPU compiles of the platform of GPUs
    "PASS_STEP_COLUMNS": "swizzled_rows: rows of 128 bytes",
    "PASS_TILE_TOKENS": "a warp group takes GROUP_TOKENS of a tile",
    "PASS_ROOM_BYTES": "the plan counts the same",
    "TENSOR_POSITIONS": "twin/schedule/splits.py: an m16n8k16 product",
    "TENSOR_HEADS": "twin/schedule/splits.py: an m16n8k16 product",
}


def refused(folder: Path, source: Path, changed: dict[str, int], *flags: str) -> str:
    """What the compiler says of a copy of the native sources with other facts; nothing where it
    takes them.
    """
    shutil.copytree(data_dir("native"), folder / "native")
    (folder / "native" / "platform" / "facts.h").write_text(facts(changed), encoding="utf-8")
    text = source.read_text(encoding="utf-8").replace("../../native", "native")
    copied = (
        folder / "native" / "platform" / source.name
        if source.is_relative_to(data_dir("native"))
        else folder / source.name
    )
    copied.write_text(text, encoding="utf-8")
    command = [
        toolchain.host_compiler(),
        "-std=c++17",
        "-fsyntax-only",
        "-pthread",
        f"-I{folder}",
        *flags,
        str(copied),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def refused_by_the_host(folder: Path, changed: dict[str, int]) -> str:
    plan = plan_for(load_model("llama-3.2-1b"), load_node("host"))
    (folder / "plan.h").write_text(header(plan, embedded=False), encoding="utf-8")
    return refused(folder, data_dir("native") / "platform" / "host_main.cpp", changed)


def test_the_header_is_up_to_date() -> None:
    kept = data_dir("native") / "platform" / "facts.h"
    assert kept.read_text(encoding="utf-8") == facts(), "run `make generated`"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HOST)
def test_the_host_does_not_compile_with_another(name: str, tmp_path: Path) -> None:
    assert HOST[name] in refused_by_the_host(tmp_path, {name: 2 * FACTS[name][0]})


@pytest.mark.few(2)
@pytest.mark.parametrize("name", DEVICE)
def test_the_tensor_cores_do_not_compile_with_another(name: str, tmp_path: Path) -> None:
    source = HERE / ("scan.cpp" if name.startswith("TENSOR") else "chunk.cpp")
    flags = ["-DHEADDIM=64", "-DSTORED=BF16", "-w", "-DCHUNK=1024", "-DWIDE_SCAN=0"]
    assert DEVICE[name] in refused(tmp_path, source, {name: 2 * FACTS[name][0]}, *flags)


def test_all_compile_as_they_are(tmp_path: Path) -> None:
    assert "error" not in refused_by_the_host(tmp_path, {})
