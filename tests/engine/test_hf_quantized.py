"""Quantised checkpoints that compressed-tensors and transformers write on a CPU: the engine and the
reference give what transformers makes of the same dequantised weights.

Scales have so few significant bits that their products with codes are exact in BF16, in which
transformers decompresses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.four_bit_cases import grouped
from twin.engine.host import HostEngine
from twin.engine.weights import open_checkpoint
from twin.models.spec import DType
from twin.plan.build import build
from twin.plan.types import Limits, Options
from twin.proof.prove import prove
from twin.reference.step import Reference

LIMITS = Limits(blocks=64, dies=1, on_chip_bytes=2**30, memory_bytes=2**40, oversubscribe=True)
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
PROMPT, MORE = [5, 74, 0, 33, 100, 2, 61, 9, 10, 11, 12, 5], 12
CHANNEL = {"group_size": None, "num_bits": 8}
CASES: dict[str, dict[str, Any]] = {
    "int8": grouped("int-quantized", 0, "channel", **CHANNEL),
    "fp8": grouped("float-quantized", 0, "channel", type="float", **CHANNEL),
    "int4-g128": grouped("pack-quantized", 128),
    "int4-g32-zp": grouped("pack-quantized", 32, symmetric=False),
    "mxfp4": grouped("mxfp4-pack-quantized", 32, type="float"),
    "nvfp4": grouped("nvfp4-pack-quantized", 16, "tensor_group", type="float"),
}
BITS = {"int8": 1, "fp8": 4, "int4-g128": 4, "int4-g32-zp": 4}  # significant ones of a scale
LARGEST = {"int8": 127, "fp8": 448, "int4-g128": 7, "int4-g32-zp": 7}


def rounded(scales: Any, bits: int) -> Any:
    """To so many significant bits, upwards."""
    import torch

    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ceil(mantissa * 2**bits) / 2**bits, exponent)


def scales_of(name: str, weight: Any, size: int | None) -> dict[str, Any]:
    """What a quantising tool would have found, but for the rounding."""
    import torch

    groups = weight.reshape(len(weight), -1, size or weight.shape[1])
    most = groups.abs().amax(dim=2)
    if name == "mxfp4":
        return {"weight_scale": torch.exp2(torch.ceil(torch.log2(most / 6)))}
    if name == "nvfp4":
        divisor = torch.exp2(torch.floor(torch.log2(448 * 6 / most.max()))).reshape(1)
        local = (most / 6 * divisor).to(torch.float8_e4m3fn).to(torch.float32)
        return {"weight_scale": local, "weight_global_scale": divisor}
    scales = rounded(most / LARGEST[name], BITS[name]).to(torch.bfloat16)
    found = {"weight_scale": scales}
    if name.endswith("-zp"):
        found["weight_zero_point"] = torch.randint(-3, 4, scales.shape).to(torch.int8)
    return found


def write(folder: Path, name: str) -> None:
    """A Llama of random weights, compressed by the library."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is missing")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import save_file

    assert library
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES, torch_dtype="bfloat16")
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    group = CASES[name]["config_groups"]["group_0"]
    scheme = QuantizationScheme(**group)
    compressor = BaseCompressor.load_from_registry(CASES[name]["format"])
    stored = {}
    for key, tensor in model.state_dict().items():
        if not key.endswith("_proj.weight"):
            stored[key] = tensor.to(torch.bfloat16)
            continue
        state = {"weight": tensor, **scales_of(name, tensor, group["weights"]["group_size"])}
        made = compressor.compress(state, scheme)
        stem = key.removesuffix("weight")
        stored |= {stem + end: part.contiguous() for end, part in made.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    written = config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": CASES[name] | {"quantization_status": "compressed"},
    }
    (folder / "config.json").write_text(json.dumps(written))


def transformers_says(folder: Path, tokens: list[int]) -> tuple[Any, list[int]]:
    """(logits of the prompt in FP32, tokens that follow greedily)."""
    import torch
    import transformers

    decompress = transformers.CompressedTensorsConfig(run_compressed=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=decompress, dtype=torch.bfloat16
    ).float()
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].numpy()
        prompt = torch.tensor([tokens])
        follow = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=MORE,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return logits, follow[0, len(tokens) :].tolist()


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_of_the_library_give_what_transformers_gives(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    wanted, follow = transformers_says(tmp_path, PROMPT)
    checkpoint = open_checkpoint(tmp_path)
    assert {form.name for form in checkpoint.spec.coded} == {name}
    options = Options(
        blocks=2,
        context=8,
        max_context=64,
        kv_page=4,
        slot_bytes=8192,
        weight_dtype=DType.BF16,
        kv_dtype=DType.FP32,
    )
    plan = build(checkpoint.spec, options, LIMITS)
    prove(plan)
    reference = Reference(plan, checkpoint.weights, kv_dtype=None)
    found = np.stack([reference.step(token).copy() for token in PROMPT])
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    with HostEngine(plan, checkpoint.weights) as engine:
        assert list(engine.generate(PROMPT, max_tokens=MORE).tokens) == follow
