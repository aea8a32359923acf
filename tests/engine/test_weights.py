"""Checkpoints: what is saved is what is opened, and every kind of damage is named before anything
is read.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.refusals import refused
from twin.engine import safetensors
from twin.engine.weights import open_checkpoint, random_weights, save_checkpoint
from twin.errors import CheckpointError, ConfigError
from twin.models.load import load_model, tensors
from twin.models.spec import (
    WEIGHT_TYPES,
    DType,
    LaneHead,
    Lanes,
    ModelSpec,
    Rope,
    RopeScaling,
    RopeStyle,
)

SPEC = ModelSpec(
    name="tiny",
    family="llama",
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ffn=32,
    vocab=24,
    context=64,
    norm_eps=1e-5,
    rope=Rope(10000.0, RopeStyle.HALF, RopeScaling("llama3", 8.0, 1.0, 4.0, 32)),
    windows=(0, 0),
)
SPECS = [
    SPEC,
    replace(SPEC, tied=True, rope=Rope(5e5, scaling=RopeScaling("linear", 2.0))),
    replace(SPEC, family="mistral", windows=(8, 8)),
    replace(SPEC, family="qwen2", qkv_bias=True, windows=(0, 8)),
    replace(SPEC, family="qwen3", qk_norm=True, head_dim=8),
    *(
        replace(
            SPEC,
            family="laneformer",
            windows=(8, 0),
            rope=Rope(1e4, RopeStyle.INTERLEAVED),
            lanes=Lanes(2, 1, head, early),
        )
        for head, early in zip(LaneHead, (False, True, False), strict=True)
    ),
]


def save(path: Path, spec: ModelSpec = SPEC, shards: int = 1) -> Path:
    save_checkpoint(path, random_weights(spec, 1, DType.BF16), shards=shards)
    return path


@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"{s.family}-{s.lanes.head.name}" if s.lanes else s.family
)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_an_opened_checkpoint_equals_what_was_saved(
    tmp_path: Path, spec: ModelSpec, shards: int, dtype: DType
) -> None:
    weights = random_weights(spec, 7, DType.FP32)
    save_checkpoint(tmp_path / "tiny", weights, shards=shards, dtype=dtype)
    checkpoint = open_checkpoint(tmp_path / "tiny")
    assert checkpoint.spec == replace(spec, dtype=dtype)
    assert checkpoint.weights.dtype is dtype
    for name in tensors(spec):
        assert np.array_equal(
            checkpoint.weights[name], weights[name].astype(safetensors.NUMPY[dtype])
        ), name


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    array = open_checkpoint(save(tmp_path)).weights["layers.1.q"]
    assert not array.flags.owndata
    assert array.dtype == ml_dtypes.bfloat16
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 0


def test_random_weights_depend_on_seed_and_name_not_on_order() -> None:
    names = list(tensors(SPEC))
    forward, backward = random_weights(SPEC, 3), random_weights(SPEC, 3)
    first = {n: forward[n] for n in names}
    assert all(np.array_equal(first[n], backward[n]) for n in reversed(names))
    assert not np.array_equal(first["layers.0.q"], first["layers.1.q"])
    assert not np.array_equal(first["embed"], random_weights(SPEC, 4)["embed"])
    with pytest.raises(CheckpointError, match=r"layers\.9\.q"):
        forward["layers.9.q"]


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    library = pytest.importorskip(
        "safetensors.numpy", reason="the safetensors library is not installed"
    )
    save_checkpoint(tmp_path, random_weights(SPEC, 1, DType.FP32))
    found = library.load_file(tmp_path / "model.safetensors")
    opened = open_checkpoint(tmp_path).weights
    assert np.array_equal(found["model.layers.0.mlp.up_proj.weight"], opened["layers.0.up"])


# ---- damage --------------------------------------------------------------------------------------


def edit(change: Callable[[dict[str, Any]], object], path: Path) -> None:
    """Rewrite the header of a file, its data kept."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def rewrite(path: Path, change: Callable[[dict[str, Any]], object], spec: ModelSpec = SPEC) -> None:
    """Save again with other tensors."""
    weights = random_weights(spec, 1, DType.BF16)
    named: dict[str, Any] = {t.name: weights[n].reshape(t.shape) for n, t in tensors(spec).items()}
    change(named)
    safetensors.write(path / "model.safetensors", named)


UP = "model.layers.1.mlp.up_proj.weight"
FILE = "model.safetensors"


def put(
    name: str, shape: tuple[int, ...] = (2,), dtype: Any = np.float32
) -> Callable[[dict[str, Any]], object]:
    return lambda named: named.update({name: np.zeros(shape, dtype)})


HEADER_DAMAGE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (
        lambda h: h[UP].update(shape=[32, 17]),
        rf"'{UP}' \[32, 17\] of BF16 needs 1088 bytes, it has 1024",
    ),
    (lambda h: h[UP].update(dtype="Q4"), "unknown dtype 'Q4'; expected F16, BF16, F32"),
    (lambda h: h[UP].pop("shape"), "entry of .* is not a dtype, a shape"),
    (lambda h: h[UP].update(shape=[-32, -16]), "is not a dtype, a shape"),
    (lambda h: h[UP].update(shape="32"), "is not a dtype, a shape"),
    (lambda h: h[UP].update(data_offsets=[0, 1024]), "overlaps"),
    (lambda h: h.pop(UP), "leaves a gap after"),
    (lambda h: h.update({UP: 3}), "is not a dtype, a shape"),
]


@pytest.mark.parametrize(("change", "message"), HEADER_DAMAGE)
def test_a_wrong_header_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(change, save(tmp_path) / FILE)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


TENSOR_DAMAGE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda t: t.pop(UP), f"tensor '{UP}' is missing"),
    (put(UP, (16, 32), ml_dtypes.bfloat16), rf"'{UP}' has shape \[16, 32\], expected \[32, 16\]"),
    (put(UP, (32, 16)), rf"mixes types: BF16 \(.*\), F32 \('{UP}'\)"),
    (
        put("model.layers.0.mlp.up_proj.weight_scale"),
        r"quantized checkpoint, FP8 or INT8 with scales; use the original in 16 bits",
    ),
    (
        put("model.layers.0.mlp.up_proj.qweight"),
        r"quantized checkpoint, AWQ or GPTQ; use the original in 16 bits.*MODEL@FORMAT",
    ),
    (put("model.layers.0.self_attn.q_proj.bias"), r"q_proj.bias' is not part of a llama model"),
]


@pytest.mark.parametrize(("change", "message"), TENSOR_DAMAGE)
def test_wrong_tensors_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    rewrite(save(tmp_path), change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_an_integer_matrix_is_refused(tmp_path: Path) -> None:
    edit(lambda h: h[UP].update(dtype="I16"), save(tmp_path) / FILE)
    with pytest.raises(CheckpointError, match=f"'{UP}' is stored as I16"):
        open_checkpoint(tmp_path)


def test_a_matrix_of_8_bits_is_refused_by_its_format(tmp_path: Path) -> None:
    rewrite(save(tmp_path), lambda t: t.update({UP: np.zeros((32, 8), ml_dtypes.bfloat16)}))
    edit(lambda h: h[UP].update(dtype="F8_E4M3", shape=[32, 16]), tmp_path / FILE)
    with pytest.raises(
        CheckpointError, match=rf"'{UP}' is stored as F8_E4M3 \(FP8\), .*original in 16 bits"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("name", "format"), [("model-q4.gguf", "GGUF"), ("model.onnx", "ONNX")])
def test_a_folder_whose_weights_are_in_another_format_is_refused_by_it(
    name: str, format: str, tmp_path: Path
) -> None:
    (save(tmp_path) / FILE).unlink()
    (tmp_path / name).touch()
    with pytest.raises(
        CheckpointError,
        match=rf"only weights in {format}, a format that is not read.*original in 16 bits",
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "visual.patch.weight",
        "model.vision_tower.layers.0.mlp.up_proj.weight",
        "model.rotary_emb.inv_freq",
        "mtp.layers.0.mlp.up_proj.weight",
    ],
)
def test_extra_tensors_that_change_nothing_are_ignored(tmp_path: Path, name: str) -> None:
    spec = replace(SPEC, tied=True)
    rewrite(save(tmp_path, spec), put(name), spec)
    assert open_checkpoint(tmp_path).dtype is DType.BF16


def test_every_other_tensor_that_is_left_over_is_refused_by_its_name(tmp_path: Path) -> None:
    """Whatever a model's code might use: what a configuration leaves out changes the output."""
    spec = replace(SPEC, tied=True)
    ends = (
        "lm_head.bias",
        "score.weight",
        "model.norm.bias",
        "model.embed_positions.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.mlp.up_proj.bias",
        "model.layers.0.pre_feedforward_layernorm.weight",
        "model.layers.0.layer_scalar",
    )
    for name in ends:
        rewrite(save(tmp_path, spec), put(name), spec)
        refused(CheckpointError, lambda: open_checkpoint(tmp_path), f"{name!r} is not part of a")


def test_layers_beyond_the_configuration_are_refused_but_for_drafts(tmp_path: Path) -> None:
    """They have every tensor of an ordinary layer; DeepSeek-V3's layer that drafts has others."""
    beyond = f"model.layers.{SPEC.layers}."
    rewrite(save(tmp_path), put(f"{beyond}mlp.up_proj.weight"))
    says = f"'{beyond}mlp.up_proj.weight' is of layer {SPEC.layers}, and config.json has "
    refused(CheckpointError, lambda: open_checkpoint(tmp_path), says)

    def drafting(table: dict[str, Any]) -> None:
        put(f"{beyond}mlp.up_proj.weight")(table)
        put(f"{beyond}eh_proj.weight")(table)

    rewrite(save(tmp_path), drafting)
    assert open_checkpoint(tmp_path).dtype is DType.BF16


def test_a_head_stored_with_tied_embeddings_is_refused_where_it_differs(tmp_path: Path) -> None:
    """transformers 5 uses the file's head then, and warns; a copy of the embedding is the same."""
    spec = replace(SPEC, tied=True)

    def copied(table: dict[str, Any], by: float = 0.0) -> None:
        head = table["model.embed_tokens.weight"].copy()
        head[-1, -1] += by
        table["lm_head.weight"] = head

    rewrite(save(tmp_path, spec), copied, spec)
    open_checkpoint(tmp_path)
    rewrite(save(tmp_path, spec), lambda table: copied(table, 1.0), spec)
    says = "'lm_head.weight' differs from 'model.embed_tokens.weight'"
    refused(CheckpointError, lambda: open_checkpoint(tmp_path), says)


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    file = save(tmp_path) / FILE
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(tmp_path)


def test_a_longer_file_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path) / FILE
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="tensors end at byte"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", [b"{", b"\xff\xff", b"[1]", b'{"a": 1, "a": 2}'])
def test_corrupt_json_is_refused(tmp_path: Path, text: bytes) -> None:
    (save(tmp_path) / FILE).write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="JSON"):
        open_checkpoint(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a directory"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (save(tmp_path) / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pickled.*save_pretrained"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.update({UP: "model-00009-of-00002.safetensors"}),
            "'model-00009-of-00002.safetensors', which is missing",
        ),
        (lambda m: m.update({UP: "../outside.safetensors"}), "not a file of this folder"),
        (
            lambda m: m.update({"model.extra.weight": m[UP]}),
            "places 'model.extra.weight' in .* does not hold it",
        ),
        (lambda m: m.pop(UP), f"'{UP}' is missing"),
        (lambda m: m.update({UP: 3}), "weight_map must map"),
    ],
)
def test_a_wrong_index_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    index = save(tmp_path, shards=2) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_saved_configuration_loads_as_the_same_model(tmp_path: Path) -> None:
    for i, spec in enumerate(SPECS):
        assert load_model(save(tmp_path / str(i), spec)) == replace(
            spec, name=str(i), dtype=DType.BF16
        )


# ---- hostile folders -----------------------------------------------------------------------------


def raw_header(path: Path, text: bytes) -> None:
    """A file whose header is this text, with the data that it had."""
    raw = path.read_bytes()
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + raw[8 + int.from_bytes(raw[:8], "little") :]
    )


ENDLESS = {
    "dimensions of thousands of digits": b'{"a": {"dtype": "F32", "shape": ['
    + (b"9" * 4_000 + b",") * 900
    + b'1], "data_offsets": [0, 4]}}',
    "dimensions beyond 64 bits": b'{"a": {"dtype": "F32", "shape": ['
    + (b"9" * 39 + b",") * 90_000
    + b'1], "data_offsets": [0, 4]}}',
    "thousands of dimensions": b'{"a": {"dtype": "F32", "shape": ['
    + b"2," * 1_000_000
    + b'1], "data_offsets": [0, 4]}}',
    "nesting": b"[" * 1_000_000,
    "nested mappings": b'{"a":' * 1_000_000,
    "empty lists": b'{"a": [' + b"[]," * 1_500_000 + b"0]}",
    "a name": b'{"'
    + b"quant_state" * 200_000
    + b' ": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
    "a dtype": b'{"a": {"dtype": "F'
    + b"8" * 2_000_000
    + b'", "shape": [1], "data_offsets": [0, 4]}}',
    "a dtype of more digits than Python reads": b'{"a": {"dtype": "F'
    + b"8" * 5_000
    + b'", "shape": [1], "data_offsets": [0, 4]}}',
    "spaces": b"{}" + b" " * 17 * 2**20,
    "a name with control characters": b'{"\\u001b[2J\\n": {"dtype": "F32", "shape": [3], '
    b'"data_offsets": [0, 4]}}',
    "a dtype with control characters": b'{"a": {"dtype": "\\u001b[2J", "shape": [1], '
    b'"data_offsets": [0, 4]}}',
    "a repeated key with control characters": b'{"\\u001b[2J": 1, "\\u001b[2J": 2}',
    "offsets beyond 64 bits": b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": '
    b"[18446744073709551612, "
    b"18446744073709551616]}}",
    "another encoding": '{"a": 1}'.encode("utf-16"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_hostile_header_is_refused_at_once_in_one_short_line(tmp_path: Path, what: str) -> None:
    raw_header(save(tmp_path) / FILE, ENDLESS[what])
    refused(CheckpointError, lambda: open_checkpoint(tmp_path), FILE)


def test_every_type_of_the_format_has_its_bits(tmp_path: Path) -> None:
    for dtype, bits in {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F8_E4M3": 8,
        "BF16": 16,
        "I32": 32,
        "C64": 64,
        "U64": 64,
    }.items():
        text = json.dumps({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}}).encode()
        (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(bits))
        assert safetensors.read_header(tmp_path / "x")["a"].dtype == dtype


SPECIAL: dict[str, Callable[[Path], object]] = {
    "is not a regular file; pipe": os.mkfifo,
    "is not a regular file; folder": Path.mkdir,
    "leads nowhere; dangling": lambda path: path.symlink_to("nowhere"),
    "leads nowhere; loop": lambda path: path.symlink_to(path.name),
    "outside of this folder; device": lambda path: path.symlink_to("/dev/zero"),
    "outside of this folder; relative": lambda path: path.symlink_to("../secret"),
    "outside of this folder; absolute": lambda path: path.symlink_to(path.parent.parent / "secret"),
}


@pytest.mark.parametrize("what", SPECIAL)
@pytest.mark.parametrize("shards", [1, 2])
def test_what_lies_outside_of_the_folder_or_is_no_file_is_not_read(
    tmp_path: Path, what: str, shards: int
) -> None:
    folder = save(tmp_path / "m", shards=shards)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.rename(tmp_path / "secret")
    SPECIAL[what](shard)
    refused(CheckpointError, lambda: open_checkpoint(folder), shard.name, what.partition(";")[0])


@pytest.mark.parametrize("shards", [1, 2])
def test_a_snapshot_of_the_hugging_face_cache_is_opened(tmp_path: Path, shards: int) -> None:
    """snapshots/REVISION/FILE -> ../../blobs/HASH, for every file."""
    blobs, snapshot = (
        tmp_path / "models--a--b" / "blobs",
        tmp_path / "models--a--b" / "snapshots" / "0123",
    )
    snapshot.mkdir(parents=True)
    save(blobs, shards=shards)
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    opened, weights = open_checkpoint(snapshot).weights, random_weights(SPEC, 1, DType.BF16)
    assert all(np.array_equal(opened[name], weights[name]) for name in tensors(SPEC))


@pytest.mark.parametrize(
    "file",
    [
        "x" * 5_000,
        "a\0b",
        "\ud800",
        "\x1b[2J",
        "",
        ".",
        "..",
        "/etc/passwd",
        "a/b",
        "../m/model.safetensors",
    ],
)
def test_an_index_names_only_files_of_its_folder(tmp_path: Path, file: str) -> None:
    index = save(tmp_path, shards=2) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][UP] = file
    index.write_text(json.dumps(content))
    refused(CheckpointError, lambda: open_checkpoint(tmp_path))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """Which of two values counts would be up to the reader."""
    index = save(tmp_path, shards=2) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"][UP]
    (tmp_path / "zz.safetensors").write_bytes((tmp_path / file).read_bytes())
    content["weight_map"][UP] = "zz.safetensors"
    index.write_text(json.dumps(content))
    refused(
        CheckpointError,
        lambda: open_checkpoint(tmp_path),
        f"is in '{file}' and in 'zz.safetensors'",
    )


def test_a_tensor_that_changes_the_output_is_not_hidden_by_the_index(tmp_path: Path) -> None:
    """A file's bias that the index leaves out would be ignored in silence."""
    folder = save(tmp_path, shards=2)
    file = sorted(folder.glob("*.safetensors"))[0]
    found = {
        name: safetensors.view(entry, np.fromfile(file, np.uint8))
        for name, entry in safetensors.read_header(file).items()
    }
    safetensors.write(
        file, found | {"model.layers.0.self_attn.q_proj.bias": np.ones(16, ml_dtypes.bfloat16)}
    )
    refused(CheckpointError, lambda: open_checkpoint(folder), "q_proj.bias' is missing")


BAD = {"infinite": float("inf"), "negative infinite": float("-inf"), "not a number": float("nan")}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_a_weight_without_a_value_is_refused_with_its_place(
    tmp_path: Path, dtype: DType, what: str
) -> None:
    weights = random_weights(SPEC, 1, dtype)
    named: dict[str, Any] = {
        t.name: np.array(weights[n].reshape(t.shape)) for n, t in tensors(SPEC).items()
    }
    named[UP][31, 15] = BAD[what]
    save_checkpoint(tmp_path, weights)
    safetensors.write(tmp_path / FILE, named)
    opened = open_checkpoint(tmp_path).weights
    assert np.isfinite(opened["layers.0.up"].astype(np.float32)).all()
    refused(
        CheckpointError,
        lambda: opened["layers.1.up"],
        UP,
        what.removeprefix("negative "),
        "[31, 15]",
    )


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_every_finite_value_passes_and_every_other_does_not(dtype: DType) -> None:
    """All patterns of 16 bits; of FP32 those whose upper half they are."""
    bits = np.arange(2**16, dtype=np.uint32)
    every = (bits.astype(np.uint16) if dtype.bytes == 2 else bits << 16).view(
        safetensors.NUMPY[dtype]
    )
    finite = np.isfinite(every.astype(np.float32))
    safetensors.check_finite("all", every[finite], dtype)
    for value in every[~finite]:
        with pytest.raises(CheckpointError, match=r"\[1\]"):
            safetensors.check_finite("one", np.array([0, value], every.dtype), dtype)


def test_the_place_is_found_in_every_block_of_a_large_tensor() -> None:
    large = np.zeros((3, 200_001), np.float16)
    safetensors.check_finite("large", large, DType.FP16)
    for place in ((0, 0), (1, 131_071), (2, 200_000)):
        large[place] = np.nan
        with pytest.raises(
            CheckpointError, match=rf"large is not a number at \[{place[0]}, {place[1]}\]"
        ):
            safetensors.check_finite("large", large, DType.FP16)
        large[place] = 0


@pytest.mark.parametrize(
    "path", ["x" * 5_000, "a\0b", "nowhere\x1b[2J"], ids=["long", "zero", "escape"]
)
def test_what_no_folder_can_be_called_is_refused(path: str) -> None:
    refused(CheckpointError, lambda: open_checkpoint(path), "not a directory")


def test_weights_are_checked_where_no_thread_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    rewrite(
        save(tmp_path),
        lambda named: named.update({UP: np.full((32, 16), np.nan, ml_dtypes.bfloat16)}),
    )
    opened = open_checkpoint(tmp_path).weights
    assert opened["layers.0.up"].shape == (32, 16)
    refused(CheckpointError, lambda: opened["layers.1.up"], UP, "not a number at [0, 0]")


@pytest.mark.parametrize("seed", [-1, 2**64, 10**400])
def test_a_seed_of_random_weights_has_64_bits(seed: int) -> None:
    with pytest.raises(ConfigError, match=r"seed .*allowed: 0 to 2\^64 - 1"):
        random_weights(SPEC, seed)
    assert random_weights(SPEC, 2**64 - 1)["final_norm"].shape == (16,)
