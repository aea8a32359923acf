"""Engines whose GPU is the interpreter, or threads of this CPU in waves of 64: sessions, requests
and results are those of every engine.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from tests.gfx942.code import Code, Instruction, code_of
from tests.gfx942.interpreter import Launched, load, run
from twin import toolchain
from twin.engine.cuda import new_launch
from twin.engine.hip_build import clang, definitions
from twin.engine.host import _Arenas
from twin.engine.session import Session, address
from twin.engine.weights import random_weights
from twin.errors import ToolchainError
from twin.kernel.header import Control, Request, header
from twin.plan.types import Plan
from twin.schedule.local import STATUS_BYTES
from twin.schedule.strips import THREADS

WATCHDOG_S = 0.003  # of the interpreter's clock, in which a microsecond is 800 instructions
SEED = 3  # of the weights
HERE = Path(__file__).resolve().parent
WAVES_FLAGS = (
    "-x",
    "c++",
    "-std=c++17",
    "-O1",
    "-march=native",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-exceptions",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-attributes",  # those of HIP
    "-Wno-ignored-attributes",
    f"-DTWIN_THREADS={THREADS}",
    f"-DTWIN_STATUS_BYTES={STATUS_BYTES}",
)


class Stepped(Session):
    """A plan with random weights in the host's memory, a launch at a time."""

    def __init__(self, plan: Plan, *, watchdog_s: float) -> None:
        super().__init__(plan, trace=False, watchdog_s=watchdog_s)
        assert plan.spec is not None
        self._launch_bytes = ctypes.sizeof(new_launch(plan.options))
        self.arguments_bytes = (self._launch_bytes + 24 + 7) // 8 * 8
        self._arenas = _Arenas(plan, random_weights(plan.spec, SEED, plan.options.weight_dtype))
        self._words = np.zeros(ctypes.sizeof(Control), np.uint8)
        self._control = Control.from_buffer(self._words)
        self._kept: list[NDArray[Any]] = []
        self.places = np.full(plan.ranks * plan.blocks, -1, np.int32)
        self.reported = self.places.copy()
        self.clears = True  # what blocks tell each other, at the start of a run

    @abstractmethod
    def _execute(self, launches: list[Launched], lent: list[NDArray[Any]]) -> None:
        """One launch on each GPU, side by side, to the end; `lent` is what they may touch."""

    def _close(self) -> None:
        pass

    def _zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        made = np.zeros(shape, dtype)
        self._kept.append(made)
        return made

    def _give(self, array: NDArray[Any]) -> int:
        self._kept.append(array)
        return address(array)

    def _write_constants(self, at: int, vector: NDArray[np.float32]) -> None:
        self._arenas.write_constants(at, vector)

    def _request(self, prompt: Sequence[int], steps: int, stop: Iterable[int]) -> Request:
        self._kept = []
        return super()._request(prompt, steps, stop)

    def fill_random(self, seed: int) -> None:
        self._arenas.fill(seed)

    def _start(self, request: Request) -> None:
        self._arenas.clear()
        self._words[:] = 0
        if self.clears:
            self.reported[:] = -1
        launch = new_launch(self.plan.options)
        launch.request, launch.control = request, ctypes.addressof(self._control)
        for rank, memory in enumerate(self._arenas.ranks):
            launch.ranks[rank] = memory
        gpus = self.plan.options.gpus
        ranks = self.plan.ranks // gpus
        launches = []
        for gpu in range(gpus):
            arguments = np.zeros(self.arguments_bytes, np.uint8)
            size = self._launch_bytes
            arguments[:size] = np.frombuffer(bytes(launch), np.uint8)
            blocks = ranks * self.plan.blocks
            arguments[size : size + 4].view(np.int32)[0] = gpu * ranks
            for at, words in ((size + 8, self.places), (size + 16, self.reported)):
                where = words[gpu * blocks :].ctypes.data
                arguments[at : at + 8].view(np.uint64)[0] = where
            launches.append(Launched(arguments, blocks))
        arenas = self._arenas
        lent = [
            self._words,
            self.places,
            self.reported,
            *arenas._streams,
            *arenas._exchange,
            *arenas._counts,
            *arenas._kept,
            *arenas.caches,
            *self._kept,
        ]
        self._execute(launches, [a for a in lent if a.nbytes])

    def _wait(self, sent: int) -> bool:
        return True

    def _join(self) -> None:
        pass


class Emulated(Stepped):
    """By the interpreter; `code` instead of what the plan compiles to, for a planted fault."""

    def __init__(
        self,
        plan: Plan,
        *,
        seed: int = 1,
        code: Code | None = None,
        dies: int = 2,
        most: int = 3 * 10**7,
    ) -> None:
        super().__init__(plan, watchdog_s=WATCHDOG_S)
        self.seed, self.dies, self._most, self.executed = seed, dies, most, 0
        self._loaded = load(code or code_of(plan))
        assert self._loaded.code.kernarg_bytes == self.arguments_bytes

    def reached(self) -> list[Instruction]:
        """What the runs so far have executed."""
        return [one for one, times in self.counted() if times]

    def counted(self) -> list[tuple[Instruction, int]]:
        """Every instruction, and how often waves have executed it in the runs so far."""
        times = (int(n) for n in self._loaded.reached)
        return list(zip(self._loaded.code.instructions, times, strict=True))

    def _execute(self, launches: list[Launched], lent: list[NDArray[Any]]) -> None:
        self.executed = run(
            self._loaded, launches, lent, dies=self.dies, seed=self.seed, most=self._most
        )


class Waved(Stepped):
    """By this CPU: the platform's own source, waves of 64 lanes (waves.h)."""

    def __init__(
        self, plan: Plan, *, seed: int = 1, sanitize: bool = False, watchdog_s: float = 30
    ) -> None:
        super().__init__(plan, watchdog_s=watchdog_s)
        self._seed = seed
        self._library = ctypes.CDLL(str(build_waves(plan, sanitize=sanitize)))

    def _execute(self, launches: list[Launched], lent: list[NDArray[Any]]) -> None:
        at = (ctypes.c_void_p * len(launches))(*(one.kernargs.ctypes.data for one in launches))
        size = self._library.waves_run(
            at, len(launches), launches[0].blocks, 8, ctypes.c_ulong(self._seed)
        )
        assert size == self.arguments_bytes


def build_waves(plan: Plan, *, sanitize: bool) -> Path:
    """Skips without a clang: the platform's vector types are its own."""
    try:
        compiler = clang()
    except ToolchainError as error:
        pytest.skip(str(error))
    text = header(plan)
    flags = [
        *WAVES_FLAGS,
        *definitions(plan),
        f'-DTWIN_PLATFORM="{HERE / "waves.h"}"',
    ]
    if sanitize:  # with GCC's runtime: Debian's clang comes without
        found = toolchain.run_compiler([toolchain.host_compiler(), "-print-file-name=libubsan.so"])
        runtime = found.strip()
        if not Path(runtime).is_absolute():
            pytest.skip("libubsan.so is not installed")
        flags += [
            "-g1",
            "-fsanitize=undefined",
            "-fno-sanitize=function",
            "-fno-sanitize-recover=all",
            f"-Wl,{runtime}",
        ]
    sources = [*toolchain.native_sources(), HERE / "waves.h", HERE / "waves_main.cpp"]
    key = toolchain.content_key([toolchain.compiler_version(compiler), *flags, text], sources)

    def build(folder: Path) -> Path:
        (folder / "plan.h").write_text(text, encoding="utf-8")
        made = folder / "waves.so"
        source = str(HERE / "waves_main.cpp")
        toolchain.run_compiler(
            [compiler, *flags, f"-I{folder}", source, "-lstdc++", "-o", str(made)]
        )
        return made

    return toolchain.cached(toolchain.cache_dir() / f"waves-{key}.so", build)
