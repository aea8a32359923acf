"""EAGLE-3 on this computer: a head drafts inside the kernel, and changes no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.families import TOGETHER
from tests.engine.small_engine import LLAMA, QWEN3, TOKENS, planned
from tests.engine.test_routed_prompts import FAMILIES
from twin.engine.draft_head import PREFIX
from twin.engine.generation import Drafting
from twin.engine.host import HostEngine
from twin.engine.sampling import SamplingParams
from twin.engine.weights import random_weights
from twin.errors import PlanError
from twin.kernel.prompt import ROUND_FIRST
from twin.kernel.tables import layout
from twin.models.eagle3 import published
from twin.models.spec import DType, ModelSpec
from twin.plan.shards import Weights
from twin.plan.types import Plan, Sampling
from twin.reference.eagle3 import Watched, drafts

MOST, SEED = 5, 1


def headed(spec: ModelSpec = LLAMA, **chosen: Any) -> ModelSpec:
    deep = replace(spec, layers=7, windows=(0, 5, 0, 0, 0, 0, 0)) if not spec.layout else spec
    return replace(deep, draft_head=replace(published(deep), **({"vocab": 60} | chosen)))


def drafting(spec: ModelSpec, **chosen: Any) -> Plan:
    return planned(spec, **({"prompt_chunk": 16, "lookup": MOST} | chosen))


class Repeating:
    """Weights of a model whose layers add nothing, so that a token follows itself, and of a head
    that finds the same.
    """

    def __init__(self, made: Weights) -> None:
        self._made, self.spec, self.dtype = made, made.spec, made.dtype

    def __getitem__(self, name: str) -> Any:
        found, leaf = self._made[name], name.rpartition(".")[2]
        if name == f"{PREFIX}fc":  # the last of the three states
            hidden = self.spec.hidden
            return np.hstack([np.zeros((hidden, 2 * hidden)), np.eye(hidden)]).astype(found.dtype)
        if name == f"{PREFIX}lm_head":
            return self._made["embed"][self._made[f"{PREFIX}ids"]]
        return found * 0 if leaf in ("o", "down") else found


def last_drafts(running: HostEngine, plan: Plan) -> list[int]:
    words = running._memory.prompts[0].view(np.int32)
    first = int(layout(plan).sizes["round_round"]) + ROUND_FIRST + 1
    return [int(token) for token in words[first : first + MOST]]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        (LLAMA, {}),
        (LLAMA, {"blocks": 3}),
        (QWEN3, {}),
        (TOGETHER, {}),
        (LLAMA, {"prompt_chunk": 32}),
    ],
    ids=str,
)
def test_a_head_drafts_what_its_paper_says(spec: ModelSpec, chosen: dict[str, Any]) -> None:
    """Rounds of which one token counts each. The last that has room for i drafts leaves its i-th
    one in memory.
    """
    plan, made = drafting(headed(spec), **chosen), 9
    assert plan.spec is not None
    weights = random_weights(plan.spec, SEED, plan.options.weight_dtype)
    with HostEngine(plan, weights) as running:
        found = running.generate(TOKENS, max_tokens=made, drafting=Drafting(accepted=1.0))
        drafted = last_drafts(running, plan)
    alike = Watched(plan, weights)
    assert alike.generate(TOKENS, max_tokens=made) == found.tokens
    whole = [*TOKENS, *found.tokens]
    for i, token in enumerate(drafted, 1):
        known = whole[: len(whole) - 1 - i]
        assert drafts(weights, alike.states[: len(known) - 1], known, i)[-1] == token


@pytest.mark.few(2)
@pytest.mark.parametrize("spec", [LLAMA, QWEN3, FAMILIES["gpt_oss"]], ids=lambda s: s.name)
def test_drafts_of_a_head_change_no_token(spec: ModelSpec) -> None:
    plan = drafting(headed(spec))
    assert plan.spec is not None
    with HostEngine(plan, random_weights(plan.spec, SEED, plan.options.weight_dtype)) as running:
        plain = running.generate(TOKENS, max_tokens=30, drafting=Drafting(0)).tokens
        for most in (1, MOST):
            made = running.generate(TOKENS, max_tokens=30, drafting=Drafting(most))
            assert made.tokens == plain
        rejected = running.generate(TOKENS, max_tokens=30, drafting=Drafting(accepted=1.0))
        assert rejected.tokens == plain
        assert len(rejected.round_ns) == 30


@pytest.mark.few(2)
@pytest.mark.parametrize("chosen", [{}, {"blocks": 3}, {"sampling": Sampling.FULL}], ids=str)
def test_good_drafts_are_accepted(chosen: dict[str, Any]) -> None:
    spec = replace(headed(replace(LLAMA, tied=True)), qkv_bias=False)
    plan = drafting(spec, **chosen)
    weights = Repeating(random_weights(spec, SEED, plan.options.weight_dtype))
    start = int(weights[f"{PREFIX}ids"][7])
    with HostEngine(plan, weights) as running:
        made = running.generate([3, start], max_tokens=40)
        assert made.tokens == [start] * 40
        assert made.tokens_per_round > 4
        stopped = running.generate([3, start], max_tokens=40, stop={start})
        assert stopped.tokens == [start]
        if plan.options.draws:
            drawn = running.generate(
                [3, start], max_tokens=40, sampling=SamplingParams(0.7, seed=5)
            )
            alone = running.generate(
                [3, start],
                max_tokens=40,
                sampling=SamplingParams(0.7, seed=5),
                drafting=Drafting(0),
            )
            assert drawn.tokens == alone.tokens


def test_what_no_head_drafts_for_is_refused() -> None:
    with pytest.raises(PlanError, match="a head drafts on one GPU"):
        drafting(headed(), gpus=2)


def test_weights_of_16_bits_have_heads_too() -> None:
    plan = drafting(headed(), weight_dtype=DType.BF16, kv_dtype=DType.BF16)
    assert plan.spec is not None
    with HostEngine(plan, random_weights(plan.spec, SEED, DType.BF16)) as running:
        one = running.generate(TOKENS, max_tokens=30)
        assert one.tokens == running.generate(TOKENS, max_tokens=30).tokens
