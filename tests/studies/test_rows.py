"""Rows of a study are prepared ahead, compiled before and kept one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from studies.common import rows
from studies.common.rows import (
    CHECK,
    checked,
    cut,
    first_tokens,
    keep,
    logit_difference,
    rows_in_turn,
)
from tests.engine.small_engine import LLAMA
from twin.hardware.load import load_node
from twin.models.feeds import ExpertFeed
from twin.models.load import load_model
from twin.schedule.options import plan_for

HOST = load_node("1xhost")
PLAN = plan_for(replace(LLAMA, vocab=101), HOST, context=8, max_context=32)


def test_a_row_gets_its_own_refusals_and_its_small_plan_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "compile_all", lambda device, plans, show: {1: "too large", 2: "no"})
    wanted = {"a": {CHECK: PLAN, "32": PLAN}, "b": {CHECK: PLAN, "32": PLAN}}
    turns = list(rows_in_turn(HOST.device, wanted, checked=3, ahead=2, show=lambda said: None))
    assert [(row.name, row.refused) for row in turns] == [
        ("a", {"32": "too large"}),
        ("b", {CHECK: "no"}),
    ]
    small = turns[0].small.result()
    assert small.tokens == first_tokens(101, 3) == [7, 20, 33]
    assert small.logits.shape == (3, 101)
    found = checked(HOST.device, small)
    assert found["bitwise_equal"] is True
    assert found["logit_difference"] == logit_difference(HOST.device, small) < 1e-2


def test_a_small_model_has_the_same_kinds_of_layers() -> None:
    whole = load_model("gpt-oss-120b")
    small = cut(whole, 4)
    assert (small.layers, small.vocab, small.hidden) == (4, 8192, whole.hidden)
    assert small.windows == whole.windows[:4]
    feeds = [layer.feed for layer in small.layout]
    assert [feed.experts for feed in feeds if isinstance(feed, ExpertFeed)] == [8] * 4
    assert cut(load_model("llama-3.2-1b")).layers == 2


def test_what_is_kept_replaces_the_file_whole(tmp_path: Path) -> None:
    file = tmp_path / "new" / "made.json"
    for count in (1, 2):
        keep(file, {"rows": list(range(count))})
        assert json.loads(file.read_text()) == {"rows": list(range(count))}
    assert list(file.parent.iterdir()) == [file]


def test_a_small_model_has_every_kind_of_layer() -> None:
    whole = load_model("qwen3-coder-next")
    small = cut(whole)
    kinds = [{type(layer.mixer) for layer in spec.layout} for spec in (whole, small)]
    assert kinds[0] == kinds[1]
    assert small.layers == 4  # the first with attention
    assert cut(load_model("qwen3-30b-a3b")).layers == 2
