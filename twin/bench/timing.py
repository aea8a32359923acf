"""Variants timed in turn, and what their samples say."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.errors import EngineError


@dataclass(frozen=True, slots=True)
class Steps:
    """One repetition: [steps] ns of each timed step, and the tokens they made (none for a
    probe).
    """

    ns: NDArray[np.int64]
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the same step. `run` takes the number of the repetition, so that all variants
    read the same prompt.
    """

    name: str
    about: str
    warm_up: Callable[[], object]
    run: Callable[[int], Steps]


@dataclass(frozen=True, slots=True)
class Sample:
    """A repetition of a variant."""

    variant: str
    repeat: int
    steps: Steps

    @property
    def us_per_token(self) -> float:
        """The mean over the repetition, slow steps included: what a user waits."""
        return float(self.steps.ns.mean()) / 1e3


def alternate(
    variants: Sequence[Variant],
    repeats: int,
    *,
    show: Callable[[str], None],
    after_round: Callable[[], object],
) -> list[Sample]:
    """Each variant warmed up, then A, B, C, ..., A, B, C, ...: what drifts meets all of them
    alike.
    """
    for variant in variants:
        show(f"warming up: {variant.name}")
        variant.warm_up()
    samples = []
    for repeat in range(repeats):
        for variant in variants:
            show(f"round {repeat + 1}/{repeats}: {variant.name}")
            steps = variant.run(repeat)
            if not len(steps.ns) or int(steps.ns.min()) <= 0:
                raise EngineError(
                    f"{variant.name}: repetition {repeat + 1} has a step that took no time; "
                    "report this"
                )
            samples.append(Sample(variant.name, repeat, steps))
        after_round()
    return samples


def summary(samples: Iterable[Sample], variant: str) -> dict[str, Any]:
    """Median over the repetitions of their mean step, and the spread. Raises EngineError without a
    sample.
    """
    chosen = [sample for sample in samples if sample.variant == variant]
    if not chosen:
        raise EngineError(f"{variant} has no sample: measure at least one repetition")
    means = [sample.us_per_token for sample in chosen]
    median = statistics.median(means)
    every = np.concatenate([sample.steps.ns for sample in chosen]) / 1e3
    p5, p50, p95 = (float(value) for value in np.percentile(every, (5, 50, 95)))
    return {
        "us_per_token": median,
        "tokens_per_s": 1e6 / median,
        "repeats_us_per_token": means,
        "spread": (max(means) - min(means)) / median,
        "step_us": {"p5": p5, "p50": p50, "p95": p95},
        "steps": len(every),
    }
