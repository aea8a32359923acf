"""Attacks on config.json: every family's configuration, changed field by field, type by type and at
every limit.

Laws: a configuration is refused by one bounded line, or its numbers are read as they stand, its
sums are finite and positive, and a plan of it on one GPU is built or refused; always in bounded
time.
"""

from __future__ import annotations

import copy
import math
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.attack.defect import Defect
from tests.attack.hostile import (
    INTEGERS,
    TEXTS,
    Pairs,
    Raw,
    check_refusal,
    near_limit,
    to_json,
    value,
)
from twin.data import data_dir, read_yaml
from twin.errors import TwinError
from twin.hardware.load import load_node
from twin.models.bounds import FIELDS
from twin.models.load import load_model, model_names
from twin.models.mixers import CompressedAttention
from twin.models.spec import ModelSpec
from twin.plan.shards import rope_table
from twin.schedule.options import plan_for

NAME = "configs"
SHORT = 8  # layers of most cases: a plan of them takes milliseconds
LARGEST = 2**53
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPES = (
    LLAMA3,
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "default"},
    {"rope_theta": 1e6},
    {},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "linear", "type": "llama3"},
    {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25},
)
QUANTIZED: tuple[dict[str, Any], ...] = (
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "fp8", "weight_block_size": [128, 64]},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    {"quant_method": "mxfp4"},
    {"quant_method": "gptq"},
    {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}},
    },
    {
        "quant_method": "modelopt",
        "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 16, "type": "float"}}},
    },
    {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"weights": {"num_bits": 8, "group_size": 32, "type": "int"}}},
    },
    {"quant_method": "compressed-tensors", "config_groups": {"\x1b[2J" * 99: 3}},
    {"quant_method": "modelopt", "config_groups": {}},
    {},
    {
        "quant_method": "mxfp4",
        "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}},
        "weight_block_size": [1, 1],
    },
)
PATTERNS = (
    "re:(a+)+$",
    "re:(.*)*x",
    "re:(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)x",
    "re:.*.*.*.*.*.*.*.*!",
    "re:(",
    "re:[",
    "re:" + "(" * 200,
    "re:a{1,99999999999}",
    "re:(?P<x>a)(?P<x>b)",
    "re:.*self_attn.*",
    "re:(?!.*mlp).*",
    "*" * 400,
    "*a" * 200 + "!",
    "[!",
    "[z-a]*",
    "model.layers.*.self_attn",
    "model.layers.0.self_attn",
    "lm_head",
    "re:(?i)MODEL.*",
    "re:(\\w+\\.?)+$",
    "re:^(?:model|x)\\.layers\\.\\d+\\.mlp\\.(gate|up)_proj$",
    "re:\\1(a)",
    "re:a**",
    "re:(?<=a*)b",
    "re:(?>a*)*",
    "re:x{0}",
)


def attack(chance: random.Random, folder: Path) -> str:
    """One configuration, damaged once to three times."""
    name = chance.choice(sorted(_bases()))
    config = (
        _shortened(copy.deepcopy(_bases()[name]))
        if chance.random() < 0.9
        else copy.deepcopy(_bases()[name])
    )
    steps = [chance.choice(_DAMAGES) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
    holder: object = config
    for step in steps:
        holder = step(chance, holder) if isinstance(holder, dict) else holder
    text = (
        chance.choice(_SPOILS)(chance, to_json(holder))
        if chance.random() < 0.06
        else to_json(holder).encode()
    )
    (folder / "config.json").write_bytes(text)
    case = f"{name} after {', '.join(step.__name__ for step in steps)}: {text[:2000]!r}"
    try:
        spec = load_model(folder)
    except TwinError as error:
        check_refusal(error, folder, case)
        return "refused"
    _check_spec(spec, case)
    if isinstance(holder, dict) and not isinstance(holder.get("text_config"), dict):
        _check_as_written(spec, holder, case)
    return (
        _planned(spec, folder, case)
        if spec.layers <= 4 * SHORT or chance.random() < 0.1
        else "accepted"
    )


# ---- laws ----------------------------------------------------------------------------------------


def _check_spec(spec: ModelSpec, case: str) -> None:
    """Sums that every report is computed from."""
    for weight in spec.weights():
        if (
            min(weight.rows, weight.cols, weight.groups, weight.experts, weight.active) < 1
            or weight.active > weight.experts
        ):
            raise Defect(f"{case}: {weight}")
    moved = spec.traffic(spec.context, 2)
    sums = (
        spec.parameters,
        spec.active_parameters,
        spec.streamed_bytes,
        spec.stored_bytes,
        moved.read_bytes,
        moved.written_bytes,
    )
    for size in (*sums, spec.held_bytes(spec.context, 2)):
        if type(size) is not int or not 0 <= size <= 2 * LARGEST:
            raise Defect(f"{case}: a sum is {size}, of {sums}")
    if spec.active_parameters > spec.parameters or spec.streamed_bytes > spec.stored_bytes:
        raise Defect(f"{case}: a part is larger than the whole: {sums}")
    for layer in (spec.layer(index) for index in range(spec.layers)):
        if (
            isinstance(layer.mixer, CompressedAttention)
            and min(layer.mixer.entry_bytes, layer.mixer.pending_bytes) < 0
        ):
            raise Defect(f"{case}: entries of {layer.mixer.entry_bytes} bytes")
    numbers = [
        spec.norm_eps,
        spec.rope.theta,
        *([spec.rope.scaling.factor] if spec.rope.scaling else []),
    ]
    with np.errstate(all="ignore"):
        if not all(
            math.isfinite(n) and np.float32(n) > 0 and np.isfinite(np.float32(n)) for n in numbers
        ):
            raise Defect(f"{case}: {numbers} are not all positive in FP32")
    if not spec.layout and not all(np.isfinite(table).all() for table in rope_table(spec, 64)):
        raise Defect(f"{case}: rotations are not finite")
    if not spec.name.isprintable() or spec.vocab > 2**24:
        raise Defect(f"{case}: {spec.name!r} with {spec.vocab} tokens")


def _check_as_written(spec: ModelSpec, config: dict[str, object], case: str) -> None:
    """Nothing is clamped: a field of the specification is that of the file."""
    fields = {
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "vocab_size": spec.vocab,
    }
    fields |= {"max_position_embeddings": spec.context, "num_attention_heads": spec.heads}
    for key, found in fields.items():
        if not isinstance(config.get(key), Raw) and (
            type(config.get(key)) is not int or config[key] != found
        ):
            raise Defect(f"{case}: {key} is read as {found}")


def _planned(spec: ModelSpec, folder: Path, case: str) -> str:
    try:
        plan = plan_for(
            spec, load_node("1xh200"), blocks=8 * (spec.lanes.count if spec.lanes else 1)
        )
    except TwinError as error:
        check_refusal(error, folder, case)
        return "read, not planned"
    if not 0 < plan.weight_bytes() <= 4 * LARGEST:
        raise Defect(f"{case}: a plan streams {plan.weight_bytes()} bytes")
    return "planned"


# ---- configurations ------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _bases() -> dict[str, dict[str, Any]]:
    """A valid configuration of every family and spelling, by name."""
    found: dict[str, dict[str, Any]] = {}
    for name in model_names():
        config = read_yaml(data_dir("hwmodels") / "models" / f"{name}.yaml")["config"]
        assert isinstance(config, dict)
        found[name] = config
    small = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    }
    found["llama"] = {"model_type": "llama", **small}
    found["mistral"] = {
        "model_type": "mistral",
        **small,
        "sliding_window": 100,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    }
    found["qwen2"] = {
        "model_type": "qwen2",
        **small,
        "use_sliding_window": True,
        "sliding_window": 100,
        "max_window_layers": 2,
    }
    found["qwen3"] = {"model_type": "qwen3", **small, "head_dim": 16, "tie_word_embeddings": True}
    found["laneformer"] = {
        "model_type": "laneformer_tp",
        **small,
        "num_lanes": 4,
        "broadcast_delay": 1,
        "sliding_window": 9,
        "swa_layers": [0, 2],
        "rope_scaling_args": LLAMA3,
        "norm_eps": 1e-5,
    }
    long = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
    found["phi3"] = {
        "model_type": "phi3",
        **small,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 64,
        "rope_scaling": long,
    }
    found["smollm3"] = {
        "model_type": "smollm3",
        **small,
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 9,
    }
    found["gemma3 with a tower"] = {"model_type": "gemma3", "text_config": found["gemma-3-1b"]}
    found["kimi with a tower"] = {
        "model_type": "kimi_k25",
        "text_config": found["kimi-k2.6"],
        "vision_config": {},
    }
    found["gemma with a tower"] = {"model_type": "gemma4", "text_config": found["gemma-4-31b"]}
    return found


def _shortened(config: dict[str, Any]) -> dict[str, Any]:
    for key, each in config.items():
        if key == "num_hidden_layers" and isinstance(each, int):
            config[key] = min(each, SHORT)
        elif key in ("layer_types", "compress_ratios") and isinstance(each, list):
            config[key] = each[:SHORT]
        elif key == "text_config":
            config[key] = _shortened(each)
    return config


# ---- damage --------------------------------------------------------------------------------------


def _target(chance: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """The mapping that is damaged: mostly the whole, sometimes one inside of it."""
    inside = [each for each in config.values() if isinstance(each, dict) and each]
    return _target(chance, chance.choice(inside)) if inside and chance.random() < 0.4 else config


def _any_value(chance: random.Random, config: dict[str, Any]) -> object:
    place = _target(chance, config)
    if place:
        place[chance.choice(list(place))] = value(chance)
    return config


def _any_field(chance: random.Random, config: dict[str, Any]) -> object:
    """A field of any family."""
    _target(chance, config)[chance.choice(list(FIELDS))] = value(chance)
    return config


def _limit(chance: random.Random, config: dict[str, Any]) -> object:
    place = _target(chance, config)
    known = [key for key in place if key in FIELDS and not isinstance(place[key], list)] or list(
        FIELDS
    )
    key = chance.choice(known)
    place[key] = near_limit(chance, key)
    return config


def _large(chance: random.Random, config: dict[str, Any]) -> object:
    """Several fields at their highest: each is allowed, together they are not."""
    place = (
        config.get("text_config", config)
        if isinstance(config.get("text_config", config), dict)
        else config
    )
    for key in list(place):
        if key in FIELDS and not isinstance(place[key], list) and chance.random() < 0.4:
            place[key] = chance.choice((FIELDS[key].highest, 2 ** chance.randrange(20)))
    return config


def _removed(chance: random.Random, config: dict[str, Any]) -> object:
    place = _target(chance, config)
    if place:
        place.pop(chance.choice(list(place)))
    return config


def _swapped(chance: random.Random, config: dict[str, Any]) -> object:
    place = _target(chance, config)
    one, other = chance.choice(list(place)), chance.choice(list(place))
    place[one], place[other] = place[other], place[one]
    return config


def _real(number: float) -> float:
    """The same number with a point, where there is one."""
    try:
        return float(number)
    except OverflowError:
        return 1e308


def _scaled(chance: random.Random, config: dict[str, Any]) -> object:
    place = _target(chance, config)
    numbers = [
        key
        for key, each in place.items()
        if isinstance(each, int | float) and not isinstance(each, bool)
    ]
    if numbers:
        key = chance.choice(numbers)
        place[key] = chance.choice(
            (
                place[key] * 3,
                place[key] * -1,
                place[key] + 1,
                place[key] - 1,
                _real(place[key]),
                str(place[key]),
                place[key] * 10**6,
            )
        )
    return config


def _retyped(chance: random.Random, config: dict[str, Any]) -> object:
    place = _target(chance, config)
    key = chance.choice(list(place))
    each = place[key]
    place[key] = chance.choice(
        ([each], {"a": each}, str(each), bool(each), [each, each], {key: each})
    )
    return config


def _listed(chance: random.Random, config: dict[str, Any]) -> object:
    lists = [key for key, each in config.items() if isinstance(each, list)]
    key = chance.choice(
        lists or ["layer_types", "mlp_only_layers", "swa_layers", "compress_ratios"]
    )
    old = list(config.get(key, [])) or ["full_attention"]
    old[chance.randrange(len(old))] = value(chance)
    many = old * 2_000 if len(to_json(old)) < 1_000 else old
    config[key] = chance.choice((old, old * 2, old[1:], many, [*old, chance.choice(INTEGERS)]))
    return config


def _rope(chance: random.Random, config: dict[str, Any]) -> object:
    part = copy.deepcopy(chance.choice(ROPES))
    if part and chance.random() < 0.6:
        part[chance.choice(list(part))] = value(chance)
    place = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    place[chance.choice(("rope_scaling", "rope_parameters", "rope_scaling_args"))] = part
    return config


def _quantized(chance: random.Random, config: dict[str, Any]) -> object:
    part = copy.deepcopy(chance.choice(QUANTIZED))
    if part and chance.random() < 0.4:
        part[chance.choice(list(part))] = value(chance)
    if chance.random() < 0.6:
        patterns: list[object] = [
            chance.choice(PATTERNS) for _ in range(chance.choice((1, 1, 2, 5, 300)))
        ]
        if chance.random() < 0.1:
            patterns.append(value(chance))
        part[chance.choice(("modules_to_not_convert", "ignore", "exclude_modules"))] = patterns
    config["quantization_config"] = part
    return config


def _family(chance: random.Random, config: dict[str, Any]) -> object:
    """The fields of one family under the name of another."""
    config["model_type"] = chance.choice(
        [each.get("model_type") for each in _bases().values()] + list(TEXTS)
    )
    return config


def _nested(chance: random.Random, config: dict[str, Any]) -> object:
    return chance.choice(
        (
            {"text_config": config},
            {"model_type": config.get("model_type"), "text_config": config},
            [config],
            {"config": config},
        )
    )


def _twice(chance: random.Random, config: dict[str, Any]) -> object:
    key = chance.choice(list(config))
    return Pairs([*config.items(), (key, chance.choice((config[key], value(chance))))])


def _unknown(chance: random.Random, config: dict[str, Any]) -> object:
    config[chance.choice(TEXTS)] = value(chance)
    return config


def _truncated(chance: random.Random, text: str) -> bytes:
    return text.encode()[: chance.randrange(len(text))]


def _recoded(chance: random.Random, text: str) -> bytes:
    return text.encode(chance.choice(("utf-16", "utf-32", "utf-8-sig", "utf-16-le")))


def _flipped(chance: random.Random, text: str) -> bytes:
    raw = bytearray(text.encode())
    for _ in range(chance.choice((1, 3, 30))):
        raw[chance.randrange(len(raw))] = chance.randrange(256)
    return bytes(raw)


def _padded(chance: random.Random, text: str) -> bytes:
    return text.encode() + b" " * chance.choice((1, 2**20, 17 * 2**20))


_DAMAGES = (
    _any_value,
    _any_value,
    _any_value,
    _any_field,
    _limit,
    _limit,
    _large,
    _removed,
    _swapped,
    _scaled,
    _retyped,
    _listed,
    _rope,
    _quantized,
    _family,
    _nested,
    _twice,
    _unknown,
)
_SPOILS = (_truncated, _recoded, _flipped, _padded)
