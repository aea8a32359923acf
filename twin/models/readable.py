"""Which quantised checkpoints of dense models are read: those whose configuration says exactly
this.

- compressed-tensors, one group of all linear layers: in 8 bits whole numbers or E4M3, symmetric,
  with a scale for each output or for the tensor; in 4 bits whole numbers in groups of 32, 64 or 128
  (`pack-quantized`), MXFP4 and NVFP4. What it says of activations is ignored: the engine keeps
  them more exact.
- `fp8` with blocks of 128 x 128 (`weight_scale_inv`).
- AWQ (`gemm`) and GPTQ in 4 bits and such groups. GPTQ with act-order is refused: neighbours of a
  row do not share a scale there.

Everything else is refused by name (`foreign.py`). Matrices that are left out must be whole kinds
(`quantized.py`). Tables and the head stay in 16 bits.
"""

from __future__ import annotations

from twin.models.config import Config, dtype, refuse_quantized
from twin.models.formats import (
    FP8,
    FP8_BLOCK,
    INT4,
    INT8,
    MXFP4,
    NVFP4,
    Format,
)
from twin.models.patterns import Style
from twin.models.quantized import Named, Part, Quantization
from twin.models.schemes import MADE, OF_GROUP, OF_WEIGHTS, refuse_others
from twin.models.spec import DType

_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")
_FOUR_BITS = ("pack-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
_MADE = (  # how a checkpoint was made, and with which kernels others run it
    *MADE,
    *("damp_percent", "damp_auto_increment", "dataset", "tokenizer", "true_sequential", "meta"),
    *("static_groups", "mse", "model_seqlen", "use_cuda_fp16", "use_exllama", "disable_exllama"),
    *("exllama_config", "max_input_length", "cache_block_outputs", "batch_size", "pack_dtype"),
    *("module_name_preceding_first_block", "block_name_to_quantize", "pad_token_id", "backend"),
    *("model_file_base_name", "model_name_or_path", "do_fuse", "fuse_max_seq_len", "adapter"),
    *("modules_to_fuse", "autoround_version", "iters", "nsamples", "lr", "seqlen", "scale_dtype"),
    *("low_gpu_mem_usage", "enable_minmax_tuning", "enable_quanted_input", "train_bs", "minmax_lr"),
    *("gradient_accumulate_steps", "amp", "not_use_best_mse", "data_type"),
)


def dense_quantization(config: Config) -> Quantization | None:
    """What a dense model's `quantization_config` says; None without. Raises ConfigError for what is
    not read.
    """
    fields = config.part("quantization_config")
    if fields is None:
        return None
    if fields.get("quant_method") == "gptq" and fields.get("desc_act"):
        raise fields.refuse(
            "desc_act",
            "false: with act-order the columns of a group are no neighbours",
            "use a checkpoint without act-order",
        )
    format = _format(fields, dtype(config))
    if format is None:
        refuse_quantized(config)
        raise AssertionError("refused")
    refuse_others(fields)
    fields.unused(*_MADE)
    part = Part(format, None, _left_out(fields))
    return Quantization((part,), head=fields.get("quant_method") == "compressed-tensors")


def _left_out(fields: Config) -> Named:
    """Of compressed-tensors exact names and expressions; of GPTQ expressions behind "-:"; of the
    others names or expressions as transformers takes them.
    """
    if fields.get("quant_method") == "compressed-tensors":
        return Named(fields.texts("ignore"), Style.EXACT)
    if fields.get("quant_method") != "gptq":
        return Named(fields.texts("modules_to_not_convert"), Style.BOUNDED)
    dynamic = fields.part("dynamic")
    if dynamic is None:
        return Named()
    for text in dynamic.values:
        if not text.startswith("-:"):
            raise dynamic.refuse(
                text,
                "expressions behind '-:', whose modules stay in 16 bits",
                "use a checkpoint whose layers all have the same bits and groups",
            )
    dynamic.unused(*dynamic)
    return Named(tuple(text.removeprefix("-:") for text in dynamic), Style.EXPRESSIONS)


def _format(fields: Config, scales: DType) -> Format | None:
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
            known = known and type(fields.get("sym")) is bool
            zeros = fields.get("sym") is False
            return _int4(fields.get("group_size"), zeros=zeros, scales=scales) if known else None
        case _:
            return None


def _int4(wide: object, *, zeros: bool, scales: DType) -> Format | None:
    """`scales`: their type as far as a configuration says it, that of the other weights."""
    name = f"int4-g{wide}{'-zp' if zeros else ''}{'-fp16' if scales is DType.FP16 else ''}"
    return next((form for form in INT4 if form.name == name and type(wide) is int), None)


def _grouped(fields: Config, scales: DType) -> Format | None:
    groups = fields.part("config_groups")
    if groups is None or len(groups.values) != 1:
        return None
    group = groups.part(*groups.values)
    weights = group.part("weights") if group else None
    if group is None or weights is None or group.get("targets") != ["Linear"]:
        return None
    group.unused(*OF_GROUP)
    weights.unused(*OF_WEIGHTS)
    if fields.get("format") in _FOUR_BITS:
        return _four_bits(str(fields.get("format")), weights, scales)
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


def _four_bits(layout: str, weights: Config, scales: DType) -> Format | None:
    """Of compressed-tensors. The order of columns may have been chosen by their weights, not so
    that groups are of columns far from each other (`actorder` "group").
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
