"""Errors of public models that studies timed, by the fits in force, next to the held-out runs:
`python studies/intervals/public.py`. Every run of calibration/measured.csv is predicted by the plan
of default options, 5 core-minutes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from twin.calibrate.known_error import keep_runs
from twin.calibrate.node import calibrated_node
from twin.calibrate.on_record import Measured, rows
from twin.calibrate.seen import Seen, features_of
from twin.models.formats import PLAIN
from twin.models.kind import stored_as
from twin.models.load import load_model
from twin.models.spec import DType, ModelSpec
from twin.study.case import Case

RECORD = "public"


def main() -> None:
    found = defaultdict(list)
    for run in rows():
        if run.tokens_per_s is not None:
            found[run.node].append(seen(run, run.tokens_per_s))
            print(found[run.node][-1].name, f"{found[run.node][-1].error:+.1%}", flush=True)
    for name, runs in found.items():
        keep_runs(calibrated_node(name), runs)


def seen(run: Measured, speed: float) -> Seen:
    spec = spec_of(run)
    chosen: dict[str, Any] = {"context": run.context}
    if spec.stored is None and run.stored in PLAIN:
        chosen |= {"weight_dtype": DType(run.stored)}
    node = calibrated_node(run.node)
    predicted = Case(spec, node, chosen).simulate().tokens_per_s
    return Seen(
        RECORD,
        f"{run.model}@{run.stored} {run.context}",
        predicted / speed - 1,
        1 / predicted / spec.layers,
        features_of(node, spec, chosen),
        public=True,
    )


def spec_of(run: Measured) -> ModelSpec:
    """As its weights were stored."""
    spec = load_model(run.model)
    same = run.stored in PLAIN or stored_as(spec) == run.stored
    return spec if same else load_model(f"{run.model}@{run.stored}")


if __name__ == "__main__":
    main()
