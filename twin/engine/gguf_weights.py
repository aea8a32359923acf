"""Weights of a GGUF file: a tensor is turned into a type of the engine's when it is requested, or
its blocks are given as the file has them.

The `gguf` package knows every stored type and every name; it is an optional extra.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from twin.engine.safetensors import NUMPY, Array, check_finite
from twin.errors import CheckpointError
from twin.models.codes import CODES, BlockCode
from twin.models.codes.gguf import as_coded, as_format
from twin.models.decoder import Tensor
from twin.models.formats import Role, format_named
from twin.models.gguf_config import Architecture, Keys, architecture_of, factors_read
from twin.models.gguf_file import DOWNLOAD, KINDS, GgufFile, GgufTensor, read_gguf
from twin.models.load import canonical, load_model, tensors
from twin.models.spec import DType, ModelSpec
from twin.models.weight import total
from twin.text import shown

BLOCKS, PARTS = "blocks", ("codes", "scales")  # of a matrix, behind its name
HEADS = ("embed", "lm_head")  # of which a plan takes blocks where the LM head has them
MISSING = "reading GGUF needs the package gguf (the extra monotwin[gguf]): pip install gguf"
KEPT_TENSORS = 8  # a layer is packed rank by rank, each with the same ones
LARGEST_KEPT_BYTES = 2**28  # the table of embeddings is loaded once or twice
# of a layer, as old files have them
_ANGLES = re.compile(r"blk\.\d+\.(rope_freqs|attn_rot_embd)\.weight\Z")
ROWS_ELEMENTS = 2**20  # turned at once: FP32 of that size stays in a core's cache for the most part


@dataclass(slots=True)
class GgufWeights:
    """Tensors by canonical name: matrices as `dtype`, vectors in FP32. Of matrices that the model's
    formats keep, "NAME.blocks", too: [rows, bytes] in the format of the stage that multiplies it;
    or its "NAME.codes" and "NAME.scales".

    Raises CheckpointError for a tensor with an infinity or a NaN, which may come from the file or
    from turning it into `dtype`.
    """

    spec: ModelSpec
    dtype: DType
    file: GgufFile
    own: Architecture
    names: dict[str, GgufTensor]  # by a checkpoint's name
    _data: Array = field(repr=False)  # the whole file, mapped
    _gguf: Any = field(repr=False)
    _recent: OrderedDict[str, Array] = field(default_factory=OrderedDict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __getitem__(self, name: str) -> Array:
        known = tensors(self.spec)
        matrix, _, part = name.rpartition(".")
        if part in (BLOCKS, *PARTS) and matrix in known:
            return self._kept(matrix, known[matrix], part)
        if name not in known:
            raise CheckpointError(f"{self.spec.name} has no tensor {shown(name)}")
        with self._lock:
            whole = self._whole(known[name])
        if self.own.norms_with_one and name.endswith("norm"):
            return whole  # it holds its one already
        return canonical(self.spec, name, whole)

    @property
    def note(self) -> str:
        """What becomes of the file's types, in a line."""
        spec, used = self.spec, set(self.names.values())
        stored = sum(tensor.bytes for tensor in used)
        kinds = sorted({KINDS[t.kind][0] for t in used if len(t.shape) > 1})
        plain = sum(math.prod(t.shape) * self._type(t).bytes for t in used)
        if spec.stored is None:
            become, made = f"become {self.dtype.value}", plain
        else:
            matrices, table = total(spec.weights(), "parameters"), spec.vocab * spec.hidden
            # the table of tokens is looked up in 16 bits
            rest = plain - (matrices + (0 if spec.tied else table)) * self.dtype.bytes
            made = total(spec.weights(), "stored_bytes") + table * self.dtype.bytes + rest
            become = (
                f"multiplied as {', '.join(dict.fromkeys(w.format.name for w in spec.weights()))}"
            )
        return (
            f"{self.file.path.name}: {', '.join(kinds)}, {stored / 1e9:.3g} GB in the file, "
            f"{become}, {made / 1e9:.3g} GB in memory"
        )

    def _type(self, tensor: GgufTensor) -> DType:
        return self.dtype if len(tensor.shape) > 1 else DType.FP32

    def _kept(self, name: str, tensor: Tensor, part: str) -> Array:
        """A part of a matrix as its format has it, rows in the order of Hugging Face's."""
        found = self.names[tensor.name]
        kind = KINDS[found.kind][0].lower()
        formats, code = self.spec.formats, CODES[kind]
        assert isinstance(code, BlockCode)
        leaf = name.rpartition(".")[2]
        form = (
            formats.of(Role.HEAD)
            if name in HEADS
            else formats.in_layer(int(name.split(".")[1]), leaf)
        )
        assert form is not None
        raw = self._data[found.begin : found.begin + found.bytes].reshape(found.shape[0], -1)
        for numbers in code.numbers(raw):
            if not np.isfinite(numbers).all():
                raise CheckpointError(
                    f"{self.file.path}: {shown(found.name)} holds a scale that is no finite "
                    f"number; {DOWNLOAD}"
                )
        # where a tensor holds several matrices, the rows of this one
        places = np.broadcast_to(np.arange(len(raw))[:, None], found.shape)
        rows = canonical(self.spec, name, self._unpermuted(found.name, places))[:, 0]
        in_order = len(rows) == len(raw) and bool((np.diff(rows) == 1).all())
        chosen = raw if in_order else raw[rows]
        return as_format(chosen, kind, form) if part == BLOCKS else as_coded(chosen, kind, part)

    def _whole(self, tensor: Tensor) -> Array:
        found = self._recent.get(tensor.name)
        if found is None:
            found = self._made(self.names[tensor.name])
            if found.nbytes > LARGEST_KEPT_BYTES:
                return found
            self._recent[tensor.name] = found
            if len(self._recent) > KEPT_TENSORS:
                self._recent.popitem(last=False)
        self._recent.move_to_end(tensor.name)
        return found

    def _made(self, tensor: GgufTensor) -> Array:
        dtype = self._type(tensor)
        out = np.empty(tensor.shape, NUMPY[dtype])
        rows = out.reshape(-1, tensor.shape[-1])
        stored = self._data[tensor.begin : tensor.begin + tensor.bytes].reshape(len(rows), -1)
        kind = self._gguf.GGMLQuantizationType(tensor.kind)

        def turn(part: slice) -> None:
            with np.errstate(over="ignore"):  # what becomes infinite is refused below
                rows[part] = self._gguf.dequantize(np.ascontiguousarray(stored[part]), kind)

        parts = _parts(len(rows), tensor.shape[-1])
        if len(parts) == 1:
            turn(parts[0])
        else:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(turn, parts))
        check_finite(f"{self.file.path}: {shown(tensor.name)} as {dtype.value}", out, dtype)
        return self._unpermuted(tensor.name, out)

    def _unpermuted(self, name: str, array: Array) -> Array:
        """Rows of q and k as Hugging Face has them: first elements of all pairs, then second."""
        leaf = name.split(".")[-2]
        if not self.own.permuted or leaf not in ("attn_q", "attn_k"):
            return array
        heads = self.spec.heads if leaf == "attn_q" else self.spec.kv_heads
        pairs = array.reshape(heads, -1, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)


def _parts(rows: int, columns: int) -> list[slice]:
    step = max(1, ROWS_ELEMENTS // columns)
    return [slice(first, first + step) for first in range(0, rows, step)]


def open_gguf(path: Path, dtype: DType | None = None, *, blocks: bool = True) -> GgufWeights:
    """A GGUF file's weights, as `dtype`, by default the model's own: `spec.dtype`. Without a
    `dtype`, matrices of types that the engine multiplies stay what they are: with `blocks` as CPUs
    have them, else as GPUs do.

    All but the tensors' elements is checked before any is read. Raises CheckpointError or
    ConfigError.
    """
    gguf = _package(path)
    file = read_gguf(path)
    _refuse_parts(file)
    spec = load_model(path, runs=True)
    if dtype is not None:
        spec = replace(spec, stored=None)
    elif spec.stored is not None and not blocks:
        plain = format_named(spec.dtype.value)
        spec = replace(spec, stored=spec.stored.turned(plain, on_gpus=True))
    names = _named(gguf, file, spec)
    for tensor in {t.kind: t for t in names.values()}.values():
        _check_kind(gguf, file, tensor)
    data = np.memmap(path, np.uint8, "r")
    return GgufWeights(spec, dtype or spec.dtype, file, architecture_of(file), names, data, gguf)


def _package(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(f"{shown(path)}: {MISSING}") from error
    return gguf


def _refuse_parts(file: GgufFile) -> None:
    count = file.metadata.get("split.count")
    if count not in (None, 0, 1):
        raise CheckpointError(
            f"{shown(file.path)}: is one of {shown(count)} parts; join them: llama-gguf-split "
            "--merge"
        )


def _named(gguf: Any, file: GgufFile, spec: ModelSpec) -> dict[str, GgufTensor]:
    """The file's tensors by the name that a Hugging Face checkpoint gives them."""
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == Keys(file).architecture)
    known = gguf.get_tensor_name_map(kind, spec.layers)
    out: dict[str, GgufTensor] = {}
    for tensor in tensors(spec).values():
        module, _, leaf = tensor.name.rpartition(".")
        name = f"{known.get_name(module)}.{leaf}"
        found = file.tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"{shown(file.path)}: tensor {shown(name)} is missing; download it again"
            )
        if found.shape != tensor.shape:
            raise CheckpointError(
                f"{shown(file.path)}: {shown(name)} has shape {list(found.shape)}, "
                f"expected {list(tensor.shape)} from its own description; download it again"
            )
        out[tensor.name] = found
    _refuse_surplus(file, spec, {tensor.name for tensor in out.values()})
    return out


def _refuse_surplus(file: GgufFile, spec: ModelSpec, used: set[str]) -> None:
    """A tensor that is not used would have changed the output, but for angles of positions."""
    for name in sorted(file.tensors.keys() - used - factors_read(file)):
        if not _ANGLES.match(name):
            raise CheckpointError(
                f"{shown(file.path)}: {shown(name)} is not part of a {spec.family} model; "
                "use the original checkpoint (a folder of config.json and safetensors)"
            )


def _check_kind(gguf: Any, file: GgufFile, tensor: GgufTensor) -> None:
    """Raises CheckpointError for a type that the package cannot turn into numbers, by its name."""
    title, _, block_bytes = KINDS[tensor.kind]
    try:
        gguf.dequantize(
            np.zeros((1, block_bytes), np.uint8), gguf.GGMLQuantizationType(tensor.kind)
        )
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(
            f"{shown(file.path)}: {shown(tensor.name)} is stored as {title}, not read; take "
            "Q4_K_M or F16"
        ) from error
