"""The kernel's full sampler on logits of the test's choice: the same tokens as the definition, and
the probabilities that it says.

The model's layers add nothing, so its logits are a column of the head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.draws import TIMES
from tests.engine.small_engine import LLAMA, planned
from twin.engine.host import HostEngine
from twin.engine.sampling import SamplingParams, sample
from twin.models.decoder import canonical_shape
from twin.models.spec import DType, ModelSpec
from twin.plan.options import HandOffKind, Sampling

CHANCE = np.random.default_rng(11)
COUNT = 2003  # no multiple of the blocks, nor of a load
DRAWS = 250 * min(TIMES, 8)  # tokens of each seed


@dataclass(frozen=True)
class Chosen:
    """Weights with which every position has these logits."""

    spec: ModelSpec
    logits: NDArray[np.float32]
    dtype: DType = DType.FP32

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        made = np.zeros(canonical_shape(self.spec, name), np.float32)
        leaf = name.rpartition(".")[2]
        if leaf.endswith("norm") or leaf == "embed":
            made[:] = 1
        if "head" in leaf:
            made[:, 0] = self.logits
        return made


def drawing(
    logits: NDArray[np.float32], *, sanitize: str | None = None, **chosen: Any
) -> HostEngine:
    spec = replace(LLAMA, vocab=len(logits), layers=1, windows=(0,), context=2048, norm_eps=1e-30)
    plan = planned(spec, **({"sampling": Sampling.FULL, "max_context": 2048} | chosen))
    return HostEngine(plan, Chosen(spec, logits), sanitize=sanitize)


def flat(scale: float) -> NDArray[np.float32]:
    return (CHANCE.standard_normal(COUNT) * scale).astype(np.float32)


def steep() -> NDArray[np.float32]:
    return (-3 * np.log1p(CHANCE.permutation(COUNT))).astype(np.float32)


def tied(values: int) -> NDArray[np.float32]:
    return CHANCE.integers(0, values, COUNT).astype(np.float32)


def some_impossible() -> NDArray[np.float32]:
    logits = flat(2)
    logits[CHANCE.random(COUNT) < 0.9] = -np.inf
    return logits


KINDS = {
    "flat": flat(1),
    "nearly the same": flat(0.01),
    "very different": flat(30),
    "steep": steep(),
    "all the same": np.zeros(COUNT, np.float32),
    "of both zeros": np.where(CHANCE.random(COUNT) < 0.5, np.float32(-0.0), np.float32(0)),
    "few values": tied(3),
    "some values": tied(40),
    "some impossible": some_impossible(),
    "one possible": np.where(np.arange(COUNT) == 1234, np.float32(-7), np.float32(-np.inf)),
}
WANTED = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(temperature=1.0, top_p=0.999, seed=3),
    SamplingParams(temperature=1.0, top_p=1e-9, seed=4),
    SamplingParams(temperature=0.8, top_k=1, seed=5),
    SamplingParams(temperature=0.8, top_k=50, seed=6),
    SamplingParams(temperature=1.3, top_k=700, seed=7),
    SamplingParams(temperature=1.0, top_k=COUNT - 1, seed=8),
    SamplingParams(temperature=1.0, top_k=300, top_p=0.6, seed=9),
    SamplingParams(temperature=1e-3, top_k=300, top_p=0.99, seed=10),
    SamplingParams(temperature=40.0, top_k=300, top_p=0.5, seed=11),
    SamplingParams(temperature=1e-30, top_p=0.5, seed=12),
    SamplingParams(temperature=1e30, top_k=1500, top_p=0.5, seed=13),
    SamplingParams(temperature=1.0, min_p=0.05, seed=14),
    SamplingParams(temperature=0.7, min_p=1.0, seed=15),
    SamplingParams(temperature=1.0, min_p=1e-9, top_k=300, seed=16),
    SamplingParams(temperature=1.0, min_p=0.2, top_k=300, seed=17),
    SamplingParams(temperature=1.0, min_p=0.01, top_p=0.7, seed=18),
    SamplingParams(temperature=1.0, min_p=0.3, top_p=0.999, seed=19),
    SamplingParams(temperature=1.5, min_p=0.02, top_k=100, top_p=0.9, seed=20),
    SamplingParams(temperature=1e30, min_p=1e-300, top_p=0.5, seed=21),
    SamplingParams(temperature=1e-30, min_p=0.5, top_k=3, seed=22),
    SamplingParams(),
]
TOKENS, FEW_TOKENS = 150, 10


# Many threads wait for each other on few cores: most divisions are slow tests.
SOON = {"blocks": 3}
SLOW = ({"blocks": 4, "gpus": 2}, {"blocks": 40})


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "chosen", "tokens"),
    [
        *((kind, SOON, FEW_TOKENS) for kind in KINDS),
        *(("some values", chosen, FEW_TOKENS) for chosen in SLOW),
        *(
            pytest.param(kind, chosen, TOKENS, marks=pytest.mark.slow)
            for kind in KINDS
            for chosen in (SOON, *SLOW)
        ),
    ],
    ids=str,
)
def test_tokens_are_those_of_the_definition(kind: str, chosen: dict[str, Any], tokens: int) -> None:
    running = drawing(KINDS[kind], **chosen)
    with running:
        logits = running.logits([1])[0]
        for params in WANTED:
            made = running.generate([1], max_tokens=tokens, sampling=params).tokens
            wanted = [sample(logits, params, step) for step in range(tokens)]
            # a draw that falls on a border between two tokens may go to either
            assert sum(a != b for a, b in zip(made, wanted, strict=True)) <= 1, params


@pytest.mark.few(1)
@pytest.mark.parametrize("handoff", list(HandOffKind))
def test_the_protocol_changes_no_token(handoff: HandOffKind) -> None:
    params = SamplingParams(temperature=0.9, top_k=400, top_p=0.8, seed=5)
    running = drawing(KINDS["flat"], blocks=3, handoff=handoff)
    with running:
        made = running.generate([1], max_tokens=TOKENS, sampling=params).tokens
        logits = running.logits([1])[0]
    assert made == [sample(logits, params, step) for step in range(TOKENS)]


def test_drawn_tokens_have_the_probabilities_of_the_definition() -> None:
    """Chi-squared over the tokens that top-k and top-p leave."""
    params = SamplingParams(temperature=1.1, top_k=40, top_p=0.9)
    logits = flat(2)
    running = drawing(logits, blocks=2)
    with running:
        drawn = np.concatenate(
            [
                running.generate([1], max_tokens=DRAWS, sampling=replace(params, seed=seed)).tokens
                for seed in range(4)
            ]
        )
    order = np.argsort(-logits, kind="stable")[:40]
    weights = np.exp(logits[order].astype(np.float64) / 1.1)
    weights /= weights.sum()
    kept = order[: int(np.searchsorted(np.cumsum(weights), 0.9)) + 1]
    expected = weights[: len(kept)] / weights[: len(kept)].sum() * len(drawn)
    counts = np.array([(drawn == token).sum() for token in kept])
    assert counts.sum() == len(drawn)
    freedom = len(kept) - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)
