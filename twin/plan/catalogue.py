"""One row for each kind of stage: what the builder, the kernel's layout and the twin have to know
about it.

The proof (twin/proof) keeps lists of its own, on purpose: a mistake here must not hide there.
"""

from __future__ import annotations

from enum import Enum
from functools import cache

from twin.frozen import frozen
from twin.plan.kinds import StageKind


class Input(Enum):
    """The vectors that a block of the engine multiplies with matrices. A device's kernel holds one
    of each width.
    """

    HIDDEN = "hidden"  # the residual, or a probe's constant
    HEADS = "heads"  # the outputs of all heads
    FFN = "ffn"  # the feed-forward's activations, of the chosen experts where there are some
    SHARED = "shared"  # those of shared experts
    DENSE = "dense"  # those of layers without experts, where others have some


class Spent(Enum):
    """What a stage's own time goes to, besides streaming and waiting; the names are those of
    twin/cost/causes.py.
    """

    CONSUMER = "consumer"
    ATTENTION = "attention"
    SAMPLING = "sampling"
    ROUTING = "routing"
    OTHER = "other"


@frozen(kw_only=True)
class Row:
    """What holds for every stage of a kind."""

    engine: bool = False  # the kernel has code for it; else it is simulated only
    # of its matrix in the kernel, whose weights may be prefetched; None: no such matrix
    input: Input | None = None
    vector: bool = False  # its blocks gather whole vectors
    norm: bool = False  # the engine norms what it reads
    summed: bool = False  # every rank makes a part of what it publishes
    bias: bool = False  # the engine adds a model's biases to its rows
    sinks: bool = False  # the engine adds learned logits to its softmax
    in_pass: bool = True  # a prompt pass runs it, where it stands before the last layer's attention
    spent: Spent = Spent.CONSUMER


ROWS: dict[StageKind, Row] = {
    # in a pass the first norm embeds
    StageKind.EMBED: Row(engine=True, in_pass=False, spent=Spent.OTHER),
    StageKind.QKV: Row(engine=True, input=Input.HIDDEN, vector=True, norm=True, bias=True),
    StageKind.ATTENTION: Row(engine=True, sinks=True, spent=Spent.ATTENTION),
    StageKind.O_PROJ: Row(engine=True, input=Input.HEADS, vector=True, summed=True, bias=True),
    StageKind.GATE_UP: Row(engine=True, input=Input.HIDDEN, vector=True, norm=True),
    StageKind.DOWN: Row(engine=True, input=Input.FFN, vector=True, summed=True),
    # in a pass parts are read where they lie
    StageKind.COLLECTIVE: Row(engine=True, in_pass=False),
    StageKind.LANE_MEAN: Row(engine=True, vector=True, norm=True),
    StageKind.LM_HEAD: Row(engine=True, input=Input.HIDDEN, vector=True, norm=True),
    StageKind.SAMPLE: Row(engine=True, spent=Spent.SAMPLING),
    StageKind.STREAM: Row(engine=True, input=Input.HIDDEN),
    StageKind.EXCHANGE: Row(engine=True),
    StageKind.REDUCE: Row(engine=True, vector=True, in_pass=False),
    StageKind.HYPER: Row(vector=True),
    StageKind.LATENT: Row(vector=True),
    StageKind.QUERY: Row(vector=True),
    StageKind.ABSORB: Row(vector=True),
    StageKind.INDEX: Row(spent=Spent.ATTENTION),
    StageKind.HEAD_OUT: Row(vector=True),
    StageKind.DELTA_IN: Row(engine=True, input=Input.HIDDEN, vector=True, norm=True),
    StageKind.DELTA_GATES: Row(engine=True, input=Input.HIDDEN, norm=True),
    StageKind.DELTA: Row(engine=True, spent=Spent.ATTENTION),
    StageKind.CONV_IN: Row(engine=True, input=Input.HIDDEN, vector=True, norm=True),
    StageKind.ROUTER: Row(engine=True, input=Input.HIDDEN, vector=True, norm=True, bias=True),
    StageKind.ROUTE: Row(engine=True, spent=Spent.ROUTING),
    StageKind.SHARED_UP: Row(engine=True, input=Input.HIDDEN, norm=True),
    StageKind.SHARED_DOWN: Row(engine=True, input=Input.SHARED, vector=True),
    StageKind.ROUTED_UP: Row(engine=True, input=Input.HIDDEN, norm=True, bias=True),
    StageKind.ROUTED_DOWN: Row(engine=True, input=Input.FFN, vector=True, summed=True, bias=True),
}

ALWAYS = (Input.HIDDEN.value, Input.HEADS.value, Input.FFN.value)  # each kernel has their vectors


def input_of(kind: StageKind, *, routed: bool) -> Input | None:
    """What a stage's matrix multiplies. `routed`: of a plan with chosen experts."""
    return Input.DENSE if routed and kind is StageKind.DOWN else ROWS[kind].input


@cache
def kinds_by_input(*, routed: bool) -> dict[str, tuple[StageKind, ...]]:
    """The stages whose matrices multiply each input."""
    return {
        each.value: tuple(kind for kind in ROWS if input_of(kind, routed=routed) is each)
        for each in Input
    }


# What the engine runs of options that plans may have more of.
ENGINE_OPTIONS = {"batch": 1, "draft": 0, "expert_ranks": 1, "ahead_slots": 0}
