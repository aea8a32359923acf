"""The tables and the figure of README.md, from results/: `python studies/best-plans/page.py`.
Nothing is simulated.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest
from studies.common.study_page import errors_chart, write_page
from twin.study.outcome import Bars

HERE = Path(__file__).resolve().parent
CASES, TABLES, QUESTIONS = (
    HERE / "results" / f"{name}.csv" for name in ("cases", "tables", "questions")
)
FIT = "2026-11-27"  # of an H200
WITHIN = 0.01
SHOWN = 6
MILLION = 1_000_000
HEAD = ("model", "node", "positions", "batch", "default", "found", "best of all", "plan found")
EXPERTS = ("gpt-oss", "qwen3-30b-a3b", "qwen3-coder-next")
Case = dict[str, str]


def cases() -> list[Case]:
    return _lines(CASES)


def _lines(file: Path) -> list[Case]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def stamp() -> Stamp:
    return Stamp(FIT, files_digest([CASES, TABLES, QUESTIONS]))


def loss(case: Case) -> float:
    """How much faster the best plan is than the one found."""
    return float(case["best"]) / float(case["found"]) - 1


def gain(case: Case) -> float:
    """Of the plan found over default options on all GPUs."""
    return float(case["found"]) / float(case["standard"]) - 1


def summary() -> str:
    """All cases, and those with experts."""
    found = cases()
    kinds = {
        "all": found,
        "dense": [case for case in found if not case["model"].startswith(EXPERTS)],
        "experts": [case for case in found if case["model"].startswith(EXPERTS)],
    }
    rows = [
        (
            name,
            str(len(some)),
            str(sum(loss(case) <= WITHIN for case in some)),
            f"{100 * max(map(loss, some)):.2f} %",
            f"{100 * median(map(gain, some)):.1f} %",
            f"{100 * max(map(gain, some)):.1f} %",
            f"{median(int(case['looked']) for case in some):g} of "
            f"{median(int(case['ways']) for case in some):g}",
        )
        for name, some in kinds.items()
        if some
    ]
    head = ("cases", "run", "within 1 %", "worst", "median gain", "largest gain", "plans simulated")
    return markdown_table(head, rows)


def table() -> str:
    """The cases in which the plan matters most."""
    rows = [
        (
            case["model"],
            case["node"],
            f"{int(case['context']):,}",
            case["batch"],
            *(f"{float(case[name]):,.0f}" for name in ("standard", "found", "best")),
            case["plan"].replace("_", r"\_"),
        )
        for case in sorted(cases(), key=gain, reverse=True)[:SHOWN]
    ]
    return markdown_table(HEAD, rows)


def tables() -> str:
    """The cells of other studies by their best plans."""
    rows = []
    for line in _lines(TABLES):
        default, best = float(line["default"]), float(line["best"])
        plan = line["plan"].replace("_", r"\_")
        speeds = (f"{default:,.0f}", f"{best:,.0f}", f"{100 * (best / default - 1):+.0f} %")
        rows.append((line["model"], line["node"], *speeds, plan, line["runs"]))
    head = ("model", "node", "default", "best", "gain", "best plan", "runs in")
    return markdown_table(head, rows)


def amd() -> str:
    """How far eight MI300X are from eight H200, by default options and by the best plans."""
    by = {(line["model"], line["node"]): line for line in _lines(TABLES)}
    rows = []
    for model in dict.fromkeys(model for model, _ in by):
        h200, mi300x = by[model, "8xh200"], by[model, "8xmi300x"]
        changes = (float(mi300x[name]) / float(h200[name]) - 1 for name in ("default", "best"))
        rows.append((model, *(f"{100 * change:+.1f} %" for change in changes)))
    return markdown_table(("MI300X against H200", "default options", "best plans"), rows)


def questions() -> str:
    """What they cost on two cores."""
    rows = []
    for line in _lines(QUESTIONS):
        points, wall_s, core_s = int(line["points"]), float(line["wall_s"]), float(line["core_s"])
        each = f"{1e3 * core_s / points:,.0f} ms" if 1 < points < MILLION else ""
        rows.append((line["question"], f"{points:,}", f"{wall_s:.1f} s", f"{core_s:.1f} s", each))
    head = ("question", "points", "on two cores", "of all cores", "a point")
    return markdown_table(head, rows)


def chart() -> Bars:
    ordered = sorted(cases(), key=gain, reverse=True)[:SHOWN]
    names = [f"{case['model']}, {case['node']}, {case['context']}" for case in ordered]
    return errors_chart(names, {"faster than default options": [gain(case) for case in ordered]})


def main() -> None:
    bodies = {"summary": summary(), "gains": table(), "tables": tables(), "amd": amd()}
    write_page(HERE, stamp(), bodies | {"questions": questions()}, chart())


if __name__ == "__main__":
    main()
