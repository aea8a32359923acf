"""Published step times next to those added up from kernels."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from twin.batching.costs import Load
from twin.batching.step import predict
from twin.errors import ConfigError
from twin.hardware.load import load_node
from twin.models.load import load_model
from twin.study.kinds import module_of, read_study
from twin.study.outcome import Outcome
from twin.study.runner import Runner

STUDIES = Path(__file__).parents[2] / "studies"
READER = import_module(f"{module_of('graph-engines').__name__}.records")
HEAD = "kind: graph-engines\ntitle: t\nquestion: q\nprediction: p\n"
BODY = "stacks: [vllm, trtllm]\nmodels: [llama-3.2-1b]\nnodes: [1xh200]\ncontext: 512\n"


def study(folder: Path, body: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(HEAD + body)
    return path


def records(folder: Path, *lines: str) -> Path:
    path = folder / "figures.csv"
    path.write_text("\n".join((",".join(READER.COLUMNS), *lines)) + "\n")
    return path


def run(folder: Path, body: str) -> Outcome:
    return read_study(study(folder, body)).body.run(Runner.inline())


def test_an_error_is_predicted_over_published_time(tmp_path: Path) -> None:
    step = predict(
        load_model("llama-3.2-1b"), load_node("1xh200"), "vllm", Load(sequences=4, context=512)
    )
    records(
        tmp_path,
        f"llama-3.2-1b,1xh200,vllm,as stored,bf16,4,512,0,0,{step.graph_s * 1e3 / 1.25},somebody",
    )
    outcome = run(tmp_path, BODY + "servers: [figures.csv]\n")
    summary = next(table for table in outcome.tables() if table.name == "held-out")
    assert summary.rows[0][3] == 1
    assert summary.rows[0][4] == pytest.approx(0.25)
    assert outcome.headline[0][0] == "25.0%"


def test_other_users_prompts_are_part_of_a_servers_time(tmp_path: Path) -> None:
    line = "llama-3.2-1b,1xh200,vllm,as stored,bf16,{users},512,{prompt},{answer},1.0,somebody"
    cases = [(4, 0, 0), (4, 1024, 256), (4, 4096, 256), (4, 1024, 128), (8, 1024, 128), (1, 64, 8)]
    records(tmp_path, *(line.format(users=u, prompt=p, answer=a) for u, p, a in cases))
    alone, some, longer, oftener, more, single = (
        record.predicted for record in READER.read_records(tmp_path / "figures.csv")
    )
    assert alone.served_s == alone.graph_s
    assert single.served_s == single.graph_s
    assert some.graph_s == alone.graph_s < some.served_s
    assert longer.prompts_s > 4 * some.prompts_s  # attention grows with the square
    assert oftener.prompts_s == pytest.approx(2 * some.prompts_s)
    assert more.prompts_s == pytest.approx(oftener.prompts_s * 7 / 3)


@pytest.mark.slow
def test_servers_are_judged_by_those_of_other_models() -> None:
    found = READER.read_records(STUDIES / "graph-engines" / "left-out.csv")
    assert sum(record.error is not None for record in found) == 129
    measured = READER.read_records(STUDIES / "graph-engines" / "measured.csv")
    assert READER.held_by_others([*measured, *found]) >= 0.7


def test_an_interval_is_the_spread_of_the_servers(tmp_path: Path) -> None:
    step = predict(
        load_model("llama-3.2-1b"), load_node("1xh200"), "vllm", Load(sequences=4, context=512)
    )
    times = [step.graph_s * 1e3 / (1 + percent / 100) for percent in range(-10, 11)]
    records(
        tmp_path,
        *(f"llama-3.2-1b,1xh200,vllm,as stored,bf16,4,512,0,0,{time},somebody" for time in times),
    )
    row = run(tmp_path, BODY + "servers: [figures.csv]\n").tables()[0].rows[0]
    assert row[5:7] == pytest.approx((row[4] * 0.92, row[4] * 1.08))


def test_what_was_not_measured_is_left_open_and_said(tmp_path: Path) -> None:
    records(
        tmp_path,
        "llama-3.2-1b,1xmi300x,vllm,as stored,bf16,1,512,0,0,3.0,somebody",
        "llama-3.2-1b,1xh200,other,as stored,bf16,1,512,0,0,0.8,x",
    )
    outcome = run(tmp_path, BODY + "elsewhere: [figures.csv]\n")
    rows = next(table for table in outcome.tables() if table.name == "elsewhere").rows
    assert [row[6] for row in rows] == [None, None]
    assert all(row[8] for row in rows)  # kernels without loss exist everywhere
    assert any("llama-3.2-1b 1xmi300x vllm" in note for note in outcome.notes)


def test_servers_measured_end_to_end_are_met() -> None:
    """What the study claims, held: 104 servers whose times are nobody's input."""
    errors = READER.errors_of(READER.read_records(STUDIES / "graph-engines" / "measured.csv"))
    assert errors is not None
    assert errors.count == 104
    assert errors.median_size < 0.06
    assert abs(errors.worst) < 0.35


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nobody,1xh200,vllm,as stored,bf16,1,512,0,0,1.0,x", "'nobody' is neither"),
        ("llama-3.2-1b,1xh200,vlm,as stored,bf16,1,512,0,0,1.0,x", "stack 'vlm'"),
        ("llama-3.2-1b,1xh200,vllm,as stored,bf16,one,512,0,0,1.0,x", "are numbers"),
        ("llama-3.2-1b,1xh200,vllm,as stored,bf16,1,512,0,0,-1,x", "must be positive"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, reason: str) -> None:
    records(tmp_path, line)
    with pytest.raises(ConfigError, match=f"line 2: .*{reason}"):
        read_study(study(tmp_path, BODY + "servers: [figures.csv]\n"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (BODY.replace("vllm", "vlm"), r"stacks\[0\]: \'vlm\' is unknown"),
        (BODY.replace("1xh200", "1xh2000"), "unknown node"),
        (BODY.replace("512", "999999"), "exceeds the 131072 positions"),
        (BODY.replace("llama-3.2-1b", "llama-3.1-405b"), "no model fits"),
        (BODY + "resident: [qwen3-8b]\n", "resident: 'qwen3-8b' is not among the models"),
        (BODY + "servers: [nothing.csv]\n", "cannot be read"),
    ],
)
def test_bad_studies_are_refused(tmp_path: Path, body: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_study(study(tmp_path, body))
