"""The weights of an EAGLE-3 head: of a published checkpoint, or from a seed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from twin.engine.safetensors import NUMPY, STORED, Array, Entry, check_finite, read_header, view
from twin.errors import CheckpointError
from twin.models.eagle3 import from_folder
from twin.models.files import find
from twin.models.spec import DraftHead, DType, ModelSpec
from twin.plan.shards import Weights
from twin.text import shown

PREFIX = "draft."  # of a head's tensors among a model's
SINGLE = "model.safetensors"
# how a published head calls its layer
LAYERS = ("midlayer.", "layers.0.")
_NAMES = {
    "fc": "fc.weight",
    "input_norm": "{layer}input_layernorm.weight",
    "hidden_norm": "{layer}hidden_norm.weight",
    "q": "{layer}self_attn.q_proj.weight",
    "k": "{layer}self_attn.k_proj.weight",
    "v": "{layer}self_attn.v_proj.weight",
    "o": "{layer}self_attn.o_proj.weight",
    "post_norm": "{layer}post_attention_layernorm.weight",
    "gate": "{layer}mlp.gate_proj.weight",
    "up": "{layer}mlp.up_proj.weight",
    "down": "{layer}mlp.down_proj.weight",
    "norm": "norm.weight",
    "lm_head": "lm_head.weight",
}
MOST_VALUES = (1 << 22) - 3  # random values of a tensor; the rest repeats them
TABLE, SHIFTS, KNOWN = "embed_tokens.weight", "d2t", "t2d"
_INTEGERS = {"I64": np.int64, "I32": np.int32}


def shapes(head: DraftHead) -> dict[str, tuple[int, ...]]:
    """Of all tensors but the ids, by name without PREFIX."""
    made: dict[str, tuple[int, ...]] = {
        "fc": head.matrices["fc"],
        "q": (head.q_size, head.input),
        "k": (head.kv_size, head.input),
        "v": (head.kv_size, head.input),
        "o": head.matrices["o"],
        "gate": (head.ffn, head.hidden),
        "up": (head.ffn, head.hidden),
        "down": head.matrices["down"],
        "lm_head": head.matrices["head"],
    }
    norms = ("input_norm", "hidden_norm", "post_norm", "norm")
    return made | dict.fromkeys(norms, (head.hidden,))


def random_tensor(spec: ModelSpec, seed: int, name: str, dtype: DType) -> Array:
    """A tensor of `spec.draft_head`, as random as the model's: drafts are accepted by chance."""
    head, leaf = spec.draft_head, name.removeprefix(PREFIX)
    assert head is not None
    random = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    if leaf == "ids":
        found: Array = np.sort(random.permutation(spec.vocab)[: head.vocab])
        return found
    shape = shapes(head)[leaf]
    size = int(np.prod(shape))
    values = random.standard_normal(min(size, MOST_VALUES), np.float32)
    if len(shape) == 1:
        return (1 + values * np.float32(0.1)).astype(NUMPY[dtype])
    scaled = (values * np.float32(shape[1] ** -0.5)).astype(NUMPY[dtype])
    return np.resize(scaled, shape)


@dataclass(frozen=True, slots=True)
class Headed:
    """A model's weights, and those of the head that drafts for it."""

    model: Weights
    spec: ModelSpec
    head: Mapping[str, Array]

    @property
    def dtype(self) -> DType:
        return self.model.dtype

    def __getitem__(self, name: str) -> Array:
        found: Array = (
            self.head[name.removeprefix(PREFIX)] if name.startswith(PREFIX) else self.model[name]
        )
        return found


def with_head(model: Weights, spec: ModelSpec, folder: Path) -> Headed:
    """The model's weights with those of a folder's head. Raises ConfigError, CheckpointError."""
    head = from_folder(folder, spec)
    file = find(folder, SINGLE)
    if file is None:
        raise CheckpointError(
            f"{folder}: has no {SINGLE}; heads are read from safetensors: load one of another "
            "format and save it with safetensors.torch.save_file"
        )
    entries = {name.removeprefix("model."): one for name, one in read_header(file).items()}
    whole = np.memmap(file, np.uint8, "r")
    head = replace(head, own_table=TABLE in entries)
    return Headed(model, replace(spec, draft_head=head), _tensors(file, entries, whole, head, spec))


def _tensors(
    file: Path, entries: Mapping[str, Entry], whole: Array, head: DraftHead, spec: ModelSpec
) -> dict[str, Array]:
    layer = next((one for one in LAYERS if f"{one}hidden_norm.weight" in entries), LAYERS[0])
    wanted = {name: text.format(layer=layer) for name, text in _NAMES.items()}
    shape: dict[str, tuple[int, ...]] = shapes(head)
    if head.own_table:
        wanted["embed"], shape["embed"] = TABLE, (spec.vocab, head.hidden)
    if left := sorted(entries.keys() - {*wanted.values(), SHIFTS, KNOWN}):
        raise CheckpointError(
            f"{file}: {shown(left[0])} is no tensor of an EAGLE-3 head of Llama's layer; use "
            "one of the published layout"
        )
    found = {name: _tensor(file, entries, whole, of, shape[name]) for name, of in wanted.items()}
    return found | {"ids": _ids(file, entries, whole, head, spec)}


def _tensor(
    file: Path, entries: Mapping[str, Entry], whole: Array, name: str, shape: tuple[int, ...]
) -> Array:
    entry = entries.get(name)
    if entry is None:
        raise CheckpointError(f"{file}: has no {shown(name)}; use a head of the published layout")
    if entry.dtype not in STORED or entry.shape != shape:
        raise CheckpointError(
            f"{file}: {shown(name)} is {entry.dtype} {list(entry.shape)}; allowed: "
            f"{', '.join(STORED)} of {list(shape)}, as config.json says"
        )
    array = view(entry, whole)
    check_finite(f"{file}: {shown(name)}", array, STORED[entry.dtype])
    return array


def _ids(
    file: Path, entries: Mapping[str, Entry], whole: Array, head: DraftHead, spec: ModelSpec
) -> Array:
    """The model's number of each token that the head knows."""
    own = np.arange(head.vocab)
    entry = entries.get(SHIFTS)
    if entry is None:
        if head.vocab != spec.vocab:
            raise CheckpointError(
                f"{file}: has no {SHIFTS}, and draft_vocab_size is {head.vocab} of {spec.vocab}"
            )
        return own
    if entry.dtype not in _INTEGERS or entry.shape != (head.vocab,):
        raise CheckpointError(
            f"{file}: {SHIFTS} is {entry.dtype} {list(entry.shape)}; allowed: I64 of [{head.vocab}]"
        )
    ids: Array = own + np.asarray(whole[entry.begin : entry.end]).view(_INTEGERS[entry.dtype])
    if ids.min() < 0 or ids.max() >= spec.vocab:
        raise CheckpointError(
            f"{file}: {SHIFTS} leads to token {int(ids.min())} or {int(ids.max())} of {spec.vocab}"
        )
    return ids
