"""An all-reduce and nothing else, as libraries make it between kernels: the twin predicts what a
published one takes.
"""

from __future__ import annotations

from twin.plan.build import dies
from twin.plan.catalogue import StageKind
from twin.plan.options import Limits, Options
from twin.plan.spans import spread
from twin.plan.types import Buffer, Parts, Plan, Read, Shard, Stage, Value


def allreduce_probe(options: Options, limits: Limits, *, elements: int, stages: int) -> Plan:
    """`stages` one-shot all-reduces a step: each GPU pushes `elements` to all others, and a block
    sums the parts of the elements that it owns. Not proven: nothing is reset, so only the twin runs
    it.
    """
    blocks, ranks = options.blocks, options.gpus
    owned = spread(elements, blocks)
    spans = tuple((span,) for span in owned)
    copies = options.copies
    values = tuple(
        Value(i, f"sum[{i}]", i, 0, i % copies, elements, True, owned) for i in range(stages)
    )
    chain = tuple(
        Stage(
            i,
            StageKind.EXCHANGE,
            i,
            (Read((i - 1) % stages, Parts.ALL, spans, previous_step=i == 0),),
            (),
            i,
            None,
            0,
            ("exchange",),
        )
        for i in range(stages)
    )
    return Plan(
        f"all-reduce {stages} x {elements} on {ranks} GPUs",
        None,
        options,
        limits,
        ranks,
        1,
        blocks,
        Shard(0, 0),
        (),
        (Buffer(0, "sum", elements, copies, ranks),),
        values,
        chain,
        dies(options, limits.dies),
    )
