"""Checkpoints in GPT-OSS's own layout: experts packed in MXFP4, read as they are or turned into 16
or 32 bits.
"""

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
from twin.engine.host import HostEngine
from twin.engine.opening import plan_run
from twin.engine.packed_experts import VALUES, PackedWeights
from twin.engine.safetensors import NUMPY
from twin.engine.weights import open_checkpoint
from twin.errors import CheckpointError
from twin.hardware.load import load_node
from twin.models.load import from_config, packed_tensors
from twin.models.spec import DType
from twin.plan.catalogue import StageKind
from twin.plan.options import Sampling
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


def test_experts_stay_as_they_are_stored(tmp_path: Path) -> None:
    """Codes and exponents are those of the file, and mean what the unpacked weights are."""
    packed = write(tmp_path)
    opened, unpacked = open_checkpoint(tmp_path), open_checkpoint(tmp_path, DType.FP32)
    assert opened.spec.runnable_reason() is None
    assert opened.note == "experts: 0.00 GB of MXFP4, as stored; the rest in BF16"
    assert opened.dtype is DType.BF16
    name = "layers.1.experts.5"
    blocks = packed["model.layers.1.mlp.experts.gate_up_proj_blocks"][5, 7]
    codes = opened.weights[f"{name}.up.codes"][3]
    assert codes[37] == blocks[1, 2] >> 4
    assert codes[36] == blocks[1, 2] & 15
    exponents = packed["model.layers.1.mlp.experts.down_proj_scales"][5]
    scales = opened.weights[f"{name}.down.scales"]
    assert np.array_equal(scales, 2.0 ** (exponents.astype(np.float32) - 127))
    for leaf in ("gate", "up", "down"):
        assert np.array_equal(opened.weights[f"{name}.{leaf}"], unpacked.weights[f"{name}.{leaf}"])
    for whole in ("embed", "layers.0.router", "layers.2.q", "layers.1.experts.5.gate_bias"):
        assert opened.weights[whole].dtype == NUMPY[DType.BF16]


def test_a_plan_of_such_a_checkpoint_streams_four_bits(tmp_path: Path) -> None:
    write(tmp_path)
    opened = open_checkpoint(tmp_path)
    plan = plan_run(opened.spec, load_node("1xhost"), {"blocks": 2}, positions=4, greedy=True)
    kinds = {stage.kind: stage.matrix.format for stage in plan.stages if stage.matrix}
    for kind in (StageKind.ROUTED_UP, StageKind.ROUTED_DOWN):
        form = kinds.pop(kind)
        assert form is not None
        assert form.name == "mxfp4"
    assert set(kinds.values()) == {None}
    assert plan.options.weight_dtype is DType.BF16


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        ("gate_up_proj_scales", np.full((8, 128, 2), 255, np.uint8), "holds a NaN"),
        ("gate_up_proj_scales", np.full((8, 128, 3), 120, np.uint8), r"expected U8 \[8, 128, 2\]"),
        ("down_proj_blocks", np.zeros((8, 64, 2, 16), NUMPY[DType.BF16]), "BF16"),
    ],
)
@pytest.mark.parametrize("dtype", [None, DType.FP16])
def test_bytes_that_are_no_weights_are_refused(
    name: str, array: Array, says: str, dtype: DType | None, tmp_path: Path
) -> None:
    write(tmp_path, {f"model.layers.0.mlp.experts.{name}": array})
    with pytest.raises(CheckpointError, match=says):
        _read(tmp_path, dtype)


def test_weights_beyond_the_requested_type_are_refused(tmp_path: Path) -> None:
    large = np.full((8, 64, 2), 250, np.uint8)
    write(tmp_path, {"model.layers.0.mlp.experts.down_proj_scales": large})
    with pytest.raises(CheckpointError, match="exceeds what fp16 holds"):
        _read(tmp_path, DType.FP16)
    _read(tmp_path, None)


def _read(folder: Path, dtype: DType | None) -> None:
    weights = open_checkpoint(folder, dtype).weights
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
@pytest.mark.parametrize("dtype", [None, DType.FP32], ids=["as stored", "unpacked"])
def test_transformers_gives_the_same_logits(dtype: DType | None, tmp_path: Path) -> None:
    """It unpacks the same folder itself."""
    from tests.engine.test_huggingface import computed

    wanted, _ = theirs(tmp_path)
    opened = open_checkpoint(tmp_path, dtype)
    prompt = tokens(copy.deepcopy(PLAIN))
    found = computed(opened.spec, opened.weights, prompt, (1, 1, 1, 16, Sampling.FULL))
    assert np.abs(found - wanted).max() < 1e-4


def theirs(folder: Path, count: int = 0) -> tuple[Array, list[int]]:
    """transformers' logits of the prompt in FP32, its greedy tokens after it, and the folder that
    it reads.
    """
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    transformers = pytest.importorskip("transformers")
    write(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        attn_implementation="eager",
        dtype=torch.bfloat16,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).float()
    prompt = made = tokens(copy.deepcopy(PLAIN))
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0].numpy()
        for _ in range(count):
            made = [*made, int(model(torch.tensor([made])).logits[0, -1].argmax())]
    return wanted, made[len(prompt) :]


@pytest.mark.hf
@pytest.mark.slow
def test_the_engine_gives_transformers_logits_and_tokens(tmp_path: Path) -> None:
    """MXFP4 and BF16 multiplied as they are stored, keys and values in FP32."""
    wanted, following = theirs(tmp_path, count=12)
    opened, prompt = open_checkpoint(tmp_path), tokens(copy.deepcopy(PLAIN))
    chosen = {"blocks": 3, "kv_dtype": DType.FP32}
    plan = plan_run(
        opened.spec,
        load_node("1xhost"),
        chosen,
        positions=len(prompt) + len(following),
        greedy=True,
    )
    with HostEngine(plan, opened.weights) as engine:
        found = engine.logits(prompt)
        made = engine.generate(prompt, max_tokens=len(following))
    assert np.abs(found - wanted).max() < 1e-4
    assert list(made.tokens) == following
