"""Which of the two executors runs a machine: compiled code where it can, SimPy where it cannot or
where it is chosen.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from twin.errors import PlanError, ToolchainError, TwinError
from twin.hardware.types import Node
from twin.plan.types import Plan
from twin.sim import compiled
from twin.sim.compiled.lower import Unsupported
from twin.sim.compiled.room import Room
from twin.sim.machine import Machine, one_stands_for_all
from twin.sim.prepare import Prepared

TRIES = 2  # of a program's first GPU alone, before it is left
MOST_WHOLE = 8  # GPUs that are all simulated where they may differ


class Executor(Enum):
    COMPILED = "compiled"  # native/simulator
    SIMPY = "simpy"  # the reference


_missing: list[str] = []  # why this computer cannot compile; looked for once


def run(
    machine: Machine, prepared: Prepared, executor: Executor | None = None, room: Room | None = None
) -> tuple[Executor, str]:
    """Run a machine of this program to its end; by which executor, and, where none was chosen
    and SimPy had to do it, why.

    What compiled code leaves of the blocks' logs lies in `room`.

    Raises ToolchainError or Unsupported if compiled code was chosen and cannot be had.
    """
    why = ""
    if executor is not Executor.SIMPY:
        try:
            if _missing and executor is None:
                raise ToolchainError(_missing[0])
            compiled.run(machine, prepared.flat, room)
            return Executor.COMPILED, ""
        except (ToolchainError, Unsupported) as error:
            if executor is Executor.COMPILED:
                raise
            why = str(error)
            if isinstance(error, ToolchainError) and not _missing:
                _missing.append(why)
    with _no_garbage_collection():
        machine.run()
    return Executor.SIMPY, why


def run_first_gpu(
    plan: Plan, node: Node, steps: int, prepared: Prepared, executor: Executor | None, room: Room
) -> Machine | None:
    """The first GPU of several, in compiled code, after it has run for all of them; None where the
    whole machine has to run.
    """
    hopeless = prepared.enough[-TRIES:] == [False] * TRIES
    if (
        executor is Executor.SIMPY
        or _missing
        or hopeless
        or not one_stands_for_all(plan, node, prepared.program)
    ):
        return None
    machine = Machine(
        plan, node, steps=steps, keep_all=False, program=prepared.program, first_of_equals=True
    )
    try:
        compiled.run(machine, prepared.flat, room)
    except TwinError:
        # no compiler, a clock that ended, GPUs that may differ: the whole machine says what there
        # is to say
        prepared.enough.append(False)
        return None
    prepared.enough.append(True)
    return machine


def can_compile() -> bool:
    """Has this computer a compiler for the simulator, or what one has made?"""
    if not _missing:
        try:
            compiled.load()
        except ToolchainError as error:
            _missing.append(str(error))
    return not _missing


def run_representative(
    plan: Plan, node: Node, steps: int, prepared: Prepared, room: Room
) -> Machine:
    """The first GPU of several, in compiled code, after it has run in place of all, whether or not
    they do the same in the same order. Raises PlanError where no GPU may stand for all,
    ToolchainError without a compiler.
    """
    program = prepared.program
    if not one_stands_for_all(plan, node, program):
        raise PlanError(
            f"gpus={plan.options.gpus}: of more than {MOST_WHOLE} one is simulated and stands for "
            f"all, and with handoff={plan.options.handoff.value} and "
            f"execution={plan.options.execution.value} none can: take sentinels in a resident "
            f"kernel, or at most {MOST_WHOLE} GPUs"
        )
    machine = Machine(
        plan,
        node,
        steps=steps,
        keep_all=program.drawn,
        program=program,
        first_of_equals=True,
        represents=True,
    )
    compiled.run(machine, prepared.flat, room)
    return machine


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The collector finds nothing here (events die by reference count) and costs a third of the
    run: 10.8 against 6.8 s.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
