"""Small plans and engines that the tests of the host engine, and those of GPUs, share."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twin.calibrate.probes import COPIES
from twin.engine.host import HostEngine
from twin.engine.sampling import SamplingParams
from twin.engine.weights import RandomWeights, random_weights
from twin.models.spec import DType, Lanes, ModelSpec, Rope, RopeScaling, RopeStyle
from twin.plan.catalogue import StageKind
from twin.plan.options import CollectiveKind, Execution, HandOffKind, Limits, Options, Sampling
from twin.plan.types import Parts, Plan, Stage
from twin.proof.prove import violations
from twin.reference.step import Reference
from twin.schedule.plans import build
from twin.schedule.probe import attention_probe, exchange_probe, sample_probe, stream_probe

LIMITS = Limits(blocks=64, dies=1, on_chip_bytes=2**30, memory_bytes=2**40, oversubscribe=True)
LLAMA = ModelSpec(
    name="llama",
    family="llama",
    layers=3,
    hidden=64,
    heads=8,
    kv_heads=4,
    head_dim=8,
    ffn=96,
    vocab=101,
    context=64,
    norm_eps=1e-5,
    rope=Rope(10000.0, scaling=RopeScaling("llama3", 8.0)),
    windows=(0, 5, 0),
)
QWEN2 = replace(LLAMA, name="qwen2", family="qwen2", qkv_bias=True, rope=Rope(10000.0))
QWEN3 = replace(LLAMA, name="qwen3", family="qwen3", qk_norm=True, tied=True, head_dim=24)
LANED = replace(
    LLAMA,
    name="lanes",
    family="laneformer",
    layers=6,
    windows=(4,) * 4 + (0, 0),
    rope=Rope(10000.0, RopeStyle.INTERLEAVED),
    lanes=Lanes(4, 2),
)
TOKENS = [5, 74, 0, 33, 100, 2, 61, 9, 10, 11, 12, 5, 5, 80]
SEED = 3
HANGS_S = 900.0  # a process that takes so long; on a busy machine others take a minute
FULL = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=7)


def probes(
    limits: Limits, execution: Execution, handoff: HandOffKind, *, blocks: int, vocab: int
) -> list[Plan]:
    """One of each kind of stage."""
    options = Options(
        blocks=blocks,
        handoff=handoff,
        execution=execution,
        context=70,
        max_context=128,
        slot_bytes=2048,
        copies=COPIES,
    )
    lone = replace(options, blocks=1, sampling=Sampling.FULL)
    return [
        stream_probe(options, limits, rows=300, cols=256, stages=2),
        exchange_probe(options, limits, elements=100),
        attention_probe(options, limits, heads=8, kv_heads=2, head_dim=64, window=33),
        sample_probe(lone, limits, vocab=vocab),
    ]


def planned(spec: ModelSpec = LLAMA, **chosen: Any) -> Plan:
    """A small plan; several ranks push unless `chosen` says otherwise."""
    base: dict[str, Any] = {
        "context": 8,
        "max_context": 64,
        "kv_page": 4,
        "slot_bytes": 1024,
        "weight_dtype": DType.FP32,
        "kv_dtype": DType.FP32,
        "blocks": 2,
    }
    if spec.lanes or chosen.get("gpus", 1) > 1:
        base["collective"] = CollectiveKind.PUSH
    return build(spec, Options(**(base | chosen)), LIMITS)


def engine(plan: Plan, **more: Any) -> HostEngine:
    assert plan.spec is not None
    return HostEngine(plan, small_weights(plan.spec, plan.options.weight_dtype), **more)


@lru_cache(maxsize=8)
def small_weights(spec: ModelSpec, dtype: DType) -> RandomWeights:
    """Made once for an engine and for what it is compared with."""
    return random_weights(spec, SEED, dtype, keep=1000)


def expected(plan: Plan, tokens: list[int]) -> np.ndarray[Any, Any]:
    return _expected(plan, tuple(tokens)).copy()


@lru_cache(maxsize=32)
def _expected(plan: Plan, tokens: tuple[int, ...]) -> np.ndarray[Any, Any]:
    assert plan.spec is not None
    reference = Reference(plan, small_weights(plan.spec, plan.options.weight_dtype))
    return np.stack([reference.step(token).copy() for token in tokens])


def error(plan: Plan, **more: Any) -> float:
    """Largest difference from the reference, relative to the largest logit."""
    wanted = expected(plan, TOKENS)
    with engine(plan, **more) as running:
        return float(np.abs(running.logits(TOKENS) - wanted).max() / np.abs(wanted).max())


def waits_for_the_others(plan: Plan) -> Plan:
    """DOWN of layer 0 asks for parts that no other rank pushes."""
    stages = list(plan.stages)
    at = next(s for s in stages if s.kind is StageKind.DOWN)
    value = next(s.publishes for s in stages if s.kind is StageKind.LM_HEAD)
    assert value is not None
    spans = (((0, plan.values[value].elements),),) * plan.blocks
    stages[at.index] = replace(
        at, reads=(*at.reads, replace(at.reads[0], value=value, parts=Parts.ALL, spans=spans))
    )
    return replace(plan, stages=tuple(stages))


def sums_what_comes_later(plan: Plan) -> Plan:
    """The first sum of late parts is of parts that other ranks push later in the step."""
    first = next(s for s in plan.stages if s.late)
    last = max(read.value for s in plan.stages if s.late for read in s.reads)
    broken = replace(first, reads=(replace(first.reads[0], value=last),))
    return replace(plan, stages=tuple(broken if s is first else s for s in plan.stages))


def after_the_first(act: Callable[[], None]) -> Callable[[int], None]:
    """Acts from another thread, a little after the first token: a busy computer may take long to
    get there.
    """
    waiting = [threading.Timer(0.05, act)]

    def on_token(token: int) -> None:
        if waiting:
            waiting.pop().start()

    return on_token


def run_script(script: str, sanitizer: str = "") -> subprocess.CompletedProcess[str]:
    """In a process of its own; a sanitizer's library must be there when it starts."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OPENBLAS_NUM_THREADS": "1",
    }
    if sanitizer:
        environment |= {
            "CXX": "g++",  # whose library it is; the shell of the tests' own does not bear it
            "LD_PRELOAD": sanitizer,
            "ASAN_OPTIONS": "detect_leaks=0",
            "TSAN_OPTIONS": "report_bugs=1 exitcode=66",
        }
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        timeout=HANGS_S,
        check=False,
    )


def sanitized(script: str, sanitize: str) -> None:
    """Runs a script that ends by printing "clean", its SANITIZE replaced, and judges that it did.

    A sanitizer must be there when the process starts, so the engine runs in one of its own.
    """
    name = {"address,undefined": "libasan.so", "thread": "libtsan.so"}[sanitize]
    runtime = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip(f"{name} is not installed")
    done = run_script(script.replace("SANITIZE", repr(sanitize)), runtime)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "clean" in done.stdout


def first(plan: Plan, kind: StageKind) -> Stage:
    """Of this kind, the first one."""
    return next(stage for stage in plan.stages if stage.kind is kind)


def found(plan: Plan, stage: Stage) -> list[str]:
    """What the proof says of a plan with this stage in place of its own."""
    stages = tuple(stage if s.index == stage.index else s for s in plan.stages)
    return [str(one) for one in violations(replace(plan, stages=stages))]
