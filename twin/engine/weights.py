"""Where weights come from: a Hugging Face directory, mapped without a copy, or a seed.

A checkpoint is checked in full when it is opened; after that a tensor is only a view of the mapped
file.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from twin.engine.cache_scales import with_cache_scales
from twin.engine.coded_tensors import CodedTensor, coded_tensor, names_read, with_stored_scales
from twin.engine.draft_head import PREFIX, random_tensor
from twin.engine.four_bit_tensors import FourBitTensor, Layout, layout_of
from twin.engine.gguf_weights import open_gguf
from twin.engine.left_over import beyond, refuse_left_over
from twin.engine.packed_experts import (
    PackedExpert,
    PackedWeights,
    coded_matrices,
    is_packed,
    note_as_stored,
    others,
    packed_entries,
    unpacked,
)
from twin.engine.safetensors import (
    INTEGERS,
    NUMPY,
    STORED,
    Array,
    Entry,
    check_finite,
    read_header,
    view,
)
from twin.engine.save import CONFIG, INDEX, SINGLE, save_checkpoint
from twin.errors import CheckpointError, ConfigError
from twin.models.codes import Encoded, code_of
from twin.models.decoder import Tensor, canonical_shape
from twin.models.experts import CHOSEN
from twin.models.feeds import ExpertFeed
from twin.models.files import find, is_there, read_json
from twin.models.foreign import (
    INSTEAD,
    format_of_dtype,
    format_of_folder,
    format_of_tensors,
    is_quantized,
)
from twin.models.formats import Format, Role, decoded
from twin.models.gguf_file import is_gguf
from twin.models.linear import DECAY, SKIP, STEP
from twin.models.load import (
    canonical,
    described,
    load_model,
    published,
    refuse_foreign,
    tensors,
)
from twin.models.side_files import read_config
from twin.models.spec import DType, ModelSpec
from twin.plan.shards import Weights
from twin.text import shown

__all__ = [
    "Checkpoint",
    "RandomWeights",
    "Weights",
    "open_checkpoint",
    "random_weights",
    "save_checkpoint",
]

LARGEST_SEED = 2**64 - 1
CODED_PARTS = ("codes", "scales", "zeros", "outer", "blocks")  # of a coded matrix, behind its name
# what tools may leave in FP32 next to weights of 16 bits
_FINE = ("attn_hyper", "ffn_hyper", "head_hyper", "compress_bias", "index_bias")
_EXACT, ROUTER = ("choice_bias", DECAY, STEP, SKIP), "router"
_ROLES = {
    Role.ATTENTION: (
        *("q", "k", "v", "o", "qkvz", "qkv", "z", "state_in", "conv_in"),
        *("q_a", "q_b", "kv", "o_a"),
    ),
    Role.INDEX: ("index_q",),
    Role.SMALL: ("ba", "b", "a"),
    Role.DENSE: ("gate", "up", "down"),
    Role.SHARED: ("shared_gate", "shared_up", "shared_down"),
    Role.HEAD: ("lm_head",),
    Role.EMBED: ("embed",),
}
# generated tensors that stay in memory: a layer is packed rank by rank, each with the same
# ones
KEPT_TENSORS = 16


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Views of mapped files, by canonical name. Raises CheckpointError for a tensor with an
    infinity or a NaN.
    """

    spec: ModelSpec
    dtype: DType
    entries: dict[str, Entry]  # by canonical name
    files: dict[Path, Array]
    # quantised matrices by canonical name
    coded: Mapping[str, CodedTensor | FourBitTensor | PackedExpert] = field(default_factory=dict)
    _looked: _Looked = field(init=False, repr=False, compare=False)

    # of a tensor that several names are parts of, the first
    _whole: dict[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        first: dict[str, str] = {}
        whole = {name: first.setdefault(entry.name, name) for name, entry in self.entries.items()}
        object.__setattr__(self, "_whole", whole)
        object.__setattr__(self, "_looked", _Looked(list(first.values()), self._check))

    def __getitem__(self, name: str) -> Array:
        matrix, _, part = name.rpartition(".")
        if part in CODED_PARTS and matrix in self.coded:
            return self.coded[matrix].part(part, self.files)
        if name in self.coded:
            return self.coded[name].matrix(self.files).astype(np.float32)
        if name not in self.entries:
            raise CheckpointError(f"{self.spec.name} has no tensor {shown(name)}")
        self._looked.at(self._whole[name])
        found = canonical(self.spec, name, self._stored(name))
        rounded = name.endswith(f".{ROUTER}")
        return found.astype(NUMPY[self.dtype], copy=False) if rounded else found

    def _stored(self, name: str) -> Array:
        entry = self.entries[name]
        return view(entry, self.files[entry.path])

    def _check(self, name: str) -> None:
        entry = self.entries[name]
        if entry.dtype in INTEGERS:
            check_numbers(f"{entry.path}: {shown(entry.name)}", self._stored(name), self.spec, name)
            return
        check_finite(f"{entry.path}: {shown(entry.name)}", self._stored(name), STORED[entry.dtype])


def check_numbers(what: str, table: Array, spec: ModelSpec, name: str) -> None:
    """Raises CheckpointError where a table of a layer's chosen experts names none of them, or one
    twice for a token.
    """
    feed = spec.layer(int(name.split(".")[1])).feed
    count = feed.experts if isinstance(feed, ExpertFeed) else 0
    if table.min(initial=0) < 0 or table.max(initial=0) >= count:
        where = int(np.argmax((table < 0) | (table >= count)))
        raise CheckpointError(
            f"{what}: names expert {int(table.reshape(-1)[where])} of token "
            f"{where // table.shape[1]}; allowed: 0 to {count - 1}; download the file again"
        )
    ordered = np.sort(table, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if twice.any():
        raise CheckpointError(
            f"{what}: names an expert twice for token {int(np.argmax(twice))}; allowed: each once; "
            "download the file again"
        )


class _Looked:
    """Which tensors were looked through. Once the first is requested, another core goes ahead
    through all of them.

    For 1 GB of BF16 in the page cache packing took 0.28 s, with looking before it 0.40 s, with
    looking meanwhile 0.30 to 0.33 s (measured on two cores of a Xeon, best and median of five).
    From a disk it reads ahead as well.
    """

    def __init__(self, names: list[str], look: Callable[[str], None]) -> None:
        self._look = look
        self._locks = {name: threading.Lock() for name in names}
        self._done: set[str] = set()
        self._ahead: threading.Thread | None = None

    def at(self, name: str) -> None:
        """Returns when this one is known to be good. Raises what looking at it raises."""
        if self._ahead is None:
            self._ahead = threading.Thread(target=self._go_ahead, daemon=True)
            # no thread can be had: each tensor is looked through when it is requested
            with suppress(RuntimeError):
                self._ahead.start()
        with self._locks[name]:
            if name not in self._done:
                self._look(name)
                self._done.add(name)

    def _go_ahead(self) -> None:
        for name in self._locks:
            try:
                self.at(name)
            except CheckpointError:
                return  # whoever asks for this one looks again and sees it


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened Hugging Face directory or GGUF file. `spec.dtype`: the type of its tensors, or the
    one for what a GGUF file holds.
    """

    path: Path
    spec: ModelSpec
    dtype: DType
    weights: Weights
    note: str = ""  # what a user should know of it, in a line


def open_checkpoint(
    path: str | Path, dtype: DType | None = None, *, blocks: bool = True
) -> Checkpoint:
    """Check a directory of config.json and safetensors, or a GGUF file, then map it. Raises
    CheckpointError or ConfigError.

    `dtype`: of a GGUF file's weights and of packed experts, which are turned into it; without it
    packed experts, and always others of safetensors, stay as they are stored. `blocks`: so do a
    GGUF file's, where a CPU multiplies them.
    """
    path = Path(path)
    if is_gguf(path):
        weights = open_gguf(path, dtype, blocks=blocks)
        return Checkpoint(path, weights.spec, weights.dtype, weights, weights.note)
    refuse_foreign(path)
    if not is_there(path, Path.is_dir):
        raise CheckpointError(
            f"{shown(path)}: not a directory; give the folder of a Hugging Face checkpoint, or a "
            "GGUF file"
        )
    if find(path, CONFIG) is None:
        raise CheckpointError(
            f"{path}: has no {CONFIG}; give the folder of a Hugging Face checkpoint"
        )
    if is_packed(packed := described(path)):
        return _open_packed(path, packed, dtype)
    spec = load_model(path, runs=True)
    found, layout, named = published(spec, _entries(path)), _layout(path), tensors(spec)
    spec = with_stored_scales(spec, named, layout, found)
    spec, of_caches = with_cache_scales(path, spec, named, found)
    _refuse_suspicious(path, spec, found, layout, of_caches)
    few = {name: form for name in named if decoded(form := format_of(spec, name))}
    if len({named[name].name for name in few}) < len(few):
        raise CheckpointError(
            f"{path}: fused matrices of family {spec.family} are not read quantised; {INSTEAD}"
        )
    coded: dict[str, CodedTensor | FourBitTensor | PackedExpert] = {
        name: coded_tensor(path, named[name], form, layout, found) for name, form in few.items()
    }
    entries = {
        name: _checked(path, name, tensor, found)
        for name, tensor in named.items()
        if name not in coded
    }
    exact = {name for name in entries if _more_exact(spec, name, entries[name])}
    alike = [entry for name, entry in entries.items() if name not in exact]
    dtype = _common_dtype(path, alike or entries.values())
    spec = replace(spec, dtype=dtype)
    all_entries = [
        *entries.values(),
        *(entry for one in coded.values() for entry in one.entries),
    ]
    files: dict[Path, Array] = {
        file: np.memmap(file, np.uint8, "r") for file in dict.fromkeys(e.path for e in all_entries)
    }
    whole = StoredWeights(spec, dtype, entries, files, coded)
    return Checkpoint(path, spec, dtype, whole, _note_rounded(exact, dtype))


def _more_exact(spec: ModelSpec, name: str, entry: Entry) -> bool:
    """Is it stored in FP32, and may be next to weights of 16 bits? Vectors of `_EXACT`, and with
    hyper-connections all vectors and mixing matrices, are taken in FP32, routers are rounded. Or is
    it a table of numbers?
    """
    leaf = name.rpartition(".")[2]
    vector = spec.hyper is not None and (len(entry.shape) == 1 or leaf.startswith(_FINE))
    exact = vector or leaf in (*_EXACT, ROUTER)
    return leaf == CHOSEN or (entry.dtype == "F32" and exact)


def _note_rounded(exact: Iterable[str], dtype: DType) -> str:
    rounded = dtype is not DType.FP32 and any(name.endswith(f".{ROUTER}") for name in exact)
    return f"routers are stored in FP32 and rounded to {dtype.value.upper()}" if rounded else ""


def _layout(path: Path) -> Layout | None:
    """How the checkpoint stores matrices of four bits, if it says that it has some."""
    config = find(path, CONFIG)
    quantization = (
        read_config(config, CheckpointError).get("quantization_config") if config else None
    )
    return layout_of(quantization) if isinstance(quantization, dict) else None


def _open_packed(path: Path, spec: ModelSpec, dtype: DType | None) -> Checkpoint:
    """Experts that are packed and quantised: as they are or, with a `dtype`, turned into it."""
    if dtype is not None:
        spec = unpacked(spec, dtype)
    found, named = _entries(path), tensors(spec)
    spec, of_caches = with_cache_scales(path, spec, named, found)
    experts = packed_entries(path, spec, found)
    of_experts = {entry.name for one in experts.values() for entry in one.entries}
    plain = replace(spec, stored=None)  # in which each tensor has the name that it has in 16 bits
    _refuse_suspicious(
        path,
        plain,
        {name: entry for name, entry in found.items() if name not in of_experts},
        None,
        of_caches,
    )
    entries = {
        name: _checked(path, name, tensor, found) for name, tensor in others(named, spec).items()
    }
    stored = _common_dtype(path, entries.values())
    every = [*entries.values(), *(entry for one in experts.values() for entry in one.entries)]
    files: dict[Path, Array] = {
        file: np.memmap(file, np.uint8, "r") for file in dict.fromkeys(e.path for e in every)
    }
    spec = replace(spec, dtype=dtype or stored)
    if dtype is None:
        whole = StoredWeights(spec, stored, entries, files, coded_matrices(experts, named))
        return Checkpoint(path, spec, stored, whole, note_as_stored(experts, stored))
    rest = StoredWeights(replace(spec, dtype=stored), stored, entries, files)
    weights = PackedWeights(spec, spec.dtype, experts, named, rest, files)
    return Checkpoint(path, spec, spec.dtype, weights, weights.note)


def _entries(path: Path) -> dict[str, Entry]:
    """Every tensor of the directory by its name there."""
    if single := find(path, SINGLE):
        return read_header(single)
    if index := find(path, INDEX):
        return _sharded(path, index)
    if format := format_of_folder(path):
        raise CheckpointError(
            f"{path}: has only weights in {format}, a format that is not read; {INSTEAD}"
        )
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise CheckpointError(
            f"{path}: has only pickled weights, which can run code; load and save_pretrained them "
            "to get safetensors"
        )
    raise CheckpointError(
        f"{path}: has neither {SINGLE} nor {INDEX}; download the weights in safetensors format"
    )


def _sharded(path: Path, index: Path) -> dict[str, Entry]:
    """Tensors of all files that the index names, each where the index places it and nowhere
    else.
    """
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{index}: weight_map must map tensors to files; download it again")
    found: dict[str, Entry] = {}
    holder: dict[str, str] = {}
    for file in sorted(set(where.values())):
        for name, entry in read_header(_shard(path, index, file)).items():
            if name in found:
                raise CheckpointError(
                    f"{path}: {shown(name)} is in {shown(holder[name])} and in {shown(file)}; "
                    "download both again"
                )
            found[name], holder[name] = entry, file
    for name, file in where.items():
        if holder.get(name) != file:
            raise CheckpointError(
                f"{index}: places {shown(name)} in {shown(file)}, which does not hold it; "
                "download both again"
            )
    for name in sorted(found.keys() - where.keys()):
        raise CheckpointError(
            f"{index}: {shown(name)} is missing, which {shown(holder[name])} holds; download both "
            "again"
        )
    return found


def _shard(path: Path, index: Path, file: str) -> Path:
    if file in ("", ".", "..") or "/" in file or os.sep in file:
        raise CheckpointError(
            f"{index}: names {shown(file)}, which is not a file of this folder; download it again"
        )
    found = find(path, file)
    if found is None:
        raise CheckpointError(f"{index}: names {shown(file)}, which is missing; download it")
    return found


def _refuse_suspicious(
    path: Path,
    spec: ModelSpec,
    found: dict[str, Entry],
    layout: Layout | None,
    of_caches: Collection[str],
) -> None:
    """Raises CheckpointError for a tensor of another format, or one that the model leaves out.
    `of_caches`: names of their scales.
    """
    known = set(of_caches)
    for name, tensor in tensors(spec).items():
        form = format_of(spec, name)
        known |= names_read(tensor, form, layout) if decoded(form) else {tensor.name}
    for name in sorted(found.keys() - known):
        if is_quantized(name) and not beyond(spec, name):
            raise CheckpointError(
                f"{path}: {shown(name)} belongs to a quantized checkpoint, "
                f"{format_of_tensors(found)}; {INSTEAD}"
            )
    refuse_left_over(path, spec, found, known)


def _checked(path: Path, name: str, tensor: Tensor, found: dict[str, Entry]) -> Entry:
    if tensor.name not in found:
        raise CheckpointError(
            f"{path}: tensor {shown(tensor.name)} is missing; is {CONFIG} that of these weights?"
        )
    entry = found[tensor.name]
    if entry.shape != tensor.shape:
        raise CheckpointError(
            f"{entry.path}: {shown(entry.name)} has shape {list(entry.shape)}, expected "
            f"{list(tensor.shape)} from {CONFIG}"
        )
    if name.endswith(f".{CHOSEN}") and entry.dtype in INTEGERS:
        return entry
    if entry.dtype not in STORED:
        format = format_of_dtype(entry.dtype)
        stored = f"{entry.dtype}{f' ({format})' if format else ''}, expected {', '.join(STORED)}"
        raise CheckpointError(f"{entry.path}: {shown(entry.name)} is stored as {stored}; {INSTEAD}")
    return entry


def _common_dtype(path: Path, entries: Iterable[Entry]) -> DType:
    """One type for all, so that nothing is converted behind the user's back."""
    examples = {entry.dtype: entry.name for entry in entries}
    if len(examples) > 1:
        kinds = ", ".join(f"{dtype} ({shown(name)})" for dtype, name in sorted(examples.items()))
        raise CheckpointError(
            f"{path}: mixes types: {kinds}; convert it to one with save_pretrained"
        )
    return STORED[next(iter(examples))]


@dataclass(slots=True)
class RandomWeights:
    """Weights from a seed, made when requested: a tensor depends on (seed, its name) alone."""

    spec: ModelSpec
    seed: int
    dtype: DType
    keep: int = KEPT_TENSORS  # made last, of matrices and of quantised ones each
    _names: frozenset[str] = field(default=frozenset(), repr=False)  # once one was requested
    _recent: OrderedDict[str, Array] = field(default_factory=OrderedDict, repr=False)
    _recent_coded: OrderedDict[str, Encoded] = field(default_factory=OrderedDict, repr=False)

    def __getitem__(self, name: str) -> Array:
        if name not in self._recent:
            matrix, _, part = name.rpartition(".")
            self._names = self._names or frozenset(tensors(self.spec))
            headed = self.spec.draft_head is not None and name.startswith(PREFIX)
            if (
                name not in self._names
                and not headed
                and not (part in CODED_PARTS and decoded(format_of(self.spec, matrix)))
            ):
                raise CheckpointError(f"{self.spec.name} has no tensor {shown(name)}")
            self._recent[name] = self._make(name)
            if len(self._recent) > self.keep:
                self._recent.popitem(last=False)
        self._recent.move_to_end(name)
        return self._recent[name]

    def _make(self, name: str) -> Array:
        if name.startswith(PREFIX):
            return random_tensor(self.spec, self.seed, name, self.dtype)
        matrix, _, part = name.rpartition(".")
        if part in CODED_PARTS:
            made: Array = getattr(self._coded(matrix), part)
            return made
        if decoded(format_of(self.spec, name)):
            return self._coded(name).astype(np.float32)
        return self._plain(name)

    def _coded(self, name: str) -> Encoded:
        """The nearest weights of the matrix's format."""
        if name not in self._recent_coded:
            code = code_of(format_of(self.spec, name))
            self._recent_coded[name] = code.quantise(self._plain(name).astype(np.float32))
            if len(self._recent_coded) > self.keep:
                self._recent_coded.popitem(last=False)
        return self._recent_coded[name]

    def _plain(self, name: str) -> Array:
        random = np.random.Generator(np.random.PCG64([self.seed, zlib.crc32(name.encode())]))
        leaf = name.rpartition(".")[2]
        if leaf == CHOSEN:
            return self._table(name, random)
        dtype = DType.FP32 if leaf.startswith(_FINE) else self.dtype
        mean, deviation = _distribution(self.spec, name)
        values = random.standard_normal(canonical_shape(self.spec, name), np.float32)
        values *= np.float32(deviation)
        values += np.float32(mean)
        return values.astype(NUMPY[dtype])

    def _table(self, name: str, random: np.random.Generator) -> Array:
        """Different experts for each token."""
        tokens, chosen = canonical_shape(self.spec, name)
        feed = self.spec.layer(int(name.split(".")[1])).feed
        assert isinstance(feed, ExpertFeed)
        first = random.integers(feed.experts, size=(tokens, 1))
        step = random.integers(1, max(2, feed.experts // max(1, chosen)), size=(tokens, 1))
        return (first + step * np.arange(chosen)) % feed.experts


def format_of(spec: ModelSpec, name: str) -> Format:
    """The stored format of a matrix by its canonical name; of a vector, that of what is not
    chosen.
    """
    leaf = name.rpartition(".")[2]
    _, _, within = name.partition(".")
    if within and within.count(".") == 1:
        own = spec.formats.in_layer(int(within.partition(".")[0]), leaf)
        if own is not None:
            return own
    role = next((role for role, leaves in _ROLES.items() if leaf in leaves), None)
    if role is Role.DENSE and ".experts." in name:
        role = Role.EXPERT
    return spec.formats.of(role) if role else spec.formats.rest


def random_weights(
    spec: ModelSpec, seed: int, dtype: DType | None = None, *, keep: int = KEPT_TENSORS
) -> RandomWeights:
    """Weights of the right shapes and of sizes that keep activations near one; `dtype`: the model's
    own unless given. `keep`: matrices that stay in memory; others are made again when requested.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(f"seed {shown(seed)}: allowed: 0 to 2^64 - 1; choose another")
    chosen = dtype or spec.dtype
    return RandomWeights(replace(spec, dtype=chosen), seed, chosen, keep)


def _distribution(spec: ModelSpec, name: str) -> tuple[float, float]:
    """(mean, standard deviation) of a tensor: unit outputs, additions small against the
    residual.
    """
    leaf = name.rpartition(".")[2]
    shape = canonical_shape(spec, name)
    if leaf.endswith(("norm", "hyper_scale")) or leaf in ("layer_scalar", "expert_scales"):
        return 1.0, 0.1
    if leaf.endswith(("_bias", "hyper_base")):
        return 0.0, 0.1
    if leaf in ("sinks", DECAY, SKIP):
        return 0.0, 1.0
    if leaf == "embed":
        # A tied table is also the LM head: rows of length 2 keep its logits within reach of
        # sampling.
        return 0.0, 2 * spec.hidden**-0.5 if spec.tied else 1.0
    if leaf in ("o", "down", "shared_down"):
        return 0.0, float((2 * spec.layers * shape[1]) ** -0.5)
    return 0.0, float((2 if leaf == "lm_head" else 1) * shape[1] ** -0.5)
