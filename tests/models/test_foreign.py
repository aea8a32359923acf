"""A format that is not read is refused by its name, with what can be done, wherever it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.test_layers import config_of
from tests.refusals import refused
from twin.errors import ConfigError
from twin.models.foreign import format_of_tensors, is_quantized
from twin.models.load import from_config, load_model

UP = "model.layers.0.mlp.up_proj."
INSTEAD = ("original in 16 bits", "MODEL@FORMAT")


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("model.ggml", b"", "GGML"),
        ("renamed.bin", b"ggjt\x03\x00\x00\x00", "GGML"),
        ("model.onnx", b"\x08\x07", "ONNX"),
        ("flax_model.msgpack", b"", "Flax"),
        ("tf_model.h5", b"\x89HDF", "Keras"),
    ],
)
def test_a_file_of_another_format_is_refused_by_its_name(
    name: str, content: bytes, format: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    refused(
        ConfigError,
        lambda: load_model(tmp_path / name),
        f"{format} is a format that is not read",
        *INSTEAD,
    )


@pytest.mark.parametrize("name", ["model.ggml", "model.onnx", "tf_model.h5"])
def test_a_folder_of_such_files_is_refused_alike(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    refused(ConfigError, lambda: load_model(tmp_path), "is a format that is not read", *INSTEAD)


@pytest.mark.parametrize(
    ("fields", "format"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'GPTQ'"),
        ({"quant_method": "awq"}, "'AWQ'"),
        ({"quant_method": "fp8"}, "'FP8'"),
        ({"quant_method": "bitsandbytes"}, "'BITSANDBYTES'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'MODELOPT' ('NVFP4')"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            "'COMPRESSED-TENSORS' ('float-quantized')",
        ),
        ({"bits": 4}, "an unnamed format"),
    ],
)
def test_a_configuration_of_quantized_weights_is_refused_by_its_format(
    fields: dict[str, object], format: str
) -> None:
    config = config_of("llama-3.2-1b") | {"quantization_config": fields}
    refused(
        ConfigError,
        lambda: from_config(config, "mine"),
        f"quantization_config says {format}",
        *INSTEAD,
    )


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq"])
def test_experts_in_a_format_that_is_not_simulated_are_refused_by_it(method: str) -> None:
    config = config_of("gpt-oss-20b") | {"quantization_config": {"quant_method": method}}
    refused(
        ConfigError, lambda: from_config(config, "mine"), f"quant_method is '{method}'", *INSTEAD
    )


@pytest.mark.parametrize(
    ("tensors", "format"),
    [
        (("qweight", "qzeros", "scales", "g_idx"), "GPTQ"),
        (("qweight", "qzeros", "scales"), "AWQ or GPTQ"),
        (("weight", "weight_scale_inv"), "FP8 in blocks"),
        (("weight", "weight_scale"), "FP8 or INT8 with scales"),
        (("weight", "weight_scale", "weight_scale_2"), "NVFP4"),
        (("weight_packed", "weight_scale", "weight_shape"), "compressed-tensors"),
        (("weight", "weight.absmax", "weight.quant_map"), "bitsandbytes"),
        (("weight", "SCB"), "bitsandbytes"),
        (("weight", "scales", "biases"), "MLX"),
        (("q_weight", "q_scale", "q_invperm"), "EXL2"),
        (("trellis", "suh", "svh"), "EXL3"),
    ],
)
def test_tensors_tell_the_format_where_the_configuration_does_not(
    tensors: tuple[str, ...], format: str
) -> None:
    names = [UP + name for name in tensors]
    assert format_of_tensors(names) == format
    assert any(is_quantized(name) for name in names)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.3.self_attn.q_proj.bias", "model.norm.weight"],
)
def test_an_ordinary_tensor_is_not_quantized(name: str) -> None:
    assert not is_quantized(name)
