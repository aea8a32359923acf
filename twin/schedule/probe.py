"""Plans that ask one question each: the kernel runs them to be measured, the twin runs them to be
fitted.
"""

from __future__ import annotations

from dataclasses import replace

from twin.errors import PlanError
from twin.models.formats import Format
from twin.plan.attention import Attention
from twin.plan.build import dies
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix, Span
from twin.plan.options import HandOffKind, Limits, Options
from twin.plan.ranges import pages_of
from twin.plan.resets import with_resets
from twin.plan.spans import scatter, spread
from twin.plan.types import Buffer, Parts, Plan, Read, Reset, Shard, Stage, Value
from twin.schedule.choose import chooser_of
from twin.schedule.splits import attention
from twin.schedule.tiles import cutter_of, tiled

ROUNDS = 3  # of hop_probe: with fewer, a block could poll a word that another has not reset yet
HOPS_A_MATRIX = 8
NO_SHARD = Shard(0, 0)


def stream_probe(
    options: Options,
    limits: Limits,
    *,
    rows: int,
    cols: int,
    stages: int = 1,
    form: Format | None = None,
) -> Plan:
    """Consume `stages` matrices of [rows, cols] a step, with no hand-off. Small ones stay in cache:
    the consumer's own speed. `form`: as they are stored, coded, if not in the plan's weight type.
    """
    owned = spread(rows, options.blocks)
    matrix = Matrix(rows, cols, 1, 0, 0, owned, form)
    chain = tuple(
        Stage(i, StageKind.STREAM, i, (), (), None, matrix, 0, ("gemv",)) for i in range(stages)
    )
    said = f", {form.name}" if form else ""
    plan = _plan(f"stream {stages} x {rows} x {cols}{said}", options, limits, chain)
    return tiled(plan, cutter_of(plan))


def exchange_probe(options: Options, limits: Limits, *, elements: int, stages: int = 15) -> Plan:
    """`stages` hand-offs a step: every block publishes its share of `elements` and gathers all of
    them.

    `stages` must be a multiple of `options.copies`, else the step border reuses a copy too early;
    with sentinels four copies at least, because nothing else tells a block of resets in time
    (`prove` refuses others).
    """
    # who publishes nothing tells nobody how far it is
    if elements < options.blocks and not options.handoff.meets:
        raise PlanError(
            f"exchange_probe: {elements} elements for {options.blocks} blocks: give each block at "
            "least one"
        )
    owned = spread(elements, options.blocks)
    whole = (((0, elements),),) * options.blocks
    copies = options.copies
    values = tuple(
        Value(i, f"exchange[{i}]", i, 0, i % copies, elements, False, owned) for i in range(stages)
    )
    chain = tuple(
        Stage(
            i,
            StageKind.EXCHANGE,
            i,
            (Read((i - 1) % stages, Parts.OWN, whole, previous_step=i == 0),),
            (),
            i,
            None,
            0,
            ("exchange",),
        )
        for i in range(stages)
    )
    plan = _plan(f"exchange {stages} x {elements}", options, limits, chain)
    plan = replace(plan, buffers=(Buffer(0, "exchange", elements, copies, 1),), values=values)
    return with_resets(plan) if options.handoff.resets else plan


def turns_probe(
    options: Options, limits: Limits, *, elements: int, rows: int, cols: int, stages: int = 15
) -> Plan:
    """An exchange_probe with a matrix of [rows, cols] after each hand-off: what work and waiting
    cost each other.
    """
    exchange = exchange_probe(
        replace(options, handoff=HandOffKind.COUNTER), limits, elements=elements, stages=stages
    )
    matrix = Matrix(rows, cols, 1, 0, 0, spread(rows, options.blocks))
    chain: list[Stage] = []
    for stage in exchange.stages:
        chain.append(replace(stage, index=2 * stage.index))
        chain.append(
            Stage(
                2 * stage.index + 1,
                StageKind.STREAM,
                stage.layer,
                (),
                (),
                None,
                matrix,
                0,
                ("gemv",),
            )
        )
    values = tuple(replace(value, stage=2 * value.stage) for value in exchange.values)
    name = f"turns {stages} x {elements}, {rows} x {cols}"
    plan = replace(
        exchange,
        name=name,
        options=replace(exchange.options, handoff=options.handoff),
        stages=tuple(chain),
        values=values,
    )
    plan = tiled(plan, cutter_of(plan))
    return with_resets(plan) if options.handoff.resets else plan


def hop_probe(
    options: Options,
    limits: Limits,
    *,
    pair: tuple[int, int],
    hops: int,
    rows: int = 0,
    cols: int = 2048,
) -> Plan:
    """One word goes to and fro between the two blocks of `pair`, `hops` times in each of ROUNDS
    rounds a step.

    The other blocks listen, and a round begins with a hand-off between all of them, which proves
    that the words of the round before may be reset. With `rows` they also consume a matrix of
    [rows, cols] every HOPS_A_MATRIX hops, so that the word travels under load; the pair must stay
    the slower of the two, else the step says how fast the others listen.
    """
    blocks = options.blocks
    if len(set(pair)) != 2 or not all(0 <= block < blocks for block in pair):
        raise PlanError(f"hop_probe: the pair {pair} must be two of the {blocks} blocks")
    if rows and blocks < 3:
        raise PlanError(
            f"hop_probe: {rows} rows on {blocks} blocks: a third one streams them, the pair does "
            "not"
        )
    if hops < 1:
        raise PlanError(f"hop_probe: {hops} hops a round; ask for at least 1")
    matrix = Matrix(rows, cols, 1, 0, 0, _without(pair, rows, blocks)) if rows else None
    owners = [
        tuple((at, at + 1) for at in range(blocks)),
        *(_lone(pair[hop % 2], blocks) for hop in range(hops)),
    ]
    stages: list[Stage] = []
    values: list[Value] = []
    for number in range(ROUNDS * (1 + hops)):
        owned = owners[number % (1 + hops)]
        elements = blocks if number % (1 + hops) == 0 else 1
        before = values[-1].elements if values else 1  # the last hop of the step before
        seen = Read(
            (number - 1) % (ROUNDS * (1 + hops)),
            Parts.OWN,
            (((0, before),),) * blocks,
            previous_step=not values,
        )
        values.append(
            Value(number, f"hop[{number}]", len(stages), number, 0, elements, False, owned)
        )
        stages.append(
            Stage(
                len(stages), StageKind.EXCHANGE, number, (seen,), (), number, None, 0, ("exchange",)
            )
        )
        if matrix is not None and number % HOPS_A_MATRIX == 0:
            stages.append(
                Stage(len(stages), StageKind.STREAM, number, (), (), None, matrix, 0, ("gemv",))
            )
    plan = _plan(
        f"hop {pair[0]}-{pair[1]}, {hops} x {rows} x {cols}", options, limits, tuple(stages)
    )
    buffers = tuple(Buffer(value.id, value.name, value.elements, 1, 1) for value in values)
    plan = replace(plan, buffers=buffers, values=tuple(values))
    plan = tiled(plan, cutter_of(plan))
    return with_resets(plan) if options.handoff.resets else plan


def attention_probe(
    options: Options,
    limits: Limits,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    stages: int = 1,
    window: int = 0,
) -> Plan:
    """Scan `options.context` cached positions `stages` times a step with a constant query; nothing
    is exchanged.
    """
    own = attention(
        chooser_of(limits),
        options,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        blocks=options.blocks,
    )
    items = scatter(own.items_of(window), options.blocks)
    chain = tuple(
        Stage(i, StageKind.ATTENTION, i, (), (), None, None, 0, ("attention",), items, window)
        for i in range(stages)
    )
    return _plan(
        f"attention {stages} x {kv_heads} x {head_dim} at {options.context}",
        options,
        limits,
        chain,
        own=own,
    )


def _lone(block: int, blocks: int) -> tuple[Span, ...]:
    """One element, owned by `block`."""
    return tuple((int(at > block), int(at >= block)) for at in range(blocks))


def _without(pair: tuple[int, int], rows: int, blocks: int) -> tuple[Span, ...]:
    """`rows` spread over all blocks but two."""
    shares = iter(spread(rows, blocks - 2))
    owned: list[Span] = []
    for block in range(blocks):
        last = owned[-1][1] if owned else 0
        owned.append((last, last) if block in pair else next(shares))
    return tuple(owned)


def _plan(
    name: str,
    options: Options,
    limits: Limits,
    stages: tuple[Stage, ...],
    *,
    shard: Shard = NO_SHARD,
    own: Attention | None = None,
) -> Plan:
    """A single-rank plan without a model."""
    pages_of(options)
    options = replace(options, delay=0)
    return Plan(
        name,
        None,
        options,
        limits,
        1,
        1,
        options.blocks,
        shard,
        (own,) if own else (),
        (),
        (),
        stages,
        dies(options, limits.dies),
    )


def sample_probe(options: Options, limits: Limits, *, vocab: int) -> Plan:
    """One block publishes `vocab` logits to itself and samples a token from them; with greedy
    sampling, `vocab` is two words a candidate.

    More blocks would need a join between the reset of the logits and their next poll, so they are
    refused.
    """
    if options.blocks != 1:
        raise PlanError(
            f"sample_probe runs on 1 block, not {options.blocks}: only one block samples"
        )
    logits = Value(0, "logits", 0, 0, 0, vocab, False, ((0, vocab),))
    token = Value(1, "token", 1, 1, 0, 1, False, ((0, 1),))
    seen = Read(1, Parts.OWN, (((0, 1),),), previous_step=True)
    everything = Read(0, Parts.OWN, (((0, vocab),),))
    resets = [
        (Reset(value, previous_step=True),) if options.handoff.resets else () for value in (0, 1)
    ]
    stages = (
        Stage(0, StageKind.EXCHANGE, 0, (seen,), resets[0], 0, None, 0, ("exchange",)),
        Stage(1, StageKind.SAMPLE, -1, (everything,), resets[1], 1, None, 0, ("sample",)),
    )
    plan = _plan(f"sample {vocab}", options, limits, stages, shard=Shard(0, vocab))
    return replace(
        plan,
        buffers=(Buffer(0, "logits", vocab, 1, 1), Buffer(1, "token", 1, 1, 1)),
        values=(logits, token),
    )
