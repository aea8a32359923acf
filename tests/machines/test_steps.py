"""The chain of dependent steps of a token."""

from __future__ import annotations

import pytest

from twin.machines.steps import ENDS, dependent_steps
from twin.models.load import load_model


@pytest.mark.parametrize(
    ("model", "per_layer"),
    [
        ("llama-3.1-8b", 3 + 2),
        ("mixtral-8x7b", 3 + 3),
        ("gpt-oss-120b", 3 + 3),
        ("qwen3-coder-next", 3 + 3),
    ],
)
def test_equal_layers_have_equal_steps(model: str, per_layer: int) -> None:
    spec = load_model(model)
    assert dependent_steps(spec) == spec.layers * per_layer + ENDS


def test_latent_attention_goes_through_the_latent_space_and_back() -> None:
    spec = load_model("deepseek-v3")
    assert dependent_steps(spec) == 3 * (6 + 2) + 58 * (6 + 3) + ENDS


def test_an_indexer_and_hyper_connections_add_steps() -> None:
    spec = load_model("deepseek-v4-flash")
    sparse = sum(1 for i in range(spec.layers) if getattr(spec.layer(i).mixer, "top_k", 0))
    assert sparse == 21
    assert dependent_steps(spec) == spec.layers * (5 + 3 + 2) + sparse + ENDS + 1
