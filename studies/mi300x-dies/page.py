"""What dies are worth on an MI300X, when gathers and polls occupy the slices of its Infinity Cache:
`python studies/mi300x-dies/page.py`.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest, fits_on_file, numbers_digest
from studies.common.study_page import write_page
from twin.study.hardware import Setting
from twin.study.outcome import Bars, Series
from twin.study.point import Point
from twin.workers import each

HERE = Path(__file__).resolve().parent
MODELS, NODES = ("laneformer-2b", "gpt-oss-120b"), ("1xmi300x", "8xmi300x")
CELLS = tuple(product(MODELS, NODES))
# where blocks stand, where words lie
WAYS = tuple(product(("flat", "by-die"), ("once", "per-io-die")))
# of one I/O die's slices: as on file; words in three of eight stacks
RATES: tuple[tuple[str, tuple[Setting, ...]], ...] = (
    ("2.98", ()),
    ("1.1", (("slices.bytes_per_s", "1.1 TB/s"),)),
)
US = 1e6


def stamp() -> Stamp:
    return Stamp(fits_on_file(*NODES), numbers_digest(NODES, files_digest([])))


def points() -> list[Point]:
    made = []
    for (model, node), (_, settings) in product(CELLS, RATES):
        for placement, exchanged in WAYS:
            point = Point(model, node, settings=settings)
            made.append(point.with_options(placement=placement, exchanged=exchanged))
    return made


def step_us(point: Point) -> float:
    return point.case().simulate().step_s * US


def main() -> None:
    times = list(each(step_us, points()))
    rows: list[tuple[str, ...]] = []
    gains: dict[str, list[float]] = {rate: [] for rate, _ in RATES}
    for at, ((model, node), (rate, _)) in enumerate(product(CELLS, RATES)):
        took = times[at * len(WAYS) : (at + 1) * len(WAYS)]
        best = 1 - min(took[1:]) / took[0]
        rows.append((f"{model} on {node}", rate, *(f"{us:,.1f}" for us in took), f"{best:.1%}"))
        gains[rate].append(100 * best)
    head = (
        *("step, us", "slices of an I/O die, TB/s", "flat, words once", "flat, on each I/O die"),
        *("by die, once", "by die, on each", "most that dies save"),
    )
    names = tuple(f"{model} on {node}" for model, node in CELLS)
    series = tuple(Series(f"{rate} TB/s", tuple(values)) for rate, values in gains.items())
    chart = Bars(names, series, "% of a step that dies save at most")
    write_page(HERE, stamp(), {"dies": markdown_table(head, rows)}, chart)


if __name__ == "__main__":
    main()
