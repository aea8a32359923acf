"""The unmodified AMD driver generates the reference's tokens: hip-python hands its calls to a
runtime of the tests, whose GPUs interpret the code object that the driver has loaded.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command_line import Twin
from tests.engine import code_object
from tests.engine.hip_runtime import (
    ILLEGAL_ADDRESS,
    LAUNCHES,
    Runtime,
    Started,
    arguments_after,
    installed,
)
from tests.engine.small_engine import SEED, TOKENS, expected
from tests.gfx942.code import compiled, objdump, read_code
from tests.gfx942.interpreter import Fault, Launched, load, run
from tests.gfx942.small import small
from twin.engine.hip import HipEngine
from twin.engine.weights import random_weights
from twin.errors import EngineError
from twin.plan.options import CollectiveKind, HandOffKind, Placement, Sampling
from twin.plan.types import Plan

PROMPT = TOKENS[:4]
CLOSE = 1e-3  # of the largest logit: cached keys and values are FP16
ONE = small(placement=Placement.BY_DIE)
PLANS: dict[str, Plan] = {
    "one GPU": ONE,
    "counter": small(handoff=HandOffKind.COUNTER),
    "two GPUs": small(gpus=2, collective=CollectiveKind.PUSH),
    "flat": small(),
}
FULL_LENGTH = ("counter", "flat")  # too long for the gate


class Interpreted(Runtime):
    """Its kernel is the code object's, and may touch only what the driver has allocated."""

    def __init__(self, *, gpus: int = 1, seed: int = 2, dies: int = 2) -> None:
        super().__init__(gpus=gpus, kernel=self._interpret)
        self.fault = ""
        self._seed, self._dies = seed, dies

    def _interpret(self, started: Sequence[Started]) -> int:
        loaded = load(read_code(started[0].image))
        size = loaded.code.kernarg_bytes
        launches = [
            Launched(np.pad(one.arguments, (0, size))[:size], one.blocks) for one in started
        ]
        memory: list[Any] = [held.array for held in self.held.values()]
        try:
            run(loaded, launches, memory, dies=self._dies, seed=self._seed, most=3 * 10**7)
        except Fault as error:
            self.fault = str(error)
            return ILLEGAL_ADDRESS
        return 0


@pytest.fixture
def install() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda runtime: stack.enter_context(installed(runtime))


def engine(plan: Plan) -> HipEngine:
    """The watchdog is of the interpreter's clock, in which a microsecond is 800 instructions."""
    compiled(plan)  # skips without a compiler
    assert plan.spec is not None
    weights = random_weights(plan.spec, SEED, plan.options.weight_dtype)
    return HipEngine(plan, weights, watchdog_s=0.003)


@pytest.mark.parametrize(
    "name",
    [name if name == "one GPU" else pytest.param(name, marks=pytest.mark.slow) for name in PLANS],
)
def test_the_driver_computes_the_references_logits_and_tokens(install: Any, name: str) -> None:
    plan, prompt = PLANS[name], PROMPT if name in FULL_LENGTH else PROMPT[:2]
    runtime = install(Interpreted(gpus=plan.options.gpus))
    wanted = expected(plan, prompt)
    with engine(plan) as running:
        off = np.abs(running.logits(prompt) - wanted).max() / np.abs(wanted).max()
        made = running.generate(prompt[:1], max_tokens=1)
        places = running.places
    assert off < CLOSE, runtime.fault
    assert made.tokens == [int(np.argmax(wanted[0]))]
    assert (runtime.held, runtime.mistakes) == ({}, [])
    for gpu in places:
        gpu.check(dies=2)
        assert len(gpu.dies) == plan.blocks
        assert gpu.neighbours or name != "one GPU"


@pytest.mark.parametrize(
    ("sampling", "launch"),
    [
        (Sampling.GREEDY, LAUNCHES[0]),
        pytest.param(Sampling.FULL, LAUNCHES[1], marks=pytest.mark.slow),
    ],
)
def test_the_kernels_arguments_lie_where_the_code_object_says(
    sampling: Sampling, launch: Any
) -> None:
    """The stub reads the code object's notes as ROCm does; llvm-readelf reads the same in them, and
    the driver's structs are as large.
    """
    code = compiled(small(sampling=sampling, placement=Placement.BY_DIE)).code_object
    reader = objdump().replace("objdump", "readelf")
    said = subprocess.run(
        [reader, "--notes", "-"], input=code, capture_output=True, check=True
    ).stdout.decode()
    found = re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)", said)
    arguments = code_object.arguments(code)
    assert [(int(at), int(size)) for at, size in found] == [*arguments]
    assert arguments == arguments_after(launch)
    assert int(re.findall(r"\.max_flat_workgroup_size: (\d+)", said)[0]) == 512
    assert read_code(code).kernarg_bytes == sum(arguments[-1])


def test_memory_that_the_driver_did_not_allocate_ends_the_run(install: Any) -> None:
    runtime = install(Interpreted())
    running = engine(ONE)
    stream = running._launch.ranks[0].stream
    running._launch.ranks[0].stream = stream + (1 << 30)
    with pytest.raises(EngineError, match="hipErrorIllegalAddress"):
        running.generate(PROMPT, max_tokens=1)
    assert "belong to nobody" in runtime.fault


BENCH = ("bench", "--context", "2", "--tokens", "2", "--repeats", "1", "--check", "2")
COMMANDS = (
    ("run", "--prompt-tokens", "1,2", "--max-tokens", "2", "--json"),
    ("run", "--prompt-tokens", "1,2", "--max-tokens", "2", "--random", "1", "--json"),
    (*BENCH, "--json"),
    (*BENCH, "--random", "1", "--json"),
)


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_reach_an_amd_gpu(
    words: tuple[str, ...], install: Any, twin: Twin, checkpoint: Path
) -> None:
    compiled(ONE)  # skips without a compiler
    runtime = install(Interpreted())
    done = twin(words[0], checkpoint, *words[1:], "--node", "1xmi300x", "--blocks", 4)
    assert done.code == 0, (done.err, runtime.fault)
    found = json.loads(done.out)
    assert found["blocks_per_gpu"] == 4
    assert (runtime.held, runtime.mistakes) == ({}, [])
    if words[0] == "bench":
        assert found["logit_difference"] < CLOSE
    elif "--random" not in words:
        on_cpu = twin(words[0], checkpoint, *words[1:], "--blocks", 4)
        assert on_cpu.code == 0, on_cpu.err
        assert found["tokens"] == json.loads(on_cpu.out)["tokens"]
