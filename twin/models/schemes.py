"""What a `quantization_config` says of a model that is described layer by layer: DeepSeek's FP8
blocks, GPT-OSS's MXFP4, compressed-tensors in groups of modules, and ModelOpt in one or several
formats.

What it says of activations is ignored: the engine keeps them more exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from twin.errors import ConfigError
from twin.models.config import Config, dtype
from twin.models.foreign import INSTEAD
from twin.models.formats import (
    FP8,
    FP8_BLOCK,
    FP8_BLOCK_E8M0,
    INT4,
    INT8,
    MXFP4,
    NVFP4,
    Format,
    Role,
)
from twin.models.patterns import Style
from twin.models.quantized import Named, Part, Quantization
from twin.models.spec import DType
from twin.text import shown

_METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt")
_MIXED = "MIXED_PRECISION"
_ALGORITHMS = {"NVFP4": NVFP4, "FP8": FP8, "W4A16_NVFP4": NVFP4, "FP8_PER_CHANNEL_PER_TOKEN": FP8}
_BLOCK = [128, 128]
# how a checkpoint was made, and what is said of activations
MADE = (
    *(
        "producer",
        "version",
        "quantization_status",
        "global_compression_ratio",
        "activation_scheme",
    ),
    *("run_compressed", "dequantize", "format_version", "quantize_and_load"),
)
OF_WEIGHTS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_NO_CACHE = "take it out to use caches of 16 bits"
_OF_CACHES = ("tensor", "attn_head")  # a scale for a layer's keys, one for each of its heads
OF_GROUP = ("input_activations", "output_activations", "format")


def quantization_of(config: Config) -> Quantization | None:
    """None without a quantization. Raises ConfigError for one that is not described."""
    fields = config.part("quantization_config")
    if fields is None:
        return None
    refuse_others(fields)
    fields.unused(*MADE)
    method = fields.text("quant_method")
    match method:
        case "mxfp4":
            left_out = Named(fields.texts("modules_to_not_convert"), Style.BOUNDED)
            return Quantization((Part(MXFP4, None, left_out, (Role.EXPERT,)),))
        case "fp8":
            return Quantization(tuple(_mixed_fp8(fields)))
        case "compressed-tensors":
            ignore = Named(fields.texts("ignore"), Style.EXACT)
            fields.get("format")
            return Quantization(tuple(_groups(fields, ignore, dtype(config))), head=True)
        case "modelopt":
            return Quantization(tuple(_modelopt(fields, dtype(config))), head=True)
        case _:
            raise fields.refuse("quant_method", " or ".join(_METHODS), INSTEAD)


def cached_in(config: Config) -> DType | None:
    """What a configuration has keys and values cached in; None where it says nothing of them.
    Raises ConfigError for another format than FP8 (E4M3).
    """
    fields = config.part("quantization_config")
    if fields is None:
        return None
    algorithm, scheme = fields.get("kv_cache_quant_algo"), fields.part("kv_cache_scheme")
    if algorithm not in (None, "", "NONE", "none", "FP8"):
        raise fields.refuse("kv_cache_quant_algo", "FP8, or null: caches of 16 bits", _NO_CACHE)
    found = DType.FP8 if algorithm == "FP8" else None
    if scheme is None or not scheme.values:
        return found
    scheme.unused(*OF_WEIGHTS, "actorder", "block_structure", "group_size")
    scheme.require("type", "float", ("float",), _NO_CACHE)
    scheme.require("num_bits", None, (8,), _NO_CACHE)
    scheme.require("strategy", "tensor", _OF_CACHES, _NO_CACHE)
    if scheme.flag("dynamic", False) or not scheme.flag("symmetric", True):
        raise fields.refuse(
            "kv_cache_scheme", "symmetric, with scales of the checkpoint", _NO_CACHE
        )
    return DType.FP8


def refuse_others(fields: Config) -> None:
    """Raises ConfigError for other things than formats of matrices and of caches."""
    for key in ("sparsity_config", "transform_config"):
        part = fields.part(key)
        if part is not None and set(part.values) - {"format"}:
            raise fields.refuse(key, "null or empty", INSTEAD)
        if part is not None:
            part.require("format", "dense", ("dense",), INSTEAD)


# ---- FP8 in blocks -------------------------------------------------------------------------------


def _mixed_fp8(fields: Config) -> Iterator[Part]:
    """FP8 in blocks, of which ModelOpt may have stored some layers anew; what that leaves out
    (`ignore`) stays as it was.
    """
    if fields.get("quant_algo") is not None:
        fields.require("quant_algo", None, (_MIXED,), INSTEAD)
        fields.unused("config_groups", "group_size", "moe_quant_algo")  # as each layer says, too
        yield from _by_layer(fields, _modelopt_exceptions(fields))
        _agree(fields)
    left_out = Named(fields.texts("modules_to_not_convert"), Style.BOUNDED)
    yield Part(_fp8(fields), None, left_out)


def _agree(fields: Config) -> None:
    """The experts' own algorithm is that of layers with experts."""
    kind = fields.get("moe_quant_algo")
    layers = fields.part("quantized_layers")
    said = {part.get("quant_algo") for key in layers or () if layers and (part := layers.part(key))}
    if kind is not None and said != {kind}:
        raise fields.refuse("moe_quant_algo", "the algorithm of all quantized_layers")


def _fp8(fields: Config) -> Format:
    if fields.wholes("weight_block_size") != (128, 128):
        raise fields.refuse("weight_block_size", "[128, 128]")
    fields.require("fmt", "e4m3", ("e4m3", "float8_e4m3fn"), INSTEAD)
    scale = fields.text("scale_fmt", "float")
    if scale not in ("float", "ue8m0"):
        raise fields.refuse("scale_fmt", "float or ue8m0")
    return FP8_BLOCK_E8M0 if scale == "ue8m0" else FP8_BLOCK


# ---- groups of modules ---------------------------------------------------------------------------


def _groups(fields: Config, left_out: Named, scales: DType) -> Iterator[Part]:
    """compressed-tensors: a module has the group that names it, before one whose expression
    matches it, before that of its class.
    """
    targets: dict[str, Format] = {}
    for group in _each(fields, "config_groups"):
        group.unused(*OF_GROUP)
        weights = group.part("weights")
        if weights is None:
            raise group.refuse("weights", "bits and groups of weights", INSTEAD)
        format = _of_weights(weights, scales)
        targets |= dict.fromkeys(group.texts("targets") or ("Linear",), format)
    for text in sorted(targets, key=lambda text: ("re:" in text, text)):
        if text != "Linear":
            yield Part(targets[text], Named((text,), Style.EXACT), left_out)
    if "Linear" in targets:
        yield Part(targets["Linear"], None, left_out)


def _each(fields: Config, key: str) -> Iterator[Config]:
    """The mappings in a mapping; at least one."""
    whole = fields.part(key)
    if whole is None or not whole.values:
        raise ConfigError(
            f"{fields.name}: {key} has no group with weights; allowed: at least one; take it from "
            "the model's config.json"
        )
    for name in whole.values:
        part = whole.part(name)
        if part is None:
            raise whole.refuse(name, "a mapping")
        yield part


def _of_weights(weights: Config, scales: DType) -> Format:
    """The format of a group's weights."""
    weights.unused(*OF_WEIGHTS)
    bits, kind = weights.count("num_bits"), weights.text("type", "int")
    size = _size(weights)
    strategy = weights.text("strategy", "group" if size else "tensor")
    block = weights.get("block_structure")
    plain = (
        weights.flag("symmetric", True)
        and not weights.get("dynamic")
        and weights.get("actorder") in (None, "weight", "static")
    )
    found = {
        (8, "int", "channel", 0): INT8,
        (8, "float", "channel", 0): FP8,
        (8, "float", "tensor", 0): FP8,
        (8, "float", "block", 0): FP8_BLOCK if block in (_BLOCK, "128x128") else None,
        (4, "float", "group", 32): MXFP4,
        (4, "float", "group", 16): NVFP4,
        (4, "float", "tensor_group", 16): NVFP4,
        **{(4, "int", "group", f.block[1]): f for f in INT4 if f.name == _int4(f.block[1], scales)},
    }.get((bits, kind, strategy, size))
    if found is None or not plain:
        raise ConfigError(
            f"{weights.name}: {shown(kind)} of {bits} bits by {shown(strategy)} of {size}"
            f"{'' if plain else ', not symmetric or ordered'}; allowed: int or float of 8 bits by "
            "channel, float of 8 bits by tensor or block of 128 x 128, symmetric int of 4 bits in "
            "groups of 32, 64 or 128, float of 4 bits in groups of 16 or 32; use another checkpoint"
        )
    return found


def _int4(wide: int, scales: DType) -> str:
    return f"int4-g{wide}{'-fp16' if scales is DType.FP16 else ''}"


# ---- ModelOpt ------------------------------------------------------------------------------------


def _modelopt(fields: Config, scales: DType) -> Iterator[Part]:
    left_out = _modelopt_exceptions(fields)
    kind = fields.text("quant_algo") if "quant_algo" in fields else None
    if kind == _MIXED:
        fields.unused("config_groups", "group_size")  # as each layer says, too
        yield from _by_layer(fields, left_out)
        return
    said = _size(fields)
    if "config_groups" in fields:
        parts = tuple(_groups(fields, left_out, scales))
        if kind is not None and {part.format for part in parts} != {_algorithm(fields, kind, said)}:
            raise fields.refuse("quant_algo", "the format of config_groups")
        yield from parts
    elif kind is not None:
        yield Part(_algorithm(fields, kind, said), None, left_out)
    else:
        raise fields.refuse("quant_algo", " or ".join((*_ALGORITHMS, _MIXED)), INSTEAD)


def _modelopt_exceptions(fields: Config) -> Named:
    return Named((*fields.texts("ignore"), *fields.texts("exclude_modules")), Style.NAMES)


def _by_layer(fields: Config, left_out: Named) -> Iterator[Part]:
    """`quantized_layers`: each format with the modules that have it."""
    layers: dict[Format, list[str]] = {}
    whole = fields.part("quantized_layers")
    for name, part in zip(whole or (), _each(fields, "quantized_layers"), strict=False):
        size = _size(part)
        format = _algorithm(part, part.text("quant_algo"), size)
        layers.setdefault(format, []).append(name)
    for format, names in layers.items():
        yield Part(format, Named(tuple(names), Style.NAMES), left_out)


def _algorithm(fields: Config, kind: str, size: int) -> Format:
    format = _ALGORITHMS.get(kind)
    if format is None:
        raise fields.refuse("quant_algo", " or ".join((*_ALGORITHMS, _MIXED)), INSTEAD)
    if size not in (0, format.row_group if format is NVFP4 else size):
        raise fields.refuse("group_size", f"{format.row_group}, which {kind} has")
    return format


def _size(fields: Config) -> int:
    """Weights that share a scale; 0: not said."""
    return fields.count("group_size") if "group_size" in fields else 0


def said_of_experts(fields: Mapping[str, object]) -> bool:
    """Whether a quantization names the experts' format itself, layer by layer."""
    return bool(fields.get("quantized_layers"))
