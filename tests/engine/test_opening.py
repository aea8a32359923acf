"""From a name to a session: what cannot run is refused before anything long starts, and what runs
is planned to fit.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.command_line import TINY
from tests.engine.gguf_cases import CONFIGS, write_case
from tests.engine.test_weights import SPEC, save
from tests.refusals import refused
from twin.calibrate.node import calibrated_node
from twin.engine.generate import Request, complete
from twin.engine.opening import Source, check_runs_here, open_session, open_source, plan_run
from twin.engine.weights import random_weights
from twin.errors import CheckpointError, ConfigError, EngineError, PlanError
from twin.hardware.load import load_node
from twin.models.load import load_model, model_names
from twin.models.spec import DType
from twin.plan.options import Sampling

HERE = "1xhost"
SMALL = {"blocks": 1}


def test_a_source_becomes_a_session_that_generates(checkpoint: Path) -> None:
    source, node = open_source(str(checkpoint)), calibrated_node(HERE)
    prompt = source.encode("hello")
    plan = plan_run(source.spec, node, SMALL, positions=len(prompt) + 4, greedy=True)
    said: list[str] = []
    with open_session(node, plan, source, said.append) as session:
        assert len(complete(session, source.tokenizer, Request(prompt, 4)).made.tokens) == 4


def test_random_weights_of_a_shape_take_any_text_and_every_token_has_one() -> None:
    source = open_source("llama-3.2-1b", 1)
    words, bytes_at = source.tokenizer, source.spec.vocab - 258
    assert words is not None
    assert source.encode("hi")[-2:] == [bytes_at + 104, bytes_at + 105]
    made = [0, 77, 1000, bytes_at - 1]
    assert words.encode_plain(words.decode(made)) == made
    assert words.stop == {source.spec.vocab - 1}
    assert all(words.decode([token]) for token in range(0, bytes_at, 97))
    assert open_source("llama-3.2-1b", 1, DType.FP16, text=False).weights.dtype is DType.FP16


def test_a_models_words_are_the_same_whatever_holds_them(tmp_path: Path) -> None:
    """A GGUF file, a folder, and the folder's config.json alone."""
    file, folder = tmp_path / "model.gguf", tmp_path / "model"
    template = "{{ bos_token }}{{ messages[0].content }}<|im_end|>"
    write_case(file, CONFIGS["qwen3"], words=True, template=template)
    theirs = open_source(str(file)).tokenizer
    assert theirs is not None
    folder.mkdir()
    theirs.backend.save(str(folder / "tokenizer.json"))
    said = {**theirs.names, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    for place in (folder, folder / "config.json"):
        source = open_source(str(place), seed=1)
        ours = source.tokenizer
        assert ours is not None
        assert source.chat_template == template
        assert (ours.names, ours.bos) == (theirs.names, theirs.bos)
        assert ours.stop == theirs.stop == {260}
        assert ours.encode("the<|im_end|>") == theirs.encode("the<|im_end|>") == [257, 260]


def test_a_checkpoint_without_a_tokenizer_takes_token_ids_only(tmp_path: Path) -> None:
    save(tmp_path)
    refused(CheckpointError, lambda: open_source(str(tmp_path)), "tokenizer.json")
    source = open_source(str(tmp_path), text=False)
    refused(ConfigError, lambda: source.encode("hello"), "no tokenizer", "token ids")


def test_a_token_that_the_model_does_not_know_is_refused() -> None:
    words = open_source("llama-3.2-1b", 1).tokenizer
    refused(
        ConfigError,
        lambda: Source(SPEC, random_weights(SPEC, 1), words).encode("hello"),
        f"knows {SPEC.vocab}",
        "--prompt-tokens",
    )


def test_a_plan_holds_the_positions_and_samples_as_requested() -> None:
    plan = plan_run(SPEC, load_node(HERE), SMALL, positions=12, greedy=False)
    assert plan.options.max_context >= 12
    assert plan.options.sampling is Sampling.FULL
    refused(
        ConfigError,
        lambda: plan_run(SPEC, load_node(HERE), SMALL, positions=SPEC.context + 2, greedy=True),
        "positions",
        "shorten",
    )


@pytest.mark.parametrize("node", [HERE, "1xh200"])
def test_a_model_too_large_is_refused_before_its_plan_is_proven(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prove(plan: object) -> None:
        raise AssertionError("proven before its size was looked at")

    monkeypatch.setattr("twin.engine.opening.prove", prove)
    spec = load_model("llama-3.1-405b")
    refused(
        PlanError,
        lambda: plan_run(spec, load_node(node), {}, positions=16, greedy=True),
        "GB of memory",
        "is the smallest node",
        "twin simulate",
    )


def test_memory_that_is_not_free_counts_as_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twin.engine.opening.free_bytes", lambda: 1000)
    refused(
        PlanError,
        lambda: plan_run(SPEC, load_node(HERE), SMALL, positions=12, greedy=True),
        "1 kB free",
    )
    # another computer's memory does not count
    plan_run(TINY, load_node("1xh200"), SMALL, positions=12, greedy=True)


def test_what_the_engine_has_no_code_for_is_refused_before_its_size_is_looked_at() -> None:
    for model in ("deepseek-v3", "kimi-k2.6", "llama-3.1-8b@fp8-128x128-e8m0"):
        refused(
            ConfigError, partial(open_source, model, 1), model, "can be planned and simulated only"
        )


def test_a_wrong_name_is_answered_with_models_that_run() -> None:
    runs = [name for name in model_names() if load_model(name).runnable_reason() is None]
    said = refused(ConfigError, lambda: open_source("lama", 1), "did you mean llama")
    assert [name for name in model_names() if name in said] == [
        name for name in runs if name in said
    ]
    said = refused(ConfigError, lambda: open_source("deepseek-v", 1), "did you mean deepseek-")
    assert not any(name in said for name in model_names() if name not in runs)
    assert "did you mean deepseek-v" in refused(ConfigError, lambda: load_model("deepseek-v"))


def test_a_family_that_is_not_known_is_answered_with_families_that_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    said = refused(
        ConfigError,
        lambda: open_source(str(tmp_path)),
        "model_type is 'bert'",
        "llama",
        "laneformer",
    )
    assert "deepseek_v3" not in said
    assert "deepseek_v3" in refused(
        ConfigError, lambda: load_model(tmp_path), "model_type is 'bert'"
    )


def test_a_node_that_no_engine_runs_is_refused() -> None:
    refused(EngineError, lambda: check_runs_here(load_node("1xmi355x")), "simulate")
