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

FEWEST = 8  # shapes from which an interval's width can be estimated


@dataclass(frozen=True, slots=True)
class Cross:
    """log(simulated / measured) of each shape by the fit without it, and how far draws of the
    numbers move together for that: one standard deviation of each number's logarithm.

    A shape's own error is no number's. The numbers move along the one direction that steps of all
    shapes see best, where little is enough; along others numbers would go to factors of ten before
    a step moved. Over the shapes the draws spread as widely as the errors, in the mean square.
    """

    errors: dict[str, float] = field(default_factory=dict)
    along: tuple[float, ...] = ()

    def said(self) -> str:
        """In words, for a report."""
        sizes = [abs(math.expm1(error)) for error in self.errors.values()]
        worst = max(self.errors.items(), key=lambda item: abs(item[1]))
        return (
            f"left out in turn, {len(sizes)} shapes are predicted {statistics.median(sizes):.1%} "
            f"off in the median, worst {math.expm1(worst[1]):+.1%} ({worst[0]}); for that the "
            f"numbers' draws move together, each by up to {max(map(abs, self.along)):.1%}"
        )


def crossed(names: Sequence[str], rows: Sequence[str], left: Vector, slopes: Vector) -> Cross:
    """Of the shapes `names`. `rows`: the probe of each residual in `left`, "" for the prior's.

    `slopes` [residuals][numbers]. The first row of a probe is its step; the others are its stages,
    which are left out with it. There is none from fewer than FEWEST shapes.
    """
    if len(names) < FEWEST:
        return Cross()
    of = np.asarray(rows)
    steps = {name: int(np.flatnonzero(of == name)[0]) for name in names}
    errors = {}
    for name, step in steps.items():
        kept = of != name
        moved = -np.linalg.pinv(slopes[kept]) @ left[kept]
        errors[name] = float(left[step] + slopes[step] @ moved)
    seen = slopes[list(steps.values())]
    best = np.linalg.svd(seen)[2][0]
    spread = math.sqrt(
        sum(error**2 for error in errors.values()) / float(((seen @ best) ** 2).sum())
    )
    return Cross(errors, tuple((spread * best).tolist()))
