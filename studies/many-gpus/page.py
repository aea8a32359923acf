"""The page of all sets of predictions: `python studies/many-gpus/page.py`. What was measured is
set next to them when a run of several GPUs is on file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from many_gpus import BY_FOUR_H200, BY_TWO, BY_TWO_H200, KOG, ROWS

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest
from studies.common.predicted import FILE as PREDICTIONS
from studies.common.predicted import limits_text, series
from studies.common.study_page import write_page
from twin.calibrate.peer_probes import reduce_seconds
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
# sets of predictions in the order in which they were made: what they are by, and their file
SETS = {
    "before any run": PREDICTIONS,
    "by two H100": BY_TWO,
    "by two H200": BY_TWO_H200,
    "by four H200": BY_FOUR_H200,
}
Cells = dict[str, dict[str, Any]]
Sets = dict[str, dict[str, Cells]]


def stamp() -> Stamp:
    fits = _made(BY_TWO)["fits"]
    return Stamp(
        "+".join(fits[device] for device in sorted(fits)),
        files_digest(
            [*(HERE / name for name in SETS.values()), *sorted(HERE.glob("measured-*.json"))]
        ),
    )


def main() -> None:
    sets = {by: _made(name) for by, name in SETS.items()}
    rows: Sets = {by: one["rows"] for by, one in sets.items()}
    bodies = {
        "rows": rows_table(rows),
        "reduce": reduce_table({by: one["all_reduce"] for by, one in sets.items()}),
    }
    write_page(HERE, stamp(), bodies, chart(rows["by two H100"]))


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


def rows_table(sets: Sets) -> str:
    """By every set of predictions that was made before the node's first run."""
    first, *later = sets
    head = (
        "row", "node", f"{first}, tokens/s", "measured", "off",
        *(f"{by}, tokens/s" for by in later), "of the step", "Kog",
    )  # fmt: skip
    lines, found = [], measured()
    for row in ROWS:
        by_set = {by: rows.get(row.name, {}) for by, rows in sets.items()}
        for node in dict.fromkeys(node for cells in by_set.values() for node in cells):
            stated = [cells[node] for cells in by_set.values() if node in cells]
            kog = KOG.get((row.name, node))
            speed = found.get(node, {}).get("row", {}).get(row.name, {}).get("tokens_per_s")
            lines.append(
                (
                    *(row.name, node, _between(by_set[first].get(node))),
                    f"{speed:,.0f}" if speed else "",
                    f"{stated[0]['p50'] / speed - 1:+.1%}" if speed else "",
                    *(_between(by_set[by].get(node)) for by in later),
                    limits_text(stated[-1]),
                    f"{kog:,.0f}" if kog else "",
                )
            )
    return markdown_table(head, lines)


def _between(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    return f"{cell['p50']:,.0f} ({cell['p10']:,.0f} to {cell['p90']:,.0f})"


def reduce_table(sets: dict[str, Cells]) -> str:
    """Microseconds, with the lowest and highest draw: by the first set and by the last that has the
    node.
    """
    before = next(iter(sets.values()))
    wanted = [what for what in next(iter(before.values())) if what != "bound_us"]
    found, lines = measured(), []
    for node in before:
        stated = {by: cells[node] for by, cells in sets.items() if node in cells}
        for by in dict.fromkeys((next(iter(stated)), next(reversed(stated)))):
            one = stated[by]
            lines.append((node, by, *(_reduction(one[what]) for what in wanted), _bound(one)))
        if node in found:
            took = [_reduced(found[node], what) for what in wanted]
            lines.append((node, "measured", *took, ""))
    return markdown_table(("node", "", *(f"{what}, us" for what in wanted), "at least, us"), lines)


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
