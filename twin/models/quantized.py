"""What a `quantization_config` stores in which format, and the same model in another format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twin.errors import ConfigError
from twin.models.config import Config, dtype
from twin.models.foreign import INSTEAD
from twin.models.formats import (
    FP8_BLOCK,
    FP8_BLOCK_E8M0,
    FP32,
    INT4_G32,
    MXFP4,
    NVFP4,
    Format,
    Formats,
    Role,
    format_named,
)
from twin.models.patterns import Patterns
from twin.models.spec import ModelSpec
from twin.text import shown

# What quantization tools leave alone: tables, routers, and the small matrices whose outputs steer
# everything else.
_KEPT = (Role.EMBED, Role.HEAD, Role.ROUTER, Role.SMALL, Role.COMPRESS, Role.HYPER)
_EXCEPTIONS = ("modules_to_not_convert", "ignore", "exclude_modules")
_METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt")


def stored_formats(config: Config, modules: Mapping[Role, str]) -> Formats | None:
    """The formats of a configuration; None without quantization. `modules`: one module's name for
    each kind of matrix of the family.

    A kind is quantized unless the configuration's list of exceptions matches its module.
    Hyper-connections are FP32.
    """
    fields = config.part("quantization_config")
    rest = format_named(dtype(config).value)
    kept = Formats(rest, ((Role.HYPER, FP32),) if Role.HYPER in modules else ())
    if fields is None:
        return kept if kept.chosen else None
    format = _format(fields)
    fields.ignored()
    left_out = Patterns(fields.name, [text for key in _EXCEPTIONS for text in fields.texts(key)])
    for role, module in modules.items():
        if role not in _KEPT and not left_out.match(module):
            kept = kept.with_role(role, format)
    return kept


def requantized(spec: ModelSpec, format: Format) -> ModelSpec:
    """The same model with its attention, feed-forward layers and experts stored in `format`; the
    rest as it was.
    """
    stored = spec.formats
    for role in Role:
        if role not in _KEPT:
            stored = stored.with_role(role, format)
    return replace(spec, name=f"{spec.name}@{format.name}", stored=stored)


def _format(fields: Config) -> Format:
    method = fields.text("quant_method")
    if method not in _METHODS:
        raise fields.refuse("quant_method", " or ".join(_METHODS), INSTEAD)
    if method == "mxfp4":
        return MXFP4
    return _fp8(fields) if method == "fp8" else _grouped(fields)


def _fp8(fields: Config) -> Format:
    if fields.wholes("weight_block_size") != (128, 128):
        raise fields.refuse("weight_block_size", "[128, 128]")
    scale = fields.text("scale_fmt", "float")
    if scale not in ("float", "ue8m0"):
        raise fields.refuse("scale_fmt", "float or ue8m0")
    return FP8_BLOCK_E8M0 if scale == "ue8m0" else FP8_BLOCK


def _grouped(fields: Config) -> Format:
    """compressed-tensors and modelopt say bits and group size of the first group of modules."""
    groups = fields.part("config_groups")
    weights = _first_group(groups).part("weights") if groups and groups.values else None
    if weights is None:
        raise ConfigError(
            f"{fields.name}: config_groups has no group with weights; allowed: one group; take it "
            "from the model's config.json"
        )
    bits, size, kind = (
        weights.count("num_bits"),
        weights.count("group_size"),
        weights.text("type", "int"),
    )
    known = {(4, 32, "int"): INT4_G32, (4, 16, "float"): NVFP4}
    if (bits, size, kind) not in known:
        allowed = "int of 4 bits in groups of 32, float of 4 bits in groups of 16"
        raise ConfigError(
            f"{weights.name}: {shown(kind)} of {bits} bits in groups of {size}; allowed: "
            f"{allowed}; use another checkpoint"
        )
    return known[bits, size, kind]


def _first_group(groups: Config) -> Config:
    key, value = next(iter(groups.values.items()))
    name = f"{groups.name}: {shown(key)}"
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name} is {shown(value)}; allowed: a mapping; take it from the model's config.json"
        )
    return Config(name, value)
