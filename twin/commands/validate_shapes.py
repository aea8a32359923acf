"""`twin validate NODE --shapes N --seed S`: shapes that a seed draws are predicted, then run and
judged.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import Any

from twin.calibrate.drawn import MOST_SEED, MOST_SHAPES
from twin.calibrate.experiment import Experiment, Runs
from twin.calibrate.measure import require
from twin.calibrate.recipe import recipe_of
from twin.calibrate.shape_record import Record, folder_of, groups, keep_errors, measure, opened
from twin.commands.arguments import check_compiler, whole
from twin.commands.output import done, emit, progress, say, warn_if_busy
from twin.errors import CalibrationError, ConfigError
from twin.files import check_folder
from twin.hardware.types import Node
from twin.models.kind import ModelKind, stored_as
from twin.models.spec import ModelSpec
from twin.report.tables import count, percent, table


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "shapes that a seed draws",
        "predicted first, by a file that is never written again; then run, where the device is",
    )
    group.add_argument(
        "--shapes",
        type=whole,
        metavar="N",
        help=f"four runs of each, of another kind than dense two; up to {MOST_SHAPES}",
    )
    group.add_argument(
        "--seed", type=whole, metavar="S", help=f"choose it after the fit; up to {MOST_SEED}"
    )
    group.add_argument(
        "--kind",
        choices=[kind.value for kind in ModelKind],
        help="what is drawn: dense shapes in 16 bits (the default), dense ones that are quantised, "
        "or mixtures of experts",
    )


def chosen(args: argparse.Namespace) -> bool:
    """Raises ConfigError for one of the two alone, or with what belongs to other runs."""
    given = [args.shapes is not None, args.seed is not None]
    if not any(given):
        if args.kind:
            raise ConfigError("--kind goes with --shapes N and --seed S: give all three")
        return False
    if not all(given):
        raise ConfigError("--shapes N and --seed S belong together: give both, or neither")
    others = {
        "--again": args.again,
        "--report": args.report,
        "--measure-only": args.measure_only,
        "--from": args.measured,
    }
    if wrong := [name for name, value in others.items() if value]:
        raise ConfigError(f"{wrong[0]} does not go with --shapes: leave one of them out")
    return True


def kind_requested(args: argparse.Namespace) -> ModelKind:
    return ModelKind(args.kind) if args.kind else ModelKind.DENSE


def run(args: argparse.Namespace, node: Node) -> int:
    recipe_of(node.device)  # refuses a device that no engine runs on
    kind = kind_requested(args)
    folder = folder_of(node, args.shapes, args.seed, kind)
    check_folder(folder.parent)
    try:
        record = opened(node, args.shapes, args.seed, folder, progress(), kind)
        say(f"predicted on {record.date} by {record.fit}: {record.folder}")
        if not record.has_intervals:
            say(
                "no p10 to p90: when these were predicted, no held-out errors of the fit in force "
                f"were on file; `twin validate {node.name}`, or with --from one of its records, "
                "puts them there, before the next seed"
            )
        here = present(node) if record.left else None
        if record.left and here is None:
            check_compiler(node)
            warn_if_busy()
            record = measure(node, record, progress())
        with suppress(ImportError):  # who measures may lack what the twin needs
            keep_errors(node, record, progress())
    finally:
        done()
    emit(args, to_json(record), text(record, advice(args, node, here)))
    return 0


def present(node: Node) -> str | None:
    """Why the node's devices are not in this computer; None where they are."""
    try:
        require(node.device, node.gpus)
    except CalibrationError as error:
        return str(error)
    return None


def advice(args: argparse.Namespace, node: Node, here: str | None) -> str:
    """What to do where the device is somewhere else."""
    if here is None:
        return ""
    again = f"twin validate {node.name} --shapes {args.shapes} --seed {args.seed}"
    again += f" --kind {args.kind}" if args.kind else ""
    folder = folder_of(node, args.shapes, args.seed, kind_requested(args))
    whose = f"{node.gpus} x" if node.gpus > 1 else "a"
    return (
        f"{here}\n\nOn a computer with {whose} {node.device.title}: put {folder} at the same place "
        f"of its calibration folder, run `{again}`, bring the folder back, and run the same "
        "command here."
    )


def to_json(record: Record) -> dict[str, Any]:
    rows = []
    for run in record.runs:
        rows.append(
            {
                "name": run.name,
                "shape": shape(run.spec),
                "context": run.options.context,
                "handoff": run.options.handoff.value,
                "predicted_tokens_per_s": run.predicted_tokens_per_s,
                "p10": run.p10,
                "p90": run.p90,
                "measured_tokens_per_s": run.measured_tokens_per_s if run.samples else None,
                "error": run.error if run.samples else None,
            }
        )
    found = record.measured if record.measured.runs else None
    return {
        "node": record.node,
        "kind": record.kind.value,
        "folder": str(record.folder),
        "fit": record.fit,
        "predicted": record.date,
        "runs": rows,
        "failed": dict(record.failed),
        "median_abs_error": found.median if found else None,
        "worst_error": found.worst if found else None,
        "share_inside_p10_p90": found.share_held if found else None,
        "groups": {
            label: {
                "runs": len(some.runs),
                "median_abs_error": some.median,
                "worst_error": some.worst,
                "share_inside_p10_p90": some.share_held,
            }
            for label, some in grouped(record)
        },
    }


def grouped(record: Record) -> list[tuple[str, Runs]]:
    """Of the runs that were measured, by format, of experts by family too."""
    parts = [
        (label, Runs(tuple(run for run in runs if run.samples)))
        for label, runs in groups(record).items()
    ]
    return [(label, some) for label, some in parts if some.runs]


def shape(spec: ModelSpec) -> str:
    """Layers x hidden, heads on KV heads of so many elements, feed-forward, vocabulary."""
    heads = f"{spec.heads}/{spec.kv_heads}x{spec.head_dim}"
    feed = f"{spec.experts.top_k}/{spec.experts.experts}x{spec.ffn}" if spec.experts else spec.ffn
    tied, stored = "tied " if spec.tied else "", stored_as(spec)
    others = "" if stored == spec.dtype.value else f" {stored}"
    family = f"{spec.family} " if spec.experts else ""
    if spec.lanes:
        family = f"{spec.lanes.count} lanes, delay {spec.lanes.delay}: "
    return (
        f"{family}{spec.layers}x{spec.hidden} {heads} {feed} {spec.vocab} "
        f"{tied}{spec.dtype.value}{others}"
    )


def text(record: Record, where: str) -> str:
    head = (
        "run",
        "layers x hidden, heads, feed-forward, words",
        "predicted tokens/s",
        "p10 to p90",
        "measured",
        "error",
    )
    parts = [table(head, [_row(run) for run in record.runs], text_columns=2)]
    if record.measured.runs:
        found = record.measured
        by_group = record.kind is not ModelKind.DENSE or len(groups(record)) > 1
        parts += [groups_text(record)] if by_group else []
        held = "" if found.share_held is None else f", {percent(found.share_held)} inside p10-p90"
        parts += [
            f"{name} was not run: {said.splitlines()[0]}" for name, said in record.failed.items()
        ]
        parts.append(
            f"{len(found.runs)} of {len(record.runs)} runs: median error {percent(found.median)}, "
            f"worst {percent(found.worst, signed=True)}{held}; fit: {record.fit}"
        )
    return "\n\n".join([*parts, *([where] if where else [])])


def _row(run: Experiment) -> tuple[str, ...]:
    interval = (
        f"{count(run.p10)} to {count(run.p90)}"
        if run.p10 is not None and run.p90 is not None
        else "unknown"
    )
    speeds = (
        (count(run.measured_tokens_per_s), percent(run.error, signed=True))
        if run.samples
        else ("", "")
    )
    return (run.name, shape(run.spec), count(run.predicted_tokens_per_s), interval, *speeds)


def groups_text(record: Record) -> str:
    rows = [
        (
            label,
            len(some.runs),
            percent(some.median),
            percent(some.worst, signed=True),
            "" if some.share_held is None else percent(some.share_held),
        )
        for label, some in grouped(record)
    ]
    what = "hand-off" if record.kind is ModelKind.DENSE else "stored as"
    return table((what, "runs", "median error", "worst", "inside p10 to p90"), rows)
