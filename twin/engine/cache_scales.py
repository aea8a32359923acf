"""The scales of cached keys and values that a checkpoint holds next to its weights: of each layer
one number for all KV heads, or one each. ModelOpt puts them into the projections,
compressed-tensors into the attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from twin.engine.safetensors import NUMPY, STORED, Entry
from twin.errors import CheckpointError
from twin.models.decoder import Tensor
from twin.models.mixers import GroupedAttention
from twin.models.spec import CacheScales, ModelSpec
from twin.text import shown

NOT_SCALED = CacheScales((1.0,), (1.0,))  # a layer without a cache


def scale_names(named: Mapping[str, Tensor], layer: int, which: str) -> tuple[str, ...]:
    """What a layer's scale of its keys ("k") or values ("v") may be called; empty for a layer
    without such a projection.
    """
    tensor = named.get(f"layers.{layer}.{which}") or named.get(f"layers.{layer}.k")
    if tensor is None:
        return ()
    attention = tensor.name.removesuffix(".weight").rpartition(".")[0]
    return f"{attention}.{which}_proj.{which}_scale", f"{attention}.{which}_scale"


def with_cache_scales(
    path: Path, spec: ModelSpec, named: Mapping[str, Tensor], found: Mapping[str, Entry]
) -> tuple[ModelSpec, set[str]]:
    """The model with the scales that a checkpoint has, and the names of their tensors. Raises
    CheckpointError where some layers have none, and for numbers that scale nothing.
    """
    known: set[str] = set()
    layers: list[CacheScales] = []
    missing: list[str] = []
    for layer in range(spec.layers):
        mixer = spec.layer(layer).mixer
        if not isinstance(mixer, GroupedAttention):
            layers.append(NOT_SCALED)
            continue
        both: list[tuple[float, ...]] = []
        for which in "kv":
            names = scale_names(named, layer, which)
            name = next((name for name in names if name in found), None)
            if name is None:
                missing.append(names[-1] if names else f"layers.{layer}")
                both.append((1.0,))
            else:
                known.add(name)
                both.append(_numbers(found[name], mixer.kv_heads))
        layers.append(CacheScales(*both))
    if not known:
        return spec, known
    if missing:
        raise CheckpointError(
            f"{path}: tensor {shown(missing[0])} is missing, and other layers have scales of their "
            "caches; download the checkpoint again"
        )
    return replace(spec, cache_scales=tuple(layers)), known


def _numbers(entry: Entry, kv_heads: int) -> tuple[float, ...]:
    """One, or one for each KV head."""
    size = int(np.prod(entry.shape)) if entry.shape else 1
    if entry.dtype not in STORED or size not in (1, kv_heads):
        raise CheckpointError(
            f"{entry.path}: {shown(entry.name)} is {entry.dtype} {list(entry.shape)}; expected one "
            f"number, or one for each of {kv_heads} KV heads, of {', '.join(STORED)}"
        )
    file = np.memmap(entry.path, np.uint8, "r")
    stored = np.asarray(file[entry.begin : entry.end]).view(NUMPY[STORED[entry.dtype]])
    numbers = stored.astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        usable = np.isfinite(numbers) & (numbers > 0) & np.isfinite(np.float32(1) / numbers)
    if not usable.all():
        raise CheckpointError(
            f"{entry.path}: {shown(entry.name)} is {numbers[~usable][0]}; allowed: finite numbers "
            "above zero; download the file again"
        )
    return tuple(map(float, numbers))
