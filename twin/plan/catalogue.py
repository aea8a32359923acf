"""The kinds of stages that a step is made of, and one row for each: what the builder, the packer,
the kernel's layout and the twin have to know about it.

The proof (twin/proof) keeps lists of its own, on purpose: a mistake here must not hide there.
"""

from __future__ import annotations

from enum import Enum
from functools import cache

from twin.frozen import frozen


class StageKind(Enum):
    """A member's place is the kernel's number."""

    EMBED = "embed"  # token -> residual, no exchange
    QKV = "qkv"  # residual += reads; norm; rows of q, k, v
    ATTENTION = "attention"  # append k, v; partial softmax per (kv head, split)
    O_PROJ = "o_proj"  # combine splits; rows of the output projection
    GATE_UP = "gate_up"  # residual += reads; norm; silu(gate) * up
    DOWN = "down"  # rows of the down projection
    COLLECTIVE = "collective"  # library all-gather of the ranks' parts, between kernels only
    LANE_MEAN = "lane_mean"  # lanes only: publish this lane's final residual
    LM_HEAD = "lm_head"  # final norm; rows of the vocabulary
    SAMPLE = "sample"  # next token
    STREAM = "stream"  # probe: consume weights, no exchange
    EXCHANGE = "exchange"  # probe: publish and gather, no weights
    # reads summed, each block its own elements (of the residual where that is sliced); publishes
    # the sums
    REDUCE = "reduce"
    HYPER = "hyper"  # residuals += reads; how they mix, one partial sum per residual
    LATENT = "latent"  # norm; rows of compressed queries, keys and values
    QUERY = "query"  # norm; queries from the compressed ones
    ABSORB = "absorb"  # each head's query carried into the latent space
    INDEX = "index"  # scores of compressed entries
    # combine splits; first half of the output projection, head by head or group by group
    HEAD_OUT = "head_out"
    DELTA_IN = "delta_in"  # norm; rows of a linear attention's queries, keys, values and gates
    DELTA = "delta"  # convolve; read, update and write the recurrent state; gate
    ROUTER = "router"  # residual += reads; norm; one logit an expert
    ROUTE = "route"  # choose each token's experts: from here on their weights may be fetched
    SHARED_UP = "shared_up"  # silu(gate) * up of the shared experts
    # their rows of the down projection, kept for ROUTED_DOWN, or published next to its own
    SHARED_DOWN = "shared_down"
    ROUTED_UP = "routed_up"  # silu(gate) * up of the chosen experts
    # their weighted rows of the down projection, and those that were kept
    ROUTED_DOWN = "routed_down"
    # between DELTA_IN and DELTA: norm once more; rows of write strengths and decays, where these
    # are stored otherwise
    DELTA_GATES = "delta_gates"
    # norm; rows of b, c, x of a short convolution; c * conv(b * x), of channels whose history a
    # block carries on
    CONV_IN = "conv_in"
    # each block its own words of all items' partial outputs, one of them; to the rank of its heads
    MERGE = "merge"
    # behind LATENT: norm once more; rows of what makes entries and their keys, where these are
    # stored otherwise
    COMPRESS = "compress"


class Input(Enum):
    """The vectors that a block of the engine multiplies with matrices. A device's kernel holds one
    of each width.
    """

    HIDDEN = "hidden"  # the residual, or a probe's constant
    HEADS = "heads"  # the outputs of all heads
    OTHER = "other"  # the same of heads of a second shape
    STATES = "states"  # what recurrences and convolutions made, where heads make another number
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


class InPass(Enum):
    """Of a stage before the last layer's attention, what a prompt pass does with it."""

    RUN = "run"
    LEFT_OUT = "left out"
    NO_CODE = "no code"  # prompts are read by ordinary steps


@frozen(kw_only=True)
class Row:
    """What holds for every stage of a kind."""

    engine: bool = False  # the kernel has code for it; else it is simulated only
    # of its matrix in the kernel, whose weights may be prefetched; None: no such matrix
    input: Input | None = None
    vector: bool = False  # its blocks gather whole vectors
    # the scale by which the engine norms the residual that it reads: of its layer, or the model's
    norm: str = ""
    norm_in_parallel: str = ""  # the same where experts stand next to a dense MLP, if another
    # tensors of its layer whose rows a rank multiplies, those of two in turns; none where shards.py
    # has a rule of its own
    weights: tuple[str, ...] = ()
    columns: bool = False  # ranks divide the columns of these, not the rows
    summed: bool = False  # every rank makes a part of what it publishes
    bias: bool = False  # the engine adds a model's biases to its rows
    sinks: bool = False  # the engine adds learned logits to its softmax
    in_pass: InPass = InPass.RUN
    keeps: bool = False  # something of a token for those behind it: a cache, a state
    spent: Spent = Spent.CONSUMER


FINAL_NORM = "final_norm"

ROWS: dict[StageKind, Row] = {
    # in a pass the first norm embeds
    StageKind.EMBED: Row(engine=True, in_pass=InPass.LEFT_OUT, spent=Spent.OTHER),
    StageKind.QKV: Row(engine=True, input=Input.HIDDEN, vector=True, norm="attn_norm", bias=True),
    StageKind.ATTENTION: Row(engine=True, sinks=True, keeps=True, spent=Spent.ATTENTION),
    StageKind.O_PROJ: Row(
        engine=True,
        input=Input.HEADS,
        vector=True,
        summed=True,
        bias=True,
        weights=("o",),
        columns=True,
    ),
    StageKind.GATE_UP: Row(
        engine=True, input=Input.HIDDEN, vector=True, norm="ffn_norm", weights=("gate", "up")
    ),
    StageKind.DOWN: Row(
        engine=True, input=Input.FFN, vector=True, summed=True, weights=("down",), columns=True
    ),
    # in a pass parts are read where they lie
    StageKind.COLLECTIVE: Row(engine=True, in_pass=InPass.LEFT_OUT),
    StageKind.LANE_MEAN: Row(engine=True, vector=True, norm=FINAL_NORM),
    StageKind.LM_HEAD: Row(engine=True, input=Input.HIDDEN, vector=True, norm=FINAL_NORM),
    StageKind.SAMPLE: Row(engine=True, spent=Spent.SAMPLING),
    StageKind.STREAM: Row(engine=True, input=Input.HIDDEN),
    StageKind.EXCHANGE: Row(engine=True),
    StageKind.REDUCE: Row(engine=True, vector=True, in_pass=InPass.LEFT_OUT),
    StageKind.HYPER: Row(engine=True, vector=True, in_pass=InPass.NO_CODE),
    StageKind.LATENT: Row(
        engine=True, input=Input.HIDDEN, vector=True, norm="attn_norm", in_pass=InPass.NO_CODE
    ),
    StageKind.COMPRESS: Row(
        engine=True, input=Input.HIDDEN, norm="attn_norm", in_pass=InPass.NO_CODE
    ),
    StageKind.QUERY: Row(engine=True, vector=True, in_pass=InPass.NO_CODE),
    StageKind.ABSORB: Row(vector=True),
    StageKind.INDEX: Row(engine=True, keeps=True, in_pass=InPass.NO_CODE, spent=Spent.ATTENTION),
    StageKind.MERGE: Row(spent=Spent.ATTENTION),
    StageKind.HEAD_OUT: Row(engine=True, vector=True, weights=("o_a",), in_pass=InPass.NO_CODE),
    StageKind.DELTA_IN: Row(engine=True, input=Input.HIDDEN, vector=True, norm="attn_norm"),
    StageKind.DELTA_GATES: Row(engine=True, input=Input.HIDDEN, norm="attn_norm"),
    StageKind.DELTA: Row(engine=True, keeps=True, spent=Spent.ATTENTION),
    StageKind.CONV_IN: Row(
        engine=True, input=Input.HIDDEN, vector=True, norm="attn_norm", keeps=True
    ),
    StageKind.ROUTER: Row(
        engine=True,
        input=Input.HIDDEN,
        vector=True,
        norm="ffn_norm",
        norm_in_parallel="router_norm",
        bias=True,
    ),
    StageKind.ROUTE: Row(engine=True, spent=Spent.ROUTING),
    StageKind.SHARED_UP: Row(
        engine=True,
        input=Input.HIDDEN,
        norm="ffn_norm",
        weights=("shared_gate", "shared_up"),
    ),
    StageKind.SHARED_DOWN: Row(
        engine=True,
        input=Input.SHARED,
        vector=True,
        summed=True,
        weights=("shared_down",),
        columns=True,
    ),
    StageKind.ROUTED_UP: Row(
        engine=True,
        input=Input.HIDDEN,
        norm="ffn_norm",
        norm_in_parallel="experts_norm",
        bias=True,
    ),
    StageKind.ROUTED_DOWN: Row(engine=True, input=Input.FFN, vector=True, summed=True, bias=True),
}

# stages whose states the kernel carries on
CARRYING = (StageKind.DELTA, StageKind.CONV_IN)
ALWAYS = (Input.HIDDEN.value, Input.HEADS.value, Input.FFN.value)  # each kernel has their vectors


INPUTS = tuple(each.value for each in Input)


@cache
def input_of(
    kind: StageKind, *, routed: bool, heads: int = 0, states: bool = False
) -> Input | None:
    """What a stage's matrix multiplies. `routed`: of a plan with chosen experts; `heads`: which
    shape of them the stage has; `states`: it follows a recurrence, or a convolution, with another
    number of outputs than heads have.
    """
    if routed and kind is StageKind.DOWN:
        return Input.DENSE
    found = ROWS[kind].input
    if found is not Input.HEADS:
        return found
    return Input.STATES if states else Input.OTHER if heads else found


# What the engine runs of options that plans may have more of.
ENGINE_OPTIONS = {"batch": 1, "draft": 0, "expert_ranks": 1, "ahead_slots": 0}
