"""The reference against Hugging Face transformers: live where it is installed, and always against recorded logits."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.hf_cases import CASES, PLANS, TOLERANCE, Table, plan, tokens, weights
from twin.engine.weights import open_checkpoint
from twin.models.load import from_config, tensors
from twin.models.spec import ModelSpec
from twin.plan.shards import Array, Weights
from twin.plan.types import Sampling
from twin.reference.step import Reference

GOLDENS = Path(__file__).parent.parent / "data" / "hf"


def computed(spec: ModelSpec, weights: Weights, prompt: list[int], options: tuple[int, int, int, int, Sampling]) -> Array:
    reference = Reference(plan(spec, *options), weights, kv_dtype=None)
    return np.array([reference.step(token) for token in prompt])


def hf_logits(config: dict[str, Any], table: Table, prompt: list[int], save: Path | None = None) -> Array:
    """[positions, vocab] in FP32 from transformers' own class; `save` gets its checkpoint, in several files."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
    hf_config = transformers.AutoConfig.for_model(**copy.deepcopy(config))  # a copy: it writes into the scaling
    hf_config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(hf_config).float().eval()
    state = {tensor.name: torch.tensor(table[name]) for name, tensor in tensors(table.spec).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # shared with the embedding table
    if save:
        model.save_pretrained(save, max_shard_size="100KB")
    with torch.no_grad():
        logits: Array = model(torch.tensor([prompt])).logits[0].numpy()
    return logits


@pytest.mark.parametrize("options", PLANS, ids=lambda p: f"{p[0]}x{p[1]}-{p[2]}splits")
@pytest.mark.parametrize("name", CASES)
def test_recorded_logits(name: str, options: tuple[int, int, int, int, Sampling]) -> None:
    golden = np.load(GOLDENS / f"{name}.npz")
    config = json.loads(str(golden["config"]))
    assert config == CASES[name], "a case changed: regenerate the recorded logits"
    prompt = [int(t) for t in golden["tokens"]]
    found = computed(from_config(config, name), weights(config), prompt, options)
    assert np.abs(found - golden["logits"]).max() < TOLERANCE


@pytest.mark.hf
@pytest.mark.parametrize("name", CASES)
def test_live_logits_from_a_checkpoint_that_transformers_saved(name: str, tmp_path: Path) -> None:
    config = CASES[name]
    prompt = tokens(config)
    expected = hf_logits(config, weights(config), prompt, tmp_path / name)
    assert len(list((tmp_path / name).glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(tmp_path / name)
    for options in PLANS:
        found = computed(checkpoint.spec, checkpoint.weights, prompt, options)
        assert np.abs(found - expected).max() < TOLERANCE, options


@pytest.mark.hf
def test_transformers_opens_what_we_save(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
    from twin.engine.weights import save_checkpoint

    config = CASES["qwen3"]
    table = weights(config)
    save_checkpoint(tmp_path, table, shards=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor([tokens(config)])).logits[0].numpy()
    assert np.abs(found - np.load(GOLDENS / "qwen3.npz")["logits"]).max() < TOLERANCE
