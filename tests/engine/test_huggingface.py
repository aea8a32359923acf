"""The reference against Hugging Face transformers: live where it is installed, and always against
recorded logits.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.hf_cases import (
    ALL,
    CASES,
    FAMILIES,
    TOLERANCE,
    Table,
    as_stored,
    plan,
    plans,
    tokens,
    weights,
)
from twin.engine import safetensors
from twin.engine.host import HostEngine
from twin.engine.weights import open_checkpoint
from twin.models.load import from_config
from twin.models.spec import DType, ModelSpec
from twin.plan.options import Sampling
from twin.plan.shards import Array, Weights
from twin.proof.prove import prove
from twin.reference.step import Reference

GOLDENS = Path(__file__).parent.parent / "data" / "hf"


def computed(
    spec: ModelSpec,
    weights: Weights,
    prompt: list[int],
    options: tuple[int, int, int, int, Sampling],
) -> Array:
    reference = Reference(plan(spec, *options), weights, kv_dtype=None)
    return np.array([reference.step(token) for token in prompt])


def hf_model(config: dict[str, Any], table: Table, save: Path | None = None) -> Any:
    """transformers' own class in FP32 with these weights; `save` gets its checkpoint, in several
    files.
    """
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra 'hf')"
    )
    # a copy: it writes into the scaling
    hf_config = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    hf_config._attn_implementation = "eager"
    if table.spec.experts or table.spec.family == "nemotron_h":
        return _from_folder(transformers, hf_config, table, save)
    model = transformers.AutoModelForCausalLM.from_config(hf_config).float().eval()
    state = {name: torch.tensor(array) for name, array in as_stored(table).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # shared with the embedding table
    if save:
        model.save_pretrained(save, max_shard_size="100KB")
    return model


def _from_folder(transformers: Any, config: Any, table: Table, save: Path | None) -> Any:
    """The same of a model whose modules hold all experts in one tensor, or are called otherwise,
    unlike its checkpoints.
    """
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        safetensors.write(Path(folder) / "model.safetensors", as_stored(table))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype="float32"
        ).eval()
    if save:
        model.save_pretrained(save, max_shard_size="100KB")
    return model


def hf_logits(
    config: dict[str, Any], table: Table, prompt: list[int], save: Path | None = None
) -> Array:
    """[positions, vocab] from transformers in FP64: its FP32 is farther from that than ours."""
    model = hf_model(config, table, save).double()
    model.set_experts_implementation("eager")  # grouped products know no FP64
    import torch

    with torch.no_grad():
        logits: Array = model(torch.tensor([prompt])).logits[0].numpy()
    return logits


def hf_greedy(config: dict[str, Any], table: Table, prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers' logits choose after a prompt, each from the whole sequence."""
    model = hf_model(config, table)
    import torch

    made = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            made.append(int(model(torch.tensor([made])).logits[0, -1].argmax()))
    return made[len(prompt) :]


CASE_PLANS = [
    pytest.param(name, options, id=f"{name}-{options[0]}x{options[1]}-{options[2]}splits")
    for name in ALL
    for options in plans(ALL[name])
]


@pytest.mark.few(12)
@pytest.mark.parametrize(("name", "options"), CASE_PLANS)
def test_recorded_logits(name: str, options: tuple[int, int, int, int, Sampling]) -> None:
    golden = np.load(GOLDENS / f"{name}.npz")
    config = json.loads(str(golden["config"]))
    assert config == ALL[name], "a case changed: regenerate the recorded logits"
    prompt = [int(t) for t in golden["tokens"]]
    found = computed(from_config(config, name), weights(config), prompt, options)
    assert np.abs(found - golden["logits"]).max() < TOLERANCE


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_cpu_engine_gives_transformers_logits_and_tokens(name: str) -> None:
    """Of every family, with weights in FP32: by steps, and where the family has passes behind
    one.
    """
    golden = np.load(GOLDENS / f"{name}.npz")
    table, prompt = weights(FAMILIES[name]), [int(t) for t in golden["tokens"]]
    made = plan(
        table.spec,
        1,
        3,
        2,
        4,
        Sampling.FULL,
        weight_dtype=DType.FP32,
        kv_dtype=DType.FP32,
        prompt_chunk=4,
    )
    prove(made)
    with HostEngine(made, table) as engine:
        assert np.abs(engine.logits(prompt) - golden["logits"]).max() < TOLERANCE
        assert (
            np.abs(engine.logits(prompt[-3:], after=prompt[:-3]) - golden["logits"][-3:]).max()
            < TOLERANCE
        )
        wanted = golden["greedy"].tolist()
        assert engine.generate(prompt, max_tokens=len(wanted)).tokens == wanted
    assert Reference(made, table).generate(prompt, len(wanted)) == wanted


@pytest.mark.few(4)
@pytest.mark.hf
@pytest.mark.parametrize("name", ALL)
def test_live_logits_from_a_checkpoint_that_transformers_saved(name: str, tmp_path: Path) -> None:
    config = ALL[name]
    prompt = tokens(config)
    expected = hf_logits(config, weights(config), prompt, tmp_path / name)
    assert len(list((tmp_path / name).glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(tmp_path / name)
    for options in plans(config):
        found = computed(checkpoint.spec, checkpoint.weights, prompt, options)
        assert np.abs(found - expected).max() < TOLERANCE, options


@pytest.mark.hf
def test_the_text_model_of_one_that_sees_images(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra 'hf')"
    )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {
        key: value
        for key, value in FAMILIES["gemma3"].items()
        if key not in ("model_type", "torch_dtype")
    }
    config = transformers.Gemma3Config(
        text_config=copy.deepcopy(text), vision_config=vision, mm_tokens_per_image=4
    )
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter)
                * (0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
            )
    model.save_pretrained(tmp_path)
    prompt = tokens(text)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.spec.family == "gemma3"
    found = computed(
        checkpoint.spec, checkpoint.weights, prompt, plans(text | {"model_type": "gemma3_text"})[1]
    )
    assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.hf
def test_transformers_opens_what_we_save(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra 'hf')"
    )
    from twin.engine.weights import save_checkpoint

    config = CASES["qwen3"]
    table = weights(config)
    save_checkpoint(tmp_path, table, shards=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        found = model(torch.tensor([tokens(config)])).logits[0].numpy()
    assert np.abs(found - np.load(GOLDENS / "qwen3.npz")["logits"]).max() < TOLERANCE
