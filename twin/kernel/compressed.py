"""What compressed attention and hyper-connections are to the kernel: constants, vectors, caches."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from twin.models.experts import CHOSEN
from twin.models.feeds import ExpertFeed
from twin.models.mixers import STATE_BYTES, CompressedAttention
from twin.models.variant import Activation
from twin.plan.catalogue import StageKind
from twin.plan.compressed_shards import compressing, mixing_parts
from twin.plan.shards import Weights
from twin.plan.types import Plan, Stage
from twin.schedule.block import up

UNIT = 256  # bytes: a stage's caches begin at whole ones (STATE_ALIGNED)
BUFFERS = 2  # entries of a stage that are under way at a time
Constant = bool | int | float | Activation
# what stages of a kind have of a layer's vectors, by their names in the kernel
OF_ENTRIES = {"compress_bias": "bias", "compress_norm": "norm"}
OF_KIND = {StageKind.ATTENTION: "compress", StageKind.INDEX: "index"}
TURNING = (StageKind.ATTENTION, StageKind.INDEX, StageKind.HEAD_OUT)  # stages that rotate


def compresses(plan: Plan) -> bool:
    """Does the kernel run compressed attention?"""
    spec = plan.spec
    return spec is not None and spec.hyper is not None and bool(plan.attentions)


def kinds_of(plan: Plan) -> list[CompressedAttention]:
    spec = plan.spec
    mixers = [spec.layer(i).mixer for i in range(spec.layers)] if spec else []
    return [mixer for mixer in mixers if isinstance(mixer, CompressedAttention)]


def compressed_traits(plan: Plan) -> dict[str, dict[str, Constant]]:
    """Members of TRAITS that differ from what other plans have."""
    if not compresses(plan):
        return {}
    assert plan.spec is not None
    assert plan.spec.hyper is not None
    kinds, hyper, own = kinds_of(plan), plan.spec.hyper, plan.kernel_attention()
    indexed = next((kind for kind in kinds if kind.top_k), None)
    found: dict[str, Constant] = {
        "ANY": True,
        "HEADS": own.heads,
        "HEAD_DIM": own.head_dim,
        "ROPE_DIM": kinds[0].rope_dim,
        "GROUPS": kinds[0].o_groups // plan.ranks,
        "WINDOW": kinds[0].window,
    }
    if indexed:
        found |= {
            "INDEX_HEADS": indexed.index_heads,
            "INDEX_DIM": indexed.index_dim,
            "TOP_K": indexed.top_k,
        }
    mixing: dict[str, Constant] = {
        "ANY": True,
        "RESIDUALS": hyper.residuals,
        "MIXES": hyper.mixes,
        "PARTS": mixing_parts(plan.options),
        "ROUNDS": hyper.iterations,
        "EPS": hyper.eps,
    }
    return {"Compressed": found, "Hyper": mixing}


# ---- vectors -------------------------------------------------------------------------------------


def compressed_names(plan: Plan, stage: Stage) -> dict[str, str]:
    """Vectors of a stage, and the tensors that they are."""
    if not compresses(plan):
        return {}
    layer = f"layers.{stage.layer}."
    if stage.kind is StageKind.HYPER:
        site = plan.values[stage.publishes or 0].name.partition("[")[0]
        where = site if stage.layer < 0 else layer + site
        return {f"mix_{end}": f"{where}_{end}" for end in ("base", "scale")}
    if stage.kind is StageKind.QUERY:
        return {"q_norm": f"{layer}q_a_norm"}
    if stage.kind is StageKind.ROUTE:
        feed = plan.spec.layer(stage.layer).feed if plan.spec else None
        return {CHOSEN: layer + CHOSEN} if isinstance(feed, ExpertFeed) and feed.hashed else {}
    found = {}
    if stage.kind is StageKind.ATTENTION:
        found = {"k_norm": f"{layer}kv_norm", "sinks": f"{layer}sinks"}
    if stage.kind in OF_KIND and compressing(plan, stage).ratio:
        of = f"{layer}{OF_KIND[stage.kind]}"
        found |= {name: f"{of}_{end}" for name, end in OF_ENTRIES.items()}
    return found


def compressed_sizes(plan: Plan, stage: Stage) -> dict[str, int]:
    """Floats of each of a stage's vectors on a rank."""
    names = compressed_names(plan, stage)
    if not names or plan.spec is None:
        return {}
    if stage.kind is StageKind.HYPER:
        assert plan.spec.hyper is not None
        shapes = plan.spec.hyper.shapes(plan.shard.hidden)
        return {name: math.prod(shapes[of.rpartition(".")[2]]) for name, of in names.items()}
    if stage.kind is StageKind.ROUTE:
        feed = plan.spec.layer(stage.layer).feed
        assert isinstance(feed, ExpertFeed)
        return {CHOSEN: plan.spec.vocab * feed.top_k}
    vectors = compressing(plan, stage).vector_shapes()
    sizes = {name: math.prod(vectors[of.rpartition(".")[2]]) for name, of in names.items()}
    return sizes | ({"sinks": sizes["sinks"] // plan.ranks} if "sinks" in sizes else {})


def compressed_vector(
    plan: Plan, stage: Stage, name: str, rank: int, weights: Weights
) -> NDArray[np.float32] | None:
    """One of these; None of other stages."""
    tensor = compressed_names(plan, stage).get(name)
    if tensor is None:
        return None
    found = weights[tensor].astype(np.float32)
    if name == "sinks":
        own = len(found) // plan.ranks
        found = found[rank * own : (rank + 1) * own]
    return found


# ---- caches --------------------------------------------------------------------------------------


def compressed_numbers(plan: Plan, stage: Stage, begin: int) -> dict[str, int]:
    """A stage's fields; its caches begin at byte `begin`."""
    if not compresses(plan) or stage.kind not in OF_KIND:
        return {}
    kind = compressing(plan, stage)
    assert stage.scan is not None
    return {
        "cached": begin // UNIT,
        "ratio": kind.ratio,
        "overlap": kind.overlap,
        "page": stage.scan.page,
    }


def cached_bytes(plan: Plan, stage: Stage) -> int:
    """Of a stage's caches on a rank: the window's positions, entries, and what waits to be one."""
    if not compresses(plan) or stage.kind not in OF_KIND:
        return 0
    kind, element = compressing(plan, stage), plan.options.kv_dtype.bytes
    attends = stage.kind is StageKind.ATTENTION
    dim = kind.head_dim if attends else kind.index_dim
    window = kind.window * dim * element if attends else 0
    entries = kind.entries(plan.options.max_context) * dim * element
    pending = BUFFERS * 2 * kind.overlap * kind.ratio * dim * STATE_BYTES
    return sum(up(part, UNIT) for part in (window, entries, pending))
