"""How far prompts' predictions are off, by kind of model: prompts that GPUs read, on record in
`calibration/measured.csv`, next to the law of `twin/cost/prompt.py`.

    python -m studies.common.prompts     # in a checkout: calibration/held-out/prompts.csv

The law's constants were fitted to some of the dense ones, so their errors are what is left, and not
held out; those of low-bit weights and experts were not fitted to.
"""

from __future__ import annotations

import csv
from functools import lru_cache

from twin.calibrate.seen import levels_of
from twin.data import data_dir
from twin.errors import CalibrationError
from twin.frozen import frozen
from twin.hardware.types import Node
from twin.models.kind import ModelKind, kind_of
from twin.models.spec import ModelSpec

FILE = "held-out/prompts.csv"
HEAD = ("model", "stored", "node", "tokens", "kind", "measured_s", "predicted_s")


@frozen
class PromptError:
    """Eight of ten prompts of a kind took between `low` and `high` of the predicted time."""

    kind: ModelKind
    prompts: int
    models: int
    low: float
    high: float


def prompt_error(spec: ModelSpec, node: Node) -> PromptError | None:
    """Of the model's kind, on GPUs of the node's device alone; of one GPU: of several none was
    read. None where none is on record.
    """
    kind = kind_of(spec)
    own = [
        row
        for row in known()
        if row["kind"] == kind.value and row["node"].split("x", 1)[1] == node.device.name
    ]
    if not own or node.gpus > 1:
        return None
    # of times, not of speeds
    slower = [float(row["measured_s"]) / float(row["predicted_s"]) for row in own]
    models = [row["model"] for row in own]
    low, high = levels_of(slower, models)
    return PromptError(kind, len(own), len(set(models)), low, high)


@lru_cache(maxsize=1)
def known() -> tuple[dict[str, str], ...]:
    """Raises CalibrationError for a file that is not one of these."""
    file = data_dir("calibration") / FILE
    try:
        with file.open(encoding="utf-8", newline="") as table:
            found = tuple(csv.DictReader(table))
    except OSError as error:
        raise CalibrationError(f"{file}: {error}; install again") from error
    if found and tuple(found[0]) != HEAD:
        raise CalibrationError(f"{file}: has {', '.join(found[0])}; write it again")
    return found
