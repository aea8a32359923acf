"""The order in which laws of the twin go (studies/laws)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from studies.laws.ablate import Known, ablated

RUNS = 12


def test_laws_go_in_the_order_of_what_the_others_cannot_make_up_for() -> None:
    random = np.random.default_rng(0)
    base, alike, alone = (random.uniform(0.02, 0.08, RUNS) for _ in range(3))
    runs = [SimpleNamespace(shape=f"s{seed}-01") for seed in np.arange(RUNS) // 3]
    draws = {"kernel.a_s": random.uniform(0.5, 2, 60), "kernel.b_s": random.uniform(0.5, 2, 60)}
    found = Known(
        cast(Any, runs),
        random.normal(0, 0.003, RUNS),
        {
            "device.kernel.unseen_s": np.zeros(RUNS),
            "device.kernel.replaced_s": -alike,  # as a larger a_s makes up for
            "device.kernel.needed_s": -alone,
        },
        {"kernel.a_s": alike, "kernel.b_s": base},
        cast(Any, draws),
    )
    rows = list(ablated(found))
    assert [row["removed"] for row in rows] == [
        "nothing",
        *(f"device.kernel.{name}_s" for name in ("unseen", "replaced", "needed")),
    ]
    assert rows[1]["all_mean"] == rows[0]["all_mean"]
    assert not rows[1]["kept"]
    assert rows[-1]["kept"] == "yes"
