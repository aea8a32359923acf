"""The errors of every record, as calibration/held-out/README.md has them:
`python -m studies.common.held_out`. Nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from studies.common.blocks import markdown_table
from twin.calibrate import shape_record, store
from twin.calibrate.all_held_out import Part, all_held_out, together
from twin.calibrate.fitted import moved_by
from twin.calibrate.packed import unpacked
from twin.files import write
from twin.hardware.load import load_node

FILE = Path(__file__).resolve().parents[2] / "calibration" / "held-out" / "README.md"
HEAD = """# Errors of held-out engine runs

Written by `python -m studies.common.held_out`; `twin validate` keeps the errors. Positive: the
twin is too fast. "By the fits in force" leaves out runs whose kernel is no more; records that moved
a fit (*) are judged by the numbers that the other seeds alone give. "As predicted" is by what was
written before the runs, of all of them.
"""
COLUMNS = (
    "node",
    "record",
    "kind",
    "runs",
    "by the fits in force: median, worst",
    "runs",
    "as predicted: median, worst",
    "inside p10-p90",
)


def page() -> str:
    parts, _ = all_held_out()
    every = markdown_table(COLUMNS, [_row(part) for part in parts], text_columns=3)
    kinds = sorted({part.kind for part in parts})
    sums = [
        together([part for part in parts if part.kind == kind], f"all {kind}") for kind in kinds
    ]
    sums.append(together(parts, "all"))
    head = ("runs of", "records", "runs", "median, worst", "inside p10-p90")
    rows = [
        (part.node, part.record.split()[0], len(part.errors), str(part), _share(part.held))
        for part in sums
    ]
    return f"{HEAD}\n{markdown_table(head, rows)}\n\n{every}\n"


def _row(part: Part) -> tuple[object, ...]:
    node = load_node(part.node)
    moved = "*" if part.record in moved_by(node) else ""
    own = (part.node, part.record + moved, part.kind, len(part.errors), str(part))
    folder = store.runs_folder(part.node) / part.record
    if not (unpacked(folder) / shape_record.PREDICTIONS).is_file():
        return (*own, None, None, _share(part.held))
    found = shape_record.read(node, folder).measured
    if not found.runs:
        return (*own, None, None, None)
    return (*own, len(found.runs), str(found), _share(found.held))


def _share(held: Sequence[bool]) -> str | None:
    return f"{sum(held) / len(held):.0%}" if held else None


def main() -> None:
    write({FILE: page()})


if __name__ == "__main__":
    main()
