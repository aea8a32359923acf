"""Models with low-bit weights and with experts that a seed draws: all formats and families, each of
them planned, proven and held by the device; recorded, run and judged as dense shapes are.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from twin.calibrate import drawn, drawn_kinds, shape_record
from twin.calibrate.drawn import drawn_runs
from twin.calibrate.drawn_kinds import ATTENDED, FORMATS, STORED, dealt
from twin.calibrate.experiment import Experiment
from twin.calibrate.held_out import TINY
from twin.calibrate.node import calibrated_node
from twin.calibrate.recorded import RUNS, recorded, written
from twin.cli import main
from twin.errors import EngineError, PlanError
from twin.models.kind import ModelKind, kind_of, stored_as
from twin.models.load import load_model
from twin.models.spec import ModelSpec
from twin.plan.options import HandOffKind
from twin.schedule.options import default_options

HOST, H200 = calibrated_node("1xhost"), calibrated_node("1xh200")
KINDS = (ModelKind.FEW_BITS, ModelKind.EXPERTS)
CARDS: dict[ModelKind, tuple[Any, ...]] = {ModelKind.FEW_BITS: FORMATS, ModelKind.EXPERTS: STORED}
MOST_BYTES = 60e9  # an H100 has 80 GB


def card(spec: ModelSpec) -> Any:
    stored = stored_as(spec)
    return (spec.family, stored) if kind_of(spec) is ModelKind.EXPERTS else stored


@pytest.mark.parametrize(
    ("model", "kind", "stored"),
    [
        ("llama-3.2-1b", ModelKind.DENSE, "bf16"),
        ("qwen3-8b@int4-g128", ModelKind.FEW_BITS, "int4-g128"),
        ("gpt-oss-20b", ModelKind.EXPERTS, "mxfp4"),
        ("mixtral-8x7b", ModelKind.EXPERTS, "bf16"),
        ("deepseek-v3", ModelKind.EXPERTS, "fp8-128x128"),
    ],
)
def test_models_on_file_have_a_kind(model: str, kind: ModelKind, stored: str) -> None:
    spec = load_model(model)
    assert (kind_of(spec), stored_as(spec)) == (kind, stored)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_every_format_and_family_comes_once_before_any_comes_again(kind: ModelKind) -> None:
    for seed in (0, 7, 2**32 - 1):
        turns = [
            [
                dealt(CARDS[kind], seed, turn * len(CARDS[kind]) + at)
                for at in range(len(CARDS[kind]))
            ]
            for turn in range(4)
        ]
        assert all(set(turn) == set(CARDS[kind]) for turn in turns)
        assert len(set(map(tuple, turns))) > 1


@lru_cache(maxsize=2)
def all_of(kind: ModelKind) -> list[Experiment]:
    """Of each card a model, and one more. Neither planned nor proven: of what a seed draws, tests
    plan and prove some.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "plan", lambda run, device: None)
        patch.setattr(drawn, "check_room", lambda plan, node: None)
        return drawn_runs(H200, len(CARDS[kind]) + 1, 11, kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_all_models_are_planned_proven_and_held_by_the_device(kind: ModelKind) -> None:
    """One seed, more models than cards. `Experiment.plan` proves."""
    count = len(CARDS[kind]) + 1
    runs = drawn_runs(H200, count, 11, kind=kind)
    assert len(runs) == 2 * count
    assert runs[:2] == drawn_runs(H200, 1, 11, kind=kind)
    assert {card(run.spec) for run in runs} == set(CARDS[kind])
    assert {run.options.handoff for run in runs} == {HandOffKind.SENTINEL}
    assert len({run.name for run in runs}) == len({run.spec for run in runs}) * 2 == 2 * count
    for short, long in zip(runs[::2], runs[1::2], strict=True):
        assert short.spec == long.spec
        assert (short.prompt, long.prompt) == drawn.GPU.prompts
        assert kind_of(short.spec) is kind
        assert short.spec.runnable_reason() is None
        plan = long.plan(H200.device.name)
        assert plan.memory_bytes() < MOST_BYTES
        assert plan.coded == (stored_as(long.spec) not in ("bf16", "fp16"))


def test_experts_stay_in_their_scope() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "plan", lambda run, device: None)
        patch.setattr(drawn, "check_room", lambda plan, node: None)
        on_cpu = drawn_runs(HOST, len(STORED), 3, kind=ModelKind.EXPERTS)
    for runs, scope in ((all_of(ModelKind.EXPERTS), drawn_kinds.GPU), (on_cpu, drawn_kinds.CPU)):
        for run in runs[::2]:
            spec, mixture = run.spec, scope.mixtures[run.spec.family]
            assert spec.experts is not None
            assert spec.experts.experts in mixture.experts
            assert spec.experts.top_k in mixture.chosen
            assert spec.ffn % drawn_kinds.GRAIN == spec.hidden % drawn_kinds.GRAIN == 0
            assert mixture.width[0] <= spec.ffn <= mixture.width[1]
            assert ATTENDED[0] <= spec.q_size / spec.hidden <= ATTENDED[1]
            assert scope.stored_bytes[0] <= spec.stored_bytes <= scope.stored_bytes[1]


def test_blocks_of_few_bits_divide_every_row() -> None:
    for run in all_of(ModelKind.FEW_BITS)[::2]:
        (form,) = run.spec.coded
        if form.grain > 1:
            wide = min(form.block[1], form.grain)
            sizes = (run.spec.hidden, run.spec.ffn, run.spec.q_size)
            assert all(size % wide == 0 for size in sizes), form.name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_what_the_device_refuses_is_drawn_again_in_the_same_format(
    kind: ModelKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ModelSpec] = []

    def refuse(plan: Any, node: Any) -> None:
        seen.append(plan.spec)
        if len(seen) <= 2:
            raise PlanError("no room")

    monkeypatch.setattr(drawn, "check_room", refuse)
    runs = drawn_runs(HOST, 1, 9, kind=kind)
    assert len(seen) == 4  # two that are refused in their first run, two runs of the third
    assert len(set(seen)) == 3
    assert {card(spec) for spec in seen} == {card(runs[0].spec)}
    assert runs[0].spec == seen[-1]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_runs_come_back_as_they_were_written(kind: ModelKind) -> None:
    runs = drawn_runs(HOST, len(CARDS[kind]), 1, kind=kind)
    kept = {RUNS: {run.name: written(run) for run in runs}}
    assert recorded(Path("record"), yaml.safe_load(yaml.safe_dump(kept, sort_keys=False))) == runs
    assert recorded(Path("record"), json.loads(json.dumps(kept))) == runs


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_a_kind_is_predicted_run_and_judged(
    kind: ModelKind,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the engine of this computer; the second call reads what is on file."""
    monkeypatch.setenv("MONOTWIN_CALIBRATION", str(tmp_path))
    command = ["validate", "host", "--shapes", "1", "--seed", "16", "--kind", kind.value]
    assert main([*command, "--json"]) == 0
    folder = tmp_path / "runs" / "host" / f"shapes-1-seed-16-{kind.value}"
    before = (folder / "predictions.json").read_bytes(), (folder / "samples.csv").read_bytes()
    said = json.loads(capsys.readouterr().out)
    assert said["kind"] == kind.value
    assert not said["failed"]
    assert all(row["measured_tokens_per_s"] > 0 for row in said["runs"])
    ((_, group),) = said["groups"].items()
    assert (group["runs"], group["worst_error"]) == (2, said["worst_error"])
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "stored as" in out
    assert "2 of 2 runs" in out
    assert before == (
        (folder / "predictions.json").read_bytes(),
        (folder / "samples.csv").read_bytes(),
    )


def test_without_the_gpu_the_kind_is_part_of_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MONOTWIN_CALIBRATION", str(tmp_path))
    run = Experiment("s3-01-short", TINY, default_options(TINY, H200, max_context=256), 48, 8, 1)
    monkeypatch.setattr(shape_record, "drawn_runs", lambda *_, kind: [run])
    monkeypatch.setattr("twin.commands.validate_shapes.present", lambda _: "no GPU here")
    command = ["validate", "1xh200", "--shapes", "1", "--seed", "3", "--kind", "few-bits"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "twin validate 1xh200-sxm --shapes 1 --seed 3 --kind few-bits" in out
    assert "shapes-1-seed-3-few-bits" in out


class _Engine:
    """Gives other tokens each time."""

    def __init__(self) -> None:
        self.reused: list[bool] = []

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(self, prompt: Any, *, max_tokens: int, reuse: bool) -> Any:
        self.reused.append(reuse)
        return _Made([len(self.reused)])


class _Made:
    stop_reason = "length"

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.step_ns = tokens, np.full(64, 1000)


def test_repeats_that_give_different_tokens_are_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = _Engine()
    monkeypatch.setattr(shape_record, "open_random", lambda *_: engine)
    (run, _) = drawn_runs(HOST, 1, 1, kind=ModelKind.FEW_BITS)
    with pytest.raises(EngineError, match="different tokens"):
        shape_record.timed(HOST, run, run.plan(HOST.device.name))
    assert engine.reused == [True, True]  # prompts of this kind are read step by step
