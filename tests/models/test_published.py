"""Published counts: given by the configuration to the last printed digit, or the difference is
explained.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from twin.data import data_dir, read_yaml
from twin.errors import ConfigError
from twin.models.formats import Role
from twin.models.load import load_model, model_names, read_named
from twin.models.spec import ModelSpec

FOLDER = data_dir("hwmodels") / "models"
TOTAL_AND_ACTIVE = {  # as printed: total, active, whether active counts the embedding table
    "deepseek-v3": ("671 B", "37 B", False),
    "deepseek-v4-flash": ("284 B", "13 B", False),
    "deepseek-v4-pro": ("1.6 T", "49 B", False),
    "ernie-4.5-21b-a3b": ("21 B", "3 B", False),
    "gemma-4-26b-a4b": ("25.2 B", "3.8 B", False),
    "gemma-4-31b": ("30.7 B", "30.7 B", False),
    "glm-4.5-air": ("106 B", "12 B", False),
    "gpt-oss-120b": ("116.83 B", "5.13 B", False),
    "gpt-oss-20b": ("20.91 B", "3.61 B", False),
    "granite-4.0-h-tiny": ("7 B", "1 B", True),
    "hunyuan-a13b": ("80 B", "13 B", True),
    "kimi-k2.6": ("1 T", "32 B", False),
    "lfm2-8b-a1b": ("8.3 B", "1.5 B", False),
    "lfm2.5-1.2b": ("1.17 B", "1.17 B", False),
    "lfm2.5-350m": ("350 M", "350 M", False),
    "minimax-m2.7": ("230 B", "10 B", False),
    "mixtral-8x7b": ("46.7 B", "12.9 B", True),
    "nemotron-3-nano-30b-a3b": ("31.6 B", "3.6 B", True),
    "qwen1.5-moe-a2.7b": ("14.3 B", "2.7 B", True),
    "qwen3-235b-a22b": ("235 B", "22 B", True),
    "qwen3-30b-a3b": ("30.5 B", "3.3 B", True),
    "qwen3-coder-next": ("79.674391296 B", "3.874929408 B", True),
    "qwen3.6-27b": ("27 B", "27 B", True),
    "qwen3.6-35b-a3b": ("35 B", "3 B", False),
}
EXPLAINED = {
    "ernie-4.5-21b-a3b",
    "glm-4.5-air",
    "lfm2-8b-a1b",
    "lfm2.5-350m",
    "minimax-m2.7",
    "qwen3-30b-a3b",
}


def write(tmp_path: Path, name: str, **published: object) -> Path:
    data = dict(read_yaml(FOLDER / f"{name}.yaml"))
    given = data["published"]
    assert isinstance(given, dict)
    data["published"] = {k: v for k, v in {**given, **published}.items() if v is not ...}
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_every_layered_model_has_published_counts() -> None:
    layered = [name for name in model_names() if load_model(name).layout]
    assert sorted(TOTAL_AND_ACTIVE) == layered
    for name in layered:
        published = read_yaml(FOLDER / f"{name}.yaml")["published"]
        assert isinstance(published, dict)
        assert (
            published["total"],
            published["active"],
            published["embedding"],
        ) == TOTAL_AND_ACTIVE[name]
        assert ("difference" in published) == (name in EXPLAINED)


def embedded(spec: ModelSpec) -> int:
    return spec.active_parameters + spec.vocab * spec.hidden


def test_exact_counts_where_they_are_published() -> None:
    """Qwen3-Coder-Next's 79,674,391,296 and 3,874,929,408; DeepSeek-V3's 671,026,419,200 without
    its draft layer.
    """
    assert embedded(load_model("qwen3-coder-next")) == 3_874_929_408
    assert embedded(load_model("mixtral-8x7b")) == 12_879_925_248
    assert embedded(load_model("qwen3-30b-a3b")) == 3_353_032_704


@pytest.mark.parametrize("changes", [{"total": "118 B"}, {"active": "5.2 B"}, {"embedding": True}])
def test_a_count_that_the_configuration_does_not_give_is_refused(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="but config gives"):
        read_named(write(tmp_path, "gpt-oss-120b", **changes))


def test_a_count_is_good_to_half_of_its_last_digit(tmp_path: Path) -> None:
    assert read_named(write(tmp_path, "gpt-oss-120b", total="117 B")).parameters == 116_829_156_672


def test_an_explained_difference_passes_and_an_idle_explanation_does_not(tmp_path: Path) -> None:
    read_named(write(tmp_path, "gpt-oss-120b", active="5.2 B", difference="printed otherwise"))
    with pytest.raises(ConfigError, match="remove it"):
        read_named(write(tmp_path, "gpt-oss-20b", difference="nothing to explain"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total": "about 117"}, "a number and M, B or T"),
        ({"total": ...}, "published.total: missing"),
        ({"totl": "1 B"}, "unknown key"),
        ({"embedding": "yes"}, "true or false"),
        ({"active": "x B"}, "a number and M, B or T"),
        ({"active": "Infinity B"}, "a number and M, B or T"),
        ({"active": "1e999999999 B"}, "a number and M, B or T"),
    ],
)
def test_wrong_published_counts_are_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match="published") as error:
        read_named(write(tmp_path, "gpt-oss-120b", **changes))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("gpt-oss-120b", 5.00),
        ("gpt-oss-20b", 3.71),
        ("deepseek-v3", 37.6),
        ("kimi-k2.6", 33.0),
        ("qwen3-30b-a3b", 6.08),
        ("qwen3-235b-a22b", 43.1),
        ("mixtral-8x7b", 25.5),
        ("qwen3-coder-next", 7.13),
        ("llama-3.1-405b", 807.5),
    ],
)
def test_bytes_a_token_agree_with_a_count_by_hand(name: str, gigabytes: float) -> None:
    assert load_model(name).streamed_bytes / 1e9 == pytest.approx(gigabytes, rel=0.003)


def test_deepseek_v4_streams_what_is_left_unquantized_too() -> None:
    """By hand 10.7 GB with everything but the head in FP8 or FP4; compressors in BF16 and
    hyper-connections in FP32 add 0.5 GB.
    """
    spec = load_model("deepseek-v4-flash")
    assert spec.streamed_bytes / 1e9 == pytest.approx(11.21, abs=0.005)
    # share of its bytes that FP8 would save
    extra = {Role.COMPRESS: 0.5, Role.SMALL: 0.5, Role.ROUTER: 0.5, Role.HYPER: 0.75}
    saved = sum(w.step_bytes * extra[w.role] for w in spec.weights() if w.role in extra)
    assert (spec.streamed_bytes - saved) / 1e9 == pytest.approx(10.7, rel=0.015)


@pytest.mark.parametrize(
    ("name", "bytes_a_position"),
    [
        ("qwen3-coder-next", 24_576),
        ("gpt-oss-120b", 18 * 2_048),  # the other 18 layers have windows
        ("deepseek-v3", 70_272),
        ("kimi-k2.6", 70_272),
        ("qwen3-30b-a3b", 98_304),
        ("qwen3-235b-a22b", 192_512),
        ("mixtral-8x7b", 131_072),
        ("llama-3.1-405b", 516_096),
    ],
)
def test_caches_grow_by_the_published_bytes_a_position(name: str, bytes_a_position: int) -> None:
    spec = load_model(name)
    assert spec.held_bytes(5000, 2) - spec.held_bytes(4000, 2) == 1000 * bytes_a_position
