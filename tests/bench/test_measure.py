"""One benchmark from start to end on the host's engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.flow import NODE, SEVERAL, Quiet, measured, prepared, shrink
from tests.command_line import TINY
from tests.engine.test_laneformer import SPEC as LANES
from twin.bench import hf_parallel, nccl, record, result
from twin.bench.measure import CAPTURED, CEILING, EAGER, GRAPH, RESIDENT, Bench, Settings
from twin.bench.plans import IDLE, LOADED, UNDISTURBED
from twin.bench.timing import Steps
from twin.engine.host import HostEngine
from twin.errors import ConfigError, EngineError
from twin.hardware.types import Node
from twin.models.spec import DType

SETTINGS = Settings(
    context=6, tokens=10, repeats=3, prompts=2, fidelity_context=6, determinism=True, peers=False
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def complete(settings: Settings, spec: Any = TINY, node: Node = NODE) -> dict[str, Any]:
    watch = Quiet()
    source, plans = prepared(spec, settings, node)
    made = measured(source, plans, settings, watch)
    assert watch.rounds == settings.repeats
    return result.build(
        made, source, plans, settings, node, clocks=watch.to_json(), driver="none", commit="x"
    ) | {"made": made}


def test_without_peers_engine_graph_and_ceiling_are_timed(tmp_path: Path) -> None:
    out = complete(SETTINGS)
    made = out.pop("made")
    assert list(out["variants"]) == [RESIDENT, GRAPH, CEILING]
    assert out["fidelity"]["determinism"] == {"runs": 5, "tokens": 20, "bitwise_equal": True}
    # partial outputs are exchanged as FP16: half a unit of its last place
    assert out["fidelity"]["numpy_logit_difference"] < 2.5e-4
    assert out["notes"]["graph_tokens_equal"] is True
    assert out["stream_fraction"] == pytest.approx(
        out["bytes_per_step"] * out["tokens_per_s"] / out["ceiling_bytes_per_s"]
    )
    assert out["mbu"] == pytest.approx(out["bytes_per_step"] * out["tokens_per_s"] / 4.8e12)
    assert result.shortfalls(out) == []
    folder = record.write(tmp_path, out, made.samples, made.judged)
    assert len((folder / record.SAMPLES).read_text().splitlines()) == 1 + 3 * (10 + 10 + 3)


def test_two_gpus_are_timed_as_one_next_to_the_kernel_s_all_reduce() -> None:
    out = complete(replace(SETTINGS, determinism=False), node=SEVERAL)
    assert list(out["variants"]) == [RESIDENT, GRAPH, CEILING, IDLE, LOADED, UNDISTURBED]
    assert (out["gpus"], out["node"], out["left_out"]) == (2, "2xh200-sxm", {})
    assert out["notes"]["graph_tokens_equal"] is True
    a_gpu = out["bytes_per_step"] * out["tokens_per_s"] / 2
    assert out["stream_fraction"] == pytest.approx(a_gpu / out["ceiling_bytes_per_s"])
    assert out["mbu"] == pytest.approx(a_gpu / 4.8e12)
    us, variants = out["all_reduce"]["us"], out["variants"]
    assert out["all_reduce"]["elements"] == TINY.hidden
    assert us[IDLE] == variants[IDLE]["us_per_all_reduce"] > 0
    assert us[LOADED] == pytest.approx(
        variants[LOADED]["us_per_stage"] - variants[UNDISTURBED]["us_per_stage"]
    )
    assert [sample.steps.ns.size for sample in out["made"].samples[3:6]] == [3, 3, 3]


@pytest.mark.slow
@pytest.mark.hf
def test_two_gpus_are_timed_next_to_nccl_and_hugging_face_on_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
    monkeypatch.setattr(nccl, "IN_A_GRAPH", 2)
    monkeypatch.setattr(nccl, "REPLAYS", 3)
    settings = replace(SETTINGS, peers=True, determinism=False, repeats=2)
    out = complete(settings, node=SEVERAL)
    variants = out["variants"]
    assert list(variants)[-4:] == ["nccl-bf16", "nccl-fp32", nccl.EDGE, hf_parallel.EAGER]
    assert set(out["left_out"]) == {CAPTURED, hf_parallel.CAPTURED}
    assert variants["nccl-bf16"]["all_reduces"] == 2 * 3
    assert variants[hf_parallel.EAGER]["steps"] == 2 * settings.tokens
    assert variants[hf_parallel.EAGER]["tokens_per_s"] > 0
    fidelity = out["fidelity"]
    assert fidelity["kl_hf_tp"]["positions"] == settings.tokens + 1
    assert fidelity["kl_hf_tp"]["mean"] < 3 * fidelity["kl_peer"]["mean"]
    assert fidelity["timed_outputs"] is True


@pytest.mark.hf
@pytest.mark.parametrize(
    "spec",
    [
        TINY,
        pytest.param(replace(LANES, context=128, heads=8, head_dim=8), marks=pytest.mark.slow),
    ],
    ids=["llama", "lanes"],
)
def test_with_peers_the_timed_outputs_are_judged(spec: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")
    pytest.importorskip("transformers", reason="transformers is not installed (extra 'hf')")
    out = complete(
        replace(SETTINGS, peers=True, determinism=False, fill_by_steps=spec is not TINY), spec
    )
    fidelity = out["fidelity"]
    assert EAGER in out["variants"]
    assert (fidelity["prompts"], fidelity["positions"], fidelity["timed_outputs"]) == (
        2,
        2 * 11,
        True,
    )
    assert fidelity["kl_engine"]["mean"] < fidelity["kl_peer"]["mean"] < 1e-3
    assert fidelity["greedy_agrees"]
    assert fidelity["replay_mismatches"] == 0
    assert ("peers_timed_as" in out["notes"]) == (spec is not TINY)


def test_fill_by_steps_times_the_same_positions() -> None:
    settings = replace(SETTINGS, fill_by_steps=True, determinism=False)
    source, plans = prepared(TINY, settings)
    with HostEngine(plans.resident, source.weights) as engine:
        bench = Bench(
            source, plans, settings, make_engine=HostEngine, watch=Quiet(), show=lambda text: None
        )
        filled, tokens = bench._decode(engine, [5, 4, 3, 2, 1, 0])
        bench.settings = SETTINGS
        read, again = bench._decode(engine, tokens[:6])
    assert len(filled.ns) == len(read.ns) == settings.tokens
    assert tokens == again
    assert len(tokens) == settings.context + settings.tokens + 1


def test_other_tokens_than_judged_stop_the_benchmark() -> None:
    source, plans = prepared(TINY, SETTINGS)
    bench = Bench(
        source, plans, SETTINGS, make_engine=HostEngine, watch=Quiet(), show=lambda text: None
    )
    bench._prompts = [[1] * 6]
    bench._known = {0: [1] * 17}
    bench._decode = lambda engine, prompt: (Steps(np.ones(10, np.int64)), [2] * 17)  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="other tokens than those that were judged"):
        bench._engine_variant(RESIDENT, None, "").run(0)  # type: ignore[arg-type]


def test_shortfalls_are_said() -> None:
    kl = {"mean": 2e-4, "max": 1e-3}
    fidelity = {
        "kl_not_worse": False,
        "kl_engine": kl,
        "kl_peer": {"mean": 1e-4, "max": 1e-3},
        "greedy_agrees": False,
        "decided_mismatches": 3,
        "decided_positions": 90,
        "determinism": {"runs": 5, "tokens": 1000, "bitwise_equal": False},
    }
    said = result.shortfalls({"fidelity": fidelity})
    assert len(said) == 3
    assert "3 of 90" in said[1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"context": 0, "fidelity_context": 0}, "--context 0: at least 1"),
        ({"prompts": 0}, "--fidelity 0: at least 1"),
        ({"fidelity_context": 7}, "--fidelity-context 7: at most --context 6"),
        ({"context": 10**7, "fidelity_context": 10**7, "peers": True}, "GiB"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(SETTINGS, **change).check_for(TINY)


def test_fp32_has_no_16_bit_noise() -> None:
    settings = replace(SETTINGS, peers=True)
    source, plans = prepared(TINY, settings, weight_dtype=DType.FP32)
    with pytest.raises(EngineError, match="--no-peers"):
        Bench(
            source, plans, settings, make_engine=HostEngine, watch=Quiet(), show=lambda text: None
        )
