"""Checkpoints: what is saved is what is opened, and every kind of damage is named before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from twin.engine import safetensors
from twin.engine.weights import open_checkpoint, random_weights, save_checkpoint
from twin.errors import CheckpointError
from twin.models.load import load_model, tensors
from twin.models.spec import DType, LaneHead, Lanes, ModelSpec, Rope, RopeScaling, RopeStyle

SPEC = ModelSpec(
    name="tiny", family="llama", layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=32, vocab=24, context=64, norm_eps=1e-5,
    rope=Rope(10000.0, RopeStyle.HALF, RopeScaling("llama3", 8.0, 1.0, 4.0, 32)), windows=(0, 0),
)  # fmt: skip
SPECS = [
    SPEC,
    replace(SPEC, tied=True, rope=Rope(5e5, scaling=RopeScaling("linear", 2.0))),
    replace(SPEC, family="mistral", windows=(8, 8)),
    replace(SPEC, family="qwen2", qkv_bias=True, windows=(0, 8)),
    replace(SPEC, family="qwen3", qk_norm=True, head_dim=8),
    *(
        replace(SPEC, family="laneformer", windows=(8, 0), rope=Rope(1e4, RopeStyle.INTERLEAVED), lanes=Lanes(2, 1, head, early))
        for head, early in zip(LaneHead, (False, True, False), strict=True)
    ),
]


def save(path: Path, spec: ModelSpec = SPEC, shards: int = 1) -> Path:
    save_checkpoint(path, random_weights(spec, 1, DType.BF16), shards=shards)
    return path


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.family}-{s.lanes.head.name}" if s.lanes else s.family)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", list(DType))
def test_an_opened_checkpoint_equals_what_was_saved(tmp_path: Path, spec: ModelSpec, shards: int, dtype: DType) -> None:
    weights = random_weights(spec, 7, DType.FP32)
    save_checkpoint(tmp_path / "tiny", weights, shards=shards, dtype=dtype)
    checkpoint = open_checkpoint(tmp_path / "tiny")
    assert checkpoint.spec == replace(spec, dtype=dtype)
    assert checkpoint.weights.dtype is dtype
    for name in tensors(spec):
        assert np.array_equal(checkpoint.weights[name], weights[name].astype(safetensors.NUMPY[dtype])), name


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
    library = pytest.importorskip("safetensors.numpy", reason="the safetensors library is not installed")
    save_checkpoint(tmp_path, random_weights(SPEC, 1, DType.FP32))
    found = library.load_file(tmp_path / "model.safetensors")
    opened = open_checkpoint(tmp_path).weights
    assert np.array_equal(found["model.layers.0.mlp.up_proj.weight"], opened["layers.0.up"])


# ---- damage -------------------------------------------------------------------------------------------------


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


def put(name: str, shape: tuple[int, ...] = (2,), dtype: Any = np.float32) -> Callable[[dict[str, Any]], object]:
    return lambda named: named.update({name: np.zeros(shape, dtype)})


HEADER_DAMAGE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda h: h[UP].update(shape=[32, 17]), rf"'{UP}' \[32, 17\] of BF16 needs 1088 bytes, it has 1024"),
    (lambda h: h[UP].update(dtype="Q4"), "unknown dtype 'Q4'; expected F16, BF16, F32"),
    (lambda h: h[UP].pop("shape"), "entry of .* is not a dtype, a shape"),
    (lambda h: h[UP].update(shape=[-32, -16]), "is not a dtype, a shape"),
    (lambda h: h[UP].update(shape="32"), "is not a dtype, a shape"),
    (lambda h: h[UP].update(data_offsets=[0, 1024]), "overlaps"),
    (lambda h: h.pop(UP), "leaves a gap after"),
    (lambda h: h.update({UP: 3}), "is not a dtype, a shape"),
]


@pytest.mark.parametrize(("change", "message"), HEADER_DAMAGE)
def test_a_wrong_header_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    edit(change, save(tmp_path) / FILE)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


TENSOR_DAMAGE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda t: t.pop(UP), f"tensor '{UP}' is missing"),
    (put(UP, (16, 32), ml_dtypes.bfloat16), rf"'{UP}' has shape \[16, 32\], expected \[32, 16\]"),
    (put(UP, (32, 16)), rf"mixes types: BF16 \(.*\), F32 \('{UP}'\)"),
    (put("model.layers.0.mlp.up_proj.weight_scale"), "quantized"),
    (put("model.layers.0.self_attn.q_proj.bias"), r"q_proj.bias' is not part of a llama model"),
]


@pytest.mark.parametrize(("change", "message"), TENSOR_DAMAGE)
def test_wrong_tensors_are_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    rewrite(save(tmp_path), change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_an_integer_matrix_is_refused(tmp_path: Path) -> None:
    edit(lambda h: h[UP].update(dtype="I16"), save(tmp_path) / FILE)
    with pytest.raises(CheckpointError, match=f"'{UP}' is stored as I16"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "visual.patch.weight"])
def test_extra_tensors_that_change_nothing_are_ignored(tmp_path: Path, name: str) -> None:
    spec = replace(SPEC, tied=True)
    rewrite(save(tmp_path, spec), put(name), spec)
    assert open_checkpoint(tmp_path).dtype is DType.BF16


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
        (lambda m: m.update({UP: "model-00009-of-00002.safetensors"}), "'model-00009-of-00002.safetensors', which is missing"),
        (lambda m: m.update({UP: "../outside.safetensors"}), "not a file of this folder"),
        (lambda m: m.update({"model.extra.weight": m[UP]}), "places 'model.extra.weight' in .* does not hold it"),
        (lambda m: m.pop(UP), f"'{UP}' is missing"),
        (lambda m: m.update({UP: 3}), "weight_map must map"),
    ],
)
def test_a_wrong_index_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    index = save(tmp_path, shards=2) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_saved_configuration_loads_as_the_same_model(tmp_path: Path) -> None:
    for i, spec in enumerate(SPECS):
        assert load_model(save(tmp_path / str(i), spec)) == replace(spec, name=str(i), dtype=DType.BF16)
