"""What a run of several GPUs found, as tables, and the command that makes it:
`studies/many-gpus/run.sh NODE --out FOLDER` (many_gpus.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from many_gpus import KOG, ROWS, Run, everything, pack, study

from studies.common.predicted import next_to, read_cells
from twin.calibrate.node import calibrated_node
from twin.calibrate.peer_probes import SIZES, reduce_seconds
from twin.engine.opening import check_runs_here
from twin.report.tables import table


def stated(run: Run, found: dict[str, Any], predicted: dict[str, Any]) -> str:
    """The tables: rows next to their predictions, and the all-reduce by size."""
    rows, notes = [], list[str]()
    for row in ROWS:
        timed, checked = found["row"][row.name], found["check"][row.name]
        cell = predicted.get(row.name, {}).get(run.node.name, {})
        speeds = next_to(timed.get("tokens_per_s"), cell)
        same, right = _judged(timed, "same_tokens"), _judged(checked, "correct")
        notes += [f"{row.name}: {one['refused']}" for one in (timed, checked) if "refused" in one]
        kog = KOG.get((row.name, run.node.name))
        rows.append((row.name, *speeds, same, right, f"{kog:,.0f}" if kog else ""))
    heads = ("row", "tokens/s", "predicted (p10-p90)", "off", "same tokens", "as reference", "Kog")
    medians = {name: one["median_s"] for name, one in found["probes"].items() if "median_s" in one}
    gpus, sizes = run.node.gpus, list[tuple[int, str, str]]()
    for kib in SIZES:
        try:
            idle, under = (
                reduce_seconds(medians, gpus, kib, loaded=loaded) for loaded in (False, True)
            )
        except KeyError:
            sizes.append((kib, "not run", "not run"))
            continue
        sizes.append((kib, f"{idle * 1e6:.2f}", f"{under * 1e6:.2f}"))
    reduced = table(("all-reduce, KiB", "idle, us", "under stream, us"), sizes)
    return "\n\n".join([table(heads, rows), reduced, f"soak: {found['soak']}", *notes])


def _judged(found: dict[str, Any], what: str) -> str:
    return "refused" if "refused" in found else "yes" if found[what] else "NO"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="studies/many-gpus/run.sh", description=__doc__)
    parser.add_argument("node", help="2xh200, 4xh100, ...; 2xhost tries it on emulated GPUs")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(words)
    node = calibrated_node(args.node)
    check_runs_here(node)
    args.out.mkdir(parents=True, exist_ok=True)
    tiny = not node.device.nvidia
    run = Run(node, args.out, tiny, lambda text: print(f"... {text}", file=sys.stderr, flush=True))
    found = everything(run)
    print(f"records: {pack(run)}\n")
    print(stated(run, found, {} if tiny else read_cells(study())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
