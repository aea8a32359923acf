"""How far prompts' predictions are off, by kind of model: prompts that GPUs read, on record in
`calibration/measured.csv`, beside the law of `twin/cost/prompt.py`.

    python -m twin.calibrate.prompt_error     # in a checkout: calibration/held-out/prompts.csv

The law's constants were fitted to some of the dense ones, so their errors are what is left, and not
held out; those of few-bit weights and experts were not fitted to.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache

from twin.calibrate.on_record import Measured, rows
from twin.calibrate.seen import Seen, levels_at
from twin.data import data_dir
from twin.errors import CalibrationError
from twin.files import write
from twin.hardware.types import Node
from twin.models.kind import ModelKind, kind_of
from twin.models.load import load_model, model_names
from twin.models.spec import ModelSpec

FILE = "held-out/prompts.csv"
HEAD = ("model", "stored", "node", "tokens", "kind", "measured_s", "predicted_s")
LEAST = 32  # tokens: a shorter prompt is no pass


@dataclass(frozen=True, slots=True)
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
    seen = [
        Seen(row["model"], row["tokens"], float(row["measured_s"]) / float(row["predicted_s"]), 1.0)
        for row in own
    ]
    # of times, not of speeds: measured over predicted
    slow = [Seen(one.record, one.name, 1 / one.error - 1, 1.0) for one in seen]
    low, high = levels_at(slow, 1.0)
    return PromptError(kind, len(own), len({row["model"] for row in own}), low, high)


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


def predicted_s(run: Measured) -> float | None:
    """By the fits in force; None of a model that is not on file, or that reads no
    prompts in passes.
    """
    from twin.calibrate.node import calibrated_node
    from twin.cost.prompt import prompt_time
    from twin.kernel.defaults import plan_for

    name = run.model if run.stored in ("bf16", "mxfp4") else f"{run.model}@{run.stored}"
    if run.model not in model_names():
        return None
    spec, node = load_model(name), calibrated_node(run.node)
    if run.context > spec.context:  # the study gave the shape more positions
        return None
    most = min(run.context + 160, spec.context)
    plan = plan_for(spec, node, context=run.context, max_context=most)
    if plan.options.prompt_chunk == 1:  # read by ordinary steps
        return None
    return prompt_time(plan, node, run.context).seconds


def main() -> None:
    lines = [",".join(HEAD)]
    for run in rows():
        if run.prompt_s is None or run.context < LEAST:
            continue
        guess = predicted_s(run)
        if guess is None:
            continue
        name = run.model if run.stored in ("bf16", "mxfp4") else f"{run.model}@{run.stored}"
        kind = kind_of(load_model(name)).value
        line = (run.model, run.stored, run.node, run.context, kind, run.prompt_s, f"{guess:.4g}")
        lines.append(",".join(map(str, line)))
        print(lines[-1], flush=True)
    write({data_dir("calibration") / FILE: "\n".join(lines) + "\n"})


if __name__ == "__main__":
    main()
