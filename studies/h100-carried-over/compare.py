"""Sets the committed predictions beside the records of an H100: `python studies/h100-carried-over/compare.py`.

Writes the tables between the markers of README.md, and errors.svg.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from twin.calibrate import store

HERE = Path(__file__).resolve().parent
RUNS, PROBES = "2026-11-22T232135-engine", "2026-11-22T232025-probes"
WIDTH, HEIGHT, LEFT, TOP, BAR = 640, 330, 170, 20, 14
Row = tuple[str, float, float]  # name, predicted and measured seconds of a step


def main() -> None:
    guessed = json.loads((HERE / "predictions.json").read_text(encoding="utf-8"))
    runs, probes = rows(guessed["runs_step_s"], RUNS), rows(guessed["probes_step_s"], PROBES)
    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8")
    for name, made in (("runs", runs_table(runs)), ("probes", probes_table(probes))):
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda found, made=made: found[1] + made + found[2], text, flags=re.DOTALL)
    readme.write_text(text, encoding="utf-8")
    (HERE / "errors.svg").write_text(figure(runs), encoding="utf-8")
    print(f"held-out runs: {summary(runs)}\nprobes: {summary(probes)}")


def rows(guessed: dict[str, float], folder: str) -> list[Row]:
    samples = store.read_run(store.runs_folder("h100-sxm") / folder).samples
    return [(name, step, statistics.median(samples[name])) for name, step in guessed.items() if name in samples]


def error(row: Row) -> float:
    """Of the speed, positive where the twin is too fast."""
    return row[2] / row[1] - 1.0


def summary(found: Sequence[Row]) -> str:
    errors = [error(row) for row in found]
    fast = sum(e > 0 for e in errors)
    return (
        f"median {statistics.median(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%}, mean {statistics.mean(errors):+.1%}, "
        f"{fast} of {len(errors)} too fast"
    )


def runs_table(found: Sequence[Row]) -> str:
    lines = [f"| {name} | {guess * 1e6:,.0f} | {took * 1e6:,.0f} | {error((name, guess, took)):+.1%} |" for name, guess, took in found]
    head = "| held-out run | predicted, us | measured, us | error of the speed |\n|---|---|---|---|\n"
    return f"{head}{chr(10).join(lines)}\n\n{len(found)} runs: {summary(found)}.\n"


def probes_table(found: Sequence[Row]) -> str:
    kinds: dict[str, list[Row]] = {}
    for row in found:
        kinds.setdefault(row[0].split("-")[0], []).append(row)
    lines = []
    for kind, members in kinds.items():
        errors = [error(row) for row in members]
        worst = max(members, key=lambda row: abs(error(row)))
        mean = statistics.mean(errors)
        lines.append(
            f"| {kind} | {len(members)} | {mean:+.1%} | {statistics.median(map(abs, errors)):.1%} | {error(worst):+.1%} ({worst[0]}) |"
        )
    head = "| probes | count | mean error | median | worst |\n|---|---|---|---|---|\n"
    return f"{head}{chr(10).join(lines)}\n\n{len(found)} probes: {summary(found)}.\n"


def figure(found: Sequence[Row]) -> str:
    """A bar a run: how much too fast the twin is, in per cent."""
    span = max(abs(error(row)) for row in found) * 1.1
    scale = (WIDTH - LEFT - 20) / (2 * span)
    middle = LEFT + span * scale
    parts = [f'<line x1="{middle:.0f}" y1="{TOP}" x2="{middle:.0f}" y2="{HEIGHT - 30}" stroke="#333"/>']
    for at, row in enumerate(found):
        y, size = TOP + at * BAR, error(row) * scale
        parts.append(f'<text x="{LEFT - 6}" y="{y + 10}" text-anchor="end">{row[0]}</text>')
        parts.append(f'<rect x="{min(middle, middle + size):.1f}" y="{y + 1}" width="{abs(size):.1f}" height="{BAR - 4}" fill="#777"/>')
    most = int(span * 50) * 2  # even, so that zero is among the ticks
    for tick in range(-most, most + 1, 2):
        x = middle + tick / 100 * scale
        parts.append(f'<text x="{x:.0f}" y="{HEIGHT - 14}" text-anchor="middle">{tick} %</text>')
    label = "predicted speed against measured speed (right: the twin is too fast)"
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 1}" text-anchor="middle">{label}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="10">'
    return f'{head}<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    main()
