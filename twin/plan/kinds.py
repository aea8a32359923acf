"""The kinds of stages that a step is made of."""

from __future__ import annotations

from enum import Enum


class StageKind(Enum):
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
    SHARED_DOWN = "shared_down"  # their rows of the down projection, kept for ROUTED_DOWN
    ROUTED_UP = "routed_up"  # silu(gate) * up of the chosen experts
    # their weighted rows of the down projection, and those that were kept
    ROUTED_DOWN = "routed_down"
    # between DELTA_IN and DELTA: norm once more; rows of write strengths and decays, where these
    # are stored otherwise
    DELTA_GATES = "delta_gates"
    # norm; rows of b, c, x of a short convolution; c * conv(b * x), of channels whose history a
    # block carries on
    CONV_IN = "conv_in"
