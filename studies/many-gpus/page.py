"""The page of all sets of predictions: `python studies/many-gpus/page.py`. What was measured is
set beside them when a run of several GPUs is on file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twin.calibrate.peer_probes import reduce_seconds
from twin.report.blocks import Stamp, markdown_table
from twin.report.study_page import write_page
from twin.study.foretold import FILE as PREDICTIONS
from twin.study.foretold import limits_text, series
from twin.study.inputs import files_digest
from twin.study.many_gpus import BY_TWO, BY_TWO_H200, KOG, ROWS
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
FILE = HERE / PREDICTIONS
Cells = dict[str, dict[str, Any]]


def stamp() -> Stamp:
    fits = _made(BY_TWO)["fits"]
    return Stamp(
        "+".join(fits[device] for device in sorted(fits)),
        files_digest(
            [FILE, HERE / BY_TWO, HERE / BY_TWO_H200, *sorted(HERE.glob("measured-*.json"))]
        ),
    )


def main() -> None:
    first, second, third = (_made(name) for name in (PREDICTIONS, BY_TWO, BY_TWO_H200))
    bodies = {
        "rows": rows_table(first["rows"], second["rows"], third["rows"]),
        "reduce": reduce_table(first["all_reduce"], second["all_reduce"]),
    }
    write_page(HERE, stamp(), bodies, chart(second["rows"]))


def _made(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / name).read_text(encoding="utf-8"))
    return found


def _nodes(cells: dict[str, Cells]) -> list[str]:
    return list(dict.fromkeys(node for row in cells.values() for node in row))


def measured() -> dict[str, dict[str, Any]]:
    """What was measured first of each node, by its name."""
    found = {}
    for file in sorted(HERE.glob("measured-*.json")):
        one = json.loads(file.read_text(encoding="utf-8"))
        found[one["machine"]["node"]] = one
    return found


def rows_table(
    cells: dict[str, Cells], by_two: dict[str, Cells], by_two_h200: dict[str, Cells]
) -> str:
    """Before any run, and by the fits of two GPUs where that was before the node's first run."""
    head = (
        "row", "node", "before any run, tokens/s", "measured", "off", "by two H100, tokens/s",
        "by two H200, tokens/s", "of the step", "Kog",
    )  # fmt: skip
    lines, found = [], measured()
    for row in ROWS:
        first, second = cells.get(row.name, {}), by_two.get(row.name, {})
        for node in first or second:
            cell, later = first.get(node), second.get(node)
            kog = KOG.get((row.name, node))
            speed = found.get(node, {}).get("row", {}).get(row.name, {}).get("tokens_per_s")
            told = cell or later
            off = f"{told['p50'] / speed - 1:+.1%}" if told and speed else ""
            lines.append(
                (
                    *(row.name, node, _between(cell), f"{speed:,.0f}" if speed else "", off),
                    _between(later),
                    _between(by_two_h200.get(row.name, {}).get(node)),
                    limits_text(later or cell or {}),
                    f"{kog:,.0f}" if kog else "",
                )
            )
    return markdown_table(head, lines)


def _between(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    return f"{cell['p50']:,.0f} ({cell['p10']:,.0f} to {cell['p90']:,.0f})"


def reduce_table(before: Cells, by_two: Cells) -> str:
    """Microseconds, with the lowest and highest draw."""
    asked = [what for what in next(iter(before.values())) if what != "bound_us"]
    found, lines = measured(), []
    for node, cell in before.items():
        for by, one in (("before any run", cell), ("by two H100", by_two.get(node))):
            if one:
                lines.append((node, by, *(_reduction(one[what]) for what in asked), _bound(one)))
        if node in found:
            took = [_reduced(found[node], what) for what in asked]
            lines.append((node, "measured", *took, ""))
    return markdown_table(("node", "", *(f"{what}, us" for what in asked), "at least, us"), lines)


def _reduction(one: dict[str, float]) -> str:
    return f"{one['nominal']:.2f} ({one['low']:.2f} to {one['high']:.2f})"


def _bound(cell: dict[str, Any]) -> str:
    return f"{cell['bound_us']:.2f}"


def _reduced(one: dict[str, Any], what: str) -> str:
    """`what`: "6 KiB under stream"."""
    medians = {name: probe["median_s"] for name, probe in one["probes"].items()}
    kib, loaded = int(what.split()[0]), what.endswith("stream")
    return f"{reduce_seconds(medians, one['machine']['gpus'], kib, loaded=loaded) * 1e6:.2f}"


def chart(cells: dict[str, Cells]) -> Bars:
    nodes, shown = _nodes(cells), [row.name for row in ROWS if row.name != "llama-3.1-70b"]
    bars = [
        series(node, [cells[name].get(node, {}) for name in shown])
        for node in nodes
        if node.endswith("h200-sxm")
    ]
    kog = Series(
        "8xh200-sxm, published by Kog",
        tuple(KOG.get((name, "8xh200-sxm")) for name in shown),
        marks=True,
    )
    ran = [
        Series(
            f"{node}, measured",
            tuple(one["row"].get(name, {}).get("tokens_per_s") for name in shown),
            marks=True,
        )
        for node, one in measured().items()
        if node in nodes and node.endswith("h200-sxm")
    ]
    return Bars(tuple(shown), (*bars, *ran, kog), "tokens/s (predicted, p10 to p90)")


if __name__ == "__main__":
    main()
