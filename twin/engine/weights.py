"""Where weights come from: a Hugging Face directory, mapped without a copy, or a seed.

A checkpoint is checked in full when it is opened; after that a tensor is only a view of the mapped file.
"""

from __future__ import annotations

import re
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

import numpy as np

from twin.engine.safetensors import NUMPY, STORED, Array, Entry, read_header, read_json, view
from twin.engine.save import CONFIG, INDEX, SINGLE, save_checkpoint
from twin.errors import CheckpointError
from twin.models.decoder import Tensor, canonical_shape
from twin.models.load import canonical, load_model, tensors
from twin.models.spec import DType, ModelSpec
from twin.plan.shards import Weights

__all__ = ["Checkpoint", "RandomWeights", "Weights", "open_checkpoint", "random_weights", "save_checkpoint"]

KEPT_TENSORS = 16  # generated tensors that stay in memory: a layer is packed rank by rank, each asking for the same ones
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_HARMLESS = re.compile(r"(rotary_emb\.inv_freq|masked_bias|attn\.bias)\Z")  # constants that old versions stored
_QUANTIZED = re.compile(r"(scales?|scale_inv|_scale|qweight|qzeros|zero_point|g_idx|absmax|quant_map|weight_packed|quant_state\S*)\Z")


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Views of mapped files, by canonical name."""

    spec: ModelSpec
    dtype: DType
    entries: dict[str, Entry]  # by canonical name
    files: dict[Path, Array]

    def __getitem__(self, name: str) -> Array:
        entry = self.entries[name]
        return canonical(self.spec, name, view(entry, self.files[entry.path]))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened Hugging Face directory. `spec.dtype` is the type its tensors really have."""

    path: Path
    spec: ModelSpec
    dtype: DType
    weights: StoredWeights


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Check a directory of config.json and safetensors in full, then map it. Raises CheckpointError or ConfigError."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a directory; give the folder of a Hugging Face checkpoint")
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path}: has no {CONFIG}; give the folder of a Hugging Face checkpoint")
    spec = load_model(path)
    found = _entries(path)
    _refuse_suspicious(path, spec, found)
    entries = {name: _checked(path, tensor, found) for name, tensor in tensors(spec).items()}
    dtype = _common_dtype(path, entries.values())
    spec = replace(spec, dtype=dtype)
    files: dict[Path, Array] = {
        entry.path: np.memmap(entry.path, np.uint8, "r") for entry in {e.path: e for e in entries.values()}.values()
    }
    return Checkpoint(path, spec, dtype, StoredWeights(spec, dtype, entries, files))


def _entries(path: Path) -> dict[str, Entry]:
    """Every tensor of the directory by its name there."""
    if (path / SINGLE).is_file():
        return read_header(path / SINGLE)
    if (path / INDEX).is_file():
        return _sharded(path)
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise CheckpointError(f"{path}: has only pickled weights, which can run code; load and save_pretrained them to get safetensors")
    raise CheckpointError(f"{path}: has neither {SINGLE} nor {INDEX}; download the weights in safetensors format")


def _sharded(path: Path) -> dict[str, Entry]:
    """Tensors as the index assigns them to its files."""
    index = path / INDEX
    where = read_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{index}: weight_map must map tensors to files; download it again")
    for file in sorted(set(where.values())):
        if PurePath(file).name != file:
            raise CheckpointError(f"{index}: names {file!r}, which is not a file of this folder")
        if not (path / file).is_file():
            raise CheckpointError(f"{index}: names {file}, which is missing; download it")
    headers = {file: read_header(path / file) for file in set(where.values())}
    for name, file in where.items():
        if name not in headers[file]:
            raise CheckpointError(f"{index}: places {name} in {file}, which does not hold it; download both again")
    return {name: headers[file][name] for name, file in where.items()}


def _refuse_suspicious(path: Path, spec: ModelSpec, found: dict[str, Entry]) -> None:
    """Tensors that the model does not use are ignored, except where leaving them out would change its output."""
    known = {tensor.name for tensor in tensors(spec).values()}
    for name in sorted(found.keys() - known):
        if _QUANTIZED.search(name):
            raise CheckpointError(f"{path}: {name} belongs to a quantized checkpoint; use the original FP16 or BF16 one")
        layer = _LAYER.search(name)
        if layer and int(layer[1]) < spec.layers and not _HARMLESS.search(name):
            raise CheckpointError(f"{path}: {name} is not part of a {spec.family} model as {CONFIG} describes it; use a matching {CONFIG}")


def _checked(path: Path, tensor: Tensor, found: dict[str, Entry]) -> Entry:
    if tensor.name not in found:
        raise CheckpointError(f"{path}: tensor {tensor.name} is missing; is {CONFIG} that of these weights?")
    entry = found[tensor.name]
    if entry.shape != tensor.shape:
        raise CheckpointError(f"{entry.path}: {entry.name} has shape {list(entry.shape)}, expected {list(tensor.shape)} from {CONFIG}")
    if entry.dtype not in STORED:
        raise CheckpointError(
            f"{entry.path}: {entry.name} is stored as {entry.dtype}, expected {', '.join(STORED)}; use an unquantized checkpoint"
        )
    return entry


def _common_dtype(path: Path, entries: Iterable[Entry]) -> DType:
    """One type for all, so that nothing is converted behind the user's back."""
    examples = {entry.dtype: entry.name for entry in entries}
    if len(examples) > 1:
        kinds = ", ".join(f"{dtype} ({name})" for dtype, name in sorted(examples.items()))
        raise CheckpointError(f"{path}: mixes types: {kinds}; convert it to one with save_pretrained")
    return STORED[next(iter(examples))]


@dataclass(slots=True)
class RandomWeights:
    """Weights from a seed, made when asked for: a tensor depends on (seed, its name) alone."""

    spec: ModelSpec
    seed: int
    dtype: DType
    _recent: OrderedDict[str, Array] = field(default_factory=OrderedDict, repr=False)

    def __getitem__(self, name: str) -> Array:
        if name not in self._recent:
            if name not in tensors(self.spec):
                raise CheckpointError(f"{self.spec.name} has no tensor {name!r}")
            self._recent[name] = self._make(name)
            if len(self._recent) > KEPT_TENSORS:
                self._recent.popitem(last=False)
        self._recent.move_to_end(name)
        return self._recent[name]

    def _make(self, name: str) -> Array:
        random = np.random.Generator(np.random.PCG64([self.seed, zlib.crc32(name.encode())]))
        mean, deviation = _distribution(self.spec, name)
        values = random.standard_normal(canonical_shape(self.spec, name), np.float32)
        values *= np.float32(deviation)
        values += np.float32(mean)
        return values.astype(NUMPY[self.dtype])


def random_weights(spec: ModelSpec, seed: int, dtype: DType | None = None) -> RandomWeights:
    """Weights of the right shapes and of sizes that keep activations near one; `dtype`: the model's own unless given."""
    return RandomWeights(replace(spec, dtype=dtype or spec.dtype), seed, dtype or spec.dtype)


def _distribution(spec: ModelSpec, name: str) -> tuple[float, float]:
    """(mean, standard deviation) of a tensor: unit outputs, residual additions small against the stream."""
    leaf = name.rpartition(".")[2]
    shape = canonical_shape(spec, name)
    if leaf.endswith("norm"):
        return 1.0, 0.1
    if leaf.endswith("_bias"):
        return 0.0, 0.1
    if leaf == "embed":
        # A tied table is also the LM head: rows of length 2 keep its logits within reach of sampling.
        return 0.0, 2 * spec.hidden**-0.5 if spec.tied else 1.0
    if leaf in ("o", "down"):
        return 0.0, float((2 * spec.layers * shape[1]) ** -0.5)
    return 0.0, float((2 if leaf == "lm_head" else 1) * shape[1] ** -0.5)
