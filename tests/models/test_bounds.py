"""Hostile configurations: every number has a range with a reason, and a refusal is one short line
at once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.models.test_config import base
from tests.models.test_layers import config_of
from tests.refusals import refused
from tests.rows import every
from twin.data import data_dir
from twin.errors import ConfigError
from twin.models import files
from twin.models.bounds import FIELDS, FP32_LARGEST, MOST_LAYERS, MOST_LISTED, quantity
from twin.models.config import Config
from twin.models.load import from_config, load_model
from twin.models.patterns import Patterns

SOURCES = Path(files.__file__).parent


def written(folder: Path, text: str | bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


# ---- ranges --------------------------------------------------------------------------------------


def test_every_number_that_a_family_reads_has_a_range() -> None:
    calls = re.compile(r"""\.(?:count|whole|wholes|real)\("(\w+)\"""")
    read = {key for path in SOURCES.glob("*.py") for key in calls.findall(path.read_text())}
    assert len(read) > 40
    assert read <= FIELDS.keys()


def test_every_range_says_why_and_fits_what_the_kernel_holds() -> None:
    for key, limits in FIELDS.items():
        assert 0 <= limits.lowest < limits.highest <= FP32_LARGEST, key
        assert len(limits.reason) > 10, key


@every("key", FIELDS)
def test_a_number_outside_of_its_range_is_refused_with_the_limit_and_its_reason(key: str) -> None:
    limits = FIELDS[key]
    read = Config.whole if isinstance(limits.highest, int) else Config.real
    for value in (limits.highest * 2, 10**400, -1, float("nan"), float("inf")):
        refused(
            ConfigError,
            partial(read, Config("tiny", {key: value}), key),
            key,
            quantity(limits.highest),
            limits.reason,
        )
    for value in {limits.highest, limits.lowest}:
        assert read(Config("tiny", {key: value}), key) == value


def test_a_vocabulary_that_fp32_cannot_count_is_refused() -> None:
    """A token's index travels between blocks as FP32: 2^24 + 1 would arrive as 2^24."""
    assert from_config(base("llama", vocab_size=2**24), "tiny").vocab == 2**24
    refused(
        ConfigError,
        lambda: from_config(base("llama", vocab_size=2**24 + 1), "tiny"),
        "vocab_size is 16777217",
        "2^24",
        "FP32",
    )


@pytest.mark.parametrize("layers", [MOST_LAYERS + 1, 10**6, 10**9, 10**30])
@pytest.mark.parametrize("family", ["llama", "mistral", "laneformer"])
def test_layers_without_end_are_refused_at_once(family: str, layers: int) -> None:
    refused(
        ConfigError,
        lambda: from_config(base(family, num_hidden_layers=layers), "tiny"),
        f"num_hidden_layers is {layers}",
        str(MOST_LAYERS),
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("q_lora_rank", 10**15), ("n_routed_experts", 10**12), ("num_hidden_layers", 10**6)],
)
def test_sizes_without_end_are_refused_in_layered_families(key: str, value: int) -> None:
    refused(
        ConfigError,
        lambda: from_config(config_of("deepseek-v3") | {key: value}, "tiny"),
        f"{key} is {value}",
    )


def test_fields_that_are_allowed_alone_are_refused_where_their_bytes_are_not_counted_exactly() -> (
    None
):
    largest = {
        "hidden_size": 2**20,
        "intermediate_size": 2**20,
        "num_hidden_layers": MOST_LAYERS,
        "vocab_size": 2**24,
        "head_dim": 2**14,
    }
    refused(
        ConfigError,
        lambda: from_config(base("llama", **largest, num_attention_heads=4096), "tiny"),
        "matrices",
        "2^53",
    )
    cache = {"max_position_embeddings": 2**30, "num_hidden_layers": MOST_LAYERS, "head_dim": 4096}
    refused(
        ConfigError,
        lambda: from_config(base("llama", **cache), "tiny"),
        "caches of 1073741824 positions",
        "2^53",
    )


def test_a_number_is_not_a_switch() -> None:
    refused(
        ConfigError,
        lambda: from_config(base("llama", mlp_bias=0), "tiny"),
        "mlp_bias is 0",
        "False",
    )
    refused(
        ConfigError,
        lambda: from_config(base("phi3", full_attn_mod=True), "tiny"),
        "full_attn_mod is True",
    )


@pytest.mark.parametrize(
    "value", [[1] * (MOST_LISTED + 1), [2**70], [True], [-1], [1.0], "1", {"0": 1}]
)
def test_a_list_of_numbers_is_bounded_in_length_and_value(value: object) -> None:
    refused(
        ConfigError,
        lambda: Config("tiny", {"compress_ratios": value}).wholes("compress_ratios"),
        "compress_ratios",
        "list of whole numbers",
    )


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("deepseek-v3", {"topk_group": 9, "n_group": 8}, ("topk_group is 9", "n_group = 8")),
        ("deepseek-v3", {"topk_method": "best"}, ("topk_method is 'best'", "noaux_tc")),
        (
            "deepseek-v4-flash",
            {"qk_rope_head_dim": 1024},
            ("qk_rope_head_dim is 1024", "head_dim = 512"),
        ),
        (
            "kimi-k2.6",
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"\x1b[2J": 3},
                }
            },
            ("config_groups", "a mapping"),
        ),
    ],
)
def test_fields_that_contradict_each_other_are_named(
    name: str, changes: dict[str, object], says: tuple[str, ...]
) -> None:
    refused(ConfigError, lambda: from_config(config_of(name) | changes, "tiny"), *says)


def test_the_text_model_behind_a_tower_is_of_a_family_that_is_described() -> None:
    whole = {
        "model_type": "kimi_k25",
        "text_config": config_of("kimi-k2.6") | {"model_type": "llama"},
    }
    refused(
        ConfigError,
        lambda: from_config(whole, "tiny"),
        "text_config: model_type is 'llama'",
        "kimi_k2",
    )


# ---- texts ---------------------------------------------------------------------------------------

HOSTILE = [
    "x" * 300_000,
    "\x1b[2J\x1b]0;owned\x07",
    "a\nb\rc",
    "\0",
    "\ud800",
    "\u202egnp",
    "[" * 900,
    ["x" * 99_999] * 9,
    {"\x1b[1m" * 99: 1},
]


@every("value", HOSTILE)
@every(
    "key",
    [
        "model_type",
        "hidden_size",
        "rms_norm_eps",
        "dtype",
        "hidden_act",
        "layer_types",
        "sliding_window",
        "mlp_bias",
    ],
)
def test_a_refusal_of_any_value_is_one_short_line_without_control_characters(
    key: str, value: object
) -> None:
    refused(ConfigError, lambda: from_config(base("llama", **{key: value}), "tiny"), key)


@every("part", ["rope_type", "type", "factor"])
@every("value", HOSTILE)
def test_so_is_one_of_a_value_inside_of_a_mapping(part: str, value: object) -> None:
    refused(
        ConfigError,
        lambda: from_config(
            base("llama", rope_scaling={"rope_type": "linear", "factor": 2.0} | {part: value}),
            "tiny",
        ),
        part,
    )


BAD_JSON = [
    ('{"model_type": "llama", "model_type": "qwen2"}', "'model_type' appears twice"),
    ("[" * 100_000, "nested too deep"),
    ('{"a": ' * 100_000, "nested too deep"),
    ('{"rope_theta": ' + "9" * 5_000 + "}", "5000 digits"),
    ('{"a": "' + " " * files.MOST_JSON_BYTES + '"}', "larger than 16777216 bytes"),
    ('{"a": [' + "[]," * files.MOST_JSON_PARTS + "[]]}", "more than 1000000 mappings and lists"),
    ("{}".encode("utf-16"), "corrupt JSON"),
    ("[]", "expected a JSON object"),
    (b"", "corrupt JSON"),
]


@pytest.mark.parametrize(("text", "says"), BAD_JSON, ids=[says for _, says in BAD_JSON])
def test_json_that_has_no_end_or_no_meaning_is_refused(
    tmp_path: Path, text: str | bytes, says: str
) -> None:
    refused(ConfigError, lambda: load_model(written(tmp_path / "m", text)), says, "config.json")


def test_a_number_of_published_length_for_no_limit_is_read(tmp_path: Path) -> None:
    assert (
        load_model(
            written(tmp_path / "m", json.dumps(base("llama") | {"model_max_length": 10**30}))
        ).layers
        == 4
    )


# ---- files ---------------------------------------------------------------------------------------


def cache(place: Path, to: str) -> Path:
    """A model in the layout of the Hugging Face cache, its configuration a link."""
    blobs, snapshot = (
        place / "models--a--b" / "blobs",
        place / "models--a--b" / "snapshots" / "0123",
    )
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in (blobs / "abcd", blobs.parent / "sibling", place / "outside"):
        file.write_text(json.dumps(base("llama")))
    (snapshot / "config.json").symlink_to(to)
    return snapshot


def test_links_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    assert load_model(cache(tmp_path, "../../blobs/abcd")).name == "a/b"


def test_the_cache_may_itself_lie_behind_a_link(tmp_path: Path) -> None:
    cache(tmp_path / "disk", "../../blobs/abcd")
    (tmp_path / "home").symlink_to("disk")
    assert load_model(tmp_path / "home" / "models--a--b" / "snapshots" / "0123").layers == 4


@pytest.mark.parametrize(
    "to", ["../../sibling", "../../../outside", "/etc/passwd", "/dev/zero", "/proc/self/environ"]
)
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, to: str) -> None:
    refused(
        ConfigError,
        lambda: load_model(cache(tmp_path, to)),
        "'config.json' is a link to",
        "outside of this folder",
    )


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    written(tmp_path / "m", json.dumps(base("llama"))).joinpath("config.json").rename(
        tmp_path / "m" / "other.json"
    )
    (tmp_path / "m" / "config.json").symlink_to("other.json")
    assert load_model(tmp_path / "m").layers == 4


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


SPECIAL: list[tuple[Callable[[Path], Any], str]] = [
    (make_pipe, "not a regular file"),
    (Path.mkdir, "not a regular file"),
    (lambda path: path.symlink_to("nowhere"), "leads nowhere"),
    (lambda path: path.symlink_to(path.name), "leads nowhere"),
]


@pytest.mark.parametrize(("make", "says"), SPECIAL)
def test_what_is_no_regular_file_is_refused_without_being_opened(
    tmp_path: Path, make: Callable[[Path], Any], says: str
) -> None:
    (tmp_path / "m").mkdir()
    make(tmp_path / "m" / "config.json")
    refused(ConfigError, lambda: load_model(tmp_path / "m"), "config.json", says)


@pytest.mark.parametrize(
    "name", ["x" * 300, "a/" * 3_000, "a\0b", "x" * 100_000, "\ud800", "llama\x1b[2J"]
)
def test_a_text_that_is_neither_name_nor_path_is_refused(name: str) -> None:
    refused(ConfigError, lambda: load_model(name), "neither a model's name nor a path")


@pytest.mark.parametrize(
    "name", ["llama-3.2-1b@fp8-128x128@mxfp4", "@fp32" * 20_000, "nothing@mxfp4", "@mxfp4"]
)
def test_a_name_has_one_format_at_most(name: str) -> None:
    refused(ConfigError, lambda: load_model(name), "neither a model's name nor a path")


def test_a_folder_whose_name_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="characters that cannot be shown; rename it"):
        load_model(written(tmp_path / "m\x1b[2J", json.dumps(base("llama"))))


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    refused(ConfigError, lambda: load_model(tmp_path), "has no config.json")


# ---- patterns ------------------------------------------------------------------------------------

MODULE = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (MODULE, True),
        ("model.layers.0.self_attn", True),
        ("model.layers.0.self_att", False),
        ("lm_head", False),
        ("model.layers.*.self_attn", True),
        ("model.layers.*.mlp", False),
        ("*q_proj", True),
        ("re:.*self_attn.*", True),
        (r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", False),
        (r"re:^model\.layers\.\d+\.self_attn\.[qkv]_proj$", True),
        (r"re:^(?!.*mlp).*$", True),
        ("re:(?:model|x).layers", True),
        ("re:self_attn", False),  # matched from the start
    ],
)
def test_exceptions_are_names_globs_or_expressions(pattern: str, found: bool) -> None:
    assert Patterns("tiny", [pattern, "other"]).match(MODULE) is found


@pytest.mark.parametrize(
    "pattern",
    [
        "re:(a+)+$",
        "re:(.*)*x",
        r"re:(\w+\.?)+$",
        "re:" + "(.|.)" * 40 + "x",
        "re:" + ".*" * 12 + "!",
        "re:(",
        "re:[",
        "re:a**",
        "re:x{1,99999999999}",
        "re:(?P<x>a)",
        "re:" + "a?" * 99 + "a" * 99,
        "re:(?>a*)*",
        "re:" + "(" * 400,
    ],
)
def test_an_expression_that_could_run_for_ever_or_means_nothing_is_refused(pattern: str) -> None:
    config = config_of("gpt-oss-20b")
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [pattern]}
    refused(ConfigError, lambda: from_config(config, "tiny"), "exception", "write names instead")


def test_the_expressions_of_a_configuration_are_bounded_together() -> None:
    refused(
        ConfigError,
        lambda: Patterns("tiny", [f"re:.*.*.*.*{n}" for n in range(99)]),
        "99 exceptions",
        "write names instead",
    )
    refused(
        ConfigError, lambda: Patterns("tiny", [f"*{n}" for n in range(9_999)]), "9999 exceptions"
    )
    assert Patterns("tiny", [f"model.layers.{n}" for n in range(60_000)]).match(MODULE)


def test_our_own_models_lie_within_the_ranges_with_room() -> None:
    """A model of twice the largest published size can still be described."""
    for path in sorted((data_dir("hwmodels") / "models").glob("*.yaml")):
        config = config_of(path.stem)
        for key, limits in FIELDS.items():
            value = config.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                assert 2 * value <= limits.highest, (path.stem, key)
