"""What recurrent states and the choice among many experts cost a GPU's blocks: chains of layers
with gated DeltaNet, and of layers with 128 to 512 experts.

Shapes of states differ in what a block has of them: elements that a thread holds, and items. Those
of experts are narrow, so that the choice is much of a layer. They are of no model that anybody runs
or that a seed draws; their steps are fitted, so they are never held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from twin.calibrate.drawn_kinds import expert_config
from twin.calibrate.gpu_layers import Question, chain_plan, chain_spec
from twin.models.feeds import ExpertFeed
from twin.models.layers import Layer
from twin.models.load import from_config
from twin.models.mixers import DeltaNet, GroupedAttention
from twin.models.spec import ModelSpec
from twin.plan.options import Limits

STATES, CHOICE = "states", "choice"  # groups, and how the names of their probes begin
RING = 7  # slots next to what the widest of them keeps in shared memory
EVERY = 4  # one of so many layers has attention
FEW = 4  # experts next to states, of which a token takes half
VOCAB = 4224


class Recurrent(NamedTuple):
    """Of a chain. Heads of attention have as many outputs in all as those of the states; the engine
    runs states next to experts.
    """

    layers: int
    hidden: int
    width: int  # of an expert
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    head_dim: int


class Choice(NamedTuple):
    """Of a chain of layers with experts."""

    layers: int
    hidden: int
    experts: int
    chosen: int
    width: int


# of 132 blocks most have one item, or all have; elements of a thread: 1, 16, 32; two items of 8
CHAINS = {
    "few": Recurrent(12, 1024, 1024, 4, 64, 8, 64, 64),
    "many": Recurrent(8, 2048, 1280, 16, 128, 64, 64, 128),
    "large": Recurrent(8, 1536, 1024, 8, 128, 40, 128, 128),
    "twice": Recurrent(8, 1792, 1536, 20, 64, 160, 32, 128),
}
MIXTURES = {
    "128": Choice(8, 1664, 128, 8, 128),
    "256": Choice(8, 1280, 256, 6, 128),
    "512": Choice(6, 1024, 512, 10, 128),
}


def mixers(limits: Limits) -> Iterator[Question]:
    """All of them."""
    for name, chain in CHAINS.items():
        spec = _recurrent(f"{STATES}-{name}", chain)
        yield spec.name, STATES, chain_plan(limits, spec, ring_slots=RING)
    for name, choice in MIXTURES.items():
        spec = _routed(f"{CHOICE}-{name}", choice)
        yield spec.name, CHOICE, chain_plan(limits, spec, ring_slots=RING)


def _recurrent(name: str, chain: Recurrent) -> ModelSpec:
    heads = chain.value_heads * chain.value_dim // chain.head_dim
    delta = DeltaNet(
        key_heads=chain.key_heads,
        key_dim=chain.key_dim,
        value_heads=chain.value_heads,
        value_dim=chain.value_dim,
        conv=4,
    )
    full = GroupedAttention(
        heads=heads, kv_heads=2, head_dim=chain.head_dim, qk_norm=True, output_gate=True
    )
    feed = ExpertFeed(experts=FEW, top_k=FEW // 2, width=chain.width)
    layers = tuple(
        Layer(full if (at + 1) % EVERY == 0 else delta, feed) for at in range(chain.layers)
    )
    spec = chain_spec(
        name,
        layers=chain.layers,
        hidden=chain.hidden,
        heads=heads,
        kv_heads=2,
        head_dim=chain.head_dim,
        ffn=chain.width,
    )
    return replace(spec, family="qwen3_next", qk_norm=True, layout=layers)


def _routed(name: str, choice: Choice) -> ModelSpec:
    config = expert_config(
        "qwen3_moe",
        layers=choice.layers,
        hidden=choice.hidden,
        heads=16,
        kv_heads=4,
        head_dim=64,
        vocab=VOCAB,
        experts=choice.experts,
        chosen=choice.chosen,
        width=choice.width,
    )
    return from_config(config, name)
