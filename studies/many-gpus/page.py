"""The page of predictions.json: `python studies/many-gpus/page.py`. What was measured is set beside
it when a run of several GPUs is on file.
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
from twin.study.many_gpus import KOG, ROWS
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
FILE = HERE / PREDICTIONS
Cells = dict[str, dict[str, Any]]


def stamp() -> Stamp:
    fits = _made()["fits"]
    return Stamp(
        "+".join(fits[device] for device in sorted(fits)),
        files_digest([FILE, *sorted(HERE.glob("measured-*.json"))]),
    )


def main() -> None:
    made = _made()
    bodies = {"rows": rows_table(made["rows"]), "reduce": reduce_table(made["all_reduce"])}
    write_page(HERE, stamp(), bodies, chart(made["rows"]))


def _made() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
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


def rows_table(cells: dict[str, Cells]) -> str:
    head = (
        "row", "node", "predicted, tokens/s", "p10", "p90", "measured", "off", "of the step", "Kog",
    )  # fmt: skip
    lines, found = [], measured()
    for row in ROWS:
        for node, cell in cells[row.name].items():
            kog = KOG.get((row.name, node))
            numbers = [f"{cell[level]:,.0f}" for level in ("p50", "p10", "p90")]
            speed = found.get(node, {}).get("row", {}).get(row.name, {}).get("tokens_per_s")
            off = f"{cell['p50'] / speed - 1:+.1%}" if speed else ""
            numbers += [f"{speed:,.0f}" if speed else "", off]
            lines.append(
                (row.name, node, *numbers, limits_text(cell), f"{kog:,.0f}" if kog else "")
            )
    return markdown_table(head, lines)


def reduce_table(nodes: Cells) -> str:
    head = ("node", "all-reduce", "predicted, us", "low", "high", "measured", "at least, us")
    found = measured()
    lines = [
        (
            node,
            what,
            *(f"{one[level]:.2f}" for level in ("nominal", "low", "high")),
            _reduced(found.get(node), node, what),
            f"{cell['bound_us']:.2f}",
        )
        for node, cell in nodes.items()
        for what, one in cell.items()
        if what != "bound_us"
    ]
    return markdown_table(head, lines)


def _reduced(one: dict[str, Any] | None, node: str, what: str) -> str:
    """`what`: "6 KiB under stream"."""
    if one is None:
        return ""
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
        "Kog, 8xh200 (published)",
        tuple(KOG.get((name, "8xh200-sxm")) for name in shown),
        marks=True,
    )
    return Bars(tuple(shown), (*bars, kog), "tokens/s (predicted, p10 to p90)")


if __name__ == "__main__":
    main()
