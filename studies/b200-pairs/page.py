"""B200 against H200: what ten public pairs of one server say, and the twin of our kernel:
`python studies/b200-pairs/page.py`.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest, fits_on_file, numbers_digest
from studies.common.study_page import write_page
from twin.hardware.types import Node
from twin.plan.types import Plan
from twin.sim.run import simulate
from twin.sim.speculation import Speculation
from twin.study.hardware import Setting, with_settings
from twin.study.interval import Draws, settings
from twin.study.outcome import Bars, Series
from twin.study.point import Point
from twin.workers import each

HERE = Path(__file__).resolve().parent
PAIRS = HERE / "pairs.csv"
NODES = ("1xh200", "1xb200", "8xb200")
LAYERS = 8  # of each model: a ratio needs no more
DRAWS, LEVELS = Draws(8, 1), (0.1, 0.9)
# heads that the kernel's GPUs could not divide
NORMED_TOGETHER = ("minimax-m2.7",)
SAME = Speculation(acceptance=0.7, draft_step_s=0.0)  # on both: only the steps differ
# of the B200 alone, by as much as a generation may bring
CHANGES: tuple[tuple[str, tuple[Setting, ...]], ...] = (
    ("clock, x1.2", (("clock", "x1.2"),)),
    ("stream, x1.2", (("memory.stream_bytes_per_s", "x1.2"),)),
    ("hop, half", (("handoff.hop_s", "x0.5"),)),
    ("tensor cores, x1.5", (("kernel.tensor_bytes_per_cycle", "x1.5"),)),
)
Row = dict[str, str]


def stamp() -> Stamp:
    return Stamp(fits_on_file(*NODES), numbers_digest(NODES, files_digest([PAIRS])))


def step_s(plan: Plan, node: Node) -> float:
    return simulate(plan, node, speculation=SAME if plan.options.draft else None).step_s


def ratios(pair: Row) -> list[float]:
    """Predicted; p10 and p90 over draws of the B200's numbers; with each change."""
    found = []
    for node in ("h200", "b200"):
        point = Point(pair["model"], f"{pair['gpus']}x{node}").with_options(
            layers=LAYERS,
            context=int(pair["context"]),
            max_context=2 * int(pair["context"]),
            draft=int(pair["draft"]),
        )
        if pair["model"] in NORMED_TOGETHER:
            point = point.with_options(residual="sliced")
        case = point.case()
        found.append((case.plan(), case.node))
    (one, hopper), (plan, node) = found
    base = step_s(one, hopper)

    def ratio(changes: tuple[Setting, ...]) -> float:
        return base / step_s(plan, with_settings(node, changes))

    drawn = [ratio(tuple(changes)) for changes in settings(node, DRAWS)]
    low, high = np.quantile(drawn, LEVELS)
    return [ratio(()), float(low), float(high), *(ratio(made) for _, made in CHANGES)]


def main() -> None:
    with PAIRS.open(encoding="utf-8", newline="") as file:
        pairs = list(csv.DictReader(file))
    rows, public, predicted = [], [], []
    for pair, (said, low, high, *changed) in zip(pairs, each(ratios, pairs), strict=True):
        true = float(pair["b200"]) / float(pair["h200"])
        public.append(true)
        predicted.append(said)
        span = f"{low:.2f} to {high:.2f}"
        inside = "inside" if low <= true <= high else f"{said / true - 1:+.0%}"
        name = f"{pair['model']} on {pair['gpus']}"
        rows.append(
            (
                *(name, pair["draft"], f"{true:.2f}", f"{said:.2f}", span, inside),
                *(f"{one:.2f}" for one in changed),
            )
        )
    head = ("B200 over H200", "drafts", "public", "the twin", "p10 to p90", "off by")
    table = markdown_table((*head, *(name for name, _ in CHANGES)), rows)
    chart = Bars(
        tuple(row[0] for row in rows),
        (Series("public", tuple(public)), Series("the twin", tuple(predicted))),
        "speed of a B200 over that of an H200",
    )
    write_page(HERE, stamp(), {"pairs": table}, chart)


if __name__ == "__main__":
    main()
