"""An engine whose GPU is the interpreter: sessions, requests and results are those of every
engine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tests.gfx942.code import Code, Instruction, code_of
from tests.gfx942.interpreter import Launched, load, run
from twin.engine.cuda import _Launch
from twin.engine.host import _Arenas
from twin.engine.session import Session, address
from twin.engine.weights import random_weights
from twin.kernel.header import Control, Request
from twin.plan.types import Plan

WATCHDOG_S = 0.003  # of the interpreter's clock, in which a microsecond is 800 instructions
SEED = 3  # of the weights


class Emulated(Session):
    """A plan with random weights; `code` instead of what the plan compiles to, for a planted
    fault.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        seed: int = 1,
        code: Code | None = None,
        dies: int = 2,
        most: int = 3 * 10**7,
    ) -> None:
        super().__init__(plan, trace=False, watchdog_s=WATCHDOG_S)
        self.seed, self.dies, self._most, self.executed = seed, dies, most, 0
        self._loaded = load(code or code_of(plan))
        assert plan.spec is not None
        self._arenas = _Arenas(plan, random_weights(plan.spec, SEED, plan.options.weight_dtype))
        self._words = np.zeros(ctypes.sizeof(Control), np.uint8)
        self._control = Control.from_buffer(self._words)
        self._kept: list[NDArray[Any]] = []
        self.places = np.full(plan.ranks * plan.blocks, -1, np.int32)

    def reached(self) -> list[Instruction]:
        """What the runs so far have executed."""
        seen = zip(self._loaded.code.instructions, self._loaded.reached, strict=True)
        return [one for one, here in seen if here]

    def _close(self) -> None:
        pass

    def _zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        made = np.zeros(shape, dtype)
        self._kept.append(made)
        return made

    def _give(self, array: NDArray[Any]) -> int:
        self._kept.append(array)
        return address(array)

    def _request(self, prompt: Sequence[int], steps: int, stop: Iterable[int]) -> Request:
        self._kept = []
        return super()._request(prompt, steps, stop)

    def fill_random(self, seed: int) -> None:
        self._arenas.fill(seed)

    def _start(self, request: Request) -> None:
        self._arenas.clear()
        self._words[:] = 0
        launch = _Launch(request=request, control=ctypes.addressof(self._control))
        for rank, memory in enumerate(self._arenas.ranks):
            launch.ranks[rank] = memory
        gpus = self.plan.options.gpus
        ranks = self.plan.ranks // gpus
        launches = []
        for gpu in range(gpus):
            arguments = np.zeros(self._loaded.code.kernarg_bytes, np.uint8)
            size = ctypes.sizeof(_Launch)
            arguments[:size] = np.frombuffer(bytes(launch), np.uint8)
            blocks = ranks * self.plan.blocks
            arguments[size : size + 4].view(np.int32)[0] = gpu * ranks
            arguments[size + 8 : size + 16].view(np.uint64)[0] = self.places[
                gpu * blocks :
            ].ctypes.data
            launches.append(Launched(arguments, blocks))
        arenas = self._arenas
        lent = [
            self._words,
            self.places,
            *arenas._streams,
            *arenas._exchange,
            *arenas._counts,
            *arenas._kept,
            *self._kept,
        ]
        self.executed = run(
            self._loaded,
            launches,
            [a for a in lent if a.nbytes],
            dies=self.dies,
            seed=self.seed,
            most=self._most,
        )

    def _wait(self, told: int) -> bool:
        return True

    def _join(self) -> None:
        pass
