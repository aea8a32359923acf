"""Sets the committed predictions of the zoo next to its measurements: `python studies/zoo/page.py`
writes README.md's blocks, and the table of speeds in the project's README.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.common.blocks import Stamp, filled, markdown_table
from studies.common.inputs import files_digest
from studies.common.study_page import write_page
from twin.files import write
from twin.hardware.floor import ceiling
from twin.hardware.load import load_device
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
FRONT = HERE.parents[1] / "README.md"  # of the project
# bytes/s
CEILINGS = {device: ceiling(load_device(device)).value for device in ("h200-sxm", "h100-sxm")}
FIRST = "h200-sxm"  # whose rows come first
OTHER = "other"  # H200, and an older kernel: its file, predicted by class alone
CLASSES = ((6.0, "6 GB and more"), (2.0, "2 to 6 GB"), (1.0, "1 to 2 GB"), (0.0, "below 1 GB"))


@dataclass(frozen=True, slots=True)
class Row:
    """A shape that ran: bytes of its weights, seconds of a step."""

    name: str
    weights: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Of the speed, positive where the twin is too fast."""
        return self.measured_s / self.predicted_s - 1.0

    def share(self, device: str) -> float:
        """Of the device's ceiling, by the weights alone."""
        return self.weights / self.measured_s / CEILINGS[device]


def _read(kind: str, device: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / f"{kind}-{device}.json").read_text(encoding="utf-8"))
    return found


def rows(device: str, kind: str = "measured") -> list[Row]:
    said, ran = _read("predictions", device)["shapes"], _read(kind, device)["shapes"]
    return [
        Row(name, p["weights"], p["step_s"], ran[name]["step_s"])
        for name, p in said.items()
        if "step_s" in ran.get(name, {})
    ]


def stamp() -> Stamp:
    """The fits are those that the predictions were made with."""
    files = [
        HERE / f"{kind}-{device}.json"
        for kind in ("predictions", "measured")
        for device in CEILINGS
    ]
    files.append(HERE / f"{OTHER}-{FIRST}.json")
    fits = (_read("predictions", device)["fit"] for device in CEILINGS)
    return Stamp("+".join(fits), files_digest(files))


def shapes_table(found: dict[str, list[Row]]) -> str:
    """A shape a row; for each device predicted and measured seconds, the error, the share."""
    head = ["shape", "GB"]
    for device in found:
        short = device.partition("-")[0].upper()
        head += [f"{short} predicted, us", "measured, us", "error of the speed", "share"]
    by_name = {device: {row.name: row for row in of} for device, of in found.items()}
    cells = []
    for first in found[FIRST]:
        line = [first.name, f"{first.weights / 1e9:.2f}"]
        for device, of in by_name.items():
            line += _cells(device, of.get(first.name))
        cells.append(line)
    said = (f"- 1x{device}: {summary(of)}" for device, of in found.items())
    return "\n".join([markdown_table(head, cells), "", *said, f"- Fit: {stamp().fit}."])


def speeds_table(found: dict[str, list[Row]]) -> str:
    """A shape a row; for each device tokens/s predicted and measured, and the share."""
    head = ["shape, BF16", "GB"]
    for device in found:
        head += [f"{device.partition('-')[0].upper()} predicted", "measured", "of the ceiling"]
    by_name = {device: {row.name: row for row in of} for device, of in found.items()}
    cells = []
    for first in found[FIRST]:
        line = [first.name, f"{first.weights / 1e9:.2f}"]
        for device, of in by_name.items():
            row = of.get(first.name)
            line += (
                [f"{1 / row.predicted_s:,.0f}", f"{1 / row.measured_s:,.0f}"] if row else ["", ""]
            )
            line.append(f"{row.share(device):.0%}" if row else "")
        cells.append(line)
    return markdown_table(head, cells)


def front(found: dict[str, list[Row]]) -> str:
    """The project's README, its table made again."""
    text = FRONT.read_text(encoding="utf-8")
    return filled(text, lambda block: speeds_table(found), stamp())


def _cells(device: str, row: Row | None) -> tuple[str, ...]:
    if row is None:
        return ("", "", "", "")
    return (
        f"{row.predicted_s * 1e6:,.0f}",
        f"{row.measured_s * 1e6:,.0f}",
        f"{row.error:+.1%}",
        f"{row.share(device):.2f}",
    )


def summary(found: Sequence[Row]) -> str:
    errors = [row.error for row in found]
    middle, worst, fast = (
        statistics.median(map(abs, errors)),
        max(errors, key=abs),
        sum(error > 0 for error in errors),
    )
    return f"{len(found)} shapes, median error {middle:.1%}, worst {worst:+.1%}, {fast} too fast."


def classes_table(found: dict[str, list[Row]]) -> str:
    """Geometric means of the shares, by size of the weights."""
    shares = {
        f"1x{device}": [(row.weights / 1e9, row.share(device)) for row in of]
        for device, of in found.items()
    }
    other = ((row.weights / 1e9, row.share(FIRST)) for row in rows(FIRST, OTHER))
    shares["another H200"] = list(other)
    lines = []
    above = float("inf")
    for least, name in CLASSES:
        some = [[share for size, share in of if least <= size < above] for of in shares.values()]
        lines.append(
            (
                name,
                *(
                    f"{statistics.geometric_mean(of):.3f} ({len(of)}), least {min(of):.2f}"
                    for of in some
                ),
            )
        )
        above = least
    means = (f"{statistics.geometric_mean(share for _, share in of):.3f}" for of in shares.values())
    return markdown_table(("weights", *shares), [*lines, ("all", *means)])


def main() -> None:
    found = {device: rows(device) for device in CEILINGS}
    bodies = {"shapes": shapes_table(found), "classes": classes_table(found)}
    names = tuple(row.name for row in found[FIRST])
    series = []
    for device, of in found.items():
        shares = {row.name: row.share(device) for row in of}
        series.append(
            Series(device.partition("-")[0].upper(), tuple(shares.get(name) for name in names))
        )
    write_page(
        HERE,
        stamp(),
        bodies,
        Bars(names, tuple(series), "share of the ceiling, by the weights alone"),
    )
    write({FRONT: front(found)})
    print(bodies["classes"])


if __name__ == "__main__":
    main()
