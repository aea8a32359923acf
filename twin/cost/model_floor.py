"""The floor of a model, whatever the plan: each byte that a step needs is moved once.

A plan's own floor counts what its blocks move: matrices that every rank streams, keys and values
that several ranks or items read again. Another plan may do without these; none does with less than
this.
"""

from __future__ import annotations

from twin.models.formats import PLAIN
from twin.models.spec import ModelSpec
from twin.models.weight import Weight
from twin.plan.options import Options
from twin.plan.types import Plan


def model_bytes(spec: ModelSpec, options: Options) -> float:
    """Bytes of weights, caches and states that a step of so many tokens moves at least, at
    `options.context` positions; of routed experts what uniform routing uses on average.
    """
    weights = sum(_moved_bytes(weight, spec, options) for weight in spec.weights())
    cached = spec.traffic(options.context, options.kv_dtype.bytes)
    return weights + options.batch * (
        cached.read_bytes + cached.written_bytes * (options.draft + 1)
    )


def _moved_bytes(weight: Weight, spec: ModelSpec, options: Options) -> float:
    copies = (
        weight.experts * (1.0 - (1.0 - weight.active / weight.experts) ** options.tokens)
        if weight.active < weight.experts
        else weight.experts
    )
    if spec.stored is None and weight.format.name in PLAIN:
        return copies * weight.rows * weight.cols * options.weight_dtype.bytes
    return copies * weight.copy_bytes


def model_floor_s(plan: Plan, floor_s: float, moved_bytes: int) -> float:
    """Seconds that these bytes take at the rates at which the plan's own floor moves its bytes. A
    plan of fewer bytes, such as one whose histories stay in a block, and a probe are their own.
    """
    if plan.spec is None or not moved_bytes:
        return floor_s
    return floor_s * min(1.0, model_bytes(plan.spec, plan.options) / moved_bytes)
