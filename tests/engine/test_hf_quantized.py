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

from tests.engine.four_bit_cases import CASES as PUBLISHED
from tests.engine.four_bit_cases import grouped, made
from tests.engine.test_four_bit_checkpoints import QUICK
from tests.engine.test_four_bit_checkpoints import write as write_published
from twin.engine.host import HostEngine
from twin.engine.save import hf_config
from twin.engine.weights import Checkpoint, open_checkpoint
from twin.models.decoder import tensors
from twin.models.spec import DType
from twin.plan.options import Limits, Options
from twin.proof.prove import prove
from twin.reference.step import Reference
from twin.schedule.plans import build

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


def random_llama() -> tuple[Any, Any]:
    import torch
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES, torch_dtype="bfloat16")
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return config, model


def write(folder: Path, name: str) -> None:
    """A Llama of random weights, compressed by the library."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is missing")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import save_file

    config, model = random_llama()
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


def transformers_opens(folder: Path) -> Any:
    import torch
    import transformers

    decompress = transformers.CompressedTensorsConfig(run_compressed=False)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=decompress, dtype=torch.bfloat16
    ).float()


def said(model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
    """(logits of the prompt in FP32, tokens that follow greedily)."""
    import torch

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


def agrees(checkpoint: Checkpoint, wanted: Any, follow: list[int]) -> None:
    """The reference's logits and the CPU engine's tokens are those of transformers."""
    options = Options(
        blocks=2,
        context=8,
        max_context=64,
        kv_page=4,
        slot_bytes=8192,
        weight_dtype=checkpoint.dtype,
        kv_dtype=DType.FP32,
    )
    plan = build(checkpoint.spec, options, LIMITS)
    prove(plan)
    reference = Reference(plan, checkpoint.weights, kv_dtype=None)
    found = np.stack([reference.step(token).copy() for token in PROMPT])
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    with HostEngine(plan, checkpoint.weights) as engine:
        assert list(engine.generate(PROMPT, max_tokens=MORE).tokens) == follow


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_of_the_library_give_what_transformers_gives(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    wanted, follow = said(transformers_opens(tmp_path), PROMPT)
    checkpoint = open_checkpoint(tmp_path)
    assert {form.name for form in checkpoint.spec.coded} == {name}
    agrees(checkpoint, wanted, follow)


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in PUBLISHED if "fp4" not in case])
def test_published_layouts_give_what_transformers_makes_of_their_weights(
    case: str, tmp_path: Path
) -> None:
    """What writes AWQ and GPTQ needs a GPU: transformers gets the weights that are meant."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    stored, meant = made(QUICK, case)
    checkpoint = open_checkpoint(write_published(tmp_path, case, stored))
    named = tensors(checkpoint.spec)
    plain = {name: meant.get(name, checkpoint.weights[name]) for name in named}
    config = transformers.LlamaConfig(
        **{k: v for k, v in hf_config(checkpoint.spec, DType.FP32).items() if k != "torch_dtype"}
    )
    model = transformers.LlamaForCausalLM(config).float()
    model.load_state_dict(
        {named[name].name: torch.tensor(array.astype(np.float32)) for name, array in plain.items()}
    )
    agrees(checkpoint, *said(model, PROMPT))


@pytest.mark.hf
@pytest.mark.slow
def test_fp8_in_blocks_gives_what_transformers_gives(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from safetensors.torch import save_file

    config, model = random_llama()
    stored = {}
    for key, tensor in model.state_dict().items():
        if not key.endswith("_proj.weight"):
            stored[key] = tensor.to(torch.bfloat16)
            continue
        rows, cols = (size // 128 for size in tensor.shape)
        most = tensor.abs().reshape(rows, 128, cols, 128).amax(dim=(1, 3))
        scales = rounded(most / 448, 4).to(torch.float32)
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        stored[key] = (tensor / wide).to(torch.float8_e4m3fn)
        stored[key + "_scale_inv"] = scales
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    written = config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head"],
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(written))
    whole = transformers.FineGrainedFP8Config(dequantize=True, modules_to_not_convert=["lm_head"])
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=whole, dtype=torch.bfloat16
    )
    agrees(open_checkpoint(tmp_path), *said(opened.float(), PROMPT))
