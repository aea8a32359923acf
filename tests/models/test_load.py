"""Our named models, their published sizes, and the names of their checkpoints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.rows import every
from twin.data import data_dir, read_yaml
from twin.engine.weights import open_checkpoint
from twin.errors import CheckpointError, ConfigError
from twin.models.decoder import canonical_shape
from twin.models.load import (
    canonical,
    from_config,
    load_model,
    model_names,
    named,
    read_named,
    tensors,
)
from twin.models.spec import LaneHead, RopeScaling

DENSE = {
    "deepseek-coder-1.3b": 1_346_471_936,
    "deepseek-coder-6.7b": 6_740_512_768,
    "falcon3-1b": 1_669_408_768,
    "falcon3-3b": 3_227_655_168,
    "falcon3-7b": 7_455_550_464,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "granite-3.1-8b": 8_170_848_256,
    "hunyuan-7b": 7_504_568_320,
    "internlm3-8b": 8_804_241_408,
    "laneformer-2b": 2_320_069_632,
    "llama-2-13b": 13_015_864_320,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "ministral-8b": 8_019_808_256,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "olmo-2-7b": 7_298_617_344,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-coder-1.5b": 1_543_714_304,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "smollm2-1.7b": 1_711_376_384,
    "smollm2-360m": 361_821_120,
    "smollm3-3b": 3_075_098_624,
    "tinyllama-1.1b": 1_100_048_384,
    "yi-1.5-6b": 6_061_035_520,
}


LAYERED = {  # the exact counts whose roundings are published (test_published.py)
    "deepseek-v3": 671_026_419_200,
    "deepseek-v4-flash": 284_332_240_471,
    "deepseek-v4-pro": 1_572_997_201_763,
    "ernie-4.5-21b-a3b": 21_825_437_888,
    "gemma-4-26b-a4b": 25_233_141_760,
    "gemma-4-31b": 30_697_345_280,
    "glm-4.5-air": 106_852_251_264,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "granite-4.0-h-tiny": 6_939_037_248,
    "hunyuan-a13b": 80_393_183_232,
    "kimi-k2.6": 1_026_408_232_448,
    "lfm2-8b-a1b": 8_339_930_560,  # 704 of them biases of the choice of experts
    "lfm2.5-1.2b": 1_170_340_608,
    "lfm2.5-350m": 354_483_968,
    "minimax-m2.7": 228_689_764_864,
    "mixtral-8x7b": 46_702_792_704,
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-coder-next": 79_674_391_296,
    "qwen3.6-27b": 26_895_998_464,  # counted: its own text model is not published
    "qwen3.6-35b-a3b": 34_660_610_688,
}
PUBLISHED = DENSE | LAYERED
# whose experts the engine runs
COMPRESSED = {"deepseek-v4-flash", "deepseek-v4-pro"}  # on CPUs
ROUTED = {
    "ernie-4.5-21b-a3b",
    "gemma-4-26b-a4b",
    "gemma-4-31b",  # none: heads of two shapes in dense layers
    "glm-4.5-air",
    "gpt-oss-120b",
    "gpt-oss-20b",
    "granite-4.0-h-tiny",
    "hunyuan-a13b",
    "lfm2-8b-a1b",
    "lfm2.5-1.2b",  # none: short convolutions in dense layers
    "lfm2.5-350m",
    "minimax-m2.7",
    "mixtral-8x7b",
    "nemotron-3-nano-30b-a3b",
    "qwen1.5-moe-a2.7b",
    "qwen3-235b-a22b",
    "qwen3-30b-a3b",
    "qwen3-coder-next",
    "qwen3.6-27b",  # none: gated DeltaNet in dense layers
    "qwen3.6-35b-a3b",
}


def test_every_model_is_there() -> None:
    assert model_names() == sorted(PUBLISHED)


@every("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones(name: str) -> None:
    assert load_model(name).parameters == PUBLISHED[name]


@every("name", sorted(DENSE))
def test_the_checkpoint_holds_exactly_the_parameters(name: str) -> None:
    spec = load_model(name)
    known = tensors(spec)
    stored = {t.name: t.shape for t in known.values()}
    assert sum(math.prod(shape) for shape in stored.values()) == spec.parameters
    # q, k, v in one, gate and up in another
    assert len(stored) == len(known) - (3 * spec.layers if spec.family == "phi3" else 0)
    assert ("lm_head" in known) == (not spec.tied)


@every("name", sorted(DENSE))
def test_a_stored_tensor_has_as_many_elements_as_the_canonical_one(name: str) -> None:
    spec = load_model(name)
    for key, tensor in tensors(spec).items():
        if tensor.name.endswith(("qkv_proj.weight", "gate_up_proj.weight")):
            continue  # several canonical ones
        assert math.prod(tensor.shape) == math.prod(canonical_shape(spec, key)), key


@every("name", sorted(PUBLISHED))
def test_every_source_is_listed(name: str) -> None:
    known = {*read_yaml(data_dir("hwmodels") / "sources.yaml"), "assumed"}
    data: dict[str, Any] = read_yaml(data_dir("hwmodels") / "models" / f"{name}.yaml")
    for text in (data["source"], *data.get("notes", {}).values()):
        assert text.split(":")[0] in known, text


@every("name", sorted(PUBLISHED))
def test_the_engine_says_which_models_it_does_not_run_and_why(name: str) -> None:
    spec = load_model(name)
    assert (spec.runnable_reason() is None) == (name in DENSE.keys() | ROUTED | COMPRESSED)
    if name in LAYERED.keys() - ROUTED - COMPRESSED:
        with pytest.raises(ConfigError, match=f"{name} .*simulated only"):
            tensors(spec)


def test_llama_names_and_shapes() -> None:
    known = tensors(load_model("llama-3.2-1b"))
    assert known["layers.3.k"].name == "model.layers.3.self_attn.k_proj.weight"
    assert known["layers.3.k"].shape == (512, 2048)
    assert known["layers.15.ffn_norm"].name == "model.layers.15.post_attention_layernorm.weight"
    assert "layers.0.q_bias" not in known
    assert load_model("llama-3.2-1b").rope.scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


def test_qwen_names() -> None:
    assert tensors(load_model("qwen2.5-coder-1.5b"))["layers.0.v_bias"].shape == (256,)
    assert (
        tensors(load_model("qwen3-8b"))["layers.0.q_norm"].name
        == "model.layers.0.self_attn.q_norm.weight"
    )


def test_laneformer_is_as_published() -> None:
    spec = load_model("laneformer-2b")
    assert spec.lanes is not None
    assert (spec.lanes.count, spec.lanes.delay, spec.lanes.head, spec.lanes.early_exchange) == (
        8,
        2,
        LaneHead.MEAN,
        False,
    )
    assert spec.windows == (512,) * 10 + (0,) * 5
    # the published count has the norm scales in it
    assert spec.streamed_parameters == 2_221_765_632 - 31 * 3072
    known = tensors(spec)
    assert (known["layers.0.q"].name, known["layers.0.q"].shape) == (
        "model.layers.0.attention.wq.weight",
        (8, 384, 3072),
    )
    assert known["layers.0.o"].shape == (8, 3072, 384)
    assert (known["layers.0.gate"].name, known["layers.0.gate"].shape) == (
        "model.layers.0.feed_forward.w1.weight",
        (8, 1536, 3072),
    )
    assert (known["layers.0.down"].name, known["layers.0.down"].shape) == (
        "model.layers.0.feed_forward.w2.weight",
        (8, 3072, 1536),
    )
    assert known["embed"].name == "model.tok_embeddings.weight"


def _tiny(**changes: object) -> dict[str, object]:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 36,
    }
    rest = {"vocab_size": 30, "max_position_embeddings": 64, "num_lanes": 3, "broadcast_delay": 1}
    return {"model_type": "laneformer", **sizes, **rest, **changes}


@pytest.mark.parametrize("leaf", ["q", "k", "v", "gate", "up"])
def test_lanes_of_a_column_parallel_matrix_stack_their_outputs(leaf: str) -> None:
    spec, rng = from_config(_tiny(), "tiny"), np.random.default_rng(0)
    stored, x = (
        rng.normal(size=tensors(spec)[f"layers.1.{leaf}"].shape),
        rng.normal(size=spec.hidden),
    )
    per_lane = np.einsum("i,loi->lo", x, stored)
    np.testing.assert_allclose(
        canonical(spec, f"layers.1.{leaf}", stored) @ x, per_lane.reshape(-1)
    )


@pytest.mark.parametrize("leaf", ["o", "down"])
def test_lanes_of_a_row_parallel_matrix_sum_to_the_whole(leaf: str) -> None:
    spec, rng = from_config(_tiny(), "tiny"), np.random.default_rng(0)
    stored = rng.normal(size=tensors(spec)[f"layers.0.{leaf}"].shape)
    x = rng.normal(size=(3, stored.shape[2]))
    partials = np.einsum("li,loi->lo", x, stored)
    np.testing.assert_allclose(
        canonical(spec, f"layers.0.{leaf}", stored) @ x.reshape(-1), partials.sum(axis=0)
    )


def test_a_split_vocabulary_is_joined() -> None:
    spec = from_config(_tiny(lm_head_type="vocab_parallel"), "tiny")
    stored = np.arange(30 * 24.0).reshape(3, 10, 24)
    np.testing.assert_array_equal(
        canonical(spec, "lm_head", stored), np.arange(30 * 24.0).reshape(30, 24)
    )


def test_other_families_are_stored_as_they_are_used() -> None:
    spec = load_model("llama-3.2-1b")
    array = np.zeros((512, 2048), np.float16)
    assert canonical(spec, "layers.0.k", array) is array


def test_a_wrong_shape_names_the_tensor() -> None:
    spec = load_model("llama-3.2-1b")
    with pytest.raises(CheckpointError, match=r"k_proj.*\(512, 2048\)"):
        canonical(spec, "layers.0.k", np.zeros((2048, 512)))


def test_an_unknown_tensor_gives_the_closest() -> None:
    with pytest.raises(CheckpointError, match=r"did you mean layers\.0\."):
        canonical(load_model("llama-3.2-1b"), "layers.0.kk", np.zeros(1))


def test_a_mistyped_model_gives_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"llama-3\.2-1b"):
        load_model("llama-3.2-1")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("parameters", 1, "config gives 1235814400"),
        ("parameters", ..., "parameters: missing"),
        ("license", "x", "license: unknown key"),
        ("name", "other", "must be the file's name"),
        ("notes", {"rope_tehta": "x"}, "did you mean rope_theta"),
        ("config", [], "config: [] must be a mapping"),
    ],
)
def test_a_wrong_model_file_is_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    data = dict(read_yaml(data_dir("hwmodels") / "models" / "llama-3.2-1b.yaml"))
    data[key] = value
    path = tmp_path / "llama-3.2-1b.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in data.items() if v is not ...}))
    with pytest.raises(ConfigError, match=r"llama-3\.2-1b\.yaml") as error:
        read_named(path)
    assert message in str(error.value)


# ---- what a newcomer brings ----------------------------------------------------------------------


def config_of(name: str) -> dict[str, Any]:
    config = read_yaml(data_dir("hwmodels") / "models" / f"{name}.yaml")["config"]
    assert isinstance(config, dict)
    return config


def test_a_file_is_called_by_its_own_name_and_a_config_by_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("config.json", "other.json"):
        (folder / name).write_text(json.dumps(config_of("llama-3.2-1b")))
    assert [load_model(folder / name).name for name in ("config.json", "other.json")] == [
        "mine",
        "other",
    ]
    assert load_model(folder).name == "mine"


def test_a_snapshot_of_the_hugging_face_cache_is_called_by_its_repository(tmp_path: Path) -> None:
    home = tmp_path / "models--org--my--model"
    snapshot, blob = home / "snapshots" / "0a1b2c", home / "blobs" / "ffee"
    for folder in (snapshot, blob.parent):
        folder.mkdir(parents=True)
    blob.write_text(json.dumps(config_of("llama-3.2-1b")))
    (snapshot / "config.json").symlink_to(blob)
    for path in (snapshot, snapshot / "config.json"):
        assert load_model(path).name == "org/my--model"


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes"])
@pytest.mark.parametrize("model", ["llama-3.2-1b", "laneformer-2b"])
def test_a_quantized_checkpoints_refusal_names_its_format_and_what_can_be_done(
    method: str, model: str
) -> None:
    with pytest.raises(ConfigError, match=f"{method.upper()}.*original in 16 bits.*MODEL@FORMAT"):
        from_config(
            config_of(model)
            | {"quantization_config": {"quant_method": method, "bits": 4, "much": "x" * 1000}},
            "mine",
        )


@pytest.mark.parametrize("read", [load_model, open_checkpoint])
def test_a_file_in_a_format_before_gguf_and_its_folder_are_refused_by_it(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "model.ggml").write_bytes(b"ggjt\x03\x00\x00\x00")
    for path in (tmp_path, tmp_path / "model.ggml"):
        with pytest.raises(ConfigError, match="GGML is a format that is not read"):
            read(path)


def test_an_unknown_familys_refusal_says_which_ones_run() -> None:
    simulated = "deepseek_v3, kimi_k2, kimi_k25"
    with pytest.raises(ConfigError, match=f"the engine runs all but {simulated}$"):
        from_config({"model_type": "bert"}, "mine")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("qwen3:8b", "qwen3-8b"),
        ("llama3.1:8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("gpt_oss_20b", "gpt-oss-20b"),
        ("Qwen/Qwen3-8B-AWQ", None),  # another format: not the same bytes
        ("qwen3", None),
    ],
)
def test_a_model_is_known_however_its_name_is_written(written: str, meant: str | None) -> None:
    assert named(written) == meant


def test_no_two_models_differ_in_signs_alone() -> None:
    """So that a name written otherwise means one model."""
    assert len({re.sub("[^a-z0-9]", "", name) for name in model_names()}) == len(model_names())
    assert all(named(f"Some/{name.upper()}") == name for name in model_names())


@pytest.mark.parametrize("missing", ["./nowhere", "../nowhere.gguf", "nowhere.gguf", "~/m"])
def test_a_path_that_is_not_there_is_called_missing(missing: str) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_model(missing)
