"""Checkpoints of four bits as their layouts are published, word by word and not by the code that
reads them, and what they mean.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from twin.engine.weights import random_weights
from twin.models.decoder import tensors
from twin.models.spec import DType, ModelSpec

# name -> type as the header spells it, and an array of its bytes or values
Stored = dict[str, tuple[str, NDArray[Any]]]
IGNORED = ["lm_head"]


def grouped(format: str, size: int, strategy: str = "group", **weights: Any) -> dict[str, Any]:
    made = {"num_bits": 4, "type": "int", "group_size": size, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": made | {"strategy": strategy} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": IGNORED,
        "config_groups": {"group_0": group},
    }


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}
CASES: dict[
    str, tuple[str, dict[str, Any]]
] = {  # name -> (format that it is read as, what it says)
    "packed": ("int4-g64", grouped("pack-quantized", 64)),
    "packed, zero points": (
        "int4-g32-zp",
        grouped("pack-quantized", 32, symmetric=False),
    ),
    "awq": (
        "int4-g64-zp-fp16",
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    ),
    "gptq": ("int4-g64-zp-fp16", GPTQ | {"sym": False}),
    "gptq, symmetric": ("int4-g64-fp16", GPTQ | {"sym": True}),
    "gptq v2": ("int4-g64-zp-fp16", GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}),
    "mxfp4": ("mxfp4", grouped("mxfp4-pack-quantized", 32, type="float")),
    "nvfp4": ("nvfp4", grouped("nvfp4-pack-quantized", 16, "tensor_group", type="float")),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def words(codes: NDArray[Any], order: tuple[int, ...] = tuple(range(8))) -> NDArray[np.int32]:
    """[rows, cols / 8]: nibble i of a word is of its column order[i]."""
    out = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for nibble, column in enumerate(order):
        out |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return out.view(np.int32)


def made(spec: ModelSpec, case: str) -> tuple[Stored, dict[str, NDArray[np.float64]]]:
    """A checkpoint's tensors, and what those of its layers' matrices mean."""
    scales = np.float16 if "fp16" in CASES[case][0] else ml_dtypes.bfloat16
    random, chance = random_weights(spec, 4, DType.FP16), np.random.default_rng(7)
    kind = "F16" if scales is np.float16 else "BF16"
    stored, meant = Stored(), {}
    for canonical, tensor in tensors(spec).items():
        array = random[canonical]
        if array.ndim == 1 or canonical in ("embed", "lm_head"):
            stored[tensor.name] = (kind, array.astype(scales))
            continue
        parts, meant[canonical] = matrix(case, array.shape, chance, scales)
        stem = tensor.name.removesuffix("weight")
        stored |= {stem + name: part for name, part in parts.items()}
    return stored, meant


def matrix(
    case: str, shape: tuple[int, int], chance: np.random.Generator, scale_type: Any
) -> tuple[Stored, NDArray[np.float64]]:
    format, config = CASES[case]
    (rows, cols), q = shape, chance.integers(0, 16, shape).astype(np.uint8)
    if "fp4" in format:
        return four_bit_floats(case, q, chance)
    wide = next(size for size in (32, 64, 128) if f"g{size}" in format.split("-"))
    scales = chance.uniform(0.2, 1, (rows, cols // wide)).astype(scale_type) / scale_type(200)
    scales = scales.astype(scale_type)
    zeros = np.full(scales.shape, 8, np.uint8)
    if "-zp" in format:
        zeros = chance.integers(0, 16, scales.shape).astype(np.uint8)
    meant = (q.astype(np.float64) - np.repeat(zeros, wide, axis=1)) * np.repeat(
        scales.astype(np.float64), wide, axis=1
    )
    kind = "F16" if scale_type is np.float16 else "BF16"
    if config["quant_method"] == "compressed-tensors":
        parts: Stored = {
            "weight_packed": ("I32", words(q)),
            "weight_scale": (kind, scales),
            "weight_shape": ("I64", np.array(shape, np.int64)),
        }
        if "-zp" in format:
            parts["weight_zero_point"] = ("I32", words(zeros.T).T)
        return parts, meant
    if config["quant_method"] == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": ("I32", words(q.T, order)),
            "qzeros": ("I32", words(zeros.T, order)),
            "scales": (kind, scales.T),
        }, meant
    # GPTQModel's convert_gptq_v2_to_v1: whole words are less, so a nibble of 0 borrows
    less = np.uint32(0 if "v2" in case else 0x11111111)
    return {
        "qweight": ("I32", words(q).T),
        "qzeros": ("I32", (words(zeros.T).view(np.uint32) - less).view(np.int32)),
        "scales": (kind, scales.T),
        "g_idx": ("I32", (np.arange(cols) // wide).astype(np.int32)),
    }, meant


def four_bit_floats(
    case: str, q: NDArray[np.uint8], chance: np.random.Generator
) -> tuple[Stored, NDArray[np.float64]]:
    values = np.array(E2M1)[q & 7] * np.where(q & 8, -1, 1)
    packed = ("U8", q[:, 0::2] | q[:, 1::2] << 4)
    if case == "mxfp4":
        exponents = chance.integers(116, 120, (len(q), q.shape[1] // 32)).astype(np.uint8)
        scales = np.repeat(2.0 ** (exponents.astype(np.float64) - 127), 32, axis=1)
        return {"weight_packed": packed, "weight_scale": ("U8", exponents)}, values * scales
    bits = chance.integers(0x30, 0x60, (len(q), q.shape[1] // 16)).astype(np.uint8)
    scales = np.repeat(bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, axis=1)
    divisor = np.array([chance.uniform(500, 900)], np.float32)
    return {
        "weight_packed": packed,
        "weight_scale": ("F8_E4M3", bits),
        "weight_global_scale": ("F32", divisor),
        "input_global_scale": ("F32", divisor),
    }, values * scales / np.float64(divisor[0])
