"""Experts of which a layer has two tensors in checkpoints, [experts, gates and ups, in] and
[experts, out, in], as transformers 5 holds them in 16 bits. Quantised ones have a module each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.models.decoder import Tensor
from twin.models.experts import expert_of
from twin.models.feeds import ExpertFeed
from twin.models.formats import Role
from twin.models.spec import ModelSpec


def is_stacked(spec: ModelSpec) -> bool:
    return spec.formats.of(Role.EXPERT).name == spec.dtype.value


def tensors(spec: ModelSpec, module: str) -> dict[str, Tensor]:
    """Canonical name -> the tensor that it is a part of, of all experts. `module`: theirs, below
    their layer.
    """
    out: dict[str, Tensor] = {}
    for layer in range(spec.layers):
        feed = spec.layer(layer).feed
        if not isinstance(feed, ExpertFeed):
            continue
        at = f"model.layers.{layer}.{module}"
        up = Tensor(f"{at}.gate_up_proj", (feed.experts, 2 * feed.width, spec.hidden))
        down = Tensor(f"{at}.down_proj", (feed.experts, spec.hidden, feed.width))
        for expert in range(feed.experts):
            name = f"layers.{layer}.experts.{expert}"
            out |= {f"{name}.gate": up, f"{name}.up": up, f"{name}.down": down}
    return out


def canonical(name: str, array: NDArray[Any]) -> NDArray[Any] | None:
    """A stored array's part of one expert; None where it is not stacked."""
    expert = expert_of(name)
    if expert is None or array.ndim == 2:
        return None
    own: NDArray[Any] = array[expert]
    leaf, half = name.rpartition(".")[2], len(own) // 2
    return {"gate": own[:half], "up": own[half:], "down": own}[leaf]


def joined(names: Sequence[str], arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The way back, of all parts of a tensor in the order of `tensors`."""
    if len(arrays) == 1:
        return arrays[0]
    if names[0].endswith(".down"):
        return np.stack(arrays)
    return np.stack([np.concatenate(two) for two in zip(arrays[0::2], arrays[1::2], strict=True)])
