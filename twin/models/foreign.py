"""Formats of weights that the engine does not read: recognised by files, fields and tensors,
refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from twin.models.files import is_there
from twin.text import shown

INSTEAD = (
    "use the original in 16 bits (a folder of config.json and safetensors), and predict smaller "
    "weights with MODEL@FORMAT, such as llama-3.1-8b@int4-g32 (`twin models --help` lists the "
    "formats)"
)
_FILES = {
    ".gguf": "GGUF",
    ".ggml": "GGML",
    ".onnx": "ONNX",
    ".msgpack": "Flax",
    ".h5": "Keras",
    ".engine": "TensorRT",
    ".mlmodelc": "Core ML",
}
_MAGIC = {b"ggml": "GGML", b"ggjt": "GGML"}  # a file's first bytes, whatever it is called
_TENSORS = (  # (format, ends of names that only its checkpoints have), the most telling first
    ("GPTQ", ("qweight", "g_idx")),
    ("AWQ or GPTQ", ("qweight",)),
    ("compressed-tensors", ("weight_packed",)),
    ("NVFP4", ("weight_scale_2",)),
    ("FP8 in blocks", ("weight_scale_inv",)),
    ("EXL2", ("q_weight", "q_scale")),
    ("EXL3", ("trellis",)),
    ("HQQ", ("W_q",)),
    ("bitsandbytes", ("absmax",)),
    ("bitsandbytes", ("SCB",)),
    ("MXFP4", ("_blocks", "_scales")),
    ("MLX", ("weight", "scales", "biases")),
    ("FP8 or INT8 with scales", ("weight_scale",)),
)
_DTYPES = {"F8_E4M3": "FP8", "F8_E5M2": "FP8", "F4": "FP4", "I8": "INT8"}
_QUANTIZED = re.compile(
    r"(scales?|scale_inv|_scale|_scale_2|qweight|qzeros|zero_point|g_idx|absmax|quant_map|weight_packed|q_weight|q_scale|trellis|W_q"
    r"|SCB|quant_state\S*)\Z"
)


def format_of_file(path: Path) -> str | None:
    """The format of a file of weights, by its first bytes or its ending."""
    if not is_there(path, Path.is_file):
        return None
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError:
        magic = b""
    return _MAGIC.get(magic) or _FILES.get(path.suffix.lower())


def format_of_folder(path: Path) -> str | None:
    """The format of the first file in a folder that is known."""
    if not is_there(path, Path.is_dir):
        return None
    return next(
        (
            _FILES[file.suffix.lower()]
            for file in sorted(path.iterdir())
            if file.suffix.lower() in _FILES
        ),
        None,
    )


def format_of_config(quantization: Mapping[str, object]) -> str:
    """What a `quantization_config` calls its format; not all of its settings."""
    method = quantization.get("quant_method")
    kinds = [
        kind
        for key in ("quant_algo", "format")
        if isinstance(kind := quantization.get(key), str) and kind
    ]
    return " ".join(
        [
            shown(method.upper()) if isinstance(method, str) else "an unnamed format",
            *(f"({shown(kind)})" for kind in kinds),
        ]
    )


def format_of_tensors(names: Collection[str]) -> str:
    """What a checkpoint's tensors tell of its format, where at least one `is_quantized`."""
    for format, ends in _TENSORS:
        if all(any(name.endswith(end) for name in names) for end in ends):
            return format
    return "a format that its tensors do not tell"


def format_of_dtype(dtype: str) -> str | None:
    """What a tensor's stored type says of the format."""
    return _DTYPES.get(dtype)


def is_quantized(name: str) -> bool:
    """Does a tensor of this name belong to quantized weights?"""
    return _QUANTIZED.search(name) is not None
