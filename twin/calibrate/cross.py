"""Cross-validation over shapes: how well does a fit predict a chain of layers whose shape it has
not seen?

Each shape is left out in turn, and the linearised fit is moved to the least misfit of the others. A
full fit for each shape would take minutes; near the optimum the model is close to linear.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

FEWEST = 8  # shapes from which an interval's width can be told
HELD = 0.8  # of the shapes that were left out lie inside what the draws say of them
# of a prediction's draws: a probe that no number of the group moves tells nothing of their widths
NARROWEST = 1e-4


@dataclass(frozen=True, slots=True)
class Cross:
    """log(simulated / measured) of each shape by the fit without it, and by how much intervals
    widen for that.
    """

    errors: dict[str, float] = field(default_factory=dict)
    widened: float = 1.0

    def said(self) -> str:
        """In words, for a report."""
        sizes = [abs(math.expm1(error)) for error in self.errors.values()]
        worst = max(self.errors.items(), key=lambda item: abs(item[1]))
        return (
            f"left out in turn, {len(sizes)} shapes are predicted {statistics.median(sizes):.1%} "
            f"off in the median, worst {math.expm1(worst[1]):+.1%} ({worst[0]}); intervals are "
            f"{self.widened:.2g} times the bootstrap's"
        )


def crossed(
    names: Sequence[str], rows: Sequence[str], left: Vector, slopes: Vector, draws: Vector
) -> Cross:
    """Of the shapes `names`. `rows`: the probe of each residual in `left`, "" for the prior's.

    `slopes` [residuals][numbers]; `draws` [draws][numbers], as steps from the fitted point. The
    first row of a probe is its step; the others are its stages, which are left out with it. Nothing
    is told of fewer than FEWEST shapes.
    """
    if len(names) < FEWEST:
        return Cross()
    of, errors, ratios = np.asarray(rows), {}, []
    for name in names:
        kept, step = of != name, int(np.flatnonzero(of == name)[0])
        moved = -np.linalg.pinv(slopes[kept]) @ left[kept]
        errors[name] = float(left[step] + slopes[step] @ moved)
        said = float(np.quantile(np.abs(draws @ slopes[step]), HELD))
        ratios.append(abs(errors[name]) / max(said, NARROWEST))
    return Cross(errors, max(1.0, _least_that_holds(ratios)))


def _least_that_holds(ratios: Sequence[float]) -> float:
    """The smallest factor that HELD of the shapes ask at most."""
    return sorted(ratios)[math.ceil(HELD * len(ratios)) - 1]
