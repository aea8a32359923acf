"""Predicted beside measured, as a Markdown table.

python studies/h200-changes/table.py predictions.json measured.json
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

COLUMNS = (
    "model",
    "change",
    "predicted us",
    "measured us",
    "error",
    "predicted change",
    "measured change",
    "off by",
)


def main(predictions: Path, measurements: Path) -> None:
    predicted, measured = (
        json.loads(path.read_text())["rows"] for path in (predictions, measurements)
    )
    missing = sorted(predicted.keys() ^ measured.keys())
    if missing:
        sys.exit(
            f"{missing[0]}: stands in one file only; predict and measure the same plans (same "
            "commit)"
        )
    errors = []
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for name, guess in predicted.items():
        model, change = name.split(" | ")
        truth = measured[name]
        error = guess["us_per_token"] / truth["us_per_token"] - 1
        errors.append(abs(error))
        changes = (
            f"{guess['change']:+.1%} | {truth['change']:+.1%} | "
            f"{100 * (guess['change'] - truth['change']):+.1f} points"
        )
        print(
            f"| {model} | {change} | {guess['us_per_token']:,.1f} | {truth['us_per_token']:,.1f} "
            f"| {error:+.1%} | {changes} |"
        )
    print(f"\nMedian error {statistics.median(errors):.1%}, worst {max(errors):.1%}.")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
