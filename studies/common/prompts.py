"""Prompts on record next to the law of `twin/sim/prompt.py`, as `calibration/held-out/prompts.csv`
has them: `python -m studies.common.prompts`, in a checkout.
"""

from __future__ import annotations

from twin.calibrate.node import calibrated_node
from twin.calibrate.on_record import Measured, rows
from twin.calibrate.prompt_error import FILE, HEAD
from twin.cost.prompt import prompt_time
from twin.data import data_dir
from twin.files import write
from twin.models.kind import kind_of
from twin.models.load import load_model, model_names
from twin.schedule.options import plan_for

LEAST = 32  # tokens: a shorter prompt is no pass


def predicted_s(run: Measured) -> float | None:
    """By the fits in force; None of a model that is not on file, or that reads no
    prompts in passes.
    """
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
