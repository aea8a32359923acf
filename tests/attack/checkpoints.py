"""Attacks on checkpoint folders: headers, offsets, types, shapes, indices, links, special files,
weights without a value, tokenizers.

Laws: a folder is refused by one bounded line, or every weight is, bit for bit, what was saved; a
tokenizer that is accepted gives token ids and stop tokens that a model can have, and a prompt is
neither cut nor filled up; always in bounded time.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.attack.defect import Defect
from tests.attack.hostile import INTEGERS, TEXTS, Pairs, Raw, check_refusal, to_json, value
from tests.attack.machinery import machinery
from tests.command_line import TINY
from twin.engine.safetensors import NUMPY, Array
from twin.engine.save import INDEX, SINGLE
from twin.engine.tokenizer import TOKENIZER, make_byte_tokenizer, open_tokenizer
from twin.engine.weights import open_checkpoint, random_weights, save_checkpoint
from twin.engine.words import TOKENIZER_CONFIG
from twin.errors import TwinError
from twin.models.load import tensors
from twin.models.spec import DType, Lanes, Rope, RopeStyle

NAME = "checkpoints"
PROMPT = "ab <bos> the naïve 🙂 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"
SMALL = replace(TINY, hidden=32, ffn=64, vocab=300, context=64)
SPECS = {
    "one file": (SMALL, DType.BF16, 1),
    "three files": (SMALL, DType.FP16, 3),
    "tied": (replace(SMALL, tied=True), DType.FP32, 1),
    "biases": (replace(SMALL, family="qwen2", qkv_bias=True), DType.BF16, 2),
    "lanes": (
        replace(
            SMALL, family="laneformer", rope=Rope(1e4, RopeStyle.INTERLEAVED), lanes=Lanes(2, 1)
        ),
        DType.BF16,
        1,
    ),
}


@dataclass(frozen=True, slots=True)
class Saved:
    """A good checkpoint: its files, and its tensors under their canonical names."""

    files: dict[str, bytes]
    tensors: dict[str, Array]


@dataclass(slots=True)
class Case:
    """A folder that is being damaged, `home`, inside of the case's scratch folder."""

    home: Path
    saved: Saved
    story: str

    def file(self, chance: random.Random) -> Path:
        """One of the files of weights."""
        return self.home / chance.choice(
            [name for name in self.saved.files if name.endswith(".safetensors")]
        )


def attack(chance: random.Random, folder: Path) -> str:
    """One folder, damaged once or twice."""
    name = chance.choice(sorted(SPECS))
    case = Case(folder / "tiny", _saved(name), name)
    case.home.mkdir()
    for file, content in case.saved.files.items():
        (case.home / file).write_bytes(content)
    chosen = [chance.choice(_DAMAGES) for _ in range(chance.choice((1, 1, 1, 2)))]
    # last: another damage would wait for a pipe
    for damage in sorted(set(chosen), key=lambda each: each is _special):
        case.story += f", {damage.__name__}"
        try:
            damage(chance, case)
        except Exception:  # the damage before left nothing that this one can change
            case.story += " (not possible)"
    weights = _open_weights(case, folder)
    words = _open_tokenizer(case, folder)
    return f"weights {weights}, tokenizer {words}"


# ---- laws ----------------------------------------------------------------------------------------


def _open_weights(case: Case, folder: Path) -> str:
    try:
        opened = open_checkpoint(case.home).weights
        found = {name: opened[name] for name in tensors(opened.spec)}
    except TwinError as error:
        check_refusal(error, folder, case.story)
        return "refused"
    for name, array in found.items():
        saved = case.saved.tensors[name]
        if (
            array.dtype != saved.dtype
            or array.shape != saved.shape
            or array.tobytes() != saved.tobytes()
        ):
            raise Defect(f"{case.story}: {name} is not what was saved, and nothing was said")
    return "accepted"


def _open_tokenizer(case: Case, folder: Path) -> str:
    try:
        tokenizer = open_tokenizer(case.home)
        tokens = tokenizer.encode(PROMPT)
    except TwinError as error:
        check_refusal(error, folder, case.story)
        return "refused"
    if not all(type(token) is int and 0 <= token < 2**32 for token in tokens):
        raise Defect(f"{case.story}: the prompt is {tokens[:9]}")
    if not all(type(token) is int and 0 <= token < 2**24 for token in tokenizer.stop):
        raise Defect(f"{case.story}: generation stops at {tokenizer.stop}")
    if (
        case.story.count(",") == 1
        and case.story.endswith("_frame")
        and len(tokens) != len(_tokens())
    ):
        raise Defect(
            f"{case.story}: a prompt of {len(_tokens())} tokens became one of {len(tokens)}"
        )
    try:
        detokenizer = tokenizer.detokenizer(tokens)
        text = (
            "".join(detokenizer.push(token) for token in (65, 0, 299, 257, 256))
            + detokenizer.finish()
        )
    except TwinError as error:
        check_refusal(error, folder, case.story)
        return "refused"
    if not isinstance(text, str):
        raise Defect(f"{case.story}: decoded as {type(text)}")
    return "accepted"


@lru_cache(maxsize=8)
def _saved(name: str) -> Saved:
    spec, dtype, shards = SPECS[name]
    weights = random_weights(spec, 5, DType.FP32)
    with TemporaryDirectory() as place:
        home = Path(place) / "tiny"
        save_checkpoint(home, weights, shards=shards, dtype=dtype)
        make_byte_tokenizer(home)
        files = {path.name: path.read_bytes() for path in sorted(home.iterdir())}
    return Saved(
        files, {each: np.array(weights[each].astype(NUMPY[dtype])) for each in tensors(spec)}
    )


@lru_cache(maxsize=1)
def _tokens() -> list[int]:
    with TemporaryDirectory() as place:
        make_byte_tokenizer(Path(place))
        return open_tokenizer(place).encode(PROMPT)


# ---- headers -------------------------------------------------------------------------------------


def _parts(raw: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def _rewritten(path: Path, header: object, data: bytes, length: int | None = None) -> None:
    text = to_json(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def _entry(chance: random.Random, case: Case) -> None:
    """One field of one tensor."""
    path = case.file(chance)
    header, data = _parts(path.read_bytes())
    name = chance.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    match chance.choice(
        (
            "dtype",
            "shape",
            "one of the shape",
            "offsets",
            "one offset",
            "any",
            "whole",
            "gone",
            "more",
        )
    ):
        case "dtype":
            entry["dtype"] = chance.choice(
                (
                    *TEXTS,
                    "F" + "8" * 5_000,
                    "F8_E4M3",
                    "I16",
                    "F64",
                    "BOOL",
                    "U8",
                    "I٣",
                    "BF1" + "6" * 100,
                    16,
                    None,
                    ["F16"],
                    "bf16",
                )
            )
        case "shape":
            entry["shape"] = chance.choice(
                (
                    [],
                    [1],
                    [*entry["shape"][::-1], 1],
                    [1] * 500,
                    [Raw("9" * 4_000)] * 900,
                    [10**39] * 8,
                    [0, 10**18],
                    [-32, -16],
                    [True, 5],
                    [32.0],
                    [2**63],
                    "32",
                    {"0": 1},
                    value(chance),
                    [*entry["shape"], 1],
                    [0],
                    [chance.choice(INTEGERS)] * 2,
                )
            )
        case "one of the shape":
            entry["shape"][chance.randrange(len(entry["shape"]))] = value(chance)
        case "offsets":
            begin, end = entry["data_offsets"]
            entry["data_offsets"] = chance.choice(
                (
                    [end, begin],
                    [begin + 2, end + 2],
                    [begin, end + 2],
                    [begin - 2, end],
                    [0, end - begin],
                    [2**63, 2**63 + end - begin],
                    [begin],
                    [],
                    [begin, end, 0],
                    [-8, end - begin - 8],
                    [float(begin), end],
                    [str(begin), str(end)],
                    {"a": begin, "b": end},
                    [2**64 - 8, 2**64 + end - begin - 8],
                    [begin, begin],
                    value(chance),
                )
            )
        case "one offset":
            entry["data_offsets"][chance.randrange(2)] = value(chance)
        case "any":
            entry[chance.choice(("dtype", "shape", "data_offsets"))] = value(chance)
        case "whole":
            header[name] = value(chance)
        case "gone":
            entry.pop(chance.choice(("dtype", "shape", "data_offsets")))
        case "more":
            entry[chance.choice(TEXTS)] = value(chance)
    _rewritten(path, header, data)


def _names(chance: random.Random, case: Case) -> None:
    """Tensors missing, twice, under other names, in another order, and unknown ones."""
    path = case.file(chance)
    header, data = _parts(path.read_bytes())
    names = [key for key in header if key != "__metadata__"]
    name, other = chance.choice(names), chance.choice(names)
    changed: object = header
    match chance.choice(
        (
            "gone",
            "renamed",
            "same name",
            "same place",
            "shuffled",
            "empty",
            "hostile",
            "extra",
            "metadata",
            "none",
        )
    ):
        case "gone":
            header.pop(name)
        case "renamed":
            header[
                chance.choice(
                    (
                        *TEXTS,
                        name + ".bias",
                        "model.layers.0.extra.weight",
                        "quant_state" * 2_000 + " ",
                        "model.layers." + "9" * 600 + ".x",
                    )
                )
            ] = header.pop(name)
        case "same name":
            changed = Pairs([*header.items(), (name, header[other])])
        case "same place":
            header[name] = dict(
                header[name],
                data_offsets=header[other]["data_offsets"],
                shape=header[other]["shape"],
            )
        case "shuffled":
            pairs = list(header.items())
            chance.shuffle(pairs)
            changed = dict(pairs)
        case "empty":
            header[chance.choice(TEXTS)] = {
                "dtype": "F32",
                "shape": [0, 7],
                "data_offsets": [len(data)] * 2,
            }
        case "hostile":
            extra = chance.choice(
                (
                    *TEXTS,
                    "model.layers.0.self_attn.q_proj.bias",
                    "model.layers.1.x\x1b[2J",
                    "a.weight_scale",
                    "a" * 600,
                )
            )
            header[extra] = {
                "dtype": "U8",
                "shape": [4],
                "data_offsets": [len(data), len(data) + 4],
            }
            data += bytes(4)
        case "extra":
            for number in range(5_000):
                header[f"visual.{number}"] = {
                    "dtype": "U8",
                    "shape": [0],
                    "data_offsets": [len(data)] * 2,
                }
        case "metadata":
            header["__metadata__"] = value(chance)
        case "none":
            changed = {}
    _rewritten(path, changed, data)


def _length(chance: random.Random, case: Case) -> None:
    """What a file says of its header, and what there is of the file."""
    path = case.file(chance)
    raw = path.read_bytes()
    header, data = _parts(raw)
    at = chance.randrange(len(raw))
    match chance.choice(
        ("length", "cut", "longer", "flipped", "nothing", "sparse", "spaces", "large", "aligned")
    ):
        case "length":
            length = chance.choice(
                (
                    0,
                    1,
                    7,
                    len(raw),
                    len(raw) - 8,
                    len(raw) - 7,
                    2**31,
                    2**32,
                    2**63,
                    2**64 - 1,
                    100_000_001,
                    len(raw) // 2,
                )
            )
            _rewritten(path, header, data, length)
        case "cut":
            path.write_bytes(raw[: chance.choice((at, 0, 7, 8, 9, len(raw) - 1, len(raw) - 2))])
        case "longer":
            path.write_bytes(raw + bytes(chance.choice((1, 2, 8, 4096))))
        case "flipped":
            head = bytearray(raw[: len(raw) - len(data)])
            digits = bytes(head)
            head[chance.randrange(len(head))] ^= 1 << chance.randrange(8)
            if not _same_layout(digits, bytes(head)):
                path.write_bytes(bytes(head) + data)
        case "nothing":
            path.write_bytes(
                chance.choice(
                    (b"", bytes(8), b"{}", b"\2" + bytes(7) + b"{}", b"PK\3\4" + bytes(99))
                )
            )
        case "sparse":
            path.write_bytes(raw)
            os.truncate(path, 2**40)
        case "spaces":
            text = json.dumps(header).encode() + b" " * chance.choice((1, 3, 10**6, 17 * 2**20))
            path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        case "large":
            piece = chance.choice(
                (b"[],", b"{},", b'"",', b"1,", b'{"a":1},', b"[1,2],", b"9" * 39 + b",")
            )
            text = b'{"a": [' + piece * (4_000_000 // len(piece)) + b"0]}"
            path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        case "aligned":  # tensors at odd addresses are still what was saved
            text = json.dumps(header).encode()
            text += b" " * chance.randrange(8)
            path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _same_layout(one: bytes, other: bytes) -> bool:
    """Whether two headers exchange the places or types of tensors: a file that says so is another
    file, not a damaged one.
    """
    try:
        first, second = json.loads(one[8:]), json.loads(other[8:])
    except ValueError:
        return False
    return isinstance(second, dict) and first.keys() == second.keys()


# ---- folders -------------------------------------------------------------------------------------


def _index(chance: random.Random, case: Case) -> None:
    """The index of several files; of one file it becomes an index of that one."""
    index = case.home / INDEX
    if not index.exists():
        names = [
            key for key in _parts((case.home / SINGLE).read_bytes())[0] if key != "__metadata__"
        ]
        (case.home / SINGLE).rename(case.home / "all.safetensors")
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "all.safetensors")}))
    content = json.loads(index.read_text())
    where = content["weight_map"]
    name, files = chance.choice(list(where)), sorted(set(where.values()))
    outside = case.home.parent / "outside.safetensors"
    outside.write_bytes((case.home / files[0]).read_bytes())
    match chance.choice(
        ("file", "file", "moved", "gone", "more", "no map", "twin", "copied", "text", "orphan")
    ):
        case "file":
            where[name] = chance.choice(
                (
                    *TEXTS,
                    "..",
                    ".",
                    "",
                    "/",
                    "../outside.safetensors",
                    str(outside),
                    "tiny/../x",
                    "x" * 5_000,
                    "a\0b",
                    "config.json",
                    INDEX,
                    3,
                    None,
                    [],
                    {"a": 1},
                    "./" + files[0],
                    files[0] + "/",
                    files[0].upper(),
                    value(chance),
                )
            )
        case "moved":
            where[name] = chance.choice(files)
        case "gone":
            where.pop(name)
        case "more":
            where[chance.choice(TEXTS)] = files[0]
        case "no map":
            content = chance.choice(
                ({}, {"weight_map": value(chance)}, {"weight_map": {}}, [], Raw("[" * 50_000))
            )
        case "twin":
            (case.home / "zz.safetensors").symlink_to(files[0])
            where[name] = "zz.safetensors"
        case "copied":
            header, data = _parts((case.home / files[0]).read_bytes())
            _rewritten(case.home / "zz.safetensors", header, bytes(len(data)))
            where[name] = "zz.safetensors"
        case "text":
            content = Raw(
                chance.choice(
                    (
                        "",
                        "{",
                        "\ufeff{}",
                        '{"weight_map": {"a": "b", "a": "c"}}',
                        "nul",
                        '{"weight_map": ' + "9" * 9_999 + "}",
                    )
                )
            )
        case "orphan":
            (case.home / chance.choice(files)).unlink()
    index.write_text(to_json(content), encoding="utf-8", errors="replace")


def _special(chance: random.Random, case: Case) -> None:
    """Something else in place of a file."""
    path = case.home / chance.choice([*case.saved.files, "generation_config.json"])
    content = path.read_bytes() if path.exists() else b"{}"
    path.unlink(missing_ok=True)
    outside = case.home.parent / "secret"
    outside.write_bytes(content)
    kinds = (
        "gone",
        "pipe",
        "folder",
        *LINKS,
        "inside",
        "cache",
        "cache out",
        "hard",
        "hop",
        "empty",
    )
    kind = chance.choice(kinds)
    case.story += f" {kind}"
    if kind in LINKS:
        path.symlink_to(chance.choice(LINKS[kind]).format(outside=outside, itself=path.name))
    elif kind in ("cache", "cache out"):
        _cached(case, path, content, outside="out" in kind)
    else:
        _replaced(kind, path, case.home, content)


LINKS = {  # where links lead
    "outside": ("../secret",),
    "absolute": ("{outside}",),
    "dangling": ("nowhere",),
    "loop": ("{itself}",),
    "device": ("/dev/zero", "/dev/null", "/dev/stdin", "/dev/tty"),
    "kernel": ("/proc/self/mem", "/proc/self/environ", "/etc/passwd", "/proc/self/fd/0"),
}


def _cached(case: Case, path: Path, content: bytes, *, outside: bool) -> None:
    """The layout of the Hugging Face cache."""
    place = case.home.parent / "models--a--b"
    (place / "blobs").mkdir(parents=True)
    (place / "snapshots").mkdir()
    (place / "blobs" / "0123").write_bytes(content)
    (place / "elsewhere").write_bytes(content)
    path.symlink_to("../../elsewhere" if outside else "../../blobs/0123")
    case.home = case.home.rename(place / "snapshots" / "tiny")


def _replaced(kind: str, path: Path, home: Path, content: bytes) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "inside":
            (home / "kept").mkdir()
            (home / "kept" / "blob").write_bytes(content)
            path.symlink_to("kept/blob")
        case "hard":
            os.link(home.parent / "secret", path)
        case "hop":
            (home / "hop").symlink_to("..")
            path.symlink_to("hop/secret")
        case "empty":
            path.write_bytes(b"")


def _worthless(chance: random.Random, case: Case) -> None:
    """A weight that is infinite or not a number. Must be refused: the bits differ from what was
    saved.
    """
    path = case.file(chance)
    header, data = _parts(path.read_bytes())
    name = chance.choice([key for key in header if key != "__metadata__"])
    begin, end = header[name]["data_offsets"]
    bits = {
        "BF16": (0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81),
        "F16": (0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x7C01),
    }
    word = (
        struct.pack(
            "<I", chance.choice((0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001))
        )
        if header[name]["dtype"] == "F32"
        else struct.pack("<H", chance.choice(bits[header[name]["dtype"]]))
    )
    at = begin + len(word) * chance.randrange((end - begin) // len(word))
    _rewritten(path, header, data[:at] + word + data[at + len(word) :])


def _config(chance: random.Random, case: Case) -> None:
    """A field of config.json, so that it no longer describes the weights."""
    path = case.home / "config.json"
    config = json.loads(path.read_text())
    key = chance.choice(
        [
            *(k for k in config if k not in ("rope_theta", "hidden_act")),
            "torch_dtype",
            "eos_token_id",
        ]
    )
    config[key] = value(chance)
    path.write_text(to_json(config))


# ---- tokenizers ----------------------------------------------------------------------------------


def _stops(chance: random.Random, case: Case) -> None:
    """Special tokens where the files name them."""
    file = case.home / chance.choice(("generation_config.json", "config.json", TOKENIZER_CONFIG))
    content = json.loads(file.read_text()) if file.exists() else {}
    key = chance.choice(
        ("eos_token_id", "eos_token_id", "bos_token", "eos_token", "add_bos_token", "bos_token_id")
    )
    content[key] = chance.choice(
        (
            value(chance),
            chance.choice(INTEGERS),
            [chance.choice(INTEGERS), 1],
            [1] * 5_000,
            {"content": value(chance)},
            299,
            300,
            [[1]],
            [True],
            1.0,
        )
    )
    file.write_text(to_json(content))


def _frame(chance: random.Random, case: Case) -> None:
    """Settings that a tool left behind: they would cut or fill up prompts."""
    content = json.loads((case.home / TOKENIZER).read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": chance.choice((0, 1, 5)),
        "strategy": "LongestFirst",
        "stride": 0,
    }
    padding = {
        "direction": "Left",
        "pad_to_multiple_of": chance.choice((None, 8, 0)),
        "pad_id": 7,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    content["padding"] = padding | {"strategy": {"Fixed": chance.choice((0, 100, 10**12))}}
    (case.home / TOKENIZER).write_text(json.dumps(content))


def _part(chance: random.Random, case: Case) -> None:
    content = json.loads((case.home / TOKENIZER).read_text())
    (case.home / TOKENIZER).write_text(to_json(content | machinery(chance)))


def _leaf(chance: random.Random, case: Case) -> None:
    """Any value of tokenizer.json."""
    content = json.loads((case.home / TOKENIZER).read_text())
    holder: Any = content
    while True:
        key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if not (isinstance(holder[key], dict | list) and holder[key] and chance.random() < 0.8):
            break
        holder = holder[key]
    holder[key] = value(chance)
    (case.home / TOKENIZER).write_text(to_json(content))


def _spoiled(chance: random.Random, case: Case) -> None:
    """The text of any JSON file: cut, in another encoding, with bytes that are none, nested without
    end.
    """
    path = case.home / chance.choice([name for name in case.saved.files if name.endswith(".json")])
    raw = bytearray(path.read_bytes())
    at = chance.randrange(len(raw))
    match chance.choice(("cut", "utf-16", "mark", "bytes", "nested", "zeros")):
        case "cut":
            path.write_bytes(raw[:at])
        case "utf-16":
            path.write_bytes(raw.decode().encode("utf-16"))
        case "mark":
            path.write_bytes(b"\xef\xbb\xbf" + raw)
        case "bytes":
            raw[at] = chance.choice((0, 0xFF, 0x80, 0x1B))
            path.write_bytes(raw)
        case "nested":
            path.write_bytes(chance.choice((b"[", b'{"a":', b'{"model":[')) * 100_000)
        case "zeros":
            path.write_bytes(bytes(10_000))


_DAMAGES: tuple[Callable[[random.Random, Case], None], ...] = (
    _entry,
    _entry,
    _entry,
    _names,
    _names,
    _length,
    _length,
    _index,
    _index,
    _special,
    _special,
    _worthless,
    _config,
    _stops,
    _frame,
    _part,
    _part,
    _leaf,
    _spoiled,
)
