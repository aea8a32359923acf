"""A GGUF file is the model that was converted into it: its description, its weights, its words."""

from __future__ import annotations

import builtins
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.gguf_cases import CONFIGS, finish, named, start, write_case
from tests.engine.hf_cases import ALL, TOLERANCE, plan, tokens, weights
from tests.engine.test_huggingface import GOLDENS, computed
from tests.refusals import refused
from twin.engine.gguf_weights import open_gguf
from twin.engine.host import HostEngine
from twin.engine.opening import open_source
from twin.engine.weights import open_checkpoint
from twin.errors import CheckpointError, ConfigError, TwinError
from twin.models.gguf_file import KINDS, read_gguf
from twin.models.load import from_config, load_model, tensors
from twin.models.spec import DType, ModelSpec
from twin.plan.options import Sampling

gguf = pytest.importorskip("gguf", reason="gguf is not installed (extra 'gguf')")
PLAIN = (1, 1, 1, 16, Sampling.GREEDY)
WIDE = {  # rows of 256 elements, which all stored types divide
    **CONFIGS["llama"],
    "hidden_size": 256,
    "intermediate_size": 256,
    "rope_scaling": None,
    "num_hidden_layers": 2,
}
KINDS_READ = [
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "MXFP4",
]


def comparable(spec: ModelSpec) -> ModelSpec:
    """Without what a file says in its own way: FP32 numbers, names, and frequencies as factors."""
    scaled = spec.rope.scaling is not None and spec.rope.scaling.kind in ("llama3", "longrope")
    rope = replace(spec.rope, scaling=None) if scaled else spec.rope
    variant = replace(
        spec.variant,
        **{
            field: round(value, 6)
            for field in ("embedding", "residual", "score", "logit", "score_cap", "logit_cap")
            if (value := getattr(spec.variant, field)) is not None
        },
    )
    return replace(
        spec,
        name="",
        dtype=DType.FP32,
        norm_eps=round(spec.norm_eps, 12),
        rope=rope,
        variant=variant,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_is_the_model_that_was_converted(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    table = write_case(tmp_path / "model.gguf", config)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert comparable(checkpoint.spec) == comparable(from_config(config, name))
    assert checkpoint.spec.name == "model"
    for tensor in tensors(checkpoint.spec):
        assert np.array_equal(checkpoint.weights[tensor], table[tensor]), tensor


@pytest.mark.parametrize("name", [name for name in CONFIGS if CONFIGS[name] == ALL[name]])
def test_a_file_gives_the_recorded_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """Frequencies that a file scales by factors among them: of Llama 3 and of LongRoPE."""
    golden = np.load(GOLDENS / f"{name}.npz")
    write_case(tmp_path / "model.gguf", CONFIGS[name])
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    prompt = [int(t) for t in golden["tokens"]]
    found = computed(checkpoint.spec, checkpoint.weights, prompt, PLAIN)
    assert np.abs(found - golden["logits"]).max() < TOLERANCE


# ---- stored types ----------------------------------------------------------------------------


def stored(kind: str, array: np.ndarray[Any, Any], seed: int = 7) -> tuple[Any, Any]:
    """A matrix in a stored type, and the type; K types, which nobody writes here, at random."""
    type = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quantize(array, type), type
    except NotImplementedError:
        _, block, size = KINDS[type.value]
        random = np.random.RandomState(seed)
        data = random.randint(0, 256, (array.size // block, size)).astype(np.uint8)
        scale = np.frombuffer(np.float16(2.0**-12).tobytes(), np.uint8)
        if kind == "Q6_K":
            data[:, -2:] = scale
        else:
            data[:, :2] = data[:, 2:4] = scale
        return data.reshape(array.shape[0], -1), type


def write_stored(path: Path, kind: str) -> dict[str, Any]:
    """A small Llama with all matrices in a type; what they mean, by their names in the file."""
    found = named(WIDE, weights(WIDE))
    data = {name: stored(kind, a) for name, a in found.items() if a.ndim > 1}
    write_case(path, WIDE, data)
    return {name: gguf.dequantize(*pair) for name, pair in data.items()}


@pytest.mark.parametrize("kind", KINDS_READ)
def test_stored_types_become_what_they_mean(kind: str, tmp_path: Path) -> None:
    meant = write_stored(tmp_path / "model.gguf", kind)
    exact = open_gguf(tmp_path / "model.gguf", DType.FP32)
    dtype = DType.BF16 if kind in ("BF16", "MXFP4") else DType.FP16
    assert open_gguf(tmp_path / "model.gguf").dtype is dtype
    rounded = open_gguf(tmp_path / "model.gguf", dtype)
    for name, file_name in (
        ("layers.1.down", "blk.1.ffn_down.weight"),
        ("embed", "token_embd.weight"),
    ):
        assert np.array_equal(exact[name], meant[file_name])
        error = np.abs(rounded[name].astype(np.float32) - meant[file_name])
        assert (error <= 2.0**-9 * np.abs(meant[file_name]) + 2.0**-25).all()
    assert kind in rounded.note
    assert f"become {rounded.dtype.value}" in rounded.note


def test_the_engine_runs_what_the_file_means(tmp_path: Path) -> None:
    """Prepared from 4 bits: the CPU engine's logits are the reference's."""
    write_stored(tmp_path / "model.gguf", "Q4_0")
    source = open_source(str(tmp_path / "model.gguf"), dtype=DType.FP32, text=False)
    prompt = tokens(WIDE)
    made = plan(
        source.spec, 1, 3, 2, 4, Sampling.FULL, weight_dtype=DType.FP32, kv_dtype=DType.FP32
    )
    with HostEngine(made, source.weights) as engine:
        found = engine.logits(prompt)
    assert np.abs(found - computed(source.spec, source.weights, prompt, PLAIN)).max() < TOLERANCE


LIVE: dict[str, dict[str, Any]] = {  # what transformers does not read is as in its classes
    "qwen2": CONFIGS["qwen2"],
    "qwen3": {**CONFIGS["qwen3"], "head_dim": 128},
    "gemma2": {
        **CONFIGS["gemma2"],
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}


@pytest.mark.few(3)
@pytest.mark.hf
@pytest.mark.parametrize("name", [*LIVE, *KINDS_READ])
def test_transformers_computes_the_same_from_a_file(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed (extra 'hf')")
    path = tmp_path / "model.gguf"
    if name in KINDS_READ:
        write_stored(path, name)
    else:
        write_case(path, LIVE[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompt = tokens(WIDE)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0].numpy()
    ours = open_gguf(path, DType.FP32)
    found = computed(ours.spec, ours, prompt, PLAIN)
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(found - expected).max() < TOLERANCE * scale


# ---- refusals --------------------------------------------------------------------------------


def test_the_types_of_the_format_are_those_of_the_package() -> None:
    for kind in gguf.GGMLQuantizationType:
        assert KINDS[kind.value] == (kind.name, *gguf.GGML_QUANT_SIZES[kind])


def test_a_type_without_numbers_is_refused_by_its_name(tmp_path: Path) -> None:
    blocks = np.zeros((256, 292), np.uint8)
    data = {"blk.0.ffn_down.weight": (blocks, gguf.GGMLQuantizationType.Q8_K)}
    write_case(tmp_path / "model.gguf", WIDE, data)
    refused(CheckpointError, lambda: open_gguf(tmp_path / "model.gguf"), "stored as Q8_K", "Q4_K_M")


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    write_case(tmp_path / "model.gguf", CONFIGS["qwen3"])
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    refused(CheckpointError, lambda: open_checkpoint(tmp_path / "model.gguf"), "monotwin[gguf]")
    assert load_model(tmp_path / "model.gguf").layers == 3  # plans and simulations do without


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("general.architecture", "falcon-h1", "'falcon-h1'"),
        ("llama.expert_count", 8, "dense models"),
        ("llama.attention.sliding_window", 4096, "sliding_window"),
        ("llama.rope.scaling.type", "yarn", "'yarn'"),
        ("llama.rope.dimension_count", 6, "a whole head"),
        ("llama.attention.head_count", [8, 4, 8], "the same in every layer"),
        ("llama.block_count", 1000, "num_hidden_layers is 1000"),
        ("split.count", 3, "one of 3 parts"),
    ],
)
def test_what_would_be_another_model_is_refused(
    key: str, value: Any, says: str, tmp_path: Path
) -> None:
    writer = start(tmp_path / "model.gguf", WIDE)
    writer.kv_data[0].pop(key, None)
    kind = {str: "add_string", int: "add_uint32", list: "add_array"}[type(value)]
    getattr(writer, kind)(key, value)
    for name, tensor in named(WIDE, weights(WIDE)).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    refused(TwinError, lambda: open_gguf(tmp_path / "model.gguf"), says)


def test_a_tensor_too_few_or_too_many_is_refused(tmp_path: Path) -> None:
    table = named(WIDE, weights(WIDE))
    for name, change, says in (
        ("few", {"blk.1.ffn_up.weight": None}, "'blk.1.ffn_up.weight' is missing"),
        (
            "many",
            {"blk.0.attn_q.bias": np.zeros(256, np.float32)},
            "'blk.0.attn_q.bias' is not part",
        ),
        ("head", {"output.bias": np.zeros(101, np.float32)}, "'output.bias' is not part"),
        ("norm", {"token_embd_norm.weight": np.ones(64, np.float32)}, "embd_norm.weight' is not"),
        ("short", {"rope_factors_short.weight": np.ones(4, np.float32)}, "short.weight' is not"),
        ("layer", {"blk.9.attn_norm.weight": np.ones(64, np.float32)}, "'blk.9.attn_norm.weight'"),
        ("shape", {"output_norm.weight": np.ones(64, np.float32)}, "has shape [64]"),
    ):
        writer = start(tmp_path / f"{name}.gguf", WIDE)
        for key, tensor in {**table, **change}.items():
            if tensor is not None:
                writer.add_tensor(key, tensor)
        finish(writer)
        refused(CheckpointError, lambda at=name: open_gguf(tmp_path / f"{at}.gguf"), says)  # type: ignore[misc]


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    array = np.ones((256, 256), np.float32)
    array[3, 5] = math.nan
    data = {"blk.0.ffn_down.weight": (array, None)}
    write_case(tmp_path / "model.gguf", WIDE, data)
    opened = open_gguf(tmp_path / "model.gguf")
    refused(CheckpointError, lambda: opened["layers.0.down"], "ffn_down", "not a number at [3, 5]")


def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    write_case(tmp_path / "whole.gguf", CONFIGS["qwen3"])
    content = (tmp_path / "whole.gguf").read_bytes()
    for end in (*range(0, 6000, 97), len(content) - 1):
        (tmp_path / f"{end}.gguf").write_bytes(content[:end])
        refused(TwinError, lambda at=end: open_checkpoint(tmp_path / f"{at}.gguf"), "download")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(16), "has version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), "big end first"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16, "allowed: up to"),
        (b"NOPE", "no GGUF file"),
        (b"", "no GGUF file"),
    ],
)
def test_other_files_and_endless_counts_are_refused(
    content: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    refused(CheckpointError, lambda: load_model(tmp_path / "model.gguf"), says)


def test_a_list_without_end_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    key = b"general.x"
    head = (
        b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    )
    pair = len(key).to_bytes(8, "little") + key + (9).to_bytes(4, "little")
    for kind in (4, 8, 9):
        length = kind.to_bytes(4, "little") + (2**62).to_bytes(8, "little")
        (tmp_path / "model.gguf").write_bytes(head + pair + length)
        refused(CheckpointError, lambda: read_gguf(tmp_path / "model.gguf"), "allowed: up to")


def test_a_folder_of_files_says_to_name_one(tmp_path: Path) -> None:
    write_case(tmp_path / "model.gguf", CONFIGS["qwen3"])
    for act in (load_model, open_checkpoint):
        refused(ConfigError, lambda act=act: act(tmp_path), "model.gguf", "name the file")  # type: ignore[misc]
