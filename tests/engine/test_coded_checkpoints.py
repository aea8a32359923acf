"""Checkpoints in 8 bits: built after the documented layouts, opened, and run like the weights that
they mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.small_engine import LIMITS, TOKENS
from tests.refusals import refused
from twin.engine.coded_tensors import SCALES
from twin.engine.host import HostEngine
from twin.engine.save import hf_config
from twin.engine.weights import Checkpoint, open_checkpoint, random_weights
from twin.errors import CheckpointError, ConfigError
from twin.models.codes import CODES
from twin.models.decoder import tensors
from twin.models.load import load_model
from twin.models.spec import DType, ModelSpec, Rope
from twin.plan.options import Options
from twin.proof.prove import prove
from twin.reference.step import Reference
from twin.schedule.plans import build

SPEC = ModelSpec(
    name="small",
    family="llama",
    layers=2,
    hidden=192,
    heads=8,
    kv_heads=4,
    head_dim=16,
    ffn=320,
    vocab=101,
    context=64,
    norm_eps=1e-5,
    rope=Rope(10000.0),
    windows=(0, 0),
)
CHANNEL: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 8,
        "type": "int",
        "strategy": "channel",
        "symmetric": True,
        "dynamic": False,
    },
}
TENSORS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "int8": TENSORS | {"config_groups": {"group_0": CHANNEL}},
    "fp8": TENSORS
    | {
        "format": "float-quantized",
        "config_groups": {"group_0": CHANNEL | {"weights": CHANNEL["weights"] | {"type": "float"}}},
    },
    "fp8-128x128": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head"],
    },
}
KINDS = {"int8": "I8", "fp8": "F8_E4M3", "fp8-128x128": "F8_E4M3"}

# name -> type as the header spells it, and an array of its bytes or values
Stored = dict[str, tuple[str, NDArray[Any]]]


def made(name: str) -> tuple[Stored, dict[str, NDArray[np.float64]]]:
    """A checkpoint's tensors, and what its coded ones mean, by the documentation of their
    layouts.
    """
    random, stored, meant = random_weights(SPEC, 4, DType.BF16), Stored(), {}
    for canonical, tensor in tensors(SPEC).items():
        array = random[canonical]
        if array.ndim == 1 or canonical in ("embed", "lm_head"):
            stored[tensor.name] = ("BF16", array)
            continue
        coded = CODES[name].quantise(array.astype(np.float32))
        stored[tensor.name] = (KINDS[name], coded.codes)
        scales = coded.scales[::128] if name == "fp8-128x128" else coded.scales
        kind = np.float32 if name == "fp8-128x128" else ml_dtypes.bfloat16
        scales = scales.astype(kind)
        stored[tensor.name.removesuffix("weight") + SCALES[name]] = (
            "F32" if kind is np.float32 else "BF16",
            scales,
        )
        values = coded.codes.view(np.int8 if name == "int8" else ml_dtypes.float8_e4m3fn).astype(
            np.float64
        )
        wide = scales.astype(np.float64)
        if name == "fp8-128x128":
            wide = np.kron(wide, np.ones((128, 128)))[: array.shape[0], : array.shape[1]]
        meant[canonical] = values * wide
    return stored, meant


def write(folder: Path, stored: Stored, quantization: dict[str, Any]) -> Path:
    config = hf_config(SPEC, DType.BF16) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name, (kind, array) in stored.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": kind,
            "shape": array.shape,
            "data_offsets": (len(data), len(data) + len(raw)),
        }
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def opened(
    folder: Path,
    name: str,
    change: Callable[[Stored], object] = lambda _: None,
    **quantization: Any,
) -> Checkpoint:
    stored, _ = made(name)
    change(stored)
    return open_checkpoint(write(folder, stored, CONFIGS[name] | quantization))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_means_what_its_layout_documents(name: str, tmp_path: Path) -> None:
    checkpoint, (_, meant) = opened(tmp_path, name), made(name)
    assert {w.format.name for w in checkpoint.spec.weights() if w.name != "lm_head"} == {name}
    for canonical, wanted in meant.items():
        assert np.allclose(checkpoint.weights[canonical], wanted, rtol=1e-6, atol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_runs_it_like_the_reference(name: str, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, name)
    options = Options(
        blocks=2,
        context=8,
        max_context=64,
        kv_page=4,
        slot_bytes=4096,
        weight_dtype=DType.BF16,
        kv_dtype=DType.FP32,
    )
    plan = build(checkpoint.spec, options, LIMITS)
    prove(plan)
    reference = Reference(plan, checkpoint.weights)
    wanted = np.stack([reference.step(token).copy() for token in TOKENS])
    with HostEngine(plan, checkpoint.weights) as engine:
        assert np.abs(engine.logits(TOKENS) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_a_scale_of_the_whole_tensor_is_that_of_each_row(tmp_path: Path) -> None:
    def one(stored: Stored) -> None:
        for name in [name for name in stored if name.endswith("weight_scale")]:
            stored[name] = ("F32", np.array([0.25], np.float32))

    assert (opened(tmp_path, "int8", one).weights["layers.0.q.scales"] == 0.25).all()


def nan(stored: Stored) -> None:
    kind, array = stored["model.layers.1.mlp.up_proj.weight"]
    stored["model.layers.1.mlp.up_proj.weight"] = (
        kind,
        np.where(np.arange(array.size).reshape(array.shape) == 7, 0xFF, array),
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "int8",
            lambda s: s.pop("model.layers.1.mlp.up_proj.weight_scale"),
            "weight_scale' is missing",
        ),
        (
            "int8",
            lambda s: s.update(
                {
                    "model.layers.0.self_attn.o_proj.weight": (
                        "BF16",
                        np.zeros((192, 128), np.uint16),
                    )
                }
            ),
            "expected I8",
        ),
        (
            "fp8",
            lambda s: s.update(
                {"model.layers.0.mlp.up_proj.weight_scale": ("BF16", np.zeros((3, 1), "u2"))}
            ),
            "expected [320, 1]",
        ),
        (
            "int8",
            lambda s: s.update(
                {
                    "model.layers.0.mlp.up_proj.weight_zero_point": (
                        "I8",
                        np.zeros((320, 1), np.int8),
                    )
                }
            ),
            "zero_point",
        ),
        (
            "int8",
            lambda s: s.update({"lm_head.weight": ("I8", np.zeros((101, 192), np.int8))}),
            "is stored as I8",
        ),
    ],
)
def test_what_the_configuration_does_not_say_is_refused(
    name: str, change: Callable[[Stored], object], message: str, tmp_path: Path
) -> None:
    refused(CheckpointError, lambda: opened(tmp_path, name, change), message)


def test_a_code_that_is_no_number_is_refused(tmp_path: Path) -> None:
    weights = opened(tmp_path, "fp8", nan).weights
    refused(CheckpointError, lambda: weights["layers.1.up.codes"], "holds a NaN")


@pytest.mark.parametrize(
    "changed",
    [
        {"ignore": []},
        {"format": "pack-quantized"},
        {
            "config_groups": {
                "group_0": CHANNEL | {"weights": CHANNEL["weights"] | {"symmetric": False}}
            }
        },
        {
            "config_groups": {
                "group_0": CHANNEL
                | {"weights": CHANNEL["weights"] | {"strategy": "group", "group_size": 128}}
            }
        },
        {"config_groups": {"group_0": CHANNEL, "group_1": CHANNEL}},
        {"config_groups": {"group_0": CHANNEL | {"targets": ["re:.*mlp.*"]}}},
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_refused_by_name(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    stored, _ = made("int8")
    folder = write(tmp_path, stored, CONFIGS["int8"] | changed)
    refused(
        ConfigError,
        lambda: load_model(folder),
        "COMPRESSED-TENSORS" if "ignore" not in changed else "lm_head",
    )
