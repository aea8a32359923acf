"""What every command promises: results on stdout, talk on stderr, the same output for the same
input.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.command_line import TINY, Twin
from tests.patience import PATIENCE_S
from twin.calibrate.known_error import known_error
from twin.calibrate.node import calibrated_node
from twin.cli import COMMANDS, build_parser
from twin.commands import demo
from twin.commands.arguments import option_value
from twin.commands.output import harmless
from twin.commands.reference import subparsers
from twin.commands.run import show_piece
from twin.engine.generate import Piece
from twin.engine.opening import Watched
from twin.engine.weights import random_weights
from twin.hardware.load import load_node
from twin.models.load import load_model, tensors
from twin.plan.options import CollectiveKind, Execution, HandOffKind, Options
from twin.proof.prove import prove
from twin.schedule.choose import schedule_of
from twin.schedule.options import SETTLED, default_options, plan_for
from twin.schedule.ring import limits_of
from twin.schedule.strips import MOST_STRIPS, with_strips
from twin.study.engines import ENGINES
from twin.study.sensitivity import OPTIONS, sensitivity

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tiny(checkpoint: Path) -> str:
    """Cheap to simulate on a real GPU's description."""
    return str(checkpoint)


ONE = ("1xh200", "--blocks", "8")


# ---- help and output -----------------------------------------------------------------------------


def test_a_search_names_the_options_of_a_faster_division(twin: Twin) -> None:
    line = ("plan", "gemma-2-2b", "1xh200", "--context", "300", "--max-context", "372")
    found = json.loads(twin(*line, "--search", "--json").out)
    assert "division" not in json.loads(twin(*line, "--json").out)
    words = [
        word
        for name, value in found["division_options"].items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    assert words
    assert " ".join(words) in " ".join(twin(*line, "--search").out.split())
    assert twin(*line, *words).code == 0


def test_help_names_every_command(twin: Twin) -> None:
    outcome = twin("--help")
    assert outcome.code == 0
    for name in COMMANDS:
        assert re.search(rf"^ +{name} ", outcome.out, re.MULTILINE)
    assert "twin demo" in outcome.out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_examples_and_no_empty_line_of_help(name: str, twin: Twin) -> None:
    outcome = twin(name, "--help")
    assert outcome.code == 0
    assert f"examples:\n  twin {name}" in outcome.out
    for action in subparsers(build_parser())[name]._actions:
        assert action.help is not None


def test_every_option_of_the_engine_is_a_flag() -> None:
    parser = subparsers(build_parser())["plan"]
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {"--" + f.name.replace("_", "-") for f in fields(Options)} - {"--gpus"} <= flags
    assert "--dtype" in flags


def test_option_values_carry_units_and_names() -> None:
    assert option_value("slot_bytes", "16 KiB") == 16384
    assert option_value("handoff", "grid") is HandOffKind.GRID
    assert option_value("delay", "2") == 2


@pytest.mark.parametrize(
    "words",
    [
        ("models",),
        ("models", "qwen3-8b"),
        ("hardware",),
        ("hardware", "8xmi300x"),
        ("plan", "laneformer-2b", "8xmi300x"),
    ],
    ids=lambda words: " ".join(words),
)
def test_json_is_one_object_and_stderr_stays_empty(words: tuple[str, ...], twin: Twin) -> None:
    outcome = twin(*words, "--json")
    assert outcome.code == 0
    assert isinstance(json.loads(outcome.out), dict)
    assert outcome.err == ""
    assert twin(*words).out != outcome.out


def test_hardware_gives_each_number_its_kind_and_source(twin: Twin) -> None:
    for number in json.loads(twin("hardware", "8xmi300x", "--json").out)["numbers"].values():
        assert number["kind"]
        assert number["source"]
        assert number["low"] <= number["value"] <= number["high"]


# ---- plan ----------------------------------------------------------------------------------------


def test_plan_adds_up(twin: Twin) -> None:
    data = json.loads(twin("plan", "laneformer-2b", "8xmi300x", "--json").out)
    kinds = data["stage_kinds"].values()
    assert sum(kind["bytes"] for kind in kinds) == data["bytes_per_step"]
    assert sum(kind["count"] for kind in kinds) == data["stages"]
    assert data["floor_s"] * data["floor_tokens_per_s"] == pytest.approx(1)
    for budget in data["budgets"].values():
        assert budget["used"] <= budget["limit"]


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "node", ["1xh200", "2xb200", "8xh200", "8xmi300x", "8xmi355x", "1xhost", "2xhost"]
)
@pytest.mark.parametrize("model", ["laneformer-2b", "llama-3.2-1b"])
def test_default_options_are_valid_and_fill_the_ring(model: str, node: str) -> None:
    plan = plan_for(load_model(model), load_node(node))
    prove(plan)
    left = plan.limits.on_chip_bytes - schedule_of(plan).block_bytes
    assert left >= 0
    most = with_strips(plan, MOST_STRIPS).options.ring_slots  # of a ring in registers
    in_strips = load_node(node).device.amd and plan.options.ring_slots == most
    assert plan.limits.oversubscribe or in_strips or left < plan.options.slot_bytes


def test_defaults_change_only_what_depends_on_model_and_node() -> None:
    made, plain = default_options(load_model("laneformer-2b"), load_node("8xmi300x")), Options()
    for field in fields(Options):
        assert field.name in SETTLED or getattr(made, field.name) == getattr(plain, field.name)
    assert made.blocks == 256
    assert made.collective is CollectiveKind.PUSH


def test_what_a_user_chooses_wins() -> None:
    chosen = {
        "blocks": 64,
        "ring_slots": 2,
        "slot_bytes": 8192,
        "window_slots": 1,
        "max_context": 777,
    }
    made = default_options(load_model("laneformer-2b"), load_node("8xh200"), **chosen)
    assert {name: getattr(made, name) for name in chosen} == chosen


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_every_engine_can_be_planned(engine: dict[str, object]) -> None:
    plan = plan_for(load_model("laneformer-2b"), load_node("8xh200"), **engine)
    prove(plan)
    assert (plan.options.execution is Execution.RESIDENT) == (plan.launches() == 0)


def test_limits_come_from_the_node() -> None:
    limits = limits_of(load_node("8xmi300x"))
    assert (limits.blocks, limits.dies, limits.oversubscribe) == (304, 8, False)
    assert limits_of(load_node("1xhost")).oversubscribe


# ---- simulate and whatif -------------------------------------------------------------------------


def test_simulate_is_deterministic_and_complete(twin: Twin, tiny: str) -> None:
    first, second = (twin("simulate", tiny, *ONE, "--json") for _ in range(2))
    assert first.out == second.out
    data = json.loads(first.out)
    assert {
        "tokens_per_s",
        "floor",
        "floor_s",
        "floor_tokens_per_s",
        "stream_fraction",
        "attribution",
        "options",
    } <= data.keys()
    assert sum(data["attribution"].values()) == pytest.approx(data["step_s"])
    assert data["stream_fraction"] == pytest.approx(data["floor_s"] * data["tokens_per_s"])
    assert "simulated steps per second" in first.err


def test_simulate_writes_trace_and_report(twin: Twin, tiny: str, tmp_path: Path) -> None:
    trace, report = tmp_path / "a" / "trace.json", tmp_path / "b" / "page.html"
    outcome = twin("simulate", tiny, *ONE, "--trace", trace, "--report", report)
    assert outcome.code == 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert "Timeline of one step" in report.read_text()
    assert str(report) in outcome.err
    assert "(predicted)" in outcome.out
    assert outcome.out.rstrip().endswith(("simulated by compiled code", "simulated by SimPy"))


def test_four_engines_side_by_side(twin: Twin, tiny: str) -> None:
    data = json.loads(twin("simulate", tiny, *ONE, "--engines", "--json").out)["engines"]
    assert list(data) == list(ENGINES)
    assert (
        data["stream"]["tokens_per_s"]
        < data["graph"]["tokens_per_s"]
        < data["resident, sentinel"]["tokens_per_s"]
    )


def test_whatif_shows_the_effect(twin: Twin, tiny: str) -> None:
    outcome = twin(
        "whatif", tiny, *ONE, "--set", "handoff=grid", "--set", "handoff.hop=x2", "--json"
    )
    data = json.loads(outcome.out)
    assert data["effect"] < 0
    assert data["changed"]["tokens_per_s"] == pytest.approx(
        data["baseline"]["tokens_per_s"] * (1 + data["effect"])
    )


def test_whatif_without_effect_is_zero(twin: Twin, tiny: str) -> None:
    assert (
        json.loads(twin("whatif", tiny, *ONE, "--set", "power.tdp=x2", "--json").out)["effect"] == 0
    )


def test_whatif_can_change_the_number_of_gpus(twin: Twin, tiny: str) -> None:
    assert (
        twin("whatif", tiny, *ONE, "--set", "gpus=2", "--set", "link.hop=x0.5", "--json").code == 0
    )
    outcome = twin("whatif", tiny, *ONE, "--set", "link.hop=x0.5", "--json")
    assert outcome.code == 2  # one GPU has no link to change
    assert "link.hop" in outcome.err
    assert twin("whatif", tiny, "2xh200", "--blocks", "8", "--set", "gpus=1", "--json").code == 0


def test_sensitivity_covers_every_number_once_and_reports_progress(twin: Twin, tiny: str) -> None:
    outcome = twin("whatif", tiny, *ONE, "--sensitivity", "--json")
    effects = json.loads(outcome.out)["sensitivity"]
    names = [effect["name"] for effect in effects]
    assert len(names) == len(set(names))
    assert set(OPTIONS) <= set(names)
    assert "device.memory.stream_bytes_per_s" in names
    assert [abs(e["effect"]) for e in effects] == sorted(
        (abs(e["effect"]) for e in effects), reverse=True
    )
    assert f"{len(names)}/{len(names)}" in outcome.err
    assert sensitivity.__doc__


# ---- run -----------------------------------------------------------------------------------------


def test_run_prints_text_and_speed(twin: Twin, checkpoint: Path) -> None:
    outcome = twin("run", checkpoint, "--prompt", "Hello", "--max-tokens", "12")
    assert outcome.code == 0
    assert outcome.out.endswith("\n")
    assert "12 tokens generated" in outcome.err
    assert "(measured)" in outcome.err


def test_run_json_holds_what_the_text_says(twin: Twin, checkpoint: Path) -> None:
    text = twin("run", checkpoint, "--prompt", "Hello", "--max-tokens", "12").out
    data = json.loads(
        twin("run", checkpoint, "--prompt", "Hello", "--max-tokens", "12", "--json").out
    )
    assert harmless(data["text"], allowed="\t") + "\n" == text
    assert len(data["tokens"]) == 12
    assert data["prompt_tokens"][-5:] == list(b"Hello")
    assert data["stop_reason"] == "length"


def test_run_is_the_same_on_any_number_of_gpus_and_blocks(twin: Twin, checkpoint: Path) -> None:
    words = ("run", checkpoint, "--prompt-tokens", "1,2,3", "--max-tokens", "8", "--json")
    tokens = [
        json.loads(twin(*words, *more).out)["tokens"]
        for more in ((), ("--gpus", "2"), ("--blocks", "3"))
    ]
    assert tokens[0] == tokens[1] == tokens[2]


def test_seed_decides_what_is_sampled(twin: Twin, checkpoint: Path) -> None:
    words = (
        "run",
        checkpoint,
        "--prompt",
        "x",
        "--max-tokens",
        "10",
        "--temperature",
        "1.5",
        "--top-k",
        "50",
        "--json",
        "--seed",
    )
    made = [json.loads(twin(*words, seed).out)["tokens"] for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


def test_stop_token_ends_the_generation(twin: Twin, checkpoint: Path) -> None:
    words = ("run", checkpoint, "--prompt", "Hello", "--max-tokens", "12", "--json")
    tokens = json.loads(twin(*words).out)["tokens"]
    data = json.loads(twin(*words, "--stop", tokens[3]).out)
    assert data["tokens"] == tokens[: tokens.index(tokens[3]) + 1]
    assert data["stop_reason"] == "stop-token"


def test_stop_text_is_not_printed(twin: Twin, checkpoint: Path) -> None:
    words = ("run", checkpoint, "--prompt", "Hello", "--max-tokens", "40", "--ignore-eos")
    text = json.loads(twin(*words, "--json").out)["text"]
    stop = next(c for c in text if c.isascii() and c.isprintable() and not c.isdigit())
    assert twin(*words, "--stop", stop).out == harmless(text.split(stop)[0], allowed="\t") + "\n"


def test_generated_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """A model's text may hold a terminal's commands; newlines and tabs are text."""
    show_piece(Piece("a\tb\n\x1b]0;x\x07\r\x9b\u202eé🙂"))
    assert capsys.readouterr().out == "a\tb\n\\x1b]0;x\\x07\\r\\x9b\\u202eé🙂"


def test_random_weights_need_no_checkpoint(twin: Twin, checkpoint: Path) -> None:
    words = (
        "run",
        checkpoint / "config.json",
        "--random",
        "3",
        "--prompt",
        "abc",
        "--max-tokens",
        "5",
        "--json",
    )
    assert len(json.loads(twin(*words).out)["tokens"]) <= 5


def test_ctrl_c_prints_what_was_generated(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 1_000_000, "num_hidden_layers": 1})
    )
    words = [
        sys.executable,
        "-m",
        "twin.cli",
        "run",
        str(tmp_path),
        "--random",
        "1",
        "--prompt-tokens",
        "1",
        "--max-tokens",
        "900000",
    ]
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        # a background job inherits "ignore"
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout
    assert process.stdout.read(10)  # it generates
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err.decode()
    assert out.endswith(b"\n")
    assert b"cancelled" in err
    assert b"Traceback" not in err


def test_bench_checks_what_it_times(twin: Twin, checkpoint: Path) -> None:
    data = json.loads(twin("bench", checkpoint, "--repeats", "2", "--tokens", "8", "--json").out)
    assert data["tokens_per_s"] > 0
    assert data["logit_difference"] < 1e-3
    assert len(data["samples"]) == 2


# ---- what a newcomer meets -----------------------------------------------------------------------


def test_the_version_is_that_of_the_package(twin: Twin) -> None:
    outcome = twin("--version")
    assert (outcome.code, outcome.out) == (0, f"twin {version('monotwin')}\n")


def test_the_demo_predicts_gpus_from_their_fit_like_simulate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "compare_engines", lambda case, show: {})
    assert demo._study("8xh200")[0] == calibrated_node("8xh200") != load_node("8xh200")


def test_ctrl_c_amid_the_imports_is_no_traceback(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(named: object) -> object:
        # numpy would make an ImportError of a KeyboardInterrupt here
        signal.raise_signal(signal.SIGINT)
        loaded.append(True)
        return build_parser(["models"])

    loaded: list[bool] = []
    monkeypatch.setattr("twin.cli.build_parser", build)
    # a program in the background is begun without one
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcome = twin("models")
        assert (outcome.code, outcome.out, outcome.err, loaded) == (
            130,
            "",
            "twin: interrupted\n",
            [True],
        )
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words",
    [
        ("calibrate", "host", "--quick"),
        ("demo",),
        ("validate", "host", "--measure-only", "--out", "runs"),
    ],
)
def test_a_missing_compiler_is_said_once(
    words: tuple[str, ...], twin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    outcome = twin(*words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("no-such-compiler") == 1


def test_weights_that_take_long_say_how_far_they_are() -> None:
    said: list[str] = []
    watched = Watched(random_weights(TINY, 1), said.append, quiet_s=0.0)
    names = list(tensors(TINY))
    for name in [*names, names[0]]:
        watched[name]
    assert said[-1] == f"weights: {len(names)} of {len(names)} tensors"
    silent = Watched(random_weights(TINY, 1), said.append, quiet_s=60.0)
    assert (silent.spec, silent.dtype) == (TINY, TINY.dtype)
    silent[names[0]]
    assert len(said) == len(names) + 1


def test_what_ended_a_generation_is_distinguished(twin: Twin, checkpoint: Path) -> None:
    words = ("run", checkpoint, "--prompt", "Hello", "--max-tokens", "40", "--ignore-eos")
    assert "ended by --max-tokens 40" in twin(*words).err
    data = json.loads(twin(*words, "--json").out)
    text = next(c for c in data["text"] if c.isascii() and c.isprintable() and not c.isdigit())
    assert f"ended by the stop text {text!r}" in twin(*words, "--stop", text).err
    token = data["tokens"][3]
    assert f"ended by token {token}, of --stop" in twin(*words, "--stop", token).err


def test_a_budget_is_shown_in_one_unit(twin: Twin) -> None:
    lines = [
        line
        for line in twin("plan", "llama-3.1-8b", "1xh200").out.splitlines()
        if "memory per" in line
    ]
    assert len(lines) == 2
    for line in lines:
        used, unit, limit, same = line.split()[-4:]
        assert unit == same
        assert float(used) < float(limit)


@pytest.mark.slow
def test_a_model_too_large_is_said_in_gb_with_the_smallest_node_that_holds_it(twin: Twin) -> None:
    outcome = twin("plan", "llama-3.1-405b", "1xh200")
    assert outcome.code == 2
    said = (
        "needs 812 GB of memory per GPU, a h200-sxm has 150 GB, 663 GB too few: 8xh200-sxm is the "
        "smallest node of h200-sxm that holds it"
    )
    assert said in outcome.err
    assert twin("plan", "llama-3.1-405b", "8xh200").code == 0
    assert (
        "2xmi455x is the smallest node on file that holds it"
        in twin("plan", "deepseek-v4-pro", "8xh100-sxm").err
    )
    for command in ("plan", "simulate"):
        assert "is the smallest node on file" in twin(command, "llama-3.1-405b", "8xhost").err
    for command in (("run", "--prompt", "hi"), ("bench",)):
        assert (
            "is the smallest node on file" in twin(*command, "llama-3.1-405b", "--random", "1").err
        )


def test_a_model_a_little_too_large_does_not_seem_to_fit(twin: Twin) -> None:
    """Both sizes are 150 GB to three digits."""
    said = twin("plan", "llama-3.1-70b", "1xh200", "--max-context", "26000").err
    assert re.search(r"needs 150 GB .* a h200-sxm has 150 GB, \d+ MB too few", said)


def test_a_prediction_says_what_is_known_of_its_error(twin: Twin, tiny: str) -> None:
    said = twin("simulate", tiny, *ONE).out
    known = known_error(calibrated_node("1xh200"))
    assert known is not None
    assert re.search(
        rf"the fit of 1xh200-sxm .* missed {len(known.every)} engine runs that it had not seen .* "
        r"by \d\.\d% in the median, [+-]\d+\.\d% at",
        said,
    )
    assert re.search(r"interval +[\d,]+ \.\. [\d,]+ tokens/s", said)
    eight = twin("simulate", "llama-3.2-1b", "8xh200", "--plan", "fixed").out
    there = "8xh200-sxm has the numbers of its devices from there"
    assert f"{there}, what is assumed of its link is as between 4xh200-sxm" in eight
    mesh = twin("simulate", "llama-3.2-1b", "2xmi300x", "--plan", "fixed").out
    assert "no held-out runs of the fit of 1xmi300x are on file" in mesh
    unknown = twin("simulate", tiny, "1xmi355x", "--blocks", "8").out
    assert "no interval: 1xmi355x has no fit" in unknown
    assert "tokens/s, if it" not in unknown
    published = twin("simulate", tiny, "1xmi300x", "--blocks", "8").out  # fitted to others' figures
    assert "no interval: no held-out runs of the fit of 1xmi300x are on file" in published


def test_rows_of_a_sweep_are_the_prediction_with_an_interval(
    twin: Twin, tiny: str, tmp_path: Path
) -> None:
    words = ("whatif", tiny, *ONE, "--sweep", "context=8,16", "--store", tmp_path, "--workers", "1")
    assert "predicted (p10-p90), tokens/s" in twin(*words).out  # of held-out runs


@pytest.mark.parametrize("name", ["plan", "simulate"])
def test_help_explains_block_ring_and_floor(name: str, twin: Twin) -> None:
    said = twin(name, "--help").out
    for word in ("block", "ring", "floor", "hand-off"):
        assert f"- {word}: " in said
