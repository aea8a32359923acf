"""The simulated queue against closed forms, and its laws."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from twin.errors import ConfigError
from twin.study.kinds import module_of

NAME = module_of("mixed-load").__name__
FORMS, QUEUE = import_module(f"{NAME}.closed_forms"), import_module(f"{NAME}.queueing")
EXPONENTIAL, FIXED, Traffic = QUEUE.EXPONENTIAL, QUEUE.FIXED, QUEUE.Traffic

TOKEN_S = 0.01
TOKENS = 100.0
SERVICE_S = TOKEN_S * TOKENS


def run(
    load: float,
    *,
    nodes: int = 1,
    batch: int = 1,
    distribution: str = EXPONENTIAL,
    shared: bool = False,
    requests: int = 20_000,
) -> Any:
    """One class at `load` of the group's capacity. `shared`: a batch is as slow as its sequences
    one after the other.
    """
    traffic = Traffic("all", load * nodes / SERVICE_S, TOKENS, distribution)
    step = (lambda sequences: TOKEN_S * sequences) if shared else (lambda sequences: TOKEN_S)
    hours = requests / traffic.per_s / 3600
    return QUEUE.serve([traffic], nodes=nodes, batch=batch, step_s=step, hours=hours, seed=7)


@pytest.mark.few(1)
@pytest.mark.parametrize("load", [0.3, 0.6])
def test_one_server_waits_as_mm1(load: float) -> None:
    assert run(load).waits("all").mean() == pytest.approx(
        FORMS.mean_wait_mg1(load / SERVICE_S, SERVICE_S, 1.0), rel=0.06
    )


# of 20,000 requests at the larger load the mean lies within 4.5 % (one standard deviation)
@pytest.mark.few(1)
@pytest.mark.parametrize(("load", "requests"), [(0.3, 20_000), (0.6, 160_000)])
def test_equal_requests_wait_as_md1(load: float, requests: int) -> None:
    served = run(load, distribution=FIXED, requests=requests)
    assert served.waits("all").mean() == pytest.approx(
        FORMS.mean_wait_mg1(load / SERVICE_S, SERVICE_S, 0.0), rel=0.06
    )


def test_several_servers_wait_as_mmc() -> None:
    served = run(0.6, nodes=4, requests=40_000)
    expected = FORMS.mean_wait_mmc(0.6 * 4 / SERVICE_S, SERVICE_S, 4)
    assert served.waits("all").mean() == pytest.approx(expected, rel=0.08)
    assert (served.waits("all") > 0).mean() == pytest.approx(
        FORMS.waits_mmc(0.6 * 4 / SERVICE_S, SERVICE_S, 4), rel=0.05
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("distribution", [EXPONENTIAL, FIXED])
def test_a_shared_server_takes_as_long_as_processor_sharing(distribution: str) -> None:
    """Whatever the lengths' distribution, and nobody waits for a place."""
    served = run(0.6, batch=10_000, distribution=distribution, shared=True, requests=15_000)
    assert served.took("all").mean() == pytest.approx(
        FORMS.mean_time_shared(0.6 / SERVICE_S, SERVICE_S), rel=0.07
    )
    assert served.waits("all").max() == 0


def test_a_batch_without_a_price_is_as_many_servers() -> None:
    batched, servers = run(0.2, batch=4, requests=5000), run(0.05, nodes=4, requests=5000)
    assert np.allclose(batched.took("all"), servers.took("all"))


def test_the_busy_share_is_the_load() -> None:
    served = run(0.7, requests=20_000)
    assert served.busy_s / served.elapsed_s == pytest.approx(0.7, rel=0.03)
    assert served.tokens / served.elapsed_s == pytest.approx(0.7 * TOKENS / SERVICE_S, rel=0.03)


def test_same_seed_same_requests_and_more_nodes_never_wait_longer() -> None:
    few, many, again = (
        run(0.8, nodes=2, requests=3000),
        run(0.4, nodes=4, requests=3000),
        run(0.8, nodes=2, requests=3000),
    )
    assert [r.done for r in few.requests] == [r.done for r in again.requests]
    assert [r.tokens for r in few.requests] == [r.tokens for r in many.requests]
    assert many.waits("all").mean() <= few.waits("all").mean()


def test_first_come_first_served() -> None:
    begun = [request.begun for request in run(0.9, nodes=3, requests=2000).requests]
    assert begun == sorted(begun)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="nodes=0"):
        QUEUE.serve([Traffic("a", 1, 1)], nodes=0, batch=1, step_s=lambda n: 1.0, hours=1, seed=1)
    with pytest.raises(ConfigError, match=r"a: -1 requests/s"):
        QUEUE.serve([Traffic("a", -1, 1)], nodes=1, batch=1, step_s=lambda n: 1.0, hours=1, seed=1)
    with pytest.raises(ConfigError, match=r"utilisation 1.20"):
        FORMS.mean_wait_mg1(1.2, 1.0, 1.0)
