"""A fit that misses its probes, that no stream binds or whose rates are absurd is not stored; the
one on file stays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.calibrate.pretended import stored_run
from tests.calibrate.test_fit import elsewhere, two_cores  # noqa: F401 (a fixture of its own)
from twin.calibrate import store, trusted
from twin.calibrate.busy import ACTIVITY
from twin.calibrate.fit import Fit
from twin.calibrate.probes import Probe, host_probes
from twin.calibrate.recipe import HOST_RECIPE
from twin.commands import calibrate
from twin.errors import CalibrationError
from twin.hardware.number import Kind, Number
from twin.hardware.types import Node
from twin.schedule.ring import limits_of

RATE = 10e9
NUMBERS = {
    "block.load_bytes_per_s": 10e9,
    "memory.stream_bytes_per_s": 18e9,
    "kernel.bf16_bytes_per_s": 30e9,
}


def _streams(node: Node) -> list[Probe]:
    chosen = host_probes(limits_of(node), 2, node.device, quick=True)
    return [p for p in chosen if p.name.startswith("stream-bf16")]


def _run(probes: list[Probe], **meta: Any) -> store.Run:
    samples = {p.name: [p.plan.weight_bytes() / RATE] * 3 for p in probes}
    return stored_run("host", "test", {"device": "host", "cores": 2, **meta}, samples)


def _fit(
    run: store.Run,
    *,
    misfit: float = 0.05,
    binding: float = 5.0,
    numbers: dict[str, float] | None = None,
) -> Fit:
    values = NUMBERS | (numbers or {})
    return Fit(
        {path: Number(value, Kind.FITTED, "test", value, value) for path, value in values.items()},
        dict.fromkeys(run.samples, misfit),
        run.id,
        dict.fromkeys(run.samples, "stream"),
        binding=dict.fromkeys(values, binding),
        settled=("stream",),
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"misfit": 0.97}, r"misses its probes of stream by 97%, more than 25%"),
        ({"misfit": -0.26}, r"by 26%, more than 25%"),
        ({"binding": 0.5}, r"no probe binds what memory streams"),
        ({"numbers": {"block.load_bytes_per_s": 44e12}}, r"load_bytes_per_s is 44,000 GB/s"),
        ({"numbers": {"kernel.bf16_bytes_per_s": 1e12}}, r"bf16_bytes_per_s is 1,000 GB/s"),
    ],
)
def test_a_fit_that_says_nothing_leaves_the_one_on_file(
    changed: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = two_cores()
    probes = _streams(node)
    run = _run(probes)
    store.write_fit(node.name, {"handoff.hop_s": Number(1e-7, Kind.FITTED, "old")}, {"run": "old"})
    before = store.fit_file(node.name).read_bytes()
    monkeypatch.setattr("twin.calibrate.fit.fit_node", lambda *_: _fit(run, **changed))
    monkeypatch.setattr(calibrate, "probes_of", lambda *_: probes)
    with pytest.raises(CalibrationError, match=rf"{said}.*stays.*`twin calibrate host` again"):
        calibrate.fit_and_store(node, run)
    assert store.fit_file(node.name).read_bytes() == before


def test_a_good_fit_is_stored_unless_stated_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    node = two_cores()
    probes = _streams(node)
    run = _run(probes)
    monkeypatch.setattr("twin.calibrate.fit.fit_node", lambda *_: _fit(run))
    monkeypatch.setattr(calibrate, "probes_of", lambda *_: probes)
    calibrate.fit_and_store(node, run, keep=False)
    assert not store.fit_file(node.name).exists()
    calibrate.fit_and_store(node, run)
    assert store.fit_file(node.name).exists()


def test_one_bound_stream_is_enough() -> None:
    """Two cores need not fill a memory's channels, so its rate may be open above."""
    probes = _streams(two_cores())
    run = _run(probes)
    fit = _fit(run)
    fit.binding["memory.stream_bytes_per_s"] = 0.1
    trusted.check(fit, run, probes, HOST_RECIPE, "1xhost")


def test_a_refusal_says_that_the_computer_was_busy(tmp_path: Path) -> None:
    probes = _streams(two_cores())
    run = _run(probes, **{ACTIVITY: {"others": 0.6}})
    with pytest.raises(CalibrationError, match=r"other programs had 1\.2 of 2 cores while"):
        trusted.check(_fit(run, misfit=0.9), run, probes, HOST_RECIPE, "1xhost")
