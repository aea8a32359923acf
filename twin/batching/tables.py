"""Measured kernel times of ordinary engines, from hwmodels/kernels, and the times between the
measured shapes.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import exp, log
from pathlib import Path

from twin.data import data_dir, did_you_mean, read_yaml
from twin.errors import ConfigError, HardwareError
from twin.frozen import frozen
from twin.hardware.number import Number
from twin.hardware.schema import read

US, TERA = 1e-6, 1e12
Key = tuple[str, ...]
Curve = tuple[tuple[float, float], ...]  # (size, seconds), ascending in size


@frozen
class Stack:
    """What differs between ordinary engines, except for the times of their kernels."""

    title: str
    rope_kernels: Number  # between the QKV product and the attention: rotation, cache append


@frozen
class Prompts:
    """Products of thousands of tokens, which a prompt is: seconds of 10^12 operations on a GPU."""

    bf16_tera_s: Number
    fp8_tera_s: Number
    fp8_block_tera_s: Number

    def rate(self, dtype: str) -> float:
        """Operations per second in a type of the tables; those without a rate of their own multiply
        in 16 bits.
        """
        own = {"fp8": self.fp8_tera_s, "fp8-block": self.fp8_block_tera_s}
        return TERA / own.get(dtype, self.bf16_tera_s).value


class Curves(Mapping[Key, Curve]):
    """A table: its first columns name a line, the other columns are sizes. A line's times are
    parsed when they are needed: a prediction needs few of some thousand.
    """

    def __init__(self, path: Path, keys: int) -> None:
        with path.open(encoding="utf-8", newline="") as file:
            header, *lines = csv.reader(file)
        self._sizes = [float(name) for name in header[keys:]]
        self._lines = {tuple(line[:keys]): line[keys:] for line in lines}
        self._curves: dict[Key, Curve] = {}
        self._numbers: dict[Key, list[int]] = {}

    def numbers(self, *prefix: str) -> list[int]:
        """The measured values of the key column behind a prefix, ascending."""
        if prefix not in self._numbers:
            column = len(prefix)
            found = {key[column] for key in self._lines if key[:column] == prefix}
            self._numbers[prefix] = sorted(map(int, found))
        return self._numbers[prefix]

    def __getitem__(self, key: Key) -> Curve:
        if key not in self._curves:
            cells = zip(self._sizes, self._lines[key], strict=True)
            self._curves[key] = tuple((size, float(us) * US) for size, us in cells if us)
        return self._curves[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


@frozen
class KernelTables:
    """The kernels of one stack on one device. Times in seconds, from one kernel of a CUDA graph to
    the next.
    """

    device: str
    stack: Stack
    stack_name: str
    gemm: Curves  # (dtype, m, k) -> by n
    # (dtype, head_dim, window, heads, kv_heads, m) -> by cached positions
    attention: Curves
    latent: Curves  # (dtype, heads, m) -> by cached positions: latent attention
    heads: Curves  # (side, m) -> by heads: products with one matrix a head
    allreduce: Curves  # (gpus) -> by 16-bit elements
    moe: Curves  # (dtype, hidden, inner, experts, top_k, tp) -> by tokens
    rows: Curves  # (kind, m) -> by elements of a row
    # (m) -> by k: what finding its input's scale adds to an FP8 product; empty: nothing
    scale: Curves
    prompts: Prompts

    def gemm_s(self, *, rows: int, cols: int, tokens: int, dtype: str) -> float:
        """`tokens` vectors of `cols` elements times a matrix [rows, cols]. In type "fp8" the
        input's scale is known beforehand.
        """
        by_tokens = []
        for m in around(self.gemm.numbers(dtype), tokens):
            lines = [
                (float(k), between(self.gemm[dtype, str(m), str(k)], rows))
                for k in around(self.gemm.numbers(dtype, str(m)), cols)
            ]
            by_tokens.append((float(m), between(lines, cols)))
        seconds = between(
            self._found(by_tokens, f"matrices of type {dtype}", self._of(self.gemm, 0)), tokens
        )
        if dtype == "fp8" and self.scale:
            seconds -= between(
                [
                    (float(m), between(self.scale[str(m),], cols))
                    for m in around(self.scale.numbers(), tokens)
                ],
                tokens,
            )
        return seconds

    def attention_s(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        tokens: int,
        context: int,
        window: int,
        dtype: str,
    ) -> float:
        """One rank's heads over `context` cached positions of each of `tokens` sequences; `window`
        0 is all of them.

        A window that was not measured as such reads as many positions as it holds.
        """
        measured = window and bool(self.attention.numbers(dtype, str(head_dim), str(window)))
        positions = min(context, window) if window and not measured else context
        shape = (dtype, str(head_dim), str(window if measured else 0), str(heads), str(kv_heads))
        curves = [
            (float(m), between(self.attention[*shape, str(m)], positions))
            for m in self.attention.numbers(*shape)
        ]
        what = (
            f"attention of {heads} heads on {kv_heads} KV heads of {head_dim} elements, type "
            f"{dtype}"
        )
        return between(
            self._found(
                curves,
                what,
                sorted({"/".join(key[3:5]) for key in self.attention if key[1] == str(head_dim)}),
            ),
            tokens,
        )

    def latent_s(self, *, heads: int, tokens: int, context: int, dtype: str) -> float:
        """One rank's heads of latent attention over `context` cached latents of each of `tokens`
        sequences.
        """
        shape = (dtype, str(heads))
        curves = [
            (float(m), between(self.latent[*shape, str(m)], context))
            for m in self.latent.numbers(*shape)
        ]
        return between(
            self._found(
                curves,
                f"latent attention of {heads} heads, type {dtype}",
                self._of(self.latent, 1),
            ),
            tokens,
        )

    def heads_s(self, *, side: str, heads: int, tokens: int) -> float:
        """`side` "k_up" or "v_up": a product with one matrix a head, into or out of the latent
        space.
        """
        return between(
            [
                (float(m), between(self.heads[side, str(m)], heads))
                for m in around(self.heads.numbers(side), tokens)
            ],
            tokens,
        )

    def allreduce_s(self, *, elements: int, gpus: int) -> float:
        """The sum of `elements` 16-bit numbers over `gpus`, delivered to all."""
        return between(
            self._found(
                self.allreduce.get((str(gpus),), ()),
                f"all-reduce on {gpus} GPUs",
                [k[0] for k in self.allreduce],
            ),
            elements,
        )

    def moe_s(
        self,
        *,
        hidden: int,
        inner: int,
        experts: int,
        top_k: int,
        ranks: int,
        tokens: int,
        dtype: str,
    ) -> float:
        """A layer's routing, routed products and weighted sum on one of `ranks` that each hold a
        slice of every expert.
        """
        shape = (dtype, *map(str, (hidden, inner, experts, top_k, ranks)))
        what = (
            f"{experts} experts of {hidden} x {inner}, {top_k} at a time, type {dtype}, on {ranks} "
            "GPUs"
        )
        return between(
            self._found(self.moe.get(shape, ()), what, [" ".join(key) for key in self.moe]), tokens
        )

    def row_s(self, *, elements: int, tokens: int, reduces: bool) -> float:
        """A kernel without weights over `tokens` rows; `reduces`: each row is summed first, as for
        a norm.
        """
        kind = "reduce" if reduces else "map"
        return between(
            [
                (float(m), between(self.rows[kind, str(m)], elements))
                for m in around(self.rows.numbers(kind), tokens)
            ],
            tokens,
        )

    def _of(self, table: Curves, column: int) -> list[str]:
        return sorted({key[column] for key in table})

    def _found(
        self, curve: Sequence[tuple[float, float]], what: str, known: list[str]
    ) -> Sequence[tuple[float, float]]:
        if not curve:
            raise HardwareError(
                f"{self.stack_name} on {self.device}: no kernel was measured for {what}; "
                f"measured: {', '.join(known)}"
            )
        return curve


def stack_names() -> list[str]:
    return sorted(_stacks())


@lru_cache(maxsize=1)
def _prompts() -> Prompts:
    file = data_dir("hwmodels") / "kernels" / "prompts.yaml"
    return read(read_yaml(file), Prompts, file)


@lru_cache(maxsize=1)
def _stacks() -> dict[str, Stack]:
    file = data_dir("hwmodels") / "kernels" / "stacks.yaml"
    return read(read_yaml(file), dict[str, Stack], file)


def devices_with_tables() -> list[str]:
    return sorted(
        path.name for path in (data_dir("hwmodels") / "kernels").iterdir() if path.is_dir()
    )


@lru_cache(maxsize=16)
def load_tables(device: str, stack: str) -> KernelTables:
    """The tables of one stack on one device. Raises ConfigError for an unknown stack, HardwareError
    for a device without tables.
    """
    folder = data_dir("hwmodels") / "kernels"
    if stack not in stack_names():
        raise ConfigError(f"unknown stack {stack!r}; {did_you_mean(stack, stack_names())}")
    if device not in devices_with_tables():
        known = ", ".join(devices_with_tables())
        raise HardwareError(
            f"{device}: no kernels of {stack} were measured on it; measured: {known}; the stack "
            "'ideal' needs no measurement"
        )
    own = folder / device / stack
    return KernelTables(
        device=device,
        stack=_stacks()[stack],
        stack_name=stack,
        gemm=Curves(own / "gemm.csv", 3),
        attention=Curves(own / "attention.csv", 6),
        latent=Curves(own / "latent.csv", 3),
        heads=Curves(own / "heads.csv", 2),
        allreduce=Curves(own / "allreduce.csv", 1),
        moe=Curves(own / "moe.csv", 6),
        rows=Curves(folder / device / "rows.csv", 2),
        scale=Curves(own / "scale.csv", 1),
        prompts=_prompts(),
    )


def between(curve: Sequence[tuple[float, float]], size: float) -> float:
    """The time at `size`: linear between the logarithms of the points, constant below the first,
    proportional above the last.
    """
    sizes = [point[0] for point in curve]
    right = bisect_right(sizes, size)
    if right == 0:
        return curve[0][1]
    (low, before) = curve[right - 1]
    if right == len(curve):
        return before * size / low
    (high, after) = curve[right]
    share = log(size / low) / log(high / low)
    return exp(log(before) + share * log(after / before))


def around(sizes: Sequence[int], size: float) -> Sequence[int]:
    """Those of the ascending `sizes` on which the time at `size` depends: two, or the end beyond
    which it lies.
    """
    right = bisect_right(sizes, size)
    return sizes[max(0, right - 1) : max(1, right + 1)]
