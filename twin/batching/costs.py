"""What a kernel of an ordinary engine takes: measured on the device, or derived from the device's
own numbers.
"""

from __future__ import annotations

from typing import Protocol

from twin.batching.kernels import (
    AllReduce,
    Attention,
    Experts,
    HeadProduct,
    LatentScan,
    Product,
    Row,
    Work,
)
from twin.batching.tables import KernelTables
from twin.errors import HardwareError
from twin.frozen import frozen
from twin.hardware.number import Number
from twin.hardware.types import Node
from twin.models.formats import BF16, INT4, Format

TABLE = {
    "bf16": "bf16",
    "fp16": "bf16",
    "fp8": "fp8",
    "fp8-128x128": "fp8-block",
    "fp8-128x128-e8m0": "fp8-block",
    "mxfp4": "mxfp4",
}
TABLE |= {form.name: "int4" for form in INT4}  # a format's name -> the tables' type
KV_BYTES = {"bf16": 2, "fp8": 1}


@frozen(kw_only=True)
class Load:
    """What a step works on: one token of each of `sequences`, all with `context` cached
    positions.
    """

    sequences: int = 1
    context: int = 1024
    kv: str = "bf16"  # element type of the cache: one of KV_BYTES
    # tokens of each other user's prompt and answer: every answer is followed by the next prompt,
    # which steps wait for; without them nobody's prompt is read meanwhile
    prompt: int = 0
    answer: int = 0


class Costs(Protocol):
    """Time of a kernel in seconds, from the end of the one before it in a graph."""

    def seconds(self, work: Work, load: Load) -> float: ...

    def prompt_s(self, work: Work, tokens: int) -> float:
        """Of a pass over a prompt instead."""
        ...

    def rests_on(self) -> str:
        """Where the times come from, for the reader of a prediction."""
        ...


@frozen
class Measured:
    """Times of the stack's own kernels."""

    tables: KernelTables
    gpus: int

    def seconds(self, work: Work, load: Load) -> float:
        tables, tokens = self.tables, load.sequences
        match work:
            case Product():
                return tables.gemm_s(
                    rows=work.rows, cols=work.cols, tokens=tokens, dtype=_type(work.format)
                )
            case Experts():
                return tables.moe_s(
                    hidden=work.hidden,
                    inner=work.inner,
                    experts=work.experts,
                    top_k=work.top_k,
                    ranks=work.ranks,
                    tokens=tokens,
                    dtype=_type(work.format),
                )
            case Attention():
                return tables.attention_s(
                    heads=work.heads,
                    kv_heads=work.kv_heads,
                    head_dim=work.head_dim,
                    tokens=tokens,
                    context=load.context,
                    window=work.window,
                    dtype=load.kv,
                )
            case LatentScan():
                self._only(work.name, (work.kv_rank, work.rope_dim), (512, 64))
                return tables.latent_s(
                    heads=work.heads, tokens=tokens, context=load.context, dtype=load.kv
                )
            case HeadProduct():
                self._only(
                    work.name, (max(work.rows, work.cols), min(work.rows, work.cols)), (512, 128)
                )
                return tables.heads_s(side=work.name, heads=work.heads, tokens=tokens)
            case Row():
                return tables.row_s(elements=work.elements, tokens=tokens, reduces=work.reduces)
            case AllReduce():
                return tables.allreduce_s(elements=work.elements * tokens, gpus=self.gpus)

    def prompt_s(self, work: Work, tokens: int) -> float:
        """By the rates of products of thousands of tokens, and the all-reduces of as many. What
        weights of 8 or 4 bits are unpacked to multiplies at the 16-bit rate, unless in FP8. Kernels
        without weights are left out.
        """
        rate = self.tables.prompts.rate
        match work:
            case Product():
                return 2 * work.rows * work.cols * tokens / rate(_type(work.format))
            case Experts():
                weights = 3 * work.hidden * -(-work.inner // work.ranks) * work.top_k
                return 2 * weights * tokens / rate(_type(work.format))
            case HeadProduct():
                return 2 * work.heads * work.rows * work.cols * tokens / rate("bf16")
            case Attention():
                return 2 * work.heads * work.head_dim * tokens**2 / rate("bf16")  # half is masked
            case LatentScan():
                wide = work.kv_rank + work.rope_dim // 2  # scores and values
                return 2 * work.heads * wide * tokens**2 / rate("bf16")
            case AllReduce():
                return self.tables.allreduce_s(elements=work.elements * tokens, gpus=self.gpus)
            case Row():
                return 0.0

    def _only(self, name: str, shape: tuple[int, int], measured: tuple[int, int]) -> None:
        if shape != measured:
            raise HardwareError(
                f"{self.tables.stack_name}: {name} of {shape} elements: latent attention was "
                f"measured for {measured} only"
            )

    def rests_on(self) -> str:
        return (
            f"{self.tables.stack.title} kernels measured on {self.tables.device} (vendor: "
            "AIConfigurator 0.12.0)"
        )


@frozen
class Ideal:
    """Kernels that read memory at the rate of the twin's pipe as soon as it flows again: a border,
    a restart, the bytes.

    Nothing here was taken from an engine, so it may be checked against all of them. It is too fast
    where kernels are imperfect.
    """

    node: Node

    def seconds(self, work: Work, load: Load) -> float:
        device = self.node.device
        edge, restart = device.launch.graph_edge_s.value, device.launch.restart_s.value
        stream = device.memory.stream_bytes_per_s.value
        match work:
            case Product():
                return edge + restart + work.format.bytes(work.rows, work.cols) / stream
            case Experts():
                width = -(-work.inner // work.ranks)
                one = 2 * work.format.bytes(width, work.hidden) + work.format.bytes(
                    work.hidden, width
                )
                return (
                    2 * (edge + restart)
                    + one * visited(work.experts, work.top_k, load.sequences) / stream
                )
            case Attention():
                positions = min(load.context, work.window) if work.window else load.context
                cache = (
                    2
                    * work.kv_heads
                    * work.head_dim
                    * KV_BYTES[load.kv]
                    * positions
                    * load.sequences
                )
                # the scan, then the merging of the splits
                return 2 * (edge + restart) + cache / stream
            case LatentScan():
                cache = (
                    (work.kv_rank + work.rope_dim)
                    * KV_BYTES[load.kv]
                    * load.context
                    * load.sequences
                )
                return 2 * (edge + restart) + cache / stream
            case HeadProduct():
                return edge + restart + BF16.bytes(work.heads * work.rows, work.cols) / stream
            case Row():
                return edge + 2 * device.l2.latency_s.value
            case AllReduce():
                return self._link().value

    def prompt_s(self, work: Work, tokens: int) -> float:
        """One pass over the weights: there is no rate of products on file that is no engine's."""
        return self.seconds(work, Load()) if isinstance(work, Product | HeadProduct) else 0.0

    def _link(self) -> Number:
        if self.node.link is None:
            raise HardwareError(
                f"{self.node.name} has no link for an all-reduce; choose a node of several GPUs"
            )
        return self.node.link.library_allreduce_s

    def rests_on(self) -> str:
        return (
            f"borders, restarts and the memory pipe of {self.node.device.name}, and its library's "
            "all-reduce"
        )


def visited(experts: int, top_k: int, tokens: int) -> float:
    """Experts that at least one of `tokens` visits when each picks top_k of them evenly."""
    return float(experts * (1 - (1 - top_k / experts) ** tokens))


def _type(form: Format) -> str:
    if form.name not in TABLE:
        raise HardwareError(
            f"format {form.name}: no kernel was measured for it; measured: {', '.join(TABLE)}"
        )
    return TABLE[form.name]
