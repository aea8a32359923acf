"""Which quantised checkpoints of dense models are read: those whose configuration says exactly
this.

- compressed-tensors, one group of all linear layers: in 8 bits whole numbers or E4M3, symmetric,
  with a scale for each output or for the tensor; in 4 bits whole numbers in groups of 32, 64 or 128
  (`pack-quantized`), MXFP4 and NVFP4. What it says of activations is left aside: the engine keeps
  them more exact.
- `fp8` with blocks of 128 x 128 (`weight_scale_inv`).
- AWQ (`gemm`) and GPTQ in 4 bits and such groups. GPTQ with act-order is refused: neighbours of a
  row do not share a scale there.

Everything else is refused by name (`foreign.py`). Layers that are left out must be whole kinds of
matrices; a checkpoint where single layers differ is refused when its tensors are looked at. Tables
and the head stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twin.models.config import Config, dtype, refuse_quantized
from twin.models.formats import (
    FP8,
    FP8_BLOCK,
    INT4,
    INT8,
    MXFP4,
    NVFP4,
    Format,
    Formats,
    Role,
    format_named,
)
from twin.models.patterns import Patterns
from twin.models.spec import DType

MODULES = {
    Role.ATTENTION: "model.layers.0.self_attn.q_proj",
    Role.DENSE: "model.layers.0.mlp.gate_proj",
}
HEAD = "lm_head"
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")
_FOUR_BITS = ("pack-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
_EXCEPTIONS = ("modules_to_not_convert", "ignore")


def dense_formats(config: Config) -> Formats | None:
    """The formats of a dense model's matrices; None without quantization. Raises ConfigError for
    what is not read.
    """
    fields = config.part("quantization_config")
    if fields is None:
        return None
    fields.ignored()
    if fields.values.get("quant_method") == "gptq" and fields.values.get("desc_act"):
        raise fields.refuse(
            "desc_act",
            "false: with act-order the columns of a group are no neighbours",
            "use a checkpoint without act-order",
        )
    format = _format(fields.values, dtype(config))
    if format is None:
        refuse_quantized(config)
        raise AssertionError("refused")
    left_out = Patterns(fields.name, [text for key in _EXCEPTIONS for text in fields.texts(key)])
    if fields.values["quant_method"] == "compressed-tensors" and not left_out.match(HEAD):
        raise fields.refuse(
            "ignore",
            f"a list with {HEAD!r}: the engine multiplies the head in 16 bits",
            "use another checkpoint",
        )
    rest = format_named(dtype(config).value)
    return Formats(
        rest,
        tuple((role, format) for role, module in MODULES.items() if not left_out.match(module)),
    )


def _format(fields: Mapping[str, Any], scales: DType) -> Format | None:
    match fields.get("quant_method"):
        case "fp8":
            known = (
                fields.get("weight_block_size") == [128, 128]
                and fields.get("fmt", "e4m3") == "e4m3"
            )
            return FP8_BLOCK if known and fields.get("scale_fmt", "float") == "float" else None
        case "compressed-tensors":
            return (
                _grouped(fields, scales)
                if fields.get("format") in (*_FORMATS, *_FOUR_BITS)
                else None
            )
        case "awq":
            known = fields.get("bits") == 4 and fields.get("zero_point") is True
            known = known and str(fields.get("version", "gemm")).lower() == "gemm"
            return _int4(fields.get("group_size"), zeros=True, scales=scales) if known else None
        case "gptq":
            known = fields.get("bits") == 4 and fields.get("lm_head", False) is False
            known = known and fields.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2")
            known = known and not fields.get("dynamic") and type(fields.get("sym")) is bool
            zeros = fields.get("sym") is False
            return _int4(fields.get("group_size"), zeros=zeros, scales=scales) if known else None
        case _:
            return None


def _int4(wide: object, *, zeros: bool, scales: DType) -> Format | None:
    """`scales`: their type as far as a configuration tells it, that of the other weights."""
    name = f"int4-g{wide}{'-zp' if zeros else ''}{'-fp16' if scales is DType.FP16 else ''}"
    return next((form for form in INT4 if form.name == name and type(wide) is int), None)


def _grouped(fields: Mapping[str, Any], scales: DType) -> Format | None:
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        return None
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or group.get("targets") != ["Linear"]:
        return None
    if fields.get("format") in _FOUR_BITS:
        return _four_bits(str(fields["format"]), weights, scales)
    plain = (
        weights.get("symmetric", True) is True
        and not weights.get("dynamic")
        and weights.get("group_size") is None
    )
    if (
        not plain
        or weights.get("num_bits") != 8
        or weights.get("strategy") not in ("channel", "tensor")
    ):
        return None
    return {"int": INT8, "float": FP8}.get(str(weights.get("type", "int")))


def _four_bits(layout: str, weights: Mapping[str, Any], scales: DType) -> Format | None:
    """Of compressed-tensors. The order of columns may have been chosen by their weights, not so
    that groups are of columns far apart (`actorder` "group").
    """
    size, symmetric = weights.get("group_size"), weights.get("symmetric", True)
    if weights.get("num_bits") != 4 or weights.get("dynamic"):
        return None
    match layout, weights.get("type", "int"), weights.get("strategy"):
        case "pack-quantized", "int", "group":
            if weights.get("actorder") not in (None, "weight", "static"):
                return None
            return _int4(size, zeros=symmetric is not True, scales=scales)
        case "mxfp4-pack-quantized", "float", "group":
            return MXFP4 if size == 32 and symmetric is True else None
        case "nvfp4-pack-quantized", "float", "tensor_group":
            return NVFP4 if size == 16 and symmetric is True else None
        case _:
            return None
