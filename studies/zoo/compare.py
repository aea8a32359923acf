"""Measurements of the zoo beside the predictions of before: `python studies/zoo/compare.py` writes the tables of README.md."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEVICES = ("h200-sxm", "h100-sxm")


def read(kind: str, device: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / f"{kind}-{device}.json").read_text(encoding="utf-8"))
    return found


def rows(device: str) -> list[tuple[str, float, float, float, float]]:
    """Name, GB streamed, seconds measured and predicted, share of the floor."""
    said, ran = read("predictions", device)["shapes"], read("measured", device)["shapes"]
    return [
        (name, p["weights"] / 1e9, m["step_s"], p["step_s"], p["floor_s"] / m["step_s"])
        for name, p in said.items()
        if (m := ran.get(name)) and "step_s" in m
    ]


def table(device: str) -> str:
    said = read("predictions", device)
    fit = said["fit"] or "none of its own: the H200's latencies and laws"
    lines = [f"`1x{device}`, fit {fit}, predicted at {said['commit']}:", ""]
    lines += ["| shape | GB a step | us a token | predicted | error | tokens/s | of the ceiling |", "|---|---|---|---|---|---|---|"]
    found = rows(device)
    for name, size, ran, guess, share in found:
        lines.append(
            f"| {name} | {size:.2f} | {ran * 1e6:.0f} | {guess * 1e6:.0f} | {guess / ran - 1:+.1%} | {1 / ran:.0f} | {share:.0%} |"
        )
    errors = [guess / ran - 1 for _, _, ran, guess, _ in found]
    worst, middle = max(errors, key=abs), statistics.median(map(abs, errors))
    mean = statistics.geometric_mean(share for *_, share in found)
    lines += ["", f"{len(found)} shapes: median error {middle:.1%}, worst {worst:+.1%}; share of the ceiling {mean:.3f} (geometric mean)."]
    return "\n".join(lines)


def main() -> None:
    page = HERE / "README.md"
    text = page.read_text(encoding="utf-8")
    for device in DEVICES:
        mark = rf"(<!-- {device} -->\n).*?(<!-- end -->)"
        made = table(device)
        text = re.sub(mark, lambda at, made=made: f"{at[1]}{made}\n{at[2]}", text, flags=re.DOTALL)
        print(made)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
