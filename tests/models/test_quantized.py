"""Which matrices a quantization stores in low-bit formats: drawn configurations, by the rule of the
library that each method comes from.
"""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.models.test_config import base
from tests.refusals import refused
from twin.errors import ConfigError
from twin.models.formats import FP8, FP8_BLOCK, NVFP4, Format, Role
from twin.models.load import from_config
from twin.models.modules import KEPT, QWEN_EXPERTS, modules
from twin.models.patterns import Patterns, Style, names_single_experts

LAYERS, EXPERTS = 12, 11  # numbers of one and of two digits
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
CONFIG = base(
    "qwen3_moe",
    num_hidden_layers=LAYERS,
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    mlp_only_layers=[0, 1],
)
SPEC = from_config(CONFIG, "tiny")
NAMES = [module.name for module in modules(SPEC, QWEN_EXPERTS, each_expert=True)]
ROLES = {m.name: m.role for m in modules(SPEC, QWEN_EXPERTS, each_expert=True)}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DRAWS = 15
Rule = Callable[[str, list[str]], bool]


def transformers_rule(name: str, texts: list[str]) -> bool:
    should = pytest.importorskip("transformers.quantizers.quantizers_utils").should_convert_module
    return not should(name, texts)


def compressed_rule(name: str, texts: list[str]) -> bool:
    match = pytest.importorskip("compressed_tensors.utils.match").match_name
    return any(match(name, text) for text in texts)


def modelopt_rule(name: str, texts: list[str]) -> bool:
    """Wildcards over names, as its exports say; what is in a module that is named is left, too."""
    parts = name.split(".")
    parents = {".".join(parts[: n + 1]) for n in range(len(parts))}
    return any(fnmatch.fnmatchcase(name, text) or text in parents for text in texts)


def names(rng: random.Random, prefix: str) -> list[str]:
    """Exceptions by name: of some kinds of module in all layers, or of a few modules."""
    kinds = rng.sample(["self_attn", "mlp", "mlp.experts"], rng.randint(0, 2))
    chosen = [name for name in NAMES if any(f".{kind}." in name for kind in kinds)]
    few = rng.sample(NAMES, rng.choice([0, 0, 0, 1, 3]))
    return [prefix + name for name in {*chosen, *few}]


def parents(rng: random.Random, prefix: str) -> list[str]:
    kinds = rng.sample(["self_attn", "mlp", "mlp.experts"], rng.randint(1, 2))
    layers = range(LAYERS) if rng.random() < 0.6 else rng.sample(range(LAYERS), 3)
    return [f"{prefix}layers.{layer}.{kind}" for layer in layers for kind in kinds]


def globs(rng: random.Random, prefix: str) -> list[str]:
    kinds = ["*self_attn*", "*mlp.experts*", "*.mlp.*", f"*{rng.choice(PROJECTIONS)}"]
    own = [f"{prefix}layers.{n}.self_attn*" for n in range(LAYERS)]
    return rng.choice([rng.sample(kinds, rng.randint(1, 2)), own, [f"{prefix}layers.1*"]])


def expressions(rng: random.Random, prefix: str) -> list[str]:
    start = prefix.replace(".", r"\.")
    kinds = [
        r".*self_attn.*",
        r".*\.mlp\..*",
        r".*mlp\.experts.*",
        rf"{start}layers\.\d+\.self_attn\.[qkvo]_proj",
        rf"{start}layers\.(0|1)\.mlp.*",
        rf".*\.{rng.choice(PROJECTIONS)}$",
        rf".*layers\.{rng.randrange(LAYERS)}\..*",
        rf".*experts\.{rng.randrange(EXPERTS)}\..*",
    ]
    return rng.sample(kinds, rng.randint(1, 2))


def prefixed(texts: list[str]) -> list[str]:
    return [f"re:{text}" for text in texts]


def exceptions(rng: random.Random, style: Style, prefix: str) -> list[str]:
    spellings = {
        Style.BOUNDED: [names, parents, expressions],
        Style.EXACT: [names, lambda r, p: prefixed(expressions(r, p))],
        Style.NAMES: [names, parents, globs],
    }[style]
    return [text for draw in rng.sample(spellings, rng.randint(1, 2)) for text in draw(rng, prefix)]


def quantization(style: Style, texts: list[str]) -> dict[str, Any]:
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    return {
        Style.BOUNDED: {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [*texts, "lm_head"],
        },
        Style.EXACT: {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {**group, "targets": ["Linear"]}},
            "ignore": [*texts, "re:.*lm_head"],
        },
        Style.NAMES: {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "exclude_modules": [*texts, "*lm_head"],
        },
    }[style]


RULES: dict[Style, tuple[Rule, Format]] = {
    Style.BOUNDED: (transformers_rule, FP8_BLOCK),
    Style.EXACT: (compressed_rule, FP8),
    Style.NAMES: (modelopt_rule, NVFP4),
}


@pytest.mark.parametrize("style", RULES, ids=lambda style: style.name)
def test_every_matrix_has_the_format_that_the_methods_own_library_gives_it(style: Style) -> None:
    rng, (rule, format) = random.Random(52), RULES[style]
    read = uneven = 0
    for _ in range(DRAWS):
        prefix = rng.choice(PREFIXES)
        texts = exceptions(rng, style, prefix)
        by_role: dict[Role, set[bool]] = {}
        for name in NAMES:
            by_role.setdefault(ROLES[name], set()).add(rule(prefix + name, texts))
        config = {**CONFIG, "quantization_config": quantization(style, texts)}
        if any(len(found) > 1 for found in by_role.values()):
            uneven += 1
            refused(ConfigError, lambda config=config: from_config(config, "m"), "layers.")
            continue
        read += 1
        formats = from_config(config, "m").formats
        right = {r: SPEC.formats.of(r) if True in left else format for r, left in by_role.items()}
        assert {role: formats.of(role) for role in right} == right, texts
    assert read > DRAWS // 10
    assert uneven > DRAWS // 10


@pytest.mark.parametrize("style", RULES, ids=lambda style: style.name)
def test_a_list_that_names_all_experts_alike_is_judged_by_one(style: Style) -> None:
    rng = random.Random(7)
    seen = 0
    for _ in range(DRAWS):
        texts = exceptions(rng, style, "model.")
        if names_single_experts(texts, style):
            continue
        seen += 1
        patterns = Patterns("m", texts, style)
        for layer in range(2, LAYERS):
            of_layer = [f"model.layers.{layer}.mlp.experts.{e}.up_proj" for e in range(EXPERTS)]
            assert len({patterns.match(name) for name in of_layer}) == 1, texts
    assert seen > 3


def test_groups_of_modules_have_their_own_formats() -> None:
    four = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    eight = {"num_bits": 8, "type": "float", "strategy": "channel"}
    groups = {
        "group_0": {"weights": four, "targets": [r"re:.*mlp\.experts.*"]},
        "group_1": {"weights": eight, "targets": ["Linear"]},
    }
    said = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    formats = from_config({**CONFIG, "quantization_config": said}, "m").formats
    assert formats.of(Role.EXPERT) is NVFP4
    assert formats.of(Role.ATTENTION) is formats.of(Role.DENSE) is FP8
    assert formats.of(Role.HEAD) is formats.of(Role.ROUTER) is SPEC.formats.rest


def test_layers_of_mixed_precision_have_the_formats_that_name_them() -> None:
    layers = {
        **{f"model.layers.{n}.self_attn": {"quant_algo": "FP8"} for n in range(LAYERS)},
        **{
            f"model.layers.{n}.mlp.experts.{e}.{p}": {"quant_algo": "NVFP4", "group_size": 16}
            for n in range(2, LAYERS)
            for e in range(EXPERTS)
            for p in PROJECTIONS[4:]
        },
    }
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    formats = from_config({**CONFIG, "quantization_config": said}, "m").formats
    assert (formats.of(Role.ATTENTION), formats.of(Role.EXPERT)) == (FP8, NVFP4)
    assert formats.of(Role.DENSE) is SPEC.formats.rest
    del layers[f"model.layers.5.mlp.experts.{EXPERTS - 1}.down_proj"]
    refused(
        ConfigError,
        lambda: from_config({**CONFIG, "quantization_config": said}, "m"),
        f"layers.5.mlp.experts.{EXPERTS - 1}.down_proj",
    )


@pytest.mark.parametrize(
    "text",
    [
        "decoder.layers.3.self_attn.q_proj",
        "model.layers.3.self_attn.qkv_proj",
        "model.layers.3.mlp",
    ],
)
def test_a_matrix_in_a_spelling_that_is_not_known_is_refused(text: str) -> None:
    said = quantization(Style.EXACT, [text])
    refused(ConfigError, lambda: from_config({**CONFIG, "quantization_config": said}, "m"), text)


@pytest.mark.parametrize(
    "text",
    [
        "vision_tower.encoder.layers.3.self_attn.q_proj",
        f"model.layers.{LAYERS}.self_attn.q_proj",  # a draft's
        "model.layers.0.mlp.experts.0.up_proj",  # of a dense layer
        "model.layers.3.input_layernorm",
        "re:visual.*",
    ],
)
def test_a_name_of_something_else_changes_nothing(text: str) -> None:
    said = quantization(Style.EXACT, [text])
    formats = from_config({**CONFIG, "quantization_config": said}, "m").formats
    assert formats.of(Role.ATTENTION) is formats.of(Role.EXPERT) is FP8


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_cache_scheme", {"num_bits": 8, "type": "int"}),
        ("kv_cache_scheme", {"num_bits": 8, "type": "float", "dynamic": True}),
        ("kv_cache_scheme", {"num_bits": 8, "type": "float", "strategy": "token"}),
        ("kv_cache_quant_algo", "NVFP4"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("transform_config", {"config_groups": {"R1": {}}}),
        ("llm_int8_skip_modules", ["lm_head"]),
        ("something_new", 3),
    ],
)
def test_what_else_a_quantization_says_is_refused_by_its_key(key: str, value: object) -> None:
    for style in RULES:
        said = quantization(style, []) | {key: value}
        refused(
            ConfigError,
            lambda said=said: from_config({**CONFIG, "quantization_config": said}, "m"),
            key,
        )


def test_gptq_leaves_out_what_its_expressions_name() -> None:
    said = {
        **{"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
        "dynamic": {r"-:.*self_attn.*": {}},
    }
    config = base("llama", quantization_config=said)
    spec = from_config(config, "m")
    assert spec.formats.of(Role.DENSE).name == "int4-g32"
    assert spec.formats.of(Role.ATTENTION) is spec.formats.rest
    said["dynamic"] = {r"-:model\.layers\.2\..*": {}}
    refused(ConfigError, lambda: from_config(config, "m"), "layers.2.")
    said["dynamic"] = {r"+:.*down_proj.*": {"bits": 8}}
    refused(ConfigError, lambda: from_config(config, "m"), "dynamic")


def test_every_matrix_is_judged_once() -> None:
    assert all(role not in KEPT for role in ROLES.values())
    assert len(set(NAMES)) == len(NAMES) == LAYERS * 4 + 2 * 3 + (LAYERS - 2) * EXPERTS * 3
