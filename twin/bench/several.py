"""What several GPUs are timed next to, after the engine has left them: NCCL's all-reduce, and
Hugging Face's tensor parallelism. What does not work is left out with its reason.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from twin.bench import hf_parallel, nccl, peers
from twin.bench.fidelity import Logits, kl_divergence
from twin.bench.plans import Plans
from twin.bench.ranks import run_ranks
from twin.bench.source import Source
from twin.bench.timing import Sample, Steps
from twin.engine.save import save_checkpoint
from twin.errors import EngineError, TwinError
from twin.models.load import tensors
from twin.models.spec import DType

NCCL = tuple(f"nccl-{name}" for name in nccl.TYPES)
NCCL_TIMEOUT_S, HF_TIMEOUT_S = 60.0, 90.0
LOADED_BYTES_PER_S = 2.5e8  # a checkpoint written and read: slower than any disk that serves
NCCL_REPEATS = 10  # at most, as the following
HF_TOKENS, HF_REPEATS = 64, 3  # a step takes 10 to 40 ms
SPARE = 1.05  # of a disk, over the checkpoint's size


@dataclass(frozen=True, slots=True)
class Followed:
    """An output with the FP32 logits of its last `keep` tokens."""

    sequence: list[int]
    keep: int
    reference: Logits


class Into(Protocol):
    """Where it is put."""

    samples: list[Sample]
    about: dict[str, str]
    left_out: dict[str, str]
    fidelity: dict[str, Any]
    notes: dict[str, Any]
    versions: dict[str, str]


def time_nccl(elements: int, gpus: int, repeats: int, *, backend: str, into: Into) -> None:
    """NCCL's all-reduce of `elements`, and the edge of a graph that its time includes."""
    try:
        answer = run_ranks(
            nccl.__name__,
            gpus,
            {
                "elements": elements,
                "repeats": min(repeats, NCCL_REPEATS),
                "times": nccl.IN_A_GRAPH,
                "replays": nccl.REPLAYS,
            },
            backend=backend,
            timeout_s=NCCL_TIMEOUT_S,
        )
    except (TwinError, OSError) as error:
        into.left_out |= dict.fromkeys(NCCL, first_line(error))
        return
    how = f"{nccl.IN_A_GRAPH} in a captured CUDA graph" if answer["captured"] else "no graph"
    for name, spans in answer["ns"].items():
        what = (
            "a kernel over one element, alike: the edge that an all-reduce's time includes"
            if name == nccl.EDGE
            else f"torch.distributed.all_reduce of {elements} {name[5:].upper()}, {how}"
        )
        into.about[name] = what
        into.samples += _samples(name, spans)
    into.versions |= answer["versions"]
    if "failed" in answer:
        into.notes["nccl_ended"] = answer["failed"]


def time_hugging_face(
    source: Source,
    plans: Plans,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    capacity: int,
    followed: Followed,
    *,
    backend: str,
    into: Into,
) -> None:
    """Steps of transformers' own tensor parallelism, and the KL of its logits."""
    dtype = plans.resident.options.weight_dtype
    ahead = min(tokens, followed.keep - 1)
    request = {
        "dtype": peers.TORCH[dtype],
        "prompts": [list(prompt) for prompt in prompts],
        "tokens": tokens,
        "capacity": capacity,
        "follow": followed.sequence[: -followed.keep],
        "forced": followed.sequence[-followed.keep :][:ahead],
    }
    try:
        with tempfile.TemporaryDirectory(prefix="twin-hf-") as made:
            here = Path(made)
            checkpoint, size = _checkpoint(source, dtype, here / "checkpoint")
            (here / "ranks").mkdir()
            answer = run_ranks(
                hf_parallel.__name__,
                plans.gpus,
                {**request, "folder": str(checkpoint)},
                backend=backend,
                timeout_s=HF_TIMEOUT_S + size / LOADED_BYTES_PER_S,
                folder=here / "ranks",
            )
            logits = np.load(here / "ranks" / hf_parallel.FOLLOWED)
    except (TwinError, OSError) as error:
        into.left_out[hf_parallel.EAGER] = first_line(error)
        return
    reason = answer["captured"] or answer.get("failed", "")
    if hf_parallel.CAPTURED not in answer["made"]:
        into.left_out[hf_parallel.CAPTURED] = reason
    for name, runs in answer["made"].items():
        how = "a step captured as a CUDA graph" if name == hf_parallel.CAPTURED else "eager"
        into.about[name] = f"transformers' tensor parallelism on {plans.gpus} GPUs, {how}"
        into.samples += _samples(name, [r["ns"] for r in runs], [r["tokens"] for r in runs])
    kl = kl_divergence(followed.reference[: 1 + ahead], logits)
    into.fidelity["kl_hf_tp"] = {
        "mean": float(kl.mean()),
        "max": float(kl.max()),
        "positions": len(kl),
    }


def _checkpoint(source: Source, dtype: DType, folder: Path) -> tuple[Path, int]:
    """The folder that transformers opens, written where there is none, and its bytes."""
    spec = source.spec
    if spec.lanes:
        raise EngineError(f"transformers has no class for {spec.family}")
    size = sum(source.weights[name].nbytes for name in tensors(spec))
    if source.stored and source.folder and spec.stored is None:
        return source.folder, size
    free = shutil.disk_usage(folder.parent).free
    if free < SPARE * size:
        raise EngineError(
            f"a checkpoint of {size / 1e9:.3g} GB does not fit into the {free / 1e9:.3g} GB that "
            f"are free in {folder.parent}: set TMPDIR to a larger disk"
        )
    save_checkpoint(folder, source.weights, dtype=dtype)
    return folder, size


def _samples(
    name: str, spans: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]] = ()
) -> list[Sample]:
    made = tokens or [()] * len(spans)
    return [
        Sample(name, repeat, Steps(np.array(ns, np.int64), tuple(each)))
        for repeat, (ns, each) in enumerate(zip(spans, made, strict=True))
    ]


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
