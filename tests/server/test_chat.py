"""`twin chat`: turns, commands and Ctrl-C, as at a terminal."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import Outcome, Twin
from tests.patience import PATIENCE_S
from tests.refusals import refused, refused_command
from tests.server.serving import SMALL
from twin.calibrate.node import calibrated_node
from twin.engine.generate import Stop
from twin.engine.generation import Generation
from twin.engine.opening import open_source
from twin.server.open import opened
from twin.server.problem import Problem
from twin.server.talk import Talk


@pytest.fixture
def talk(checkpoint: Path, template_file: Path) -> Iterator[Talk]:
    node, source = calibrated_node("1xhost"), open_source(str(checkpoint))
    with opened(
        source, checkpoint, node, SMALL, lambda _: None, greedy=True, template=template_file
    ) as (model, session, _):
        yield Talk(model, session, 12, 0.0)


def chat(twin: Twin, lines: str, monkeypatch: pytest.MonkeyPatch, *words: object) -> Outcome:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return twin("chat", *words, "--blocks", 1, "--greedy")


def test_a_turn_reads_only_what_is_new(talk: Talk) -> None:
    first = talk.say("hello", lambda _: None)
    second = talk.say("more", lambda _: None)
    assert first.made.kept == 0
    assert second.made.kept >= len("<user>hello\n<assistant>")
    assert [m.role for m in talk.history] == ["user", "assistant"] * 2
    assert f"{second.made.kept} of them kept" in talk.stats()


def test_a_new_conversation_says_what_the_first_said(talk: Talk) -> None:
    first = talk.say("hello", lambda _: None).text
    assert talk.say("hello", lambda _: None).text != "" or first == ""
    talk.reset()
    assert talk.stats() == "nothing was said yet"
    assert talk.say("hello", lambda _: None).text == first


def test_an_interrupted_answer_stays_and_the_talk_goes_on(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, on_token: Callable[[int], None], **__: object) -> Generation:
        for token in b"abc":
            on_token(token)
        return Generation([*b"abc"], np.full(3, 1000), 500, "cancelled")

    with monkeypatch.context() as patch:
        patch.setattr(talk.session, "generate", interrupted)
        cut = talk.say("hello", lambda _: None)
    assert (cut.stop, cut.text) == (Stop.CANCELLED, "abc")
    assert "Ctrl-C" in talk.stats()
    assert talk.history[-1].content == "abc"
    talk.say("more", lambda _: None)
    assert len(talk.history) == 4


def test_a_conversation_beyond_the_context_says_how_to_go_on(talk: Talk) -> None:
    refused(Problem, lambda: talk.say("x" * 300, lambda _: None), "/reset", "256")
    assert not talk.history, "what was refused is not part of it"
    talk.say("hello", lambda _: None)


def test_the_command_answers_lines_and_obeys(
    checkpoint: Path, template_file: Path, twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "hello\n\n/stats\n/reset\nhello\n/help\n/quit\nnever\n"
    words = (checkpoint, "--chat-template", template_file, "--max-tokens", 8, "--json")
    outcome = chat(twin, lines, monkeypatch, *words)
    assert outcome.code == 0, outcome.err
    first, second = (json.loads(line) for line in outcome.out.splitlines())
    assert first == second
    assert "8 tokens" in outcome.err
    assert "a new conversation" in outcome.err


def test_a_misspelt_command_is_not_sent_to_the_model(
    checkpoint: Path, template_file: Path, twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "/rest\n/reset all\n/etc/passwd is a file\n/x y\n/quit\n"
    words = (checkpoint, "--chat-template", template_file, "--max-tokens", 2, "--json")
    outcome = chat(twin, lines, monkeypatch, *words)
    assert outcome.code == 0, outcome.err
    assert len(outcome.out.splitlines()) == 2, "these two are meant for the model"
    assert "/rest is no command; /reset forgets" in outcome.err
    assert "/reset takes nothing behind it" in outcome.err


def test_without_a_template_it_says_how_to_give_one(
    checkpoint: Path, twin: Twin, template_file: Path
) -> None:
    refused_command(twin, "chat", checkpoint, "--blocks", 1, says=("--chat-template",))
    words = ("chat", checkpoint, "--greedy", "--temperature", 1)
    refused_command(twin, *words, says=("contradict",))
    refused_command(twin, "chat", checkpoint, "--chat-template", "gone", says=("gone",))


def test_a_line_that_is_no_text_is_refused_and_the_next_one_answered(
    checkpoint: Path, template_file: Path
) -> None:
    words = [sys.executable, "-m", "twin", "chat", str(checkpoint), "--blocks", "1", "--greedy"]
    words += ["--chat-template", str(template_file), "--max-tokens", "4", "--json"]
    done = subprocess.run(
        words,
        input=b"\xff\xfe\nhello\n",
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},  # as in a locale such as en_US.UTF-8
    )
    assert b"no UTF-8 text" in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_ctrl_c_ends_an_answer_and_not_the_program(checkpoint: Path, template_file: Path) -> None:
    """As a user starts it: an interrupt while it waits for words, then one more turn."""
    words = [sys.executable, "-m", "twin", "chat", str(checkpoint), "--blocks", "1", "--greedy"]
    words += ["--chat-template", str(template_file), "--max-tokens", "4", "--json"]
    child = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        while "context 256" not in (said := child.stderr.readline()):
            assert said, "it ended before it began"
        child.stdin.write("hello\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline())["text"]
        os.kill(child.pid, signal.SIGINT)
        while "Ctrl-D" not in child.stderr.readline():
            assert child.poll() is None
        time.sleep(0.05)
        out, _ = child.communicate("again\n/quit\n", timeout=PATIENCE_S)
        assert json.loads(out)["text"]
        assert child.returncode == 0
    finally:
        child.kill()
        child.communicate()
