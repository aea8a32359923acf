"""The kernel with many warps in a block: the same numbers, and no race between its barriers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from twin import toolchain
from twin.engine import host

HERE = Path(__file__).resolve().parent
SCRIPT = """
from dataclasses import replace
import numpy as np
import pytest
from tests.engine.small_engine import *
from tests.engine.test_experts import routed
import twin.engine.host
from twin.engine.sampling import sample
from twin.errors import EngineError
from twin.plan.options import HandOffKind, Sampling
from tests.native.test_warps import build_warps
twin.engine.host.build_host = build_warps
first = None
cases = (
    {"gpus": 2, "sampling": Sampling.FULL},
    {"handoff": HandOffKind.COUNTER, "attention_splits": 2},
    {"handoff": HandOffKind.GRID},
    {"gpus": 1},
)
for more in cases:
    # every row costs three barriers of threads: still two rows a tile, two heads a group
    spec = replace(QWEN3 if "gpus" in more else QWEN2, layers=2, windows=(0, 5), ffn=32)
    spec = replace(spec, hidden=32, heads=4, kv_heads=2)
    if more == {"gpus": 1}:
        spec = routed()
        spec = replace(spec, layers=2, hidden=32, windows=spec.windows[:2], layout=spec.layout[:2])
    plan = planned(spec, slot_bytes=256, **more)
    first = first or plan
    weights = random_weights(plan.spec, SEED, DType.FP32)
    with HostEngine(plan, weights, sanitize=SANITIZE) as running:
        params = FULL if plan.options.sampling is Sampling.FULL else SamplingParams()
        tokens = running.generate(TOKENS[:3], max_tokens=2, sampling=params).tokens
        logits = running.logits(TOKENS[:3] + tokens[:-1])
        wanted = expected(plan, TOKENS[:3] + tokens[:-1])
        assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max(), more
        assert tokens == [sample(row, params, step) for step, row in enumerate(logits[2:])], more
# of a kernel that is there
hung = pytest.raises(EngineError, match="watchdog")
with engine(waits_for_the_others(first), watchdog_s=0.3, sanitize=SANITIZE) as running, hung:
    running.generate([1, 2, 3], max_tokens=3)
print("clean")
"""

STATES = """
from dataclasses import replace
import numpy as np
from tests.engine.small_engine import *
from tests.engine.test_mamba import EXPERTS, MAMBA, mixed
from tests.engine.test_recurrent import DELTA, recurrent
import twin.engine.host
from tests.native.test_warps import build_warps
twin.engine.host.build_host = build_warps
def small(spec):
    return replace(spec, layers=3, windows=(0,) * 3, hidden=32, layout=spec.layout[1:4])
# as many threads as an item has columns and more, with threads that hold nothing; fewer threads
kinds = [recurrent(replace(DELTA, key_heads=2, value_heads=4, value_dim=d)) for d in (8, 32)]
feed = replace(EXPERTS, width=16, shared_width=32)
mamba = mixed(replace(MAMBA, key_heads=2, value_heads=4, value_dim=32), feed)
kinds.append(replace(mamba, ropes=(None,) * 3))  # experts, states, attention
for spec in map(small, kinds):
    plan = planned(spec, slot_bytes=256, blocks=2)
    with HostEngine(plan, random_weights(spec, SEED, DType.FP32), sanitize=SANITIZE) as running:
        tokens = running.generate(TOKENS[:3], max_tokens=2).tokens
        logits = running.logits(TOKENS[:3] + tokens[:-1])
        wanted = expected(plan, TOKENS[:3] + tokens[:-1])
        assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max(), spec
print("clean")
"""

DRAWS = """
import numpy as np
import twin.engine.host
from tests.engine.test_drawing import KINDS, drawing
from twin.engine.sampling import SamplingParams, sample
from tests.native.test_warps import build_warps
twin.engine.host.build_host = build_warps
wanted = (
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.0, top_k=200, top_p=0.6, seed=2),
    SamplingParams(temperature=40.0, top_k=200, top_p=0.9, seed=3),
)
for kind in ("flat", "all the same"):  # few of a bucket, and more than are compared one by one
    running = drawing(KINDS[kind][:320], blocks=2, sanitize=SANITIZE)
    with running:
        logits = running.logits([1])[0]
        for params in wanted:
            made = running.generate([1], max_tokens=1, sampling=params).tokens
            assert made == [sample(logits, params, 0)], (kind, params)
print("clean")
"""


def build_warps(header: str, *, sanitize: str | None = None) -> Path:
    """The host engine's library with the platform of warps.h."""
    flags = [
        *toolchain.FLAGS,
        f'-DTWIN_PLATFORM="{HERE / "warps.h"}"',
        *([f"-fsanitize={sanitize}", "-O1", "-g1"] if sanitize else ["-O0"]),
    ]
    compiler = toolchain.host_compiler()
    sources = [*toolchain.native_sources(), HERE / "warps.h", HERE / "warps_main.cpp"]
    key = toolchain.content_key([toolchain.compiler_version(compiler), *flags, header], sources)
    target = toolchain.cache_dir() / f"warps-{key}.so"

    def build(folder: Path) -> Path:
        (folder / "plan.h").write_text(header, encoding="utf-8")
        toolchain.run_compiler(
            [
                compiler,
                *flags,
                f"-I{folder}",
                str(HERE / "warps_main.cpp"),
                "-o",
                str(folder / "warps.so"),
            ]
        )
        return folder / "warps.so"

    return toolchain.cached(target, build)


@pytest.mark.few(1)
@pytest.mark.parametrize("script", [SCRIPT, STATES, DRAWS], ids=["stages", "states", "draws"])
@pytest.mark.parametrize("sanitize", [None, pytest.param("thread", marks=pytest.mark.slow)])
def test_many_warps_compute_the_same_without_races(
    sanitize: str | None, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sanitizer must be there when its process starts."""
    script = script.replace("SANITIZE", repr(sanitize))
    if sanitize is None:
        monkeypatch.setattr(host, "build_host", build_warps)  # what a script sets ends with it
        exec(script, {})
        return
    runtime = subprocess.run(
        ["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip("libtsan.so is not installed")
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "PYTHONPATH": str(HERE.parents[1]),
            "TSAN_OPTIONS": "exitcode=66",
            "OPENBLAS_NUM_THREADS": "1",
            "LD_PRELOAD": runtime,
            "CXX": "g++",
        },
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "clean" in done.stdout
