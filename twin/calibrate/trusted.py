"""May a fit be stored? One that misses its own probes, or that no probe of a stream binds, says
nothing of the device: the fit on file stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from twin.calibrate.busy import busy, counted
from twin.calibrate.fit import Fit
from twin.calibrate.probes import Probe
from twin.calibrate.reading import settled
from twin.calibrate.recipe import Recipe
from twin.calibrate.store import Run
from twin.errors import CalibrationError
from twin.hardware.number import Kind

STREAMS = ("block.load_bytes_per_s", "memory.stream_bytes_per_s")
BEYOND = 8.0  # times the fastest stream that was measured: no rate of this computer


def check(fit: Fit, run: Run, probes: Sequence[Probe], recipe: Recipe, node: str) -> None:
    """Raises CalibrationError with the reason and what to do next."""
    if wrong := _wrong(fit, run, probes, recipe):
        why = busy(run.meta)
        said = f" ({why} while it was measured)" if why else ""
        raise CalibrationError(
            f"the fit of {run.id} is not stored: {wrong}{said}; the fit on file stays. Close other "
            f"programs, then run `twin calibrate {node.removeprefix('1x')}` again"
        )


def _wrong(fit: Fit, run: Run, probes: Sequence[Probe], recipe: Recipe) -> str | None:
    groups = [group for group in fit.settled if group in fit.groups.values()]
    worst = max(groups, key=fit.rms, default=None)
    if worst is not None and fit.rms(worst) > recipe.most_misfit:
        return (
            f"it misses its probes of {worst} by {fit.rms(worst):.0%}, more than "
            f"{recipe.most_misfit:.0%}"
        )
    if not recipe.quieter:
        return None
    wanted = [path for path in STREAMS if path in fit.binding]
    if wanted and all(fit.binding[path] < 1 for path in wanted):
        return f"no probe binds what memory streams ({', '.join(wanted)})"
    seconds = settled(counted(run))
    fastest = max(p.plan.weight_bytes() / seconds[p.name] for p in probes if p.name in seconds)
    for path, number in fit.numbers.items():
        known = number.kind is Kind.FITTED  # nothing waits for a rate that is open above
        if known and path.endswith("bytes_per_s") and number.value > BEYOND * fastest:
            return (
                f"{path} is {number.value / 1e9:,.0f} GB/s, and the fastest stream that was "
                f"measured {fastest / 1e9:,.0f} GB/s"
            )
    return None
