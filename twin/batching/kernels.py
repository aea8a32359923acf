"""Which kernels an ordinary engine launches for one decode step on one of its GPUs.

Tensor parallelism as vLLM, SGLang and TensorRT-LLM do it: q, k, v, gate and up are cut by rows, o
and down by columns, and the partial sums meet in an all-reduce after each of them. One kernel for
each operation that the plan of a launch-by-launch engine names (`Stage.operations`); for dense
models a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator

from twin.errors import HardwareError, PlanError
from twin.frozen import frozen
from twin.hardware.types import Node
from twin.models.feeds import ExpertFeed, NoFeed
from twin.models.formats import Format
from twin.models.mixers import GroupedAttention, LatentAttention
from twin.models.spec import ModelSpec
from twin.models.weight import Weight

FP8 = Format("fp8", 8)  # one scale a matrix: what an engine makes of a 16-bit checkpoint
QUANTISED = {"as stored": None, "fp8": FP8}


@frozen
class Product:
    """Tokens times a matrix [rows, cols] of this GPU."""

    name: str
    rows: int
    cols: int
    format: Format


@frozen
class Experts:
    """The routed experts of a layer: this GPU holds one of `ranks` slices of each."""

    name: str
    hidden: int
    inner: int  # of a whole expert
    experts: int
    top_k: int
    ranks: int
    format: Format


@frozen
class Attention:
    """This GPU's heads over each sequence's cache, splits merged. `window` 0: all cached
    positions.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int


@frozen
class LatentScan:
    """This GPU's heads of latent attention, absorbed: all of them read the same cached latents."""

    name: str
    heads: int
    kv_rank: int
    rope_dim: int


@frozen
class HeadProduct:
    """One matrix [rows, cols] for each of this GPU's heads, 16-bit: into the latent space (k_up) or
    out of it (v_up).
    """

    name: str
    heads: int
    rows: int
    cols: int


@frozen
class Row:
    """A kernel without weights over one row a token; `reduces`: the row is summed first, as for a
    norm.
    """

    name: str
    elements: int
    reduces: bool


@frozen
class AllReduce:
    """A library's sum over all GPUs, one row a token."""

    name: str
    elements: int


Work = Product | HeadProduct | Experts | Attention | LatentScan | Row | AllReduce


def launched(
    spec: ModelSpec, gpus: int, *, rope_kernels: int, weights: str = "as stored"
) -> Iterator[Work]:
    """The kernels of one step, in order. `weights`: "fp8" stores all layers' matrices but the
    router's in FP8.

    Raises PlanError for attention of another kind and for sizes that do not divide over the GPUs.
    """
    yield Row("embedding", spec.hidden, reduces=False)
    if gpus > 1:
        yield AllReduce("all_reduce", spec.hidden)
    for index in range(spec.layers):
        yield from _layer(spec, index, gpus, rope_kernels, QUANTISED[weights])
    yield Row("add_norm", spec.hidden, reduces=True)
    yield Product("lm_head", -(-spec.vocab // gpus), spec.hidden, spec.end_weights()[-1].format)
    if gpus > 1:
        yield AllReduce("all_reduce", spec.vocab)
    yield Row("sample", spec.vocab, reduces=True)


def check_memory(
    spec: ModelSpec, node: Node, *, weights: str, sequences: int, context: int
) -> None:
    """Raises HardwareError when weights and caches do not fit the node."""
    quantised = QUANTISED[weights]
    stored = sum(
        _stored(weight, quantised)
        for index in range(spec.layers)
        for weight in spec.layer_weights(index)
    )
    stored += (
        sum(weight.stored_bytes for weight in spec.end_weights())
        + spec.vocab * spec.hidden * spec.dtype.bytes
    )
    needed = stored + sequences * spec.held_bytes(context, spec.dtype.bytes)
    held = node.gpus * node.device.memory.usable_bytes
    if needed > held:
        raise HardwareError(
            f"{spec.name} with {sequences} sequences of {context} positions needs "
            f"{needed / 1e9:,.0f} GB, {node.name} holds {held / 1e9:,.0f} GB: use more GPUs, FP8 "
            "weights, or fewer and shorter sequences"
        )


def _stored(weight: Weight, quantised: Format | None) -> int:
    return weight.experts * _format(weight, quantised).bytes(weight.rows, weight.cols)


def _format(weight: Weight, quantised: Format | None) -> Format:
    """Only 16-bit matrices are quantised, and routers are not."""
    return (
        quantised
        if quantised and weight.format.bits == 16 and weight.name != "router"
        else weight.format
    )


def _layer(
    spec: ModelSpec, index: int, gpus: int, rope_kernels: int, quantised: Format | None
) -> Iterator[Work]:
    layer = spec.layer(index)
    if isinstance(layer.feed, NoFeed) or not layer.feed.gated:
        raise PlanError(
            f"{spec.name}: layer {index} has no gated feed-forward layer: ordinary engines are "
            "modelled for layers of attention and such a one; choose another model"
        )
    stored = {weight.name: weight for weight in spec.layer_weights(index)}
    yield Row("add_norm", spec.hidden, reduces=True)
    if isinstance(layer.mixer, GroupedAttention):
        yield from _attention(spec, layer.mixer, stored, gpus, rope_kernels, quantised)
    elif isinstance(layer.mixer, LatentAttention):
        yield from _latent(spec, layer.mixer, stored, gpus, rope_kernels, quantised)
    else:
        raise PlanError(
            f"{spec.name}: layer {index} mixes tokens by {type(layer.mixer).__name__}: ordinary "
            "engines are modelled for softmax attention with grouped queries or latents; choose "
            "another model"
        )
    if gpus > 1:
        yield AllReduce("all_reduce", spec.hidden)
    yield Row("add_norm", spec.hidden, reduces=True)
    if isinstance(layer.feed, ExpertFeed):
        yield from _experts(spec, layer.feed, stored, gpus, quantised)
    else:
        yield from _swiglu(spec, "", stored, gpus, quantised)
    if gpus > 1:
        yield AllReduce("all_reduce", spec.hidden)


def _attention(
    spec: ModelSpec,
    mixer: GroupedAttention,
    stored: dict[str, Weight],
    gpus: int,
    rope_kernels: int,
    quantised: Format | None,
) -> Iterator[Work]:
    heads, kv_heads = (
        _shared(spec, "attention heads", mixer.heads, gpus),
        max(1, mixer.kv_heads // gpus),
    )
    if mixer.kv_heads % gpus and gpus % mixer.kv_heads:
        raise PlanError(
            f"{spec.name}: {mixer.kv_heads} KV heads neither divide over {gpus} GPUs nor "
            "replicate evenly"
        )
    query = stored["q"].rows // gpus
    rows = query + 2 * kv_heads * mixer.head_dim
    yield Product("qkv_proj", rows, spec.hidden, _format(stored["q"], quantised))
    if mixer.qk_norm:
        yield Row("qk_norm", (heads + kv_heads) * mixer.head_dim, reduces=True)
    for _ in range(rope_kernels):
        yield Row("rope_append", (heads + kv_heads) * mixer.head_dim, reduces=False)
    yield Attention("attention", heads, kv_heads, mixer.head_dim, mixer.window)
    if mixer.output_gate:
        yield Row("output_gate", heads * mixer.head_dim, reduces=False)
    yield Product("o_proj", spec.hidden, heads * mixer.head_dim, _format(stored["o"], quantised))


def _latent(
    spec: ModelSpec,
    mixer: LatentAttention,
    stored: dict[str, Weight],
    gpus: int,
    rope_kernels: int,
    quantised: Format | None,
) -> Iterator[Work]:
    """The way down to the latents is not cut: every GPU computes and caches all of it."""
    heads = _shared(spec, "attention heads", mixer.heads, gpus)
    query = mixer.nope_dim + mixer.rope_dim
    if mixer.q_rank:
        yield Product(
            "qkv_a_proj",
            mixer.q_rank + mixer.latent_dim,
            spec.hidden,
            _format(stored["q_a"], quantised),
        )
        yield Row("q_norm", mixer.q_rank, reduces=True)
        yield Product("q_b_proj", heads * query, mixer.q_rank, _format(stored["q_b"], quantised))
    else:
        yield Product(
            "q_kv_a_proj",
            heads * query + mixer.latent_dim,
            spec.hidden,
            _format(stored["q"], quantised),
        )
    yield Row("kv_norm", mixer.kv_rank, reduces=True)
    yield HeadProduct("k_up", heads, mixer.kv_rank, mixer.nope_dim)
    for _ in range(rope_kernels):
        yield Row("rope_append", heads * mixer.rope_dim + mixer.latent_dim, reduces=False)
    yield LatentScan("attention", heads, mixer.kv_rank, mixer.rope_dim)
    yield HeadProduct("v_up", heads, mixer.value_dim, mixer.kv_rank)
    yield Product("o_proj", spec.hidden, heads * mixer.value_dim, _format(stored["o"], quantised))


def _swiglu(
    spec: ModelSpec, prefix: str, stored: dict[str, Weight], gpus: int, quantised: Format | None
) -> Iterator[Work]:
    gate, down = stored[prefix + "gate"], stored[prefix + "down"]
    width = _shared(spec, "feed-forward width", gate.rows, gpus)
    yield Product(prefix + "gate_up_proj", 2 * width, spec.hidden, _format(gate, quantised))
    yield Row(prefix + "silu_mul", 2 * width, reduces=False)
    yield Product(prefix + "down_proj", spec.hidden, width, _format(down, quantised))


def _experts(
    spec: ModelSpec,
    feed: ExpertFeed,
    stored: dict[str, Weight],
    gpus: int,
    quantised: Format | None,
) -> Iterator[Work]:
    yield Product("router", feed.experts, spec.hidden, stored["router"].format)
    if feed.shared_width:
        yield from _swiglu(spec, "shared_", stored, gpus, quantised)
        yield Row("add_shared", spec.hidden, reduces=False)
    yield Experts(
        "experts",
        spec.hidden,
        feed.width,
        feed.experts,
        feed.top_k,
        gpus,
        _format(stored["gate"], quantised),
    )


def _shared(spec: ModelSpec, what: str, count: int, gpus: int) -> int:
    if count % gpus:
        raise PlanError(
            f"{spec.name}: {what} {count} does not divide over {gpus} GPUs; choose a "
            "tensor-parallel degree that does"
        )
    return count // gpus
