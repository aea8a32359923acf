"""Weights for runs whose numbers do not matter: the engine fills the matrices on the device, and
requests only the rest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twin.engine.draft_head import PREFIX, random_tensor
from twin.engine.safetensors import NUMPY
from twin.models.decoder import canonical_shape
from twin.models.spec import DType, ModelSpec

ROWS = 1000  # of the embedding that differ; the rest repeats them


class StandIn:
    """Vectors of ones and an embedding that repeats, for an engine with `random_streams`."""

    def __init__(self, spec: ModelSpec, seed: int, dtype: DType) -> None:
        self.spec, self.seed, self.dtype = spec, seed, dtype

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        if name.startswith(PREFIX):  # a head's matrices are packed
            return random_tensor(self.spec, self.seed, name, self.dtype)
        shape = canonical_shape(self.spec, name)
        if len(shape) == 1:
            return np.ones(shape, NUMPY[self.dtype])
        rows = np.random.default_rng(self.seed).standard_normal(
            (min(ROWS, shape[0]), *shape[1:]), np.float32
        )
        return np.resize(rows.astype(NUMPY[self.dtype]), shape)
