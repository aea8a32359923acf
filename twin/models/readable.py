"""Which quantised checkpoints of dense models are read: those whose configuration says exactly
this.

- compressed-tensors, one group of all linear layers in 8 bits: whole numbers or E4M3, symmetric,
  with a scale for each
  output or for the tensor. What it says of activations is left aside: the engine keeps them more
  exact.
- `fp8` with blocks of 128 x 128 (`weight_scale_inv`).

Everything else is refused by name (`foreign.py`). Layers that are left out must be whole kinds of
matrices; a checkpoint where single layers differ is refused when its tensors are looked at. Tables
and the head stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twin.models.config import Config, dtype, refuse_quantized
from twin.models.formats import FP8, FP8_BLOCK, INT8, Format, Formats, Role, format_named
from twin.models.patterns import Patterns

MODULES = {
    Role.ATTENTION: "model.layers.0.self_attn.q_proj",
    Role.DENSE: "model.layers.0.mlp.gate_proj",
}
HEAD = "lm_head"
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")
_EXCEPTIONS = ("modules_to_not_convert", "ignore")


def dense_formats(config: Config) -> Formats | None:
    """The formats of a dense model's matrices; None without quantization. Raises ConfigError for
    what is not read.
    """
    fields = config.part("quantization_config")
    if fields is None:
        return None
    format = _format(fields.values)
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


def _format(fields: Mapping[str, Any]) -> Format | None:
    match fields.get("quant_method"):
        case "fp8":
            known = (
                fields.get("weight_block_size") == [128, 128]
                and fields.get("fmt", "e4m3") == "e4m3"
            )
            return FP8_BLOCK if known and fields.get("scale_fmt", "float") == "float" else None
        case "compressed-tensors":
            return _grouped(fields) if fields.get("format") in _FORMATS else None
        case _:
            return None


def _grouped(fields: Mapping[str, Any]) -> Format | None:
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        return None
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or group.get("targets") != ["Linear"]:
        return None
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
