"""Models, plans and engines that the GPU studies run. On `host` small stand-ins of the same kinds,
to try the scripts without a GPU.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from twin.engine.cuda import CudaEngine
from twin.engine.cuda_build import compile_kernels
from twin.engine.host import HostEngine
from twin.engine.safetensors import NUMPY
from twin.engine.session import Session
from twin.engine.weights import random_weights
from twin.hardware.load import load_node
from twin.models.decoder import canonical_shape
from twin.models.load import load_model
from twin.models.spec import DType, Lanes, ModelSpec
from twin.plan.options import CollectiveKind, Limits, Options
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.choose import schedule_of
from twin.schedule.options import plan_for
from twin.schedule.plans import build
from twin.workers import each

DEVICE = "h200"
NODE = f"1x{DEVICE}"
SEED = 5
PATTERN = 1_000_003  # random values to repeat: a prime, so that the rows of a matrix differ
FP16 = {"weight_dtype": DType.FP16, "kv_dtype": DType.FP16}
# rings that wrap although the model is tiny
FEW: dict[str, Any] = {"blocks": 8, "slot_bytes": 1024, "ring_slots": 4, "window_slots": 4}
# where the studies leave the default options: all blocks, the type of Laneformer's goal
CHOSEN: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {"blocks": 132},
    "laneformer-2b": {"blocks": 128, **FP16},
    "qwen3-8b": {"blocks": 132},
    "small": {"blocks": 132},
    "tiny": FEW,
    "tiny-lanes": FEW,
    "tiny-tensor": FEW,
}
CPU = Limits(blocks=8, dies=1, on_chip_bytes=8 << 20, memory_bytes=8 << 30, oversubscribe=True)

# One head size and one query group for all small models: they share one compiled host engine.
SMALL = replace(
    load_model("llama-3.2-1b"),
    name="small",
    layers=2,
    hidden=1024,
    heads=16,
    kv_heads=8,
    head_dim=64,
    ffn=4096,
    vocab=8192,
    windows=(0, 0),
)
TINY = replace(SMALL, name="tiny", hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=320)
TINY_LANES = replace(TINY, name="tiny-lanes", layers=4, windows=(4, 4, 0, 0), lanes=Lanes(2, 2))
# scanned by two sets of warps
TINY_TENSOR = replace(TINY, name="tiny-tensor", hidden=128, heads=6, kv_heads=1, head_dim=64)
OWN = {spec.name: spec for spec in (SMALL, TINY, TINY_LANES, TINY_TENSOR)}
STAND_INS = {
    "llama-3.2-1b": TINY,
    "laneformer-2b": TINY_LANES,
    "qwen3-8b": replace(TINY, name="tiny-norms", qk_norm=True),
    "small": TINY,
}


class FilledWeights:
    """Weights that are quick to make: norms of one, matrices of one repeated random pattern that
    starts elsewhere in each.
    """

    def __init__(self, spec: ModelSpec, dtype: DType) -> None:
        self.spec, self.dtype = spec, dtype
        self.pattern = (
            np.random.default_rng(SEED).standard_normal(PATTERN, np.float32) * np.float32(0.02)
        ).astype(NUMPY[dtype])
        self.kept: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.kept:
            self.kept[name] = self._made(name)
        return self.kept[name]

    def _made(self, name: str) -> Any:
        shape = canonical_shape(self.spec, name)
        if len(shape) == 1:
            return np.ones(shape, NUMPY[self.dtype])
        pattern = np.roll(self.pattern, 7919 * sum(name.encode()))
        made = np.empty(int(np.prod(shape)), self.pattern.dtype)
        for lo in range(0, made.size, PATTERN):
            made[lo : lo + PATTERN] = pattern[: made.size - lo]
        return made.reshape(shape)


@dataclass(frozen=True)
class Bench:
    """Where the engines of a study run: `cuda` or `host`."""

    device: str

    def spec(self, name: str) -> ModelSpec:
        if self.device == "host" and name in STAND_INS:
            return STAND_INS[name]
        return OWN[name] if name in OWN else load_model(name)

    def plan(self, name: str, *, layers: int | None = None, **chosen: Any) -> Plan:
        """The plan that the engine runs best by default, of `layers` layers if given. Proven."""
        spec = self.spec(name)
        if layers is not None and layers < spec.layers:
            spec = replace(
                spec, layers=layers, windows=spec.windows[-layers:], vocab=min(spec.vocab, 8192)
            )
        if "max_context" in chosen:
            chosen = {"context": min(Options().context, chosen["max_context"]), **chosen}
        made = (
            cpu_plan(spec, chosen)
            if self.device == "host"
            else _h200_plan(spec, {**CHOSEN[name], **chosen})
        )
        prove(made)
        return made

    def engine(
        self,
        plan: Plan,
        *,
        trace: bool = False,
        watchdog_s: float | None = None,
        weights: Any = None,
    ) -> Session:
        """With random weights. On a GPU its matrices are filled on the device, unless `weights` are
        given.
        """
        assert plan.spec is not None
        patience: dict[str, Any] = {} if watchdog_s is None else {"watchdog_s": watchdog_s}
        dtype = plan.options.weight_dtype
        if self.device == "host":
            made = weights if weights is not None else random_weights(plan.spec, SEED, dtype)
            return HostEngine(plan, made, trace=trace, **patience)
        if weights is not None:
            return CudaEngine(plan, weights, trace=trace, **patience)
        return CudaEngine(
            plan, FilledWeights(plan.spec, dtype), random_streams=SEED, trace=trace, **patience
        )

    def compile(self, plans: Iterable[Plan], traced: Iterable[Plan] = ()) -> None:
        """All kernels on all cores, before the GPU is first touched: a fork after that would be
        unsafe.
        """
        wanted = list(
            dict.fromkeys([(plan, False) for plan in plans] + [(plan, True) for plan in traced])
        )
        if self.device == "host":
            return
        begun = time.monotonic()
        for _ in each(_compile, wanted):
            pass
        print(f"{len(wanted)} kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)


def fitting_slots(plan: Plan) -> int:
    """The plan's ring slots, or as many as fit into a block's shared memory with the rest."""
    over = max(0, schedule_of(plan).block_bytes - plan.limits.on_chip_bytes)
    return plan.options.ring_slots - -(-over // plan.options.slot_bytes)


def prompt_of(plan: Plan, length: int, seed: int = SEED) -> list[int]:
    assert plan.spec is not None
    return [int(t) for t in np.random.default_rng(seed).integers(0, plan.spec.vocab, length)]


def conditions() -> dict[str, str]:
    """The GPU, its driver, clocks and temperature now; empty without nvidia-smi."""
    fields = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return {}
    first = said.stdout.strip().splitlines()[:1]
    return (
        dict(zip(fields.split(","), (part.strip() for part in first[0].split(",")), strict=True))
        if first
        else {}
    )


def _compile(wanted: tuple[Plan, bool]) -> None:
    compile_kernels(wanted[0], trace=wanted[1])


def _h200_plan(spec: ModelSpec, chosen: dict[str, Any]) -> Plan:
    """Default options; the default ring, less what the kernel's scratch and barriers take of a
    block's shared memory.
    """
    node = load_node(f"{chosen.get('gpus', 1)}x{DEVICE}")
    made = plan_for(spec, node, **chosen)
    slots = fitting_slots(made)
    return (
        made
        if slots == made.options.ring_slots
        else plan_for(spec, node, **{**chosen, "ring_slots": slots, "window_slots": slots})
    )


def cpu_plan(spec: ModelSpec, chosen: dict[str, Any]) -> Plan:
    """Small rings, of which half is in flight, and few blocks."""
    base: dict[str, Any] = {
        "blocks": 4 if spec.lanes else 2,
        "slot_bytes": 1024,
        "ring_slots": 4,
        "window_slots": 2,
        "weight_dtype": DType.BF16,
        "kv_dtype": DType.BF16,
        "collective": CollectiveKind.PUSH if spec.lanes else CollectiveKind.NONE,
    }
    return build(spec, Options(**{**base, **chosen}), CPU)
