"""Ordinary models over several GPUs, emulated on the CPU: a rank is a GPU with memory of its own.

The engine's all-reduce is a push of every rank's part to all ranks, whose words are their own
flags, and a sum in rank order at each of them. What others report of such collectives is listed in
docs/kernel.md, several GPUs; each has a test here or where that list says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.engine.small_engine import FULL, LLAMA, QWEN2, QWEN3, TOKENS, engine, expected, planned
from twin.engine import host
from twin.engine.host import HostEngine
from twin.engine.weights import random_weights
from twin.errors import EngineError, InvalidPlan
from twin.kernel.header import SENTINEL_WORD
from twin.kernel.tables import layout
from twin.models.spec import ModelSpec
from twin.plan.options import Execution, HandOffKind, Sampling
from twin.plan.types import Reset
from twin.proof.prove import prove
from twin.schedule.block import LINE_FLOATS
from twin.toolchain import build_host

PROMPT = TOKENS[:9]
# eight ranks divide it, and it needs no other build than LLAMA
WIDE = replace(LLAMA, name="wide", layers=4, windows=(0, 5, 0, 0), heads=16, kv_heads=8, ffn=128)
FAULTS = ("-DTWIN_NAPS", "-DTWIN_FAULTS")


def residuals(running: HostEngine) -> np.ndarray[Any, Any]:
    """[ranks, blocks, hidden] as the last step left them, in bits."""
    plan = running.plan
    assert plan.spec is not None
    whole = running._blocks.reshape(plan.ranks, plan.blocks, -1)
    return whole[:, :, : plan.spec.hidden].view(np.uint32).copy()


def pushed_words(running: HostEngine) -> np.ndarray[Any, Any]:
    """[ranks, words] that ranks pushed to all, in bits: what is left of a run with counters."""
    made, found = layout(running.plan), []
    fields = dict(zip(("offset", "stride", "parts", "elements", "pushed"), range(5), strict=True))
    for exchange in running._memory._exchange:
        words = exchange.view(np.uint32)
        found.append(
            np.concatenate(
                [
                    words[row[fields["offset"]] + part * row[fields["stride"]] :][
                        : row[fields["elements"]]
                    ]
                    for row in made.values
                    if row[fields["pushed"]]
                    for part in range(row[fields["parts"]])
                ]
            )
        )
    return np.stack(found)


@pytest.mark.few(1)
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_all_ranks_and_runs_hold_the_same_bits_and_the_references_numbers(gpus: int) -> None:
    plan = planned(WIDE, gpus=gpus, blocks=2, handoff=HandOffKind.COUNTER, copies=1)
    wanted = expected(plan, TOKENS)
    seen = []
    with engine(plan) as running:
        for _ in range(2):
            logits = running.logits(TOKENS)
            assert np.abs(logits - wanted).max() / np.abs(wanted).max() < 1e-5
            bits = residuals(running)
            assert (bits == bits[0, 0]).all()
            words = pushed_words(running)
            assert (words == words[0]).all()
            assert (words != SENTINEL_WORD).any()
            seen.append((logits.tobytes(), bits.tobytes(), words.tobytes()))
    assert seen[0] == seen[1]


# options of a plan of one GPU, on several
OPTIONS: dict[str, dict[str, Any]] = {
    "sampling": {"sampling": Sampling.FULL},
    "prompts": {"prompt_chunk": 4},
    "prompts, sampling": {"prompt_chunk": 4, "sampling": Sampling.FULL},
    "counter": {"handoff": HandOffKind.COUNTER},
    "grid": {"handoff": HandOffKind.GRID},
    "splits": {"attention_splits": 2, "blocks": 3},
    "two copies": {"copies": 2},
    "graph": {"execution": Execution.GRAPH},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize(
    "spec",
    [replace(spec, ffn=128) for spec in (LLAMA, QWEN2, QWEN3)],
    ids=lambda spec: spec.name,
)
def test_every_option_of_one_gpu_gives_the_references_tokens_on_several(
    spec: ModelSpec, gpus: int, name: str
) -> None:
    one = planned(spec, **{"blocks": 2} | OPTIONS[name])
    several = planned(spec, gpus=gpus, **{"blocks": 2} | OPTIONS[name])
    sampling = {"sampling": FULL} if one.options.sampling is Sampling.FULL else {}
    with engine(one) as alone, engine(several) as together:
        wanted = alone.generate(PROMPT, max_tokens=12, **sampling).tokens
        for _ in range(2):  # one call behind the other
            assert together.generate(PROMPT, max_tokens=12, **sampling).tokens == wanted
            assert len(np.unique(residuals(together).reshape(-1, spec.hidden), axis=0)) == 1


# ---- what others report --------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_parts_of_a_value_share_no_line_and_have_one_stride_at_any_number_of_ranks(
    gpus: int,
) -> None:
    """A stride that was right at 16 ranks only; two GPUs writing bytes of one word."""
    plan = planned(WIDE, gpus=gpus, blocks=2)
    made = layout(plan)
    places: set[int] = set()
    for (offset, stride, parts, elements, pushed, *_), value in zip(
        made.values, plan.values, strict=True
    ):
        assert parts == (gpus if pushed else 1)
        assert offset % LINE_FLOATS == 0
        if pushed:
            assert stride % LINE_FLOATS == 0
            assert stride >= elements
            places |= {offset + part * stride for part in range(parts)}
            assert value.pushed
    assert places


def test_sums_of_zeros_are_no_empty_words() -> None:
    """Where zero is the empty word, an all-reduce of zeros hangs or turns them into minus zero."""
    plan = planned(WIDE, gpus=2, blocks=2)
    weights = random_weights(WIDE, 3, plan.options.weight_dtype)

    class NothingAdded:
        spec, dtype = weights.spec, weights.dtype

        def __getitem__(self, name: str) -> Any:
            made = weights[name]
            return np.zeros_like(made) if name.endswith((".o", ".down")) else made

    with HostEngine(plan, NothingAdded(), watchdog_s=5) as running:
        logits = running.logits(TOKENS[:2])
    assert np.isfinite(logits).all()
    assert (residuals(running)[0, 0] == residuals(running)).all()


class faulty:  # read as a phrase: with faulty("nap 1")
    """The engine of a build in which one rank naps or never runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
        monkeypatch.setattr(host, "build_host", partial(build_host, extra=FAULTS))
        monkeypatch.setenv("TWIN_FAULT", fault)


@pytest.mark.slow
@pytest.mark.parametrize("handoff", [HandOffKind.SENTINEL, HandOffKind.COUNTER])
@pytest.mark.parametrize(("gpus", "late"), [(2, 0), (2, 1), (4, 2), (8, 7)])
def test_a_rank_that_sleeps_at_random_changes_no_bit_of_chained_calls(
    monkeypatch: pytest.MonkeyPatch, gpus: int, late: int, handoff: HandOffKind
) -> None:
    """Dependents released before the store would read the layer before: plausible, and wrong."""
    plan = planned(WIDE, gpus=gpus, blocks=2, handoff=handoff, prompt_chunk=4)
    with engine(plan) as running:
        wanted = running.generate(PROMPT, max_tokens=30).tokens
        bits = residuals(running)
    faulty(monkeypatch, f"nap {late}")
    with engine(plan) as running:
        for _ in range(3):
            assert running.generate(PROMPT, max_tokens=30).tokens == wanted
            assert (residuals(running) == bits).all()


@pytest.mark.slow
def test_a_rank_that_never_runs_is_named_in_time_and_the_next_request_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty(monkeypatch, "dead 2")
    with engine(planned(WIDE, gpus=4, blocks=2), watchdog_s=1.0) as running:
        for _ in range(2):
            with pytest.raises(EngineError, match=r"GPU [013] .* waited 0\.5 s for GPU 2 of it to"):
                running.generate(PROMPT, max_tokens=4)
        monkeypatch.delenv("TWIN_FAULT")
        assert len(running.generate(PROMPT, max_tokens=4).tokens) == 4


@pytest.mark.parametrize("copies", [2, 3])
def test_a_pushed_words_reset_is_never_left_to_the_push_that_overwrites_it(copies: int) -> None:
    """Two epochs are safe where a kernel's end orders the clearing store before the next push. A
    resident kernel has no such end: a reset that another rank's push may overtake is refused.
    """
    plan = planned(WIDE, gpus=2, blocks=2, copies=copies)
    prove(plan)
    values = [
        value
        for value in plan.values
        if value.pushed
        and value.buffer == plan.values[next(v.id for v in plan.values if v.pushed)].buffer
    ]
    old = values[0]
    again = next(v for v in values[1:] if v.copy == old.copy)
    stages = []
    for stage in plan.stages:
        resets = tuple(reset for reset in stage.resets if reset.value != old.id)
        if stage.index == again.stage:
            resets += (Reset(old.id),)
        stages.append(replace(stage, resets=resets))
    with pytest.raises(InvalidPlan, match="another rank"):
        prove(replace(plan, stages=tuple(stages)))
