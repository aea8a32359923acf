"""What low-bit models and experts promise is shown by the acceptance, also without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from studies.common.acceptance import formats
from studies.common.acceptance.sanitizer import PLANS
from studies.common.shapes import Bench
from twin.errors import EngineError
from twin.hardware.load import load_node
from twin.hardware.types import Device
from twin.models.formats import DECODED
from twin.schedule.choose import schedule_of

SCRIPT = Path(__file__).resolve().parents[2] / "studies" / "h200-acceptance" / "acceptance.py"
PARTS = ("repeats", "fidelity", "soak", "sanitizer")


def test_small_models_hold_every_kind_of_element_and_every_family_of_experts() -> None:
    specs = formats.small_specs(formats.TINY)
    assert len({spec.name for spec in specs}) == len(specs)
    for some in (specs[: len(formats.DENSE)], specs[len(formats.DENSE) :]):
        kinds = {DECODED[form.name].bits for spec in some for form in spec.coded}
        assert kinds == {4, 8}
    assert {spec.family for spec in specs if spec.experts} == {"mixtral", "qwen3_moe", "gpt_oss"}


def test_plans_for_a_gpu_fit_a_block() -> None:
    bench = Bench("cuda")
    plans = [*formats.watched_plans(bench), *formats.small_plans(bench, formats.CONTEXT)]
    assert PLANS["formats"] is formats.watched_plans
    for plan in plans:
        assert schedule_of(plan).block_bytes <= plan.limits.on_chip_bytes, plan.name


@pytest.mark.parametrize("name", formats.GPUS)
def test_plans_are_for_the_gpu_that_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = load_node(name).device

    def check(device: Device) -> None:
        if device != here:
            raise EngineError("another GPU")

    opened = list[Device]()
    monkeypatch.setattr(formats, "check_present", check)
    monkeypatch.setattr(formats, "open_random", lambda device, *_: opened.append(device))
    plan = formats.small_plan(Bench("cuda"), formats.small_specs(formats.SMALL)[0])
    formats.open_small(Bench("cuda"), plan)
    assert opened == [here]


def test_a_peer_is_farther_from_the_reference_than_the_engine() -> None:
    (spec,) = (s for s in formats.small_specs(formats.TINY) if s.name == "dense int4-g128")
    found = formats.judged(Bench("host"), replace(spec, vocab=64))
    assert found.engine_kl.mean() < formats.KL_NEAR < found.peer_kl.mean()


@pytest.mark.slow
def test_all_few_bit_parts_pass_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--device", "host"]
    command += ["--tokens", "40", "--soak-tokens", "1000", *(f"few-bits-{one}" for one in PARTS)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(command, check=False, capture_output=True, env=environment)
    parts = json.loads((tmp_path / "summary.json").read_text())["parts"]
    wrong = {name: part for name, part in parts.items() if part["result"] != "passed"}
    assert {name: part["result"] for name, part in wrong.items()} == {
        "few-bits-sanitizer": "not run"
    }, wrong
    assert done.returncode == 1  # a part that was not run is not shown
    assert len(parts["few-bits-soak"]["facts"]) == 13
