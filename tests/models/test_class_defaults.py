"""What a key means that a configuration leaves out: what transformers' class, or the code of its
model, takes it for. Live where transformers is installed, and always against a record of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest

from tests.models.class_defaults import (
    AS_IT_IS,
    RECORD,
    applied,
    built,
    cases,
    defaults_elsewhere,
    read_by_transformers,
    variations,
)
from tests.rows import every
from twin.errors import ConfigError
from twin.models.feeds import ExpertFeed, Scoring
from twin.models.load import from_config
from twin.models.spec import ModelSpec

CASES = cases()
UNKNOWN = {"laneformer", "laneformer_tp"}  # families of remote code, which transformers has not
# Kimi K2.5's class ties the tables where the outer configuration does not say; its checkpoints hold
# two, which transformers then keeps separate. We take what the text configuration says.
BY_CHECKPOINT = {("kimi-k25", "without tie_word_embeddings")}


@lru_cache(maxsize=1)
def recorded() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def read(config: Mapping[str, Any]) -> ModelSpec | None:
    """None: refused."""
    try:
        return from_config(config, "m")
    except ConfigError:
        return None


def misread(name: str, full_of: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """Variations of a case that we read, but not as transformers does, by what it makes of each
    (None: nothing).
    """
    found = []
    for what, config in variations(CASES[name]):
        ours, full = read(config), full_of[what]
        assert ours is not None or what != AS_IT_IS
        if ours and full and ours != read(full) and (name, what) not in BY_CHECKPOINT:
            found.append(what)
    return found


def test_every_family_that_transformers_has_is_compared() -> None:
    from twin.models.load import _FAMILIES

    assert {config["model_type"] for config in CASES.values()} == set(_FAMILIES) - UNKNOWN


@every("name", CASES)
def test_a_key_that_is_left_out_or_null_means_what_the_class_takes_it_for(name: str) -> None:
    changes = recorded()["read"][name]
    plain = changes[AS_IT_IS]
    full = {what: change and applied(plain, change) for what, change in changes.items()}
    full |= {what: plain for what, change in changes.items() if change == {}}
    assert misread(name, {**full, AS_IT_IS: plain}) == []


@every("name", CASES)
def test_a_key_that_no_class_has_means_what_the_code_of_the_model_takes_it_for(name: str) -> None:
    counted = recorded()["built"][name]
    for what, config in variations(CASES[name]):
        spec = read(config) if what in counted else None
        if spec:
            assert [spec.parameters, list(spec.windows)] == counted[what], what


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_routers_of_deepseek_v3_take_sigmoids_unless_they_say_otherwise(name: str) -> None:
    config = {key: value for key, value in CASES[name].items() if key != "scoring_func"}
    feed = from_config(config, "m").layer(5).feed
    assert isinstance(feed, ExpertFeed)
    assert feed.scoring is Scoring.SIGMOID


@pytest.mark.hf
def test_the_record_is_what_the_installed_transformers_reads() -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra 'hf')"
    )
    same = transformers.__version__ == recorded()["transformers"]
    for name in CASES:
        full = {what: read_by_transformers(c) for what, c in variations(CASES[name])}
        assert misread(name, full) == []
        kept = recorded()["read"][name]
        plain = full[AS_IT_IS]
        if same:  # another version may know more keys
            restored = {what: kept[what] and applied(plain or {}, kept[what]) for what in kept}
            restored |= {what: plain for what in kept if what == AS_IT_IS or kept[what] == {}}
            assert restored == full, "record it anew: python -m tests.models.class_defaults"


@pytest.mark.hf
@pytest.mark.slow
def test_the_record_is_what_the_installed_transformers_builds() -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
    for name in CASES:
        found = {what: built(config) for what, config in defaults_elsewhere(name)}
        assert {w: [count, list(seen)] for w, (count, seen) in found.items()} == recorded()[
            "built"
        ][name]
