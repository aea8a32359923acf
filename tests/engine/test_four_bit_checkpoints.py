"""Checkpoints in 4 bits: built after the published layouts, opened, and run like the weights that
they mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.four_bit_cases import CASES, Stored, grouped, made
from tests.engine.small_engine import LIMITS, TOKENS
from tests.engine.test_coded_checkpoints import SPEC
from tests.engine.test_coded_checkpoints import write as write_config
from tests.refusals import refused
from twin.engine.host import HostEngine
from twin.engine.weights import Checkpoint, open_checkpoint
from twin.errors import CheckpointError, ConfigError
from twin.models.load import load_model
from twin.models.spec import DType, ModelSpec
from twin.plan.options import Options
from twin.proof.prove import prove
from twin.reference.step import Reference
from twin.schedule.plans import build

QUICK = replace(SPEC, layers=1, windows=(0,))
UP = "model.layers.0.mlp.up_proj."


def write(folder: Path, case: str, stored: Stored, **changed: Any) -> Path:
    format, quantization = CASES[case]
    write_config(folder, stored, quantization | changed)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": QUICK.layers}
    config.pop("dtype", None)
    config["torch_dtype"] = "float16" if format.endswith("-fp16") else "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def opened(
    folder: Path, case: str, change: Callable[[Stored], object] = lambda _: None
) -> Checkpoint:
    stored, _ = made(QUICK, case)
    change(stored)
    return open_checkpoint(write(folder, case, stored))


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_means_what_its_layout_publishes(case: str, tmp_path: Path) -> None:
    checkpoint, (_, meant) = opened(tmp_path, case), made(QUICK, case)
    formats = {w.format.name for w in checkpoint.spec.weights() if w.name != "lm_head"}
    assert formats == {CASES[case][0]}
    assert formats == {w.format.name for w in load_model(tmp_path).weights() if w.name != "lm_head"}
    for canonical, wanted in meant.items():
        assert np.allclose(checkpoint.weights[canonical], wanted, rtol=1e-6, atol=0)


def plan_of(spec: ModelSpec, dtype: DType) -> Any:
    options = Options(
        blocks=2,
        context=8,
        max_context=64,
        kv_page=4,
        slot_bytes=4096,
        weight_dtype=dtype,
        kv_dtype=DType.FP32,
    )
    plan = build(spec, options, LIMITS)
    prove(plan)
    return plan


@pytest.mark.parametrize(
    "case",
    [case if case == "packed" else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_the_engine_runs_it_like_the_reference(case: str, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, case)
    plan = plan_of(checkpoint.spec, checkpoint.dtype)
    reference = Reference(plan, checkpoint.weights)
    wanted = np.stack([reference.step(token).copy() for token in TOKENS])
    with HostEngine(plan, checkpoint.weights) as engine:
        assert np.abs(engine.logits(TOKENS) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_scales_of_another_type_than_the_other_weights_are_kept_in_theirs(tmp_path: Path) -> None:
    def plain(stored: Stored) -> None:
        for name, (kind, array) in stored.items():
            if kind == "F16" and not name.endswith("scales"):
                stored[name] = (
                    "BF16",
                    (array.astype(np.float32).view(np.uint32) >> 16).astype("u2"),
                )

    checkpoint = opened(tmp_path, "awq", plain)
    assert checkpoint.dtype is DType.BF16
    assert {form.name for form in checkpoint.spec.coded} == {"int4-g64-zp-fp16"}


def changed(end: str, make: Callable[[Any], Any], kind: str = "") -> Callable[[Stored], None]:
    def change(stored: Stored) -> None:
        was, array = stored[UP + end]
        stored[UP + end] = (kind or was, make(array))

    return change


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("packed", lambda s: s.pop(UP + "weight_scale"), "weight_scale' is missing"),
        ("packed", changed("weight_scale", lambda a: a[:, :1]), "expected BF16 [320, 3]"),
        ("awq", changed("qweight", lambda a: a.T), "expected I32 [192, 40]"),
        (
            "packed",
            lambda s: s.update({UP + "weight_zero_point": s[UP + "weight_packed"]}),
            "zero_point",
        ),
        ("awq", lambda s: s.update({UP + "g_idx": s[UP + "qzeros"]}), "g_idx"),
    ],
)
def test_what_the_configuration_does_not_say_is_refused(
    case: str, change: Callable[[Stored], object], message: str, tmp_path: Path
) -> None:
    refused(CheckpointError, lambda: opened(tmp_path, case, change), message)


@pytest.mark.parametrize(
    ("case", "change", "part", "message"),
    [
        ("gptq", changed("g_idx", lambda a: a[::-1]), "codes", "act-order"),
        ("gptq, symmetric", changed("qzeros", lambda a: a + 1), "scales", "zero points other"),
        ("gptq", changed("scales", lambda a: a * np.float16(np.inf)), "scales", "not finite"),
        ("mxfp4", changed("weight_scale", lambda a: a | 255), "scales", "holds a NaN"),
        ("nvfp4", changed("weight_global_scale", lambda a: 0 * a), "outer", "divided by it"),
    ],
)
def test_parts_that_mean_nothing_are_refused(
    case: str, change: Callable[[Stored], object], part: str, message: str, tmp_path: Path
) -> None:
    weights = opened(tmp_path, case, change).weights
    refused(CheckpointError, lambda: weights[f"layers.0.up.{part}"], message)


@pytest.mark.parametrize(
    ("case", "settings", "message"),
    [
        ("gptq", {"desc_act": True}, "act-order"),
        ("gptq", {"bits": 3}, "GPTQ"),
        ("gptq", {"group_size": -1}, "GPTQ"),
        ("gptq", {"dynamic": {"-:.*down.*": {}}}, "down_proj"),
        ("gptq", {"lm_head": True}, "GPTQ"),
        ("awq", {"version": "gemv"}, "AWQ"),
        ("awq", {"zero_point": False}, "AWQ"),
        ("packed", grouped("pack-quantized", 64, actorder="group"), "COMPRESSED-TENSORS"),
        ("packed", grouped("pack-quantized", 64, num_bits=3), "COMPRESSED-TENSORS"),
        ("packed", grouped("pack-quantized", 48), "COMPRESSED-TENSORS"),
        ("nvfp4", grouped("nvfp4-pack-quantized", 32, type="float"), "COMPRESSED-TENSORS"),
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_refused_by_name(
    case: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    stored: Stored = {"nothing": ("F32", np.zeros(1, np.float32))}
    folder = write(tmp_path, case, stored, **settings)
    refused(ConfigError, lambda: load_model(folder), message)


def test_gptq_zero_points_are_less_by_words_not_by_nibbles(tmp_path: Path) -> None:
    """A zero point of 0 has borrowed from the one before it: read nibble by nibble, both were
    wrong, 0 by 16 scales.
    """
    weights = opened(tmp_path, "gptq", changed("qzeros", lambda a: a * 0 - 0x11111111)).weights
    assert (weights["layers.0.up.zeros"] == 0).all()
    mixed = changed("qzeros", lambda a: a * 0 + (0x10203040 - 0x11111111))
    found = opened(tmp_path, "gptq", mixed).weights["layers.0.up.zeros"]
    assert found[:8, 0].tolist() == [0, 4, 0, 3, 0, 2, 0, 1]
