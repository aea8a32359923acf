"""Models by name (hwmodels/models) or by path (a Hugging Face folder, its config.json, or a GGUF
file).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from twin.data import data_dir, did_you_mean, read_yaml
from twin.errors import CheckpointError, ConfigError
from twin.frozen import frozen
from twin.models.bounds import MOST_BYTES, quantity
from twin.models.class_defaults import completed as with_defaults
from twin.models.classes import check_classes
from twin.models.config import Config, text_of
from twin.models.decoder import Tensor, canonical_shape
from twin.models.files import find, is_there
from twin.models.foreign import INSTEAD, format_of_file, format_of_folder
from twin.models.formats import format_named
from twin.models.published import Published, check_published
from twin.models.quantized import requantized
from twin.models.schemes import cached_in
from twin.models.side_files import CONFIG as _CONFIG
from twin.models.side_files import read_config
from twin.models.spec import ModelSpec
from twin.models.unread import refuse_unread
from twin.reading import read
from twin.text import shown

# of names: models that are tuned otherwise, with the same configuration
TUNINGS = ("-instruct", "-it", "-chat", "-base", "-hf")
_FILES = (".json", ".gguf", ".safetensors")
_CACHED = "models--"
LONGEST_NAME = 64  # characters of what may be a name mistyped


@frozen
class _File:
    """One of our model files."""

    name: str
    title: str
    repository: str
    source: str
    parameters: int
    config: dict[str, Any]
    published: Published | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@frozen
class _Family:
    """One architecture: a module of this package, loaded with the first model that needs it.

    It has `from_config(config)`, and where the engine runs the family what says how checkpoints
    name and store tensors: `tensors(spec)`; where they differ from what the engine takes
    `canonical(spec, name, array)`, and `stored`, the way back; `joined(names, arrays)` makes a
    tensor of several parts; `packed(spec)` has shapes of tensors whose codes and scales stand in
    their places.
    """

    module: str
    reads: str = "from_config"
    no_part: str = ""  # the constant of names that begin what is no part of the model
    # model_types of the `text_config` that is taken of a model with other towers
    text: tuple[str, ...] = ()

    def part(self, name: str) -> Any:
        """None where the module has none."""
        return getattr(import_module(f"twin.models.{self.module}"), name, None)


_FAMILIES = {  # by model_type
    "llama": _Family("llama"),
    "mistral": _Family("llama"),
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3"),
    "laneformer": _Family("laneformer"),
    "laneformer_tp": _Family("laneformer"),
    "phi3": _Family("phi3"),
    "granite": _Family("granite"),
    "granitemoehybrid": _Family("granite4"),
    "smollm3": _Family("smollm3"),
    "internlm3": _Family("internlm3"),
    "olmo2": _Family("olmo2"),
    "olmo3": _Family("olmo3"),
    "seed_oss": _Family("seed_oss"),
    "exaone4": _Family("exaone4"),
    "ernie4_5": _Family("ernie4_5"),
    "ernie4_5_moe": _Family("ernie4_5_moe", no_part="NO_PART"),
    "hunyuan_v1_dense": _Family("hunyuan"),
    "hunyuan_v1_moe": _Family("hunyuan", "with_experts"),
    "lfm2": _Family("lfm2"),
    "lfm2_moe": _Family("lfm2"),
    "gemma": _Family("gemma"),
    "gemma2": _Family("gemma2"),
    "gemma3_text": _Family("gemma3"),
    "gemma3": _Family("gemma3", "from_multimodal", "VISION", text=("gemma3_text",)),
    "mixtral": _Family("mixtral"),
    "qwen2_moe": _Family("qwen2_moe"),
    "qwen3_moe": _Family("qwen3_moe"),
    "qwen3_next": _Family("qwen3_next", no_part="NO_PART"),
    "qwen3_5": _Family("qwen3_5", "from_multimodal", "NO_PART", text=("qwen3_5_text",)),
    "qwen3_5_text": _Family("qwen3_5", no_part="NO_PART"),
    "qwen3_5_moe": _Family("qwen3_5", "from_multimodal", "NO_PART", text=("qwen3_5_moe_text",)),
    "qwen3_5_moe_text": _Family("qwen3_5", no_part="NO_PART"),
    "gpt_oss": _Family("gpt_oss"),
    "deepseek_v3": _Family("deepseek_v3"),
    "kimi_k2": _Family("deepseek_v3"),
    "kimi_k25": _Family("deepseek_v3", text=("deepseek_v3", "kimi_k2")),
    "deepseek_v4": _Family("deepseek_v4", no_part="NO_PART"),
    "glm4_moe": _Family("glm4_moe"),
    "minimax_m2": _Family("minimax_m2"),
    "nemotron_h": _Family("nemotron_h", no_part="NO_PART"),
    "gemma4": _Family("gemma4", "from_multimodal", "VISION", text=("gemma4_text",)),
    "gemma4_text": _Family("gemma4"),
}


def model_names() -> list[str]:
    """The models that load_model knows by name."""
    return sorted(p.stem for p in (data_dir("hwmodels") / "models").glob("*.yaml"))


def named(text: str) -> str | None:
    """The model on file that a name means, however it is written: "Qwen3-8B", "Qwen/Qwen3-8B",
    "qwen3:8b", "Llama-3.1-8B-Instruct".
    """
    names, plain = model_names(), text.rpartition("/")[2].lower()
    keys = {_letters(name): name for name in names}
    tunings = ("", *(end for end in TUNINGS if plain.endswith(end)))
    found = [text if text in names else keys.get(_letters(plain.removesuffix(t))) for t in tunings]
    return next((name for name in found if name), None)


def _letters(name: str) -> str:
    """What two spellings of a name share."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def load_model(name_or_path: str | Path, *, runs: bool = False) -> ModelSpec:
    """The model of that name, or of a Hugging Face folder, config.json or GGUF file at that path.
    Raises ConfigError or CheckpointError.

    "NAME@FORMAT" stores its attention, feed-forward layers and experts in another format
    (formats.STORED), for simulation. `runs`: the engine is to run it; what it cannot run is
    refused, and what a refusal lists can be run.
    """
    spec = _load(str(name_or_path), Path(name_or_path), runs)
    if runs:
        tensors(spec)
    return spec


def described(path: Path) -> ModelSpec:
    """As load_model with `runs`, also of a model that the engine cannot run as it is stored."""
    return _load(str(path), path, runs=True)


def _load(text: str, path: Path, runs: bool) -> ModelSpec:
    name, at, stored = text.rpartition("@")
    if name and at and not is_there(path, Path.exists):
        format = format_named(stored.lower())
        if named(name) is None and not is_there(Path(name), Path.exists):
            raise _unknown(name, runs)
        return requantized(_load(name, Path(name), runs), format)
    if text in model_names():
        return read_named(data_dir("hwmodels") / "models" / f"{text}.yaml")
    if is_there(path, Path.is_dir):
        file = find(path, _CONFIG, ConfigError)
        if file is None:
            refuse_foreign(path)
            raise ConfigError(
                f"{path}: has no {_CONFIG}; give a Hugging Face folder or its {_CONFIG}"
            )
        return from_config(read_config(file), _name(path.resolve()), runs=runs)
    from twin.models.gguf_file import is_gguf, read_gguf  # slow to load, and rarely needed

    if is_gguf(path):
        from twin.models.gguf_config import completed, config_of

        gguf = read_gguf(path)
        return completed(
            from_config(config_of(gguf), _name(path.absolute().with_suffix("")), runs=runs), gguf
        )
    if is_there(path, Path.is_file):
        refuse_foreign(path)
        # of the file itself: in the Hugging Face cache it links to one that is called by a hash
        home = path.parent.resolve()
        return from_config(
            read_config(path),
            _name(home if path.name == _CONFIG else home / path.stem),
            runs=runs,
        )
    if known := named(text):
        return read_named(data_dir("hwmodels") / "models" / f"{known}.yaml")
    raise _unknown(text, runs)


def refuse_foreign(path: Path) -> None:
    """Raises ConfigError for a file of weights in a format that is not read, or for a folder of
    them without a configuration.
    """
    format = format_of_file(path)
    if format is None and is_there(path, Path.is_dir) and not (path / _CONFIG).exists():
        format = format_of_folder(path)
    if format == "GGUF":
        first = min(path.glob("*.[gG][gG][uU][fF]"))
        raise ConfigError(
            f"{shown(path)}: is a folder of GGUF files; name the file, such as {shown(first)}"
        )
    if format is not None:
        raise ConfigError(f"{shown(path)}: {format} is a format that is not read; {INSTEAD}")


def _unknown(text: str, runs: bool) -> ConfigError:
    names = model_names()
    if runs:
        names = [name for name in names if _runs(_load(name, Path(name), runs))]
    if text.startswith((".", "/", "~")) or text.lower().endswith(_FILES):
        return ConfigError(f"{shown(text)}: no such file or folder; check the path")
    return ConfigError(
        f"{shown(text)} is neither a model's name nor a path; "
        f"{_hint(text.rpartition('/')[2].lower(), names)} (`twin models` lists them all; a folder "
        f"with {_CONFIG} is read, too)"
    )


def _runs(spec: ModelSpec) -> bool:
    """Can the engine run a model of this kind?"""
    return _FAMILIES[spec.family].part("tensors") is not None and spec.runnable_reason() is None


def from_config(config: Mapping[str, object], name: str, *, runs: bool = False) -> ModelSpec:
    """The model that a Hugging Face configuration describes, by its `model_type`. `runs`: a refusal
    lists the engine's families only.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        engine = [name for name, family in _FAMILIES.items() if family.part("tensors")]
        known = _hint(
            kind, engine if runs else _FAMILIES, lambda other: _agrees(config, name, other)
        )
        simulated = [name for name in _FAMILIES if name not in engine]
        others = "" if runs else f"; the engine runs all but {', '.join(simulated)}"
        raise ConfigError(f"{name}: model_type is {shown(kind)}; {known}{others}")
    outer = Config(name, config)
    outer.unused("model_type")
    inner = text_of(outer, _FAMILIES[kind].text) if _FAMILIES[kind].text else outer
    parts = (outer,) if inner is outer else (inner, outer)
    for part in parts:
        check_classes(part, part.text("model_type", kind))
    said = with_defaults(inner.text("model_type", kind), inner.values)
    family = _FAMILIES[kind]
    spec = _countable(family.part(family.reads)(replace(inner, values=said)))
    spec = replace(spec, cached=cached_in(inner))
    for part in parts:
        refuse_unread(part, kind)
    return spec


def _agrees(config: Mapping[str, object], name: str, kind: str) -> bool:
    """Whether a configuration's fields are those of a family, whatever it calls itself."""
    try:
        from_config({**config, "model_type": kind}, name)
    except ConfigError:
        return False
    return True


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> name and shape in a checkpoint of the model's family. Raises ConfigError
    where the engine cannot run the model.
    """
    named = _FAMILIES[spec.family].part("tensors")
    reason = spec.runnable_reason()
    if named is None or reason:
        raise ConfigError(
            reason
            or f"{spec.name}: checkpoints of family {spec.family} are not read; it can be planned "
            "and simulated only"
        )
    found: dict[str, Tensor] = named(spec)
    return found


def canonical(spec: ModelSpec, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A stored array under its canonical `name`, as [out, in] or [n]. Raises CheckpointError on a
    wrong shape.
    """
    known = _tensors(spec)
    if name not in known:
        raise CheckpointError(f"{spec.name} has no tensor {shown(name)}; {_hint(name, known)}")
    tensor = known[name]
    if array.shape != tensor.shape:
        raise CheckpointError(
            f"{tensor.name} has shape {array.shape}; {spec.name} needs {tensor.shape}; is it the "
            "right checkpoint?"
        )
    change = _FAMILIES[spec.family].part("canonical")
    result: npt.NDArray[Any] = change(spec, name, array) if change else array
    assert result.shape == canonical_shape(spec, name)
    return result


Named = TypeVar("Named")


class _Arrays(Protocol):
    def __getitem__(self, name: str) -> npt.NDArray[Any]: ...


def published(spec: ModelSpec, entries: Mapping[str, Named]) -> dict[str, Named]:
    """A checkpoint's tensors by the names under which the family is published: other tools write
    others.
    """
    name_of = _FAMILIES[spec.family].part("published_name")
    return {name_of(name) if name_of else name: entry for name, entry in entries.items()}


def no_part(spec: ModelSpec) -> tuple[str, ...]:
    """How names of tensors begin that a checkpoint of the family may hold, no part of the model."""
    family = _FAMILIES[spec.family]
    found: tuple[str, ...] = family.part(family.no_part) if family.no_part else ()
    return found


def packed_tensors(spec: ModelSpec) -> dict[str, tuple[int, int, int]]:
    """Name -> [experts, rows, columns] of what the family's checkpoints hold packed and quantised;
    empty where it packs nothing.
    """
    shapes = _FAMILIES[spec.family].part("packed")
    return shapes(spec) if shapes else {}


def checkpoint(spec: ModelSpec) -> dict[Tensor, list[str]]:
    """Every tensor of a checkpoint, and the canonical names of its parts."""
    parts: dict[Tensor, list[str]] = {}
    for name, tensor in tensors(spec).items():
        parts.setdefault(tensor, []).append(name)
    return parts


def stored(spec: ModelSpec, names: Iterable[str], weights: _Arrays) -> npt.NDArray[Any]:
    """A checkpoint's tensor from the canonical arrays of its parts: fused matrices whole, norms as
    the family stores them.
    """
    family, names = _FAMILIES[spec.family], list(names)
    back, join = family.part("stored"), family.part("joined")
    arrays = [back(spec, name, weights[name]) if back else weights[name] for name in names]
    if join:
        joined: npt.NDArray[Any] = join(names, arrays)
        return joined
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


@lru_cache(maxsize=8)
def _tensors(spec: ModelSpec) -> dict[str, Tensor]:
    return tensors(spec)


@lru_cache(maxsize=128)
def read_named(path: Path) -> ModelSpec:
    """One of our model files. Its configuration must give the published number of parameters."""
    data = read(read_yaml(path), _File, path)
    if data.name != path.stem:
        raise ConfigError(f"{path}: name: {shown(data.name)} must be the file's name {path.stem!r}")
    for key in data.notes:
        if key not in data.config and key not in ("parameters", "published"):
            raise ConfigError(
                f"{path}: notes: {shown(key)} is not a field of config; {_hint(key, data.config)}"
            )
    spec = from_config(data.config, path.stem)
    if spec.parameters != data.parameters:
        raise ConfigError(
            f"{path}: parameters: {data.parameters} published, but config gives {spec.parameters}; "
            "correct the one that is wrong"
        )
    if data.published:
        try:
            check_published(data.published, spec)
        except ConfigError as error:
            raise ConfigError(f"{path}: published: {error}") from error
    return spec


def _countable(spec: ModelSpec) -> ModelSpec:
    """The same, refused where fields that are each within their range make bytes together that
    times are not computed from exactly.
    """
    for what, size in (
        ("matrices", spec.stored_bytes),
        (f"caches of {spec.context} positions", spec.held_bytes(spec.context, 4)),
    ):
        if size > MOST_BYTES:
            limit = f"{quantity(MOST_BYTES)}, up to which FP64 counts bytes exactly"
            raise ConfigError(
                f"{spec.name}: its {what} have {size} bytes; allowed: up to {limit}; correct the "
                "largest fields"
            )
    return spec


def _name(folder: Path) -> str:
    """A model is called after its folder; in the Hugging Face cache
    (models--ORGANISATION--NAME/snapshots/HASH) after its repository.
    """
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith(_CACHED):
        name = folder.parent.parent.name.removeprefix(_CACHED).replace("--", "/", 1)
    else:
        name = folder.name
    if not name.isprintable():
        raise ConfigError(
            f"{shown(folder)}: the folder's name, which becomes the model's, has characters that "
            "cannot be shown; rename it"
        )
    return name


def _hint(
    wrong: object, allowed: Iterable[str], fits: Callable[[str], bool] = lambda name: True
) -> str:
    """Close names are looked for among short ones only: comparing takes the product of two
    lengths.
    """
    return did_you_mean(
        wrong if isinstance(wrong, str) and len(wrong) <= LONGEST_NAME else "", allowed, fits
    )
