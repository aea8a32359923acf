"""Our engine next to ordinary ones, and the nodes that reach a speed."""

from __future__ import annotations

import json

import pytest

from tests.command_line import Twin
from tests.refusals import refused, refused_command
from twin.batching.prices import HOUR_S, KWH_J, rates_of
from twin.data import data_dir, read_yaml
from twin.errors import ConfigError
from twin.hardware.load import device_names, load_node
from twin.models.load import load_model
from twin.study.compared import OURS, compared, spread
from twin.study.fit_for import NO, SURE, fit_for
from twin.study.runner import Runner

LLAMA = load_model("llama-3.1-8b")


def test_each_price_has_a_device_a_kind_and_a_listed_source() -> None:
    known = read_yaml(data_dir("hwmodels") / "sources.yaml")
    prices = read_yaml(data_dir("hwmodels") / "prices.yaml")
    assert set(prices["devices"]) <= set(device_names())  # type: ignore[call-overload]
    for name in prices["devices"]:  # type: ignore[attr-defined]
        for number in rates_of(load_node(f"1x{name}")).known().values():
            assert number.source.split(":")[0] in known


def test_a_faster_engine_costs_less_by_as_much() -> None:
    node = load_node("2xh200")
    rates = rates_of(node, usd_per_hour=3.6, watts=500)
    assert rates.usd_per_million(node, 100) == pytest.approx(2 * 3.6 / HOUR_S / 100 * 1e6)
    joules = 2 * (500 + rates.host_w.value) / 100 * 1e6
    assert rates.kwh_per_million(node, 100) == pytest.approx(joules / KWH_J)
    assert rates_of(load_node("1xmi455x")).usd_per_million(node, 100) is None


@pytest.mark.parametrize("wrong", [0, -1, 1e9, float("nan")])
def test_a_wrong_price_is_refused(wrong: float) -> None:
    refused(ConfigError, lambda: rates_of(load_node("1xh200"), wrong), "--usd-per-hour")
    refused(ConfigError, lambda: rates_of(load_node("1xh200"), None, wrong), "--watts")


def test_ordinary_engines_stand_next_to_ours_where_their_kernels_are_tabulated() -> None:
    node, low_high = load_node("1xh200"), spread()
    found = compared(LLAMA, node, 1024, 287, rates_of(node), interval=(280, 300), prompt_s=0.1)
    assert [row.engine.split()[0] for row in found.rows] == [
        OURS,
        "SGLang",
        "TensorRT-LLM",
        "vLLM",
    ]
    assert found.rows[0].usd_per_million is not None
    for row in found.rows[1:]:
        assert row.tokens_per_s == pytest.approx(200, rel=0.03), "the README's picture"
        assert row.low == pytest.approx(row.tokens_per_s * low_high[0])
        assert row.usd_per_million is not None
        assert row.usd_per_million > found.rows[0].usd_per_million
    elsewhere = load_node("1xb200")
    assert len(compared(LLAMA, elsewhere, 1024, 300, rates_of(elsewhere)).rows) == 1
    other = compared(load_model("gemma-2-2b"), node, 1024, 300, rates_of(node))
    assert all(":" in reason for reason in other.missing)


def test_simulate_shows_them_with_the_users_price(twin: Twin) -> None:
    stated = twin("simulate", "llama-3.2-1b", "1xh100", "--usd-per-hour", "1", "--json").out
    data = json.loads(stated)["compared"]
    assert data["rests_on"]["price"] | {"source": ""} == {
        "value": 100,
        "kind": "assumed",
        "source": "",
    }
    assert data["engines"][0]["prompt_s"] > 0
    assert data["engines"][-1]["engine"].startswith("vLLM")


def test_the_smallest_nodes_that_reach_a_speed_are_named_and_no_slower_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = ["1xh200-sxm", "2xh200-sxm", "1xl40s", "1xmi300x"]
    monkeypatch.setattr("twin.study.fit_for.node_names", lambda: few)
    found = fit_for("llama-3.2-1b", 1500, (("layers", 2),), Runner.inline(), draws=0)
    assert found.fits
    assert all(fit.tokens_per_s >= 1500 / 1.5 and fit.reaches != NO for fit in found.fits)
    usd = [fit.usd_per_million for fit in found.fits if fit.usd_per_million is not None]
    assert usd == sorted(usd)
    h200 = [fit for fit in found.fits if fit.node.endswith("h200-sxm")]
    assert [fit.node for fit in h200] == ["1xh200-sxm"]
    assert h200[0].reaches == SURE
    assert h200[0].rests.startswith("held-out")


def test_wrong_questions_are_refused(twin: Twin) -> None:
    refused_command(
        twin, "fit-for", "llama-3.2-1b", "--tokens-per-s", "0", says=("--tokens-per-s", "above 0")
    )
    refused_command(
        twin, "fit-for", "llama-9", "--tokens-per-s", "9", says=("llama-9", "did you mean")
    )
    refused_command(
        twin,
        "fit-for",
        "llama-3.2-1b",
        "--tokens-per-s",
        "9",
        "--node",
        "no.yaml",
        says=("no.yaml", "cannot be read"),
    )
