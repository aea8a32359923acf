"""The rows of this study, and their plans: which the twin predicts and which a GPU runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from twin.hardware.types import Node
from twin.kernel.defaults import plan_for
from twin.kernel.room import check_room
from twin.models.feeds import ExpertFeed
from twin.models.load import load_model
from twin.models.spec import ModelSpec
from twin.plan.types import Plan
from twin.proof.prove import prove

NODES = ("1xh200-sxm", "1xh100-sxm")
PROMPTS = (32, 4096)  # tokens before those that are timed
TOKENS, WARM_UP = 128, 8  # decoded; the first of them are not timed
# of the small model with the same layers whose logits are compared with a NumPy reference
CHECKED_LAYERS, CHECKED_VOCAB, CHECKED_EXPERTS, CHECKED_CONTEXT = 2, 8192, 8, 64


@dataclass(frozen=True, slots=True)
class Row:
    """A model in a stored format; `goal` in tokens/s of 128 tokens after 32, by node."""

    name: str
    model: str
    goal: dict[str, int]


ROWS = (
    Row("gpt-oss-20b MXFP4", "gpt-oss-20b", {"1xh200-sxm": 950, "1xh100-sxm": 720}),
    Row("gpt-oss-120b MXFP4", "gpt-oss-120b", {"1xh200-sxm": 750}),
    Row("qwen3-30b-a3b BF16", "qwen3-30b-a3b", {"1xh200-sxm": 560}),
    Row("qwen3-30b-a3b FP8", "qwen3-30b-a3b@fp8-128x128", {"1xh200-sxm": 850}),
    Row("qwen3-8b FP8", "qwen3-8b@fp8-128x128", {"1xh200-sxm": 540}),
    Row("qwen3-8b INT4", "qwen3-8b@int4-g128", {"1xh200-sxm": 850}),
    Row("llama-3.2-1b INT8", "llama-3.2-1b@int8", {"1xh200-sxm": 2400}),
    Row("llama-3.2-1b FP8", "llama-3.2-1b@fp8", {"1xh200-sxm": 2400}),
)


def cells() -> list[tuple[str, str, int]]:
    """(row, node, prompt)."""
    return [(row.name, node, prompt) for row in ROWS for node in NODES for prompt in PROMPTS]


def spec_of(name: str) -> ModelSpec:
    return load_model(next(row.model for row in ROWS if row.name == name))


def timed_plan(spec: ModelSpec, node: Node, prompt: int) -> Plan:
    """Default options, at the middle one of the timed positions, proven. Raises PlanError where the
    node has no room.
    """
    asked = {"context": prompt + TOKENS // 2, "max_context": prompt + TOKENS + WARM_UP}
    plan = plan_for(spec, node, **asked)
    check_room(plan, node)
    prove(plan)
    return plan


def checked_plan(spec: ModelSpec, node: Node) -> Plan:
    """The same kinds of layers, two of them with a few experts each."""
    plan = plan_for(cut(spec), node, context=CHECKED_CONTEXT // 2, max_context=CHECKED_CONTEXT)
    prove(plan)
    return plan


def cut(spec: ModelSpec) -> ModelSpec:
    layers = min(CHECKED_LAYERS, spec.layers)

    def fewer(feed: object) -> object:
        if not isinstance(feed, ExpertFeed):
            return feed
        return replace(feed, experts=min(feed.experts, max(CHECKED_EXPERTS, feed.top_k)))

    layout = tuple(replace(layer, feed=fewer(layer.feed)) for layer in spec.layout[:layers])
    return replace(
        spec,
        layers=layers,
        windows=spec.windows[:layers],
        layout=layout,
        vocab=min(CHECKED_VOCAB, spec.vocab),
    )
