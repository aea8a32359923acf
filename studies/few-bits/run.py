"""Runs every row on this computer's GPU, and prints each next to its prediction:
`studies/few-bits/run.sh 1xh200 --out FILE` (few_bits.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from few_bits import PROMPTS, ROWS, run_rows, study

from studies.common.predicted import next_to, read_cells
from twin.calibrate.node import calibrated_node
from twin.engine.opening import check_runs_here
from twin.hardware.types import Node
from twin.report.tables import table


def stated(node: Node, rows: dict[str, Any], predicted: dict[str, Any]) -> str:
    """The table of measured next to predicted; below it why a number is missing."""
    lines, notes = [], list[str]()
    for name, found in rows.items():
        check = found.get("check", {})
        checks = _difference(check), _equal(check)
        notes += [f"{name}: {one['failed']}" for one in (found, check) if "failed" in one]
        for prompt in map(str, PROMPTS):
            timed, cell = found.get(prompt, {}), predicted.get(name, {}).get(node.name, {})
            speeds = next_to(timed.get("tokens_per_s"), cell.get(prompt, {}))
            lines.append((name, prompt, *speeds, *checks))
            notes += [f"{name}, after {prompt}: {timed['failed']}"] if "failed" in timed else []
    heads = ("row", "after", "tokens/s", "predicted (p10-p90)", "off", "logits off", "equal runs")
    return "\n\n".join([table(heads, lines), *notes])


def _difference(check: dict[str, Any]) -> str:
    return f"{check['logit_difference']:.1e}" if "logit_difference" in check else ""


def _equal(check: dict[str, Any]) -> str:
    return {True: "yes", False: "NO", None: ""}[check.get("bitwise_equal")]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="studies/few-bits/run.sh", description=__doc__)
    parser.add_argument("node", help="1xh200 or 1xh100")
    names = [row.name for row in ROWS]
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"of {', '.join(names)}; default all"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_intermixed_args(words)
    if unknown := [name for name in args.rows if name not in names]:
        parser.error(f"no row {unknown[0]!r}: choose from {', '.join(names)}")
    node = calibrated_node(args.node)
    check_runs_here(node)
    show = partial(print, file=sys.stderr, flush=True)
    rows = run_rows(node, args.out, show, args.rows)
    print(stated(node, rows, read_cells(study())))


if __name__ == "__main__":
    main()
