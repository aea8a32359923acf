"""Hugging Face's classes with our weights, and Laneformer in torch, against the NumPy reference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.hf_cases import CASES, FAMILIES, Table, plan, tokens, weights
from tests.engine.test_laneformer import PROMPT, SPEC, stored, table
from twin.bench import peers
from twin.bench.fidelity import kl_divergence
from twin.bench.lanes import LaneModel
from twin.bench.peers import Decoder
from twin.engine.weights import random_weights
from twin.errors import ConfigError, EngineError, ToolchainError
from twin.models.load import from_config
from twin.models.spec import DType, LaneHead, Lanes, ModelSpec
from twin.plan.options import Sampling
from twin.reference.step import Reference

TOLERANCE = 2e-5  # as hf_cases

pytestmark = pytest.mark.hf


@pytest.fixture(autouse=True)
def torch(request: pytest.FixtureRequest) -> Any:
    """Loaded when a test runs: collecting the tests takes each process of them half as long."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    torch.set_num_threads(1)  # the models are tiny
    return torch


def numpy_logits(
    spec: ModelSpec, table: Table, prompt: list[int], gpus: int = 1, blocks: int = 1
) -> Any:
    reference = Reference(plan(spec, gpus, blocks, 1, 16, Sampling.GREEDY), table, kv_dtype=None)
    return np.array([reference.step(token) for token in prompt])


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_the_same_weights_give_the_same_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "AT_ONCE", 7)  # several passes over the cache
    table, prompt = weights(CASES[name]), tokens(CASES[name])
    expected = numpy_logits(table.spec, table, prompt)
    model = peers.make_model(table.spec, table, DType.FP32, device="cpu", attention="eager")
    assert np.abs(peers.reference_logits(model, prompt, 12) - expected[-12:]).max() < TOLERANCE
    decoder = Decoder(model, len(prompt))
    for _ in range(2):  # the cache forgets the sequence before
        assert (
            np.abs(decoder.follow(prompt[:8], prompt[8:], captured=False) - expected[7:]).max()
            < TOLERANCE
        )


DENSE = [name for name, config in FAMILIES.items() if not from_config(config, name).layout]
ROUTED = [name for name, config in FAMILIES.items() if from_config(config, name).experts]


@pytest.mark.parametrize("name", ROUTED)
def test_models_with_experts_are_not_compared(name: str) -> None:
    spec = from_config(FAMILIES[name], name)
    with pytest.raises(EngineError, match="--no-peers"):
        peers.make_model(spec, None, DType.FP32, device="cpu")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", DENSE)
def test_families_take_their_class_from_the_folder_and_their_weights_as_they_are_stored(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[name]))
    table, prompt = weights(FAMILIES[name]), tokens(FAMILIES[name])
    model = peers.make_model(
        table.spec, table, DType.FP32, device="cpu", attention="eager", folder=tmp_path
    )
    assert (
        np.abs(
            peers.reference_logits(model, prompt, 12)
            - numpy_logits(table.spec, table, prompt)[-12:]
        ).max()
        < TOLERANCE
    )
    with pytest.raises(
        ConfigError, match=f"a {table.spec.family} configuration cannot be written; allowed: llama"
    ):
        peers.make_model(table.spec, table, DType.FP32, device="cpu")


def test_what_is_timed_is_greedy_decoding() -> None:
    table, prompt = weights(CASES["llama"]), tokens(CASES["llama"])[:6]
    decoder = Decoder(peers.make_model(table.spec, table, DType.FP32, device="cpu"), 40)
    steps = decoder.run(prompt, 9, captured=False)
    reference = Reference(plan(table.spec, 1, 1, 1, 16, Sampling.GREEDY), table, kv_dtype=None)
    # the prompt's own step gives the first
    assert [*steps.tokens] == reference.generate(prompt, 10)[1:]
    assert len(steps.ns) == 9
    assert steps.ns.min() > 0
    with pytest.raises(EngineError, match="positions exceed the static cache"):
        decoder.run(prompt, 90, captured=False)


def test_bf16_weights_arrive_bit_by_bit(torch: Any) -> None:
    spec = replace(weights(CASES["qwen3"]).spec, dtype=DType.BF16)
    held = random_weights(spec, 3)
    model = peers.make_model(spec, held, DType.BF16, device="cpu")
    found = model.model.layers[1].mlp.up_proj.weight
    assert found.dtype == torch.bfloat16
    assert (found.view(torch.int16).numpy() == held["layers.1.up"].view(np.int16)).all()
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_class_that_does_not_fit_is_refused() -> None:
    table = weights(CASES["llama"])
    other = Table(replace(table.spec, qk_norm=True), table | {})
    with pytest.raises(
        EngineError, match=r"LlamaForCausalLM has no model\.layers\.0\.self_attn\.q_norm"
    ):
        peers.make_model(other.spec, other, DType.FP32, device="cpu")


@pytest.mark.few(3)
@pytest.mark.parametrize("delay", [0, 1, 4])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("head", list(LaneHead))
def test_lanes_follow_the_definition(head: LaneHead, early: bool, delay: int) -> None:
    spec = replace(SPEC, lanes=Lanes(8, delay, head, early))
    held = table(spec, {name: array.astype(np.float32) for name, array in stored(spec).items()})
    expected = numpy_logits(spec, held, PROMPT, 2, 8)
    found = LaneModel(spec, held, DType.FP32, device="cpu", delay=delay).logits(PROMPT, len(PROMPT))
    assert np.abs(found - expected).max() < TOLERANCE
    half = LaneModel(spec, held, DType.BF16, device="cpu", delay=delay).logits(PROMPT, 3)
    assert 0 < kl_divergence(expected[-3:], half).max() < 1e-2


def test_a_model_without_lanes_is_refused() -> None:
    table = weights(CASES["llama"])
    with pytest.raises(EngineError, match="is no Laneformer"):
        LaneModel(table.spec, table, DType.FP32, device="cpu", delay=0)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(peers, "import_module", missing)
    with pytest.raises(ToolchainError, match=r"pip install torch transformers, or .* --no-peers"):
        peers.torch_module()


def test_nothing_is_captured_without_a_gpu() -> None:
    table = weights(CASES["llama"])
    decoder = Decoder(peers.make_model(table.spec, table, DType.FP32, device="cpu"), 40)
    with pytest.raises(EngineError, match="on an NVIDIA GPU only"):
        decoder.capture([1, 2, 3])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_captured_step_is_the_eager_one(name: str) -> None:
    table, prompt = weights(CASES[name]), tokens(CASES[name])
    decoder = Decoder(peers.make_model(table.spec, table, DType.FP32, device="cuda"), 60)
    decoder.capture(prompt[:5])
    assert (
        decoder.run(prompt[:6], 20, captured=True).tokens
        == decoder.run(prompt[:6], 20, captured=False).tokens
    )
    eager, captured = (
        decoder.follow(prompt[:8], prompt[8:], captured=way) for way in (False, True)
    )
    assert np.abs(eager - captured).max() < TOLERANCE


@pytest.mark.gpu
def test_a_sliding_window_cannot_be_captured() -> None:
    table = weights(CASES["mistral"])
    with pytest.raises(EngineError, match="cannot be captured"):
        Decoder(peers.make_model(table.spec, table, DType.FP32, device="cuda"), 60).capture(
            [1, 2, 3]
        )
