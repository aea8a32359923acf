"""The page of predictions.json: `python studies/few-bits/page.py`. What was measured is set next to
it when `measured-DEVICE.json` is there (run.py's file), and in traces.md what the changes brought.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from few_bits import NODES, PROMPTS, ROWS

from studies.common.blocks import Stamp, filled, markdown_table
from studies.common.inputs import files_digest
from studies.common.predicted import FILE as PREDICTIONS
from studies.common.predicted import limits_text, series
from studies.common.study_page import write_page
from twin.files import write
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
FILE = HERE / PREDICTIONS
TRACES = HERE / "traces.md"
CHANGED = {node: HERE / f"changed-{node.removeprefix('1x')}.json" for node in NODES}
SHORT = "32"  # tokens of the prompt of the figure


def stamp() -> Stamp:
    fits = _made()["fits"]
    files = [FILE, *sorted(HERE.glob("measured-*.json")), *CHANGED.values()]
    return Stamp("+".join(fits[device] for device in sorted(fits)), files_digest(files))


def main() -> None:
    made = _made()
    write_page(HERE, stamp(), {"rows": rows_table(made["rows"])}, chart(made["rows"]))
    write({TRACES: traces(made["rows"])})


def traces(rows: dict[str, Any]) -> str:
    """traces.md, its table made again."""
    table = changed_table(rows)
    return filled(TRACES.read_text(encoding="utf-8"), lambda block: table, stamp())


def changed_rows(node: str) -> dict[str, Any]:
    """What the current kernel makes of the rows."""
    found: dict[str, Any] = json.loads(CHANGED[node].read_text(encoding="utf-8"))["rows"]
    return found


def changed_table(rows: dict[str, Any]) -> str:
    """Speeds of the first run and after the changes, each after both prompts."""
    lines = []
    for node in NODES:
        changed = changed_rows(node)
        for row in (row for row in ROWS if row.name in changed):
            first = [measured(row.name, node, str(prompt)) for prompt in PROMPTS]
            later = [changed[row.name][str(prompt)]["tokens_per_s"] for prompt in PROMPTS]
            spoken = (
                ", ".join(f"{speed:,.0f}" for speed in both if speed) for both in (first, later)
            )
            goal = f"{row.goal[node]:,}" if node in row.goal else ""
            floor = rows[row.name][node][SHORT]["floor"]
            lines.append((row.name, of_node(node), *spoken, goal, f"{floor:,.0f}"))
    return markdown_table(("row", "node", "first run", "changed", "goal", "floor"), lines)


def of_node(node: str) -> str:
    return node.removeprefix("1x").removesuffix("-sxm")


def _made() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def measured(row: str, node: str, prompt: str) -> float | None:
    file = HERE / f"measured-{node.removeprefix('1x')}.json"
    if not file.is_file():
        return None
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    speed: float | None = rows.get(row, {}).get(prompt, {}).get("tokens_per_s")
    return speed


def rows_table(rows: dict[str, Any]) -> str:
    head = (
        "row",
        "node",
        "after",
        "predicted, tokens/s",
        "p10 to p90",
        "first run",
        "changed kernel",
        "floor",
        "decoding free",
        "of the step",
    )
    lines = []
    for row, nodes in rows.items():
        for node, prompts in nodes.items():
            for prompt, cell in prompts.items():
                if "refused" in cell:  # an H100 has no room for the last rows
                    continue
                speed = measured(row, node, prompt)
                later = changed_rows(node).get(row, {}).get(prompt, {}).get("tokens_per_s")
                lines.append(
                    (
                        row,
                        of_node(node),
                        prompt,
                        f"{cell['p50']:,.0f}",
                        f"{cell['p10']:,.0f} to {cell['p90']:,.0f}",
                        f"{speed:,.0f}" if speed else "",
                        f"{later:,.0f}" if later else "",
                        f"{cell['floor']:,.0f}",
                        f"{cell['without_decoding']:,.0f}",
                        limits_text(cell),
                    )
                )
    return markdown_table(head, lines)


def chart(rows: dict[str, Any]) -> Bars:
    """After a short prompt, by node."""
    nodes = list(dict.fromkeys(node for of in rows.values() for node in of))
    bars = [
        series(node, [of.get(node, {}).get(SHORT, {}) for of in rows.values()]) for node in nodes
    ]
    found = [
        Series(f"{node}, measured", tuple(measured(row, node, SHORT) for row in rows), marks=True)
        for node in nodes
    ]
    return Bars(tuple(rows), (*bars, *found), "tokens/s after 32 tokens (predicted, p10 to p90)")


if __name__ == "__main__":
    main()
