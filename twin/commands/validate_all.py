"""`twin validate --all`: the errors of all held-out engine runs on file, of all GPUs together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from twin.calibrate.all_held_out import Part, all_held_out, together
from twin.commands.output import emit
from twin.errors import CalibrationError, ConfigError
from twin.report.tables import percent, table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all",
        action="store_true",
        help="errors of all held-out runs on file, of all GPUs and of nodes of one and of several, "
        "by the fits in force; nothing is run",
    )


def chosen(args: argparse.Namespace) -> bool:
    """Raises ConfigError for --all with anything else, and for neither it nor a node."""
    if not args.all:
        if args.node is None:
            raise ConfigError("no node: name one (`twin hardware` lists them), or give --all")
        return False
    others = {
        "NODE": args.node,
        "--shapes": args.shapes is not None,
        "--seed": args.seed is not None,
        "--kind": args.kind,
        "--again": args.again,
        "--report": args.report,
        "--measure-only": args.measure_only,
        "--from": args.measured,
        "--out": args.out,
    }
    if wrong := [name for name, value in others.items() if value]:
        raise ConfigError(f"{wrong[0]} does not go with --all: leave one of them out")
    return True


def run(args: argparse.Namespace) -> int:
    """Raises CalibrationError where no errors are on file."""
    parts, left = all_held_out()
    if not parts:
        why = f" ({'; '.join(left)})" if left else ""
        raise CalibrationError(f"no held-out runs of a GPU are on file{why}: `twin validate NODE`")
    sums = totals(parts)
    emit(args, to_json(parts, sums, left), text(parts, sums, left))
    return 0


def totals(parts: Sequence[Part]) -> list[Part]:
    """Of each node, of each kind, then of all."""
    nodes = dict.fromkeys(part.node for part in parts)
    kinds = dict.fromkeys(part.kind for part in parts)
    return [
        *(together([part for part in parts if part.node == node], node) for node in nodes),
        *(together([part for part in parts if part.kind == kind], "all", kind) for kind in kinds),
        together(parts, "all"),
    ]


def to_json(parts: Sequence[Part], sums: Sequence[Part], left: Sequence[str]) -> dict[str, Any]:
    return {
        "records": [one(part) for part in parts],
        "together": [one(part) for part in sums],
        "left_out": list(left),
    }


def one(part: Part) -> dict[str, Any]:
    return {
        "node": part.node,
        "record": part.record,
        "kind": part.kind,
        "runs": len(part.errors),
        "median_abs_error": part.median,
        "worst_error": part.worst,
        "judged_by_p10_p90": len(part.held),
        "share_inside_p10_p90": part.share_held,
    }


def text(parts: Sequence[Part], sums: Sequence[Part], left: Sequence[str]) -> str:
    rows = [
        (
            part.node,
            part.record,
            part.kind,
            len(part.errors),
            percent(part.median),
            percent(part.worst, signed=True),
            "" if part.share_held is None else percent(part.share_held),
        )
        for part in (*parts, *sums)
    ]
    head = ("node", "record", "kind", "runs", "median error", "worst", "inside p10 to p90")
    return "\n\n".join(
        [
            table(head, rows, text_columns=3),
            "errors of the predicted speed by the fits in force; p10 to p90 as it was written "
            "before the runs, of chosen models that of the other runs",
            *(f"left out: {one}" for one in left),
        ]
    )
