"""A mixture of experts with NumPy: which of them a token uses, and what these make."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.models.experts import CHOSEN
from twin.models.feeds import ExpertFeed, Scoring
from twin.models.variant import Activation
from twin.plan import matrices
from twin.plan.biases import stage_bias
from twin.plan.shards import Array, Weights
from twin.plan.types import Plan, Stage
from twin.reference.activations import ACTIVATIONS, silu

KEPT = 64  # experts' matrices: a sequence comes back to some of them


@dataclass(frozen=True, slots=True)
class Choice:
    """Of one token, in the order of the scores."""

    experts: tuple[int, ...]
    weights: Array  # [top_k]


Choices = tuple[Choice, ...]  # of each block, or of all where they agree


class Experts:
    """The experts of a plan's layers; `dtype` is the type of all arithmetic."""

    def __init__(self, plan: Plan, weights: Weights, dtype: type[np.floating[Any]]) -> None:
        self.plan, self.weights, self.dtype = plan, weights, dtype
        self.always = max((s.routed.always for s in plan.stages if s.routed), default=0)
        self._matrices: OrderedDict[tuple[int, int, int], Array] = OrderedDict()
        self._biases: dict[tuple[int, int], Array | None] = {}

    def choose(self, stage: Stage, logits: Array, token: int) -> Choices:
        """From [n, parts, elements]: ranks that divide a router publish their experts' logits in
        rank order. Shared experts that every token visits come behind the router's. `token`: where
        a table chooses, by it.
        """
        assert self.plan.spec is not None
        kind = self.plan.spec.layer(stage.layer).feed
        assert isinstance(kind, ExpertFeed)
        bias = None
        if kind.choice_bias:
            bias = self.weights[f"layers.{stage.layer}.choice_bias"].astype(self.dtype)
        table = self.weights[f"layers.{stage.layer}.{CHOSEN}"] if kind.hashed else None
        routers = [seen.reshape(-1)[: kind.experts] for seen in logits]
        made = [
            self._choice(kind, stage, seen, bias)
            if table is None
            else weighed(kind, seen, table[token])
            for seen in routers
        ]
        if kind.parallel:
            scales = self.weights[f"layers.{stage.layer}.expert_scales"].astype(self.dtype)
            made = [Choice(one.experts, one.weights * scales[list(one.experts)]) for one in made]
        if not self.always:
            return tuple(made)
        shared = tuple(range(kind.experts, kind.experts + self.always))
        return tuple(
            Choice((*one.experts, *shared), np.append(one.weights, gate.repeat(self.always)))
            for one, gate in zip(made, self.shared_gates(logits), strict=True)
        )

    def _choice(self, kind: ExpertFeed, stage: Stage, logits: Array, bias: Array | None) -> Choice:
        """Of a layer, from [experts] logits."""
        return chosen(kind, logits, bias)

    def shared_gates(self, logits: Array) -> Array:
        """[n, 1] the sigmoid of the logit behind those of the experts; ones where nothing gates
        shared experts.
        """
        assert self.plan.spec is not None
        kind = self.plan.spec.experts
        if kind is None or not kind.shared_gate:
            return np.ones((len(logits), 1), self.dtype)
        last = np.stack([seen.reshape(-1)[kind.experts : kind.experts + 1] for seen in logits])
        gates: Array = 1 / (1 + np.exp(-last))
        return gates

    def up(self, stage: Stage, rank: int, x: Array, choices: Choices) -> Array:
        """[n, top_k * width]: what the chosen experts make of x ([n, hidden]), one behind the
        other.
        """
        count = max(len(x), len(choices))
        made = [
            self._up(stage, rank, x[i % len(x)], choices[i % len(choices)]) for i in range(count)
        ]
        return np.stack(made)

    def _up(self, stage: Stage, rank: int, x: Array, choice: Choice) -> Array:
        bias, spec = self._bias(stage, rank), self.plan.spec
        assert spec is not None
        assert spec.experts is not None
        rows = [self._matrix(stage, rank, expert) @ x for expert in choice.experts]
        if bias is not None:
            rows = [made + bias[e] for made, e in zip(rows, choice.experts, strict=True)]
        kind, activation = spec.experts, spec.variant.activation
        if not kind.gated:
            return np.concatenate([ACTIVATIONS[activation](made) for made in rows])
        return np.concatenate([gated(kind, activation, made[0::2], made[1::2]) for made in rows])

    def down(self, stage: Stage, rank: int, act: Array, choices: Choices) -> Array:
        """[n, hidden]: their rows of the down projection, weighed and added in the order of the
        choice.
        """
        count = max(len(act), len(choices))
        made = [
            self._down(stage, rank, act[i % len(act)], choices[i % len(choices)])
            for i in range(count)
        ]
        return np.stack(made)

    def _down(self, stage: Stage, rank: int, act: Array, choice: Choice) -> Array:
        inputs = act.reshape(len(choice.experts), -1)
        parts = [
            self._matrix(stage, rank, expert) @ (x * weight)
            for expert, weight, x in zip(choice.experts, choice.weights, inputs, strict=True)
        ]
        bias = self._bias(stage, rank)
        if bias is not None:
            parts.append(choice.weights @ bias[list(choice.experts)])
        out: Array = np.sum(parts, axis=0)
        return out

    def _bias(self, stage: Stage, rank: int) -> Array | None:
        """[experts, rows]"""
        key = (stage.index, rank)
        if key not in self._biases:
            made = stage_bias(self.plan, stage, rank, self.weights)
            self._biases[key] = None if made is None else made.astype(self.dtype)
        return self._biases[key]

    def _matrix(self, stage: Stage, rank: int, expert: int) -> Array:
        key = (stage.index, rank, expert)
        if key not in self._matrices:
            made = matrices.expert_matrix(self.plan, stage, rank, self.weights, expert)
            self._matrices[key] = made.astype(self.dtype)
            if len(self._matrices) > KEPT:
                self._matrices.popitem(last=False)
        return self._matrices[key]


def chosen(kind: ExpertFeed, logits: Array, bias: Array | None = None) -> Choice:
    """The top_k best of [experts] logits; of equal ones the lower number. A NaN comes first, and
    all weigh NaN. `bias`: the best by their scores and this, where the model says so.
    """
    by = chosen_by(kind, logits, bias)
    order = np.argsort(-np.where(np.isnan(by), np.inf, by), kind="stable")[: kind.top_k]
    return weighed(kind, logits, order)


def chosen_by(kind: ExpertFeed, logits: Array, bias: Array | None = None) -> Array:
    """[experts] whose largest are chosen."""
    return logits if bias is None else _scores(kind, logits) + bias


def weighed(kind: ExpertFeed, logits: Array, order: Array) -> Choice:
    """The experts `order` with their weights."""
    weights = _scores(kind, logits)[order]
    if kind.renormalise:
        weights = weights / weights.sum()
    scaled: Array = (weights * kind.scaling).astype(logits.dtype)
    return Choice(tuple(int(expert) for expert in order), scaled)


def _scores(kind: ExpertFeed, logits: Array) -> Array:
    """[experts]"""
    if kind.scoring is Scoring.SIGMOID:
        sigmoids: Array = 1 / (1 + np.exp(-logits))
        return sigmoids
    if kind.scoring is Scoring.SQRT_SOFTPLUS:
        roots: Array = np.sqrt(np.logaddexp(logits, 0))
        return roots
    scores = np.exp(logits - logits.max())
    shares: Array = scores / scores.sum()
    return shares


def gated(kind: ExpertFeed, activation: Activation, gate: Array, up: Array) -> Array:
    """What passes the gates of an expert; only SiLU's have a gain."""
    if kind.limit is not None:
        gate, up = np.minimum(gate, kind.limit), np.clip(up, -kind.limit, kind.limit)
    silus = activation is Activation.SILU
    opened = silu(gate, kind.gain) if silus else ACTIVATIONS[activation](gate)
    out: Array = opened * (up + kind.offset)
    return out.astype(gate.dtype, copy=False)
