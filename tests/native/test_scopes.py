"""Which words a kernel of several GPUs loads and stores at system scope."""

from __future__ import annotations

import re

import pytest

from tests.native.disassembly import Instruction, disassembled, find_nvdisasm
from tests.native.test_device_builds import H200, NAMES, planned
from twin.engine.cuda_build import compile_cubin
from twin.errors import ToolchainError

AT_ONCE = 4  # loads of words that a scheduler warp reads back (Confirmed in cuda.cuh)
PAUSE = "0x14"  # of the instruction that looks at them (await_word)
NEAR = 120  # instructions


def names(build: str) -> list[str]:
    """Of a kernel's instructions."""
    return [one.name for one in code(build)]


def code(build: str) -> tuple[Instruction, ...]:
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        pytest.skip("nvdisasm is not installed")
    try:
        report = compile_cubin(planned("llama-3.2-1b", H200, **NAMES[build]), lines=True)
    except ToolchainError as error:
        if "installed" not in str(error) and "loaded" not in str(error):
            raise
        pytest.skip(str(error))
    return disassembled(nvdisasm, report.cubin).code


def count(found: list[str], pattern: str) -> int:
    return sum(bool(re.fullmatch(pattern, name)) for name in found)


@pytest.mark.slow
def test_only_words_that_cross_gpus_have_the_systems_scope() -> None:
    """A hang under load was a payload without it. Words of the host have it on one GPU, too."""
    one, two = names("defaults"), names("two GPUs")
    quads, stores = r"LDG\.E\.(?:64|128)\.STRONG\.", r"STG\.E\.STRONG\."
    assert count(one, quads + "SYS") == 0 < count(one, quads + "GPU")
    assert count(two, quads + "SYS") > 0 < count(two, quads + "GPU")  # residual; activations
    assert count(two, stores + "SYS") > count(one, stores + "SYS")
    assert count(two, stores + "GPU") > 0
    # plain stores alone: counters and sums in other GPUs' memory would need native atomics
    assert count(two, r"RED\..*SYS") == count(one, r"RED\..*SYS")


@pytest.mark.slow
def test_words_that_a_scheduler_warp_reads_back_are_loaded_and_awaited() -> None:
    """The compiler took the loads out when no instruction looked at their words."""
    found = code("defaults")
    looked = [
        at
        for at, one in enumerate(found)
        if one.name == "NANOSLEEP" and one.operands.startswith(PAUSE)
    ]
    assert looked
    for at in looked:
        near = [one.name for one in found[max(0, at - NEAR) : at]]
        assert count(near, r"LDG\.E\.128\.STRONG\.\w+") >= AT_ONCE
