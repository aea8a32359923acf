"""Predictions of what no engine of ours has run, with their intervals, once and before it runs:
`python studies/intervals/predict.py` writes predictions.csv, by the plans of default options.
"""

from __future__ import annotations

import csv
from pathlib import Path

from twin.calibrate.fitted import numbers_of
from twin.calibrate.known_error import known_error
from twin.calibrate.node import calibrated_node
from twin.calibrate.store import conditions
from twin.models.load import load_model
from twin.study.case import Case

FILE = Path(__file__).resolve().parent / "predictions.csv"
HEAD = (
    "model",
    "node",
    "context",
    "tokens_per_s",
    "p10",
    "p90",
    "new",
    "numbers",
    "date",
    "commit",
)
CASES = (
    ("gemma-4-26b-a4b", "1xh200", 96),
    ("gemma-4-26b-a4b", "1xh200", 4160),
    ("gpt-oss-120b", "8xh200", 96),
    ("qwen3-coder-next@fp8-128x128", "8xh200", 96),
    ("deepseek-v4-flash", "8xh200", 96),
    ("deepseek-v3", "8xh200", 96),
    ("kimi-k2.6", "8xh200", 96),
)


def main() -> None:
    if FILE.exists():
        raise SystemExit(f"{FILE}: was written before its runs and is not written again")
    stamp = conditions()
    lines = []
    for model, name, context in CASES:
        node, spec, chosen = calibrated_node(name), load_model(model), {"context": context}
        speed = Case(spec, node, chosen).simulate().tokens_per_s
        known = known_error(node, spec, chosen)
        assert known is not None
        low, high = known.interval(speed)
        numbers = (f"{value:.5g}" for value in (speed, low, high))
        new = "; ".join(known.unseen)
        when = (numbers_of(node), stamp["date"], stamp["commit"])
        lines.append((model, name, context, *numbers, new, *when))
        print(*lines[-1], flush=True)
    with FILE.open("w", encoding="utf-8", newline="") as table:
        csv.writer(table, lineterminator="\n").writerows([HEAD, *lines])


if __name__ == "__main__":
    main()
