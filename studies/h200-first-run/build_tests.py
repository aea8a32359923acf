"""Compiles what tests/engine/test_cuda_engine.py needs, on all cores: the tests alone would compile one plan after the other."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engine.test_cuda_engine import all_plans
from twin.engine.cuda_build import compile_cubin

begun = time.monotonic()
with ThreadPoolExecutor(16) as pool:
    reports = list(pool.map(compile_cubin, dict.fromkeys(all_plans())))
print(f"{len(reports)} kernels in {time.monotonic() - begun:.0f} s, at most {max(r.registers for r in reports)} registers")
