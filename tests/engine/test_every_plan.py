"""Models of every kind of layer on the CPU engine: the reference's numbers from every plan, and
nothing of one request in the next.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from tests.engine import test_gpt_oss
from tests.engine.plans import plans
from tests.engine.small_engine import TOKENS, engine, error, expected, planned
from tests.engine.test_convolution import convolved
from tests.engine.test_experts import SHARED, routed
from tests.engine.test_mamba import mixed
from tests.engine.test_prompt_chunks import CHUNK
from tests.engine.test_recurrent import recurrent
from twin.models.spec import ModelSpec
from twin.proof.prove import prove


class Model(NamedTuple):
    spec: ModelSpec
    many: int  # blocks of which some have nothing to do
    on_four: int  # blocks of each of four GPUs


MODELS = {
    "recurrent": Model(recurrent(), 35, 9),  # four items a head, and blocks without one
    "convolved": Model(convolved(), 64, 5),  # one channel each
    "mamba": Model(mixed(), 35, 5),  # two items a head, and blocks without one
    # more blocks than experts; of four GPUs the last one scores none
    "experts": Model(routed(), 11, 1),
    "shared experts": Model(routed(SHARED), 11, 1),
    # windows that hold nothing of the split with the sinks; one rank adds the biases of sums
    "gpt-oss": Model(test_gpt_oss.model(), 11, 1),
}
IN_GATE = {
    ("recurrent", "four GPUs"),
    ("mamba", "splits"),
    ("shared experts", "splits"),
}
CASES = [
    (name, plan) if (name, plan) in IN_GATE else pytest.param(name, plan, marks=pytest.mark.slow)
    for name in MODELS
    for plan in plans(many=1, on_four=1)
]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_logits_do_not_depend_on_the_plan(name: str, plan: str) -> None:
    model = MODELS[name]
    made = planned(model.spec, **plans(many=model.many, on_four=model.on_four)[plan])
    prove(made)
    assert made.simulation_only() is None
    assert error(made) < 1e-5


@pytest.mark.parametrize("name", ["recurrent", "convolved", "mamba"])
def test_a_request_begins_with_nothing_of_the_one_before(name: str) -> None:
    plan = planned(MODELS[name].spec, blocks=5, prompt_chunk=CHUNK)
    wanted = expected(plan, TOKENS)
    with engine(plan) as running:
        first = running.logits(TOKENS)
        running.logits(TOKENS[::-1])
        np.testing.assert_array_equal(running.logits(TOKENS), first)
        tokens = [running.generate(TOKENS[:5], max_tokens=8).tokens for _ in range(2)]
    assert np.abs(first - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert tokens[0] == tokens[1]
