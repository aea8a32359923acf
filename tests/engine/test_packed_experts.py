"""Checkpoints in GPT-OSS's own layout: experts packed in MXFP4, turned into 16 or 32 bits."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.engine.hf_cases import FAMILIES, as_stored, tokens, weights
from tests.engine.small_engine import SEED
from twin.engine.packed_experts import VALUES, PackedWeights
from twin.engine.safetensors import NUMPY
from twin.engine.weights import open_checkpoint
from twin.errors import CheckpointError
from twin.models.load import from_config, packed_tensors
from twin.models.spec import DType
from twin.plan.shards import Array

CONFIG: dict[str, Any] = {
    **FAMILIES["gpt-oss"],
    "intermediate_size": 64,  # whole blocks of 32
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
PLAIN = {key: value for key, value in CONFIG.items() if key != "quantization_config"}


def write(folder: Path, change: dict[str, Array] | None = None) -> dict[str, Array]:
    """A checkpoint of random bytes and 16-bit weights; its packed tensors."""
    spec, random = from_config(PLAIN, "case"), np.random.RandomState(SEED)
    table = {
        name: array.astype(NUMPY[DType.BF16]) for name, array in as_stored(weights(PLAIN)).items()
    }
    packed: dict[str, Array] = {}
    for name, (experts, rows, cols) in packed_tensors(spec).items():
        table.pop(name)
        shape = (experts, rows, cols // 32)
        packed[f"{name}_blocks"] = random.randint(0, 256, (*shape, 16)).astype(np.uint8)
        packed[f"{name}_scales"] = random.randint(120, 126, shape).astype(np.uint8)
    packed |= change or {}
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", table | packed)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return packed


def write_safetensors(path: Path, arrays: dict[str, Array]) -> None:
    """With bytes and 8-bit types, which ours does not write."""
    kinds = {
        np.dtype(np.uint8): "U8",
        NUMPY[DType.BF16]: "BF16",
        NUMPY[DType.FP32]: "F32",
        np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    }
    header, at = {}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": kinds[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).tobytes())


def test_a_packed_expert_is_what_its_codes_and_scales_say(tmp_path: Path) -> None:
    """Written out once, for one weight of each kind."""
    packed = write(tmp_path)
    opened = open_checkpoint(tmp_path, DType.FP32)
    name = "model.layers.1.mlp.experts"
    blocks, scales = packed[f"{name}.gate_up_proj_blocks"], packed[f"{name}.gate_up_proj_scales"]
    up = opened.weights["layers.1.experts.5.up"]
    assert up.shape == (64, 64)
    # row 3 of up is row 7; column 37 is the upper half of byte 2 of block 1
    code, scale = int(blocks[5, 7, 1, 2]) >> 4, int(scales[5, 7, 1])
    assert up[3, 37] == VALUES[code] * 2.0 ** (scale - 127)
    down = opened.weights["layers.1.experts.5.down"]
    code = int(packed[f"{name}.down_proj_blocks"][5, 9, 0, 1]) & 15
    assert down[9, 2] == VALUES[code] * 2.0 ** (
        int(packed[f"{name}.down_proj_scales"][5, 9, 0]) - 127
    )
    assert isinstance(opened.weights, PackedWeights)
    assert opened.note.startswith("experts: 0.00 GB of MXFP4 in the files, turned into FP32")


def test_nothing_is_unpacked_unless_somebody_asks(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(CheckpointError, match=r"stored in MXFP4.*use --dtype bf16"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        ("gate_up_proj_scales", np.full((8, 128, 2), 255, np.uint8), "holds a NaN"),
        ("gate_up_proj_scales", np.full((8, 128, 3), 120, np.uint8), r"expected U8 \[8, 128, 2\]"),
        ("down_proj_blocks", np.zeros((8, 64, 2, 16), NUMPY[DType.BF16]), "BF16"),
        ("down_proj_scales", np.full((8, 64, 2), 250, np.uint8), "exceeds what fp16 holds"),
    ],
)
def test_bytes_that_are_no_weights_are_refused(
    name: str, array: Array, says: str, tmp_path: Path
) -> None:
    write(tmp_path, {f"model.layers.0.mlp.experts.{name}": array})
    with pytest.raises(CheckpointError, match=says):
        _read(tmp_path)


def _read(folder: Path) -> None:
    weights = open_checkpoint(folder, DType.FP16).weights
    for expert in range(8):
        for leaf in ("gate", "down"):
            assert weights[f"layers.0.experts.{expert}.{leaf}"].any()


@pytest.mark.hf
def test_experts_are_those_that_transformers_unpacks(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    packed = write(tmp_path)
    opened = open_checkpoint(tmp_path, DType.BF16)
    for name in ("gate_up_proj", "down_proj"):
        whole = f"model.layers.2.mlp.experts.{name}"
        theirs = mxfp4.convert_moe_packed_tensors(
            torch.tensor(packed[f"{whole}_blocks"]), torch.tensor(packed[f"{whole}_scales"])
        ).float()
        for expert in range(8):
            ours = f"layers.2.experts.{expert}"
            found = theirs[expert].numpy().T
            if name == "down_proj":
                assert np.array_equal(opened.weights[f"{ours}.down"].astype(np.float32), found)
            else:
                for half, leaf in enumerate(("gate", "up")):
                    made = opened.weights[f"{ours}.{leaf}"].astype(np.float32)
                    assert np.array_equal(made, found[half::2])


@pytest.mark.hf
@pytest.mark.slow
def test_transformers_gives_the_same_logits(tmp_path: Path) -> None:
    """It unpacks the same folder itself."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    transformers = pytest.importorskip("transformers")
    from tests.engine.test_huggingface import computed
    from twin.plan.types import Sampling

    write(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        attn_implementation="eager",
        dtype=torch.bfloat16,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).float()
    prompt = tokens(copy.deepcopy(PLAIN))
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0].numpy()
    opened = open_checkpoint(tmp_path, DType.FP32)
    found = computed(opened.spec, opened.weights, prompt, (1, 1, 1, 16, Sampling.FULL))
    assert np.abs(found - wanted).max() < 1e-4
