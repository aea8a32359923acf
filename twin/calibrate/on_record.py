"""What engine runs on record made of public models: shown next to every prediction of one.

`calibration/measured.csv` holds a line a run, newest kernels only, with its record:

    python -m studies.common.measured     # in a checkout; made from the studies' records
"""

from __future__ import annotations

import csv
from functools import lru_cache

from msgspec import ValidationError, convert

from twin.data import data_dir
from twin.errors import CalibrationError
from twin.frozen import frozen
from twin.hardware.types import Node
from twin.models.kind import stored_as
from twin.models.load import load_model, model_names
from twin.models.spec import ModelSpec
from twin.plan.options import Execution, HandOffKind
from twin.plan.types import Plan

FILE = "measured.csv"
# of the position, beyond which a run says little about a step there
NEAR = 4.0


@frozen
class Measured:
    """A run: a step at about `context` positions, or a prompt of so many tokens."""

    model: str  # as `twin models` has it, without a format
    stored: str  # in which its weights are
    node: str
    context: int
    tokens_per_s: float | None
    prompt_s: float | None
    record: str

    def speed(self) -> str:
        assert self.tokens_per_s is not None
        return f"{self.tokens_per_s:,.0f} tokens/s at about {self.context:,} positions"


def measured(plan: Plan, node: Node) -> list[Measured]:
    """Runs of a plan's model, as it is stored there, on the node; the nearest position first."""
    assert plan.spec is not None
    name = plan.spec.name
    if name in model_names() and load_model(name).layers != plan.spec.layers:
        return []  # a part of it
    own = [
        run
        for run in rows()
        if (run.model, run.stored, run.node) == (*named(plan.spec, plan), node.name)
    ]
    at = plan.options.context
    return sorted(own, key=lambda run: abs(run.context - at))


def step_at(plan: Plan, node: Node) -> Measured | None:
    """The run whose step is nearest: the studies time one token of a resident kernel with
    sentinels.
    """
    options = plan.options
    other = (
        options.execution is not Execution.RESIDENT or options.handoff is not HandOffKind.SENTINEL
    )
    if other or plan.tokens > 1:
        return None
    near = (
        run
        for run in measured(plan, node)
        if run.tokens_per_s and _near(run.context, plan.options.context)
    )
    return next(near, None)


def prompt_of(plan: Plan, node: Node, tokens: int) -> Measured | None:
    """The run of a prompt that was as long."""
    return next(
        (run for run in measured(plan, node) if run.prompt_s and run.context == tokens), None
    )


def _near(one: int, other: int) -> bool:
    return max(one, other, 256) <= NEAR * max(min(one, other), 256)


def named(spec: ModelSpec, plan: Plan) -> tuple[str, str]:
    """A model's name without its format, and how its weights lie in memory."""
    name = spec.name.partition("@")[0]
    return name, stored_as(spec) if spec.stored else plan.options.weight_dtype.value


@lru_cache(maxsize=1)
def rows() -> tuple[Measured, ...]:
    """Raises CalibrationError for a file that is not one of these."""
    file = data_dir("calibration") / FILE
    try:
        with file.open(encoding="utf-8", newline="") as table:
            found = [{k: v or None for k, v in row.items()} for row in csv.DictReader(table)]
        return convert(found, tuple[Measured, ...], strict=False)
    except (OSError, ValidationError, ValueError) as error:
        raise CalibrationError(f"{file}: holds no runs ({error}); install again") from error
