"""Which missing waits the interpreter misses, and why: each wait that a run reaches is taken away
alone (docs/mi300x.md). Minutes: python -m tests.gfx942.missed_waits
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from tests.engine.small_engine import expected
from tests.gfx942.code import Code, code_of
from tests.gfx942.emulated import Emulated
from tests.gfx942.interpreter import Fault
from tests.gfx942.test_interpreter import CLOSE, PROMPT, SENTINEL
from tests.gfx942.waits import uncovered, without
from twin.errors import EngineError

SEEDS = (2, 5)
TOKENS = PROMPT[:3]


def noticed(code: Code) -> bool:
    """Does a run fail, or compute something else?"""
    wanted = expected(SENTINEL, TOKENS)
    for seed in SEEDS:
        try:
            got = Emulated(SENTINEL, code=code, seed=seed).logits(TOKENS)
        except (Fault, EngineError):
            return True
        if not np.abs(got - wanted).max() < CLOSE * np.abs(wanted).max():
            return True
    return False


def why(code: Code) -> str:
    """What would have needed the wait, on some path."""
    lacking = [one.what for one in uncovered(code)]
    if not lacking:
        return "redundant on every path"
    return f"needed for {lacking[0] if ' ' in lacking[0] else f'a register ({lacking[0][0]})'}"


def main() -> None:
    code = code_of(SENTINEL)
    whole = Counter(why(without(code, wait)) for wait in code.matching("^s_waitcnt "))
    print(f"waits: {sum(whole.values())}, {whole['redundant on every path']} redundant")
    running = Emulated(SENTINEL, seed=SEEDS[0])
    running.logits(TOKENS)
    reached = [one for one in running.reached() if one.name == "s_waitcnt"]
    missed = [wait for wait in reached if not noticed(without(code, wait))]
    print(f"reached: {len(reached)}, missed: {len(missed)}")
    for reason, count in Counter(why(without(code, wait)) for wait in missed).most_common():
        print(f"{count:4} {reason}")


if __name__ == "__main__":
    main()
