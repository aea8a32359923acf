"""A folder's configuration with what files next to config.json say of the stored format: ModelOpt's
hf_quant_config.json, and the files of GPTQ and AWQ before quantization_config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twin.errors import ConfigError, TwinError
from twin.models.files import find, read_json
from twin.models.foreign import INSTEAD
from twin.text import shown

CONFIG = "config.json"
_KEY = "quantization_config"


def _modelopt(file: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    inner = said.get("quantization")
    if not isinstance(inner, dict):
        raise ConfigError(
            f"{file}: quantization is {shown(inner)}; allowed: a mapping; download the file again"
        )
    return {"quant_method": "modelopt", **inner}


def _gptq(file: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    return {"quant_method": "gptq", **said}


_AWQ = {"w_bit": "bits", "q_group_size": "group_size"}  # as AutoAWQ called them first


def _awq(file: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    return {"quant_method": "awq", **{_AWQ.get(key, key): value for key, value in said.items()}}


_READ: dict[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]] = {
    "hf_quant_config.json": _modelopt,
    "quantize_config.json": _gptq,
    "quant_config.json": _awq,
}
_AGREE = ("quant_algo", "bits", "group_size", "desc_act", "sym", "zero_point", "version")
_NOT_READ = {
    "quantization_config.json": f"a format of weights that is not read; {INSTEAD}",
    "qconfig.json": f"a format of weights that is not read; {INSTEAD}",
    "smash_config.json": f"a format of weights that is not read; {INSTEAD}",
    "quant_model_description.json": f"a format of weights that is not read; {INSTEAD}",
    "adapter_config.json": "an adapter, which is not read; merge it into the weights",
}


def read_config(file: Path, refusal: type[TwinError] = ConfigError) -> dict[str, Any]:
    """The configuration in a file; of a folder's config.json with the format that files next to it
    say. Raises `refusal`, and ConfigError where they contradict each other.
    """
    config, folder = read_json(file, refusal), file.parent
    if file.name != CONFIG:
        return config
    for name, what in _NOT_READ.items():
        if find(folder, name, refusal) is not None:
            raise ConfigError(f"{folder}: {name} says {what}")
    for name, read in _READ.items():
        other = find(folder, name, refusal)
        if other is not None:
            config = _with(config, other, read(other, read_json(other, refusal)))
    return config


def _with(config: dict[str, Any], other: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    own = config.get(_KEY) or (inner.get(_KEY) if isinstance(inner, dict) else None)
    if not own:
        return {**config, _KEY: dict(said)}
    if not isinstance(own, dict):
        return config  # refused by whoever reads it
    for key in _AGREE:
        if key in own and key in said and own[key] != said[key]:
            raise ConfigError(
                f"{other}: {key} is {shown(said[key])}; allowed: {shown(own[key])}, as {_KEY} in "
                f"{CONFIG} says; remove the one that is wrong"
            )
    more = ("quant_algo",) if own.get("kv_cache_scheme") else ("quant_algo", "kv_cache_quant_algo")
    missing = {key: said[key] for key in more if key in said and key not in own}
    if not missing or own.get("quant_method") != "modelopt":
        return config
    return {**config, _KEY: {**own, **missing}}
