"""What a user has today: Hugging Face transformers with a static cache, eager and in a captured
CUDA graph, and its FP32 logits.

torch and transformers are loaded when they are needed. Without a GPU everything but the capture
works, slowly.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.bench.fidelity import Logits
from twin.bench.timing import Steps
from twin.engine.safetensors import NUMPY
from twin.engine.save import hf_config
from twin.errors import EngineError, ToolchainError
from twin.models.load import checkpoint, stored
from twin.models.spec import DType, ModelSpec
from twin.plan.shards import Array, Weights

TORCH = {DType.FP16: "float16", DType.BF16: "bfloat16", DType.FP32: "float32"}
AT_ONCE = 256  # positions of one FP32 pass: its attention scores are [heads, AT_ONCE, positions]
# capacity of the static cache: a multiple keeps its attention kernels on their aligned paths
CACHE_GRAIN = 64
STEPS_BEFORE_CAPTURE = 3


def torch_module() -> Any:
    """torch. Raises ToolchainError."""
    return _module("torch")


def device_name() -> str:
    return "cuda" if torch_module().cuda.is_available() else "cpu"


def versions() -> dict[str, str]:
    return {name: str(_module(name).__version__) for name in ("torch", "transformers")}


def to_torch(array: Array, dtype: Any, device: str) -> Any:
    """A NumPy tensor, BF16 included, on a device in another type."""
    torch = torch_module()
    if array.dtype == NUMPY[DType.BF16]:
        made = torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    else:
        # a copy: a mapped file is read-only, which torch warns of
        made = torch.from_numpy(np.array(array))
    return made.to(device=device, dtype=dtype)


def make_model(
    spec: ModelSpec,
    weights: Weights | None,
    dtype: DType,
    *,
    device: str,
    attention: str = "sdpa",
    folder: Path | None = None,
) -> Any:
    """The model's own class with the engine's very weights, or with random ones of its own.

    `folder`: a checkpoint whose config.json decides; else it is written from the spec.
    """
    if spec.experts:
        raise EngineError(
            f"{spec.name}: models with experts are not compared with Hugging Face's classes, which "
            "hold them as one tensor; use --no-peers"
        )
    torch, transformers = torch_module(), _module("transformers")
    config = (
        transformers.AutoConfig.from_pretrained(folder)
        if folder
        else transformers.AutoConfig.for_model(**hf_config(spec, dtype))
    )
    config._attn_implementation = attention
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, TORCH[dtype])
        ).eval()
    if weights is not None:
        _load(model, spec, weights)
    return model


def release() -> None:
    """Give freed models' memory back to the GPU, where the engine needs it."""
    torch = torch_module()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def reference_logits(model: Any, tokens: Sequence[int], keep: int) -> Logits:
    """[keep, vocab] after each of the last `keep` tokens, in passes over a growing cache."""
    torch, transformers = torch_module(), _module("transformers")
    torch.set_float32_matmul_precision("highest")
    ids = torch.tensor([list(tokens)], device=model.device)
    cache = transformers.DynamicCache(config=model.config)
    rows = []
    with torch.no_grad():
        for lo in range(0, len(tokens), AT_ONCE):
            hi = min(lo + AT_ONCE, len(tokens))
            wanted = hi - max(lo, len(tokens) - keep)
            made = model(
                input_ids=ids[:, lo:hi],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=max(1, wanted),
            ).logits
            if wanted > 0:
                rows.append(made[0, -wanted:].float().cpu().numpy())
    return np.concatenate(rows)


class Decoder:
    """Greedy decoding of one sequence with a static cache of `capacity` positions."""

    def __init__(self, model: Any, capacity: int) -> None:
        self._torch, self._model = torch_module(), model
        self._cuda = model.device.type == "cuda"
        self.capacity = -(-capacity // CACHE_GRAIN) * CACHE_GRAIN
        self._cache = _module("transformers").StaticCache(
            config=model.config, max_cache_len=self.capacity
        )
        self._ids = self._torch.zeros((1, 1), dtype=self._torch.long, device=model.device)
        self._graph: Any = None
        self._graph_logits: Any = None

    def capture(self, prompt: Sequence[int]) -> None:
        """Record one decode step, argmax included, as a CUDA graph. Raises EngineError where that
        cannot be done.
        """
        torch = self._torch
        if not self._cuda:
            raise EngineError(
                "a CUDA graph can be captured on an NVIDIA GPU only: leave the captured variant out"
            )
        self._prefill(prompt)
        self._check_capturable()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(STEPS_BEFORE_CAPTURE):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events meanwhile, which a global capture forbids
        with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._graph_logits = self._step()
        self._graph = graph

    def run(self, prompt: Sequence[int], tokens: int, *, captured: bool) -> Steps:
        """Read the prompt, then time `tokens` greedy steps; their tokens stay on the device until
        the end.
        """
        torch = self._torch
        self._check(len(prompt) + tokens)
        self._prefill(prompt)
        made = torch.zeros((1, tokens), dtype=torch.long, device=self._model.device)
        marks = []
        with torch.no_grad():
            self._synchronize()
            marks.append(self._mark())
            for at in range(tokens):
                self._advance(captured)
                made[:, at : at + 1].copy_(self._ids)
                marks.append(self._mark())
            self._synchronize()
        return Steps(self._between(marks), tuple(made[0].tolist()))

    def follow(self, prompt: Sequence[int], tokens: Sequence[int], *, captured: bool) -> Logits:
        """[1 + tokens, vocab]: the logits after the prompt and after each of the given tokens, by
        the steps that `run` times.
        """
        self._check(len(prompt) + len(tokens))
        rows = [self._prefill(prompt)]
        forced = self._torch.tensor(list(tokens), device=self._model.device)
        with self._torch.no_grad():
            for at in range(len(tokens)):
                self._ids.copy_(forced[at])
                rows.append(self._advance(captured).float().cpu())
        found: Logits = self._torch.stack([row.float().cpu() for row in rows]).numpy()
        return found

    # ---- steps -----------------------------------------------------------------------------------

    def _prefill(self, prompt: Sequence[int]) -> Any:
        """Logits [vocab] after the prompt; the next token is ready to be read."""
        torch = self._torch
        self._cache.reset()
        ids = torch.tensor([list(prompt)], device=self._model.device)
        with torch.no_grad():
            logits = self._model(
                input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            ).logits[0, -1]
            self._ids.copy_(logits.argmax())
        return logits

    def _check_capturable(self) -> None:
        """What is captured must find its position on the device: a number of the host's would be
        frozen into the graph.
        """
        if any(self._cache.is_sliding) or not isinstance(
            self._cache.get_seq_length(), self._torch.Tensor
        ):
            raise EngineError(
                f"the static cache of transformers {versions()['transformers']} keeps the length "
                "of this model's sequence on the host (it does so for sliding windows, and "
                "releases before 5.17 do so always): its step cannot be captured"
            )

    def _step(self) -> Any:
        """Logits [vocab] of one step as torch launches it; the next token is ready to be read."""
        logits = self._model(
            input_ids=self._ids, past_key_values=self._cache, use_cache=True
        ).logits[0, -1]
        self._ids.copy_(logits.argmax())
        return logits

    def _advance(self, captured: bool) -> Any:
        if not captured:
            return self._step()
        if self._graph is None:
            raise EngineError("no step was captured: call capture first")
        self._graph.replay()
        return self._graph_logits

    def _check(self, positions: int) -> None:
        if positions > self.capacity:
            raise EngineError(
                f"{positions} positions exceed the static cache of {self.capacity}: make a larger "
                "one"
            )

    # ---- time ------------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()

    def _mark(self) -> Any:
        """A point in the device's time."""
        if not self._cuda:
            return time.perf_counter_ns()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, marks: list[Any]) -> NDArray[np.int64]:
        if not self._cuda:
            return np.array([after - before for before, after in pairwise(marks)], np.int64)
        # ms to ns
        return np.array(
            [round(before.elapsed_time(after) * 1e6) for before, after in pairwise(marks)], np.int64
        )


def _load(model: Any, spec: ModelSpec, weights: Weights) -> None:
    """Fill every parameter. Raises EngineError when the class has others than the checkpoint."""
    torch = torch_module()
    parameters = dict(model.named_parameters())  # a tied head appears once, as the embedding table
    with torch.no_grad():
        for tensor, names in checkpoint(spec).items():
            if tensor.name not in parameters:
                raise EngineError(
                    f"{type(model).__name__} has no {tensor.name}: its class does not fit "
                    f"{spec.name}; report this"
                )
            target = parameters.pop(tensor.name)
            target.copy_(to_torch(stored(spec, names, weights), target.dtype, str(target.device)))
    if parameters:
        raise EngineError(
            f"{type(model).__name__} needs {sorted(parameters)[0]}, which {spec.name} does not "
            "have; report this"
        )


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ToolchainError(
            f"{name} is not installed: pip install torch transformers, or leave the peers out "
            "with --no-peers"
        ) from error
