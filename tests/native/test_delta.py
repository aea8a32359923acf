"""Recurrent states of a prompt pass on tensor cores, thread by thread on the CPU: what a GPU would
compute, without one.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.native.programs import built
from twin import toolchain
from twin.models.mixers import DeltaNet, Mamba2, Recurring

SOURCE = Path(__file__).resolve().parent / "delta.cpp"
CAPACITY = 256  # tokens of a pass
SHAPES: dict[str, tuple[Recurring, int]] = {  # and the columns of a state that an item has
    "two states a key, two items each": (
        DeltaNet(key_heads=1, key_dim=32, value_heads=2, value_dim=16, conv=4),
        8,
    ),
    "short keys, short convolutions": (
        DeltaNet(key_heads=2, key_dim=16, value_heads=2, value_dim=24, conv=2),
        24,
    ),
    "Mamba-2, eight states a key": (
        Mamba2(
            key_heads=1,
            key_dim=16,
            value_heads=8,
            value_dim=16,
            conv=4,
            least_step=0.05,
            most_step=2.0,
        ),
        8,
    ),
    "Mamba-2, forty states a key": (
        Mamba2(
            key_heads=1,
            key_dim=16,
            value_heads=40,
            value_dim=8,
            conv=4,
            least_step=0.05,
            most_step=2.0,
        ),
        8,
    ),
    "Mamba-2, two groups": (
        Mamba2(
            key_heads=2,
            key_dim=32,
            value_heads=4,
            value_dim=8,
            conv=3,
            least_step=0.05,
            most_step=2.0,
        ),
        8,
    ),
}
Array = NDArray[np.float32]


def silu(x: NDArray[Any]) -> NDArray[Any]:
    return x / (1 + np.exp(-x))


def stepped(
    kind: Recurring, rows: Array, taps: Array, decays: Array
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(outputs [tokens][heads][value_dim], states [heads][key_dim][value_dim]), token by token in
    FP64.
    """
    keys, values = kind.key_heads * kind.key_dim, kind.value_heads * kind.value_dim
    channels = rows[:, : 2 * keys + values].astype(np.float64)
    padded = np.vstack([np.zeros((kind.conv - 1, channels.shape[1])), channels])
    count = len(rows)
    mamba = isinstance(kind, Mamba2)
    sums = sum(padded[m : m + count] * taps[m] for m in range(kind.conv))
    made = silu(sums + taps[kind.conv] if mamba else sums)
    q, k = (
        made[:, at : at + keys].reshape(count, kind.key_heads, kind.key_dim) for at in (0, keys)
    )
    v = made[:, 2 * keys :].reshape(count, kind.value_heads, kind.value_dim)
    steering = rows[:, 2 * keys + 2 * values :].astype(np.float64)
    step = np.logaddexp(0, steering[:, -kind.value_heads :] + decays[1])
    write = 1 / (1 + np.exp(-steering[:, : kind.value_heads]))
    if isinstance(kind, Mamba2):
        step = np.clip(step, kind.least_step, kind.most_step)
    else:
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(kind.key_dim)
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    fade = np.exp(decays[0] * step)
    state = np.zeros((kind.value_heads, kind.key_dim, kind.value_dim))
    out = np.zeros((count, kind.value_heads, kind.value_dim))
    per = kind.value_heads // kind.key_heads
    for t in range(count):
        for h in range(kind.value_heads):
            state[h] *= fade[t, h]
            key = k[t, h // per]
            if mamba:
                state[h] += np.outer(key, step[t, h] * v[t, h])
                out[t, h] = decays[2, h] * v[t, h]
            else:
                state[h] += np.outer(key, write[t, h] * (v[t, h] - key @ state[h]))
            out[t, h] += q[t, h // per] @ state[h]
    return out, state


def in_passes(
    kind: Recurring, columns: int, rows: Array, taps: Array, decays: Array, passes: list[int]
) -> tuple[Array, Array]:
    """The same, in passes of so many tokens. `columns` of a state that an item has."""
    sizes = {
        "KEYS": kind.key_dim,
        "VALUES": kind.value_dim,
        "TAPS": kind.conv,
        "KEY_HEADS": kind.key_heads,
        "HEADS": kind.value_heads,
        "COLUMNS": columns,
        "MAMBA": int(isinstance(kind, Mamba2)),
    }
    flags = [*toolchain.FLAGS, *(f"-D{name}_OF={size}" for name, size in sizes.items())]
    library = ctypes.CDLL(str(built(SOURCE, flags)))
    heads, splits = kind.value_heads, kind.value_dim // columns
    each = kind.key_dim * columns + (kind.conv - 1) * (2 * kind.key_dim + columns)
    states = aligned((heads * splits, each), np.nan)
    outputs = aligned((len(rows), heads, kind.value_dim), np.nan)
    each = 64 + (2 if isinstance(kind, Mamba2) else kind.key_dim + 1)
    per_token = 2 * kind.key_heads * kind.key_dim + heads * each
    solved = aligned((CAPACITY * per_token,), np.nan)
    wide, weights = aligned_as(rows), aligned_as(taps)
    first = 0
    for count in passes:
        library.delta_pass(
            pointer(wide[first:]),
            rows.shape[1],
            rows.shape[1] - kind.steering * heads,
            pointer(weights),
            pointer(decays),
            pointer(states),
            pointer(outputs[first:]),
            pointer(solved),
            first,
            count,
        )
        first += count
    own = states[:, : kind.key_dim * columns].reshape(heads, splits, kind.key_dim, columns)
    return outputs, own.transpose(0, 2, 1, 3).reshape(heads, kind.key_dim, kind.value_dim)


def aligned(shape: tuple[int, ...], fill: float) -> Array:
    size = int(np.prod(shape))
    raw = np.full(size + 4, fill, np.float32)
    at = -raw.ctypes.data % 16 // 4
    return raw[at : at + size].reshape(shape)


def aligned_as(array: Array) -> Array:
    made = aligned(array.shape, 0.0)
    made[:] = array
    return made


def pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("passes", [[64, 1], [65, 100], [2, 63, 70]], ids=str)
def test_states_are_those_carried_on_token_by_token(name: str, passes: list[int]) -> None:
    """Chunks that end within a pass, passes shorter than a convolution's history. TF32 keeps ten
    bits.
    """
    kind, columns = SHAPES[name]
    random, count = np.random.default_rng(5), sum(passes)
    heads, mamba = kind.value_heads, isinstance(kind, Mamba2)
    width = 2 * kind.key_heads * kind.key_dim + heads * (2 * kind.value_dim + kind.steering)
    rows = random.normal(size=(count, width)).astype(np.float32)
    taps = random.normal(size=(kind.conv + mamba, kind.channels)).astype(np.float32)
    decays = np.stack([-np.exp(random.normal(size=heads)), *random.normal(size=(1 + mamba, heads))])
    decays = decays.astype(np.float32)
    wanted = stepped(kind, rows, taps, decays)
    found = in_passes(kind, columns, rows, taps, decays, passes)
    for one, other in zip(found, wanted, strict=True):
        assert np.abs(one - other).max() < 4e-3 * np.abs(other).max()
