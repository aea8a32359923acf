"""A job's wall clock, and where the tools decide it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.errors import ConfigError
from twin.study.kinds import module_of, read_study
from twin.study.runner import Runner

HEAD = "kind: agent\ntitle: t\nquestion: q\nprediction: p\n"
JOB = "job: {tokens: 50000, tokens_per_step: 500, calls_per_step: 1.5, source: x}\n"
TOOLS = (
    "tools:\n  - {name: slow, call_s: 2 s, source: x}\n  - {name: none, call_s: 0 s, source: x}\n"
)
ENGINES = """context: 1024
engines:
  - {name: vllm, model: llama-3.2-1b, node: 1xh200, stack: vllm}
  - {name: here, tokens_per_s: 100, kind: measured, source: x}
"""


def study(folder: Path, body: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(HEAD + body)
    return path


@given(st.integers(1, 10**6), st.floats(1, 1e5), st.floats(0.01, 5), st.floats(0.001, 60))
def test_at_the_balance_both_halves_are_equal(
    tokens: int, per_step: float, calls: float, call_s: float
) -> None:
    agent = module_of("agent")
    job, tools = agent.Job(tokens, per_step, calls, "x"), agent.Tools("t", call_s, "x")
    balance = job.balance(tools)
    assert balance is not None
    assert job.wall_s(balance, tools) == pytest.approx(2 * job.tool_s(tools))
    assert job.wall_s(2 * balance, tools) < job.wall_s(balance, tools)


def test_wall_clock_of_each_engine(tmp_path: Path) -> None:
    outcome = read_study(study(tmp_path, JOB + TOOLS + ENGINES)).body.run(Runner.inline())
    wall, balance, sources = outcome.tables()
    predicted, here = wall.rows
    assert here[:4] == ("here", 100, "measured", 500)
    assert here[4:] == pytest.approx((800, 500 / 800, 500, 1))  # 100 steps of 1.5 calls of 2 s
    assert predicted[2] == "predicted"
    assert balance.rows[0][2] == pytest.approx(50_000 / 300)
    assert balance.rows[1][2] is None  # without tool time generation is always the bottleneck
    assert "AIConfigurator" in str(sources.rows[0][3])


def test_an_engine_that_cannot_be_predicted_says_why(tmp_path: Path) -> None:
    engines = ENGINES.replace("1xh200, stack: vllm", "1xmi300x, stack: vllm")
    outcome = read_study(study(tmp_path, JOB + TOOLS + engines)).body.run(Runner.inline())
    assert len(outcome.tables()[0].rows) == 1
    assert any("no kernels of vllm were measured" in note for note in outcome.notes)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (JOB.replace("500,", "60000,") + TOOLS + ENGINES, "tokens_per_step: 60000 exceeds"),
        (JOB + TOOLS.replace("2 s", "2") + ENGINES, r"tools\[0\].call_s"),
        (JOB + TOOLS + ENGINES.replace("stack: vllm", "stack: vlm"), "did you mean vllm"),
        (JOB + TOOLS + ENGINES.replace("llama-3.2-1b", "nobody"), "is neither a model"),
        (JOB + TOOLS + ENGINES.replace("1024", "200000"), "exceeds the 131072 positions"),
        (JOB + TOOLS + ENGINES.replace("kind: measured", "kind: guessed"), "'guessed' is unknown"),
        (JOB + TOOLS + "context: 1024\nengines: []\n", "engines"),
    ],
)
def test_bad_studies_are_refused(tmp_path: Path, body: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_study(study(tmp_path, body))
