"""A model with fewer layers, and which numbers of layers tell what all of them take."""

from __future__ import annotations

from dataclasses import replace

from twin.errors import ConfigError
from twin.models.spec import ModelSpec


def first_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    """The model cut after some layers: embedding and head stay."""
    if not 0 < layers <= spec.layers:
        raise ConfigError(
            f"layers={layers}: {spec.name} has {spec.layers}; choose 1 to {spec.layers}"
        )
    return replace(spec, layers=layers, windows=spec.windows[:layers], layout=spec.layout[:layers])


def repeated_layers(spec: ModelSpec) -> tuple[int, int] | None:
    """The least numbers of layers between which lies what all layers below repeat; None where
    nothing does.

    DeepSeek-V3 begins with dense layers, Gemma 3 has a layer of full attention in six.
    """
    if spec.lanes is not None:
        return None  # what a layer waits for was sent some layers before
    seen = [(spec.layer(at), spec.rotation(at)) for at in range(spec.layers)]
    found = None
    for period in range(1, spec.layers // 2):
        begin = spec.layers - period
        while begin and seen[begin - 1] == seen[begin - 1 + period]:
            begin -= 1
        if found is None or begin + 2 * period < found[1]:
            found = (begin + period, begin + 2 * period)
    return found if found and found[1] < spec.layers else None


def line(layers: int, depths: tuple[int, int], times: tuple[float, float]) -> float:
    """What is the same in every layer, of all of them, from its values at two depths."""
    (shallow, deep), (few, more) = depths, times
    return more + (layers - deep) * (more - few) / (deep - shallow)
