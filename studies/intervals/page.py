"""Do the intervals hold what they say? `python studies/intervals/page.py` writes README.md's tables
and the figure. Nothing is simulated.

Every run is judged by an interval that it is no part of. "As written": p10 to p90 next to the
committed prediction. "By earlier runs": the law, with the errors of committed predictions whose
runs were earlier. "Left out": the law in force, with the errors by the fits in force of all records
but the run's own, which is its card and day, and without other runs of its shape.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest, fits_on_file
from studies.common.study_page import write_page
from studies.intervals.predicted import DRAWN, Prediction, predictions
from twin.calibrate.known_error import evidence
from twin.calibrate.seen import LANES, Evidence, Features, Seen
from twin.data import data_dir
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
NEXT = HERE / "predictions.csv"
FEWEST = 40  # runs of a bin that is judged
US = 1e6
Ends = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Judged:
    """A run, and the ends of an interval over its predicted speed."""

    run: Seen
    hidden: int | None
    ends: Ends
    news: float  # things that are new about it

    @property
    def inside(self) -> bool:
        return self.ends[0] <= self.run.factor <= self.ends[1]

    @property
    def width(self) -> float:
        return self.ends[1] - self.ends[0]


class Found:
    """All judgements, made once."""

    @cached_property
    def committed(self) -> list[Prediction]:
        return predictions()

    @cached_property
    def written(self) -> list[Judged]:
        return [
            Judged(one.run, one.hidden, one.before, self.news[one.run])
            for one in self.committed
            if one.before
        ]

    @cached_property
    def replayed(self) -> list[tuple[Prediction, Judged]]:
        """By the runs before each prediction."""
        found = []
        for date, some in groupby(self.committed, key=lambda one: one.predicted):
            known = Evidence([one.run for one in self.committed if one.ran < date])
            for one in some:
                about = one.run.features
                ends = known.levels(about, one.run.layer_s)
                found.append((one, Judged(one.run, one.hidden, ends, known.news(about))))
        return found

    @cached_property
    def news(self) -> dict[Seen, float]:
        return {judged.run: judged.news for _, judged in self.replayed}

    @cached_property
    def left_out(self) -> list[Judged]:
        hidden = {(one.run.record, one.run.name): one.hidden for one in self.committed}
        runs = evidence().runs
        by_shape: dict[tuple[str, str], list[Seen]] = defaultdict(list)
        for run in runs:
            by_shape[run.shape].append(run)
        found = []
        for (record, shape), some in by_shape.items():
            known = Evidence([r for r in runs if r.record != record and r.shape[1] != shape])
            for run in some:
                ends = known.levels(run.features, run.layer_s)
                at = hidden.get((run.record, run.name))
                found.append(Judged(run, at, ends, known.news(run.features)))
        return found


# ---- bins ----------------------------------------------------------------------------------------


def _between(limits: Sequence[float], value: float, unit: str) -> str:
    above = [limit for limit in limits if limit >= value]
    if not above:
        return f"above {limits[-1]:,g}{unit}"
    return f"up to {above[0]:,g}{unit}"


def _hidden(one: Judged) -> str | None:
    sizes = (1100, 1600, 2400, 3300, 4200)
    return None if one.hidden is None else _between(sizes, one.hidden, "")


def _of(read: Callable[[Features], str]) -> Callable[[Judged], str]:
    return lambda one: read(one.run.features)


BINS: dict[str, Callable[[Judged], str | None]] = {
    "all": lambda one: "",
    "hidden size": _hidden,
    "time a layer": lambda one: _between((20, 30, 50, 80), one.run.layer_s * US, " us"),
    "hand-off": _of(lambda about: about.handoff),
    "kind": _of(lambda about: about.kind.value),
    "device": _of(lambda about: about.device),
    "GPUs": _of(lambda about: str(about.gpus)),
    "GPUs and hand-off": _of(lambda about: f"{about.gpus}, {about.handoff}"),
    "positions": _of(lambda about: _between((200, 2000), about.context, "")),
    "lanes": _of(lambda about: "lanes" if LANES in about.parts else "none"),
    "new things": lambda one: "one or more" if one.news >= 1 else "fewer than one",
}


def bins(some: Iterable[Judged]) -> dict[tuple[str, str], list[Judged]]:
    found: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for one in some:
        for name, read in BINS.items():
            if (place := read(one)) is not None:
                found[name, place].append(one)
    return dict(found)


def share(some: Sequence[Judged]) -> float:
    return sum(one.inside for one in some) / len(some)


def width(some: Sequence[Judged]) -> float:
    return sum(one.width for one in some) / len(some)


def table(found: Found) -> str:
    """A bin a row, with at least FEWEST runs in one of the three judgements."""
    replayed = [judged for one, judged in found.replayed if one.before and one.source == DRAWN]
    drawn = {one.run for one, _ in found.replayed if one.source == DRAWN}
    written = [one for one in found.written if one.run in drawn]
    columns = [bins(some) for some in (written, replayed, found.left_out)]
    rows = []
    for name in BINS:
        places = sorted({place for of in columns for kind, place in of if kind == name}, key=_order)
        for place in places:
            parts = [of.get((name, place), []) for of in columns]
            if max(map(len, parts)) >= FEWEST:
                rows.append((name, place, *(cell for part in parts for cell in _cells(part))))
    head = ("bin", "", "runs", "as written", "width", "runs", "by earlier runs", "width")
    return markdown_table((*head, "runs", "left out", "width"), rows, text_columns=2)


def _order(place: str) -> tuple[float, str]:
    number = "".join(c for c in place.partition(",")[0] if c.isdigit())
    return (float(number) if number else 0.0) + place.startswith("above") / 2, place


def _cells(some: Sequence[Judged]) -> tuple[str, str, str]:
    if not some:
        return "", "", ""
    return str(len(some)), f"{share(some):.0%}", f"{width(some):.1%}"


def first_table(found: Found) -> str:
    """Predictions of something that had never run, by who made them."""
    written = {one.run: one for one in found.written}
    groups: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for one, judged in found.replayed:
        if judged.news >= 1:
            about = one.run.features
            node = f"{about.gpus}x{about.device}"
            name = one.run.record if one.source == DRAWN else one.source
            groups[name, node].append(judged)
            groups["all", ""].append(judged)
    rows = []
    for (name, node), some in groups.items():
        before = [written[one.run] for one in some if one.run in written]
        news = sum(one.news for one in some) / len(some)
        own = (f"{sum(one.inside for one in before)} of {len(before)}" if before else "", "")
        rows.append((name, node, f"{news:.1f}", own[0], *_cells(some)))
    head = ("predictions", "node", "new things", "inside as written", "runs", "by the law", "width")
    return markdown_table(head, [*rows[:1], *rows[2:], rows[1]], text_columns=2)


def ends_table() -> str:
    """What the law makes of some predictions."""
    from twin.calibrate.known_error import known_error
    from twin.calibrate.node import calibrated_node
    from twin.models.load import load_model

    rows = []
    for model, node, speed, chosen in (
        ("llama-3.1-8b", "1xh200", 285.0, {}),
        ("llama-3.1-8b", "1xh200", 285.0, {"handoff": "grid"}),
        ("llama-3.1-8b", "1xh200", 200.0, {"context": 131_000}),
        ("llama-3.1-8b", "1xh200", 200.0, {"batch": 8}),
        ("gpt-oss-120b", "1xh200", 497.0, {}),
        ("gpt-oss-120b", "8xh200", 758.0, {}),
        ("deepseek-v4-flash", "8xh200", 328.0, {}),
    ):
        known = known_error(calibrated_node(node), load_model(model), chosen)
        assert known is not None
        low, high = known.interval(speed)
        assert known.about is not None
        said = ", ".join(f"{name} {value}" for name, value in chosen.items())
        ends = f"{low / speed - 1:+.1%} to {high / speed - 1:+.1%}"
        rows.append((model, node, said, f"{evidence().news(known.about):.1f}", ends))
    head = ("model", "node", "options", "new things", "p10 to p90")
    return markdown_table(head, rows, text_columns=3)


def next_table() -> str:
    """What predict.py wrote."""
    with NEXT.open(encoding="utf-8", newline="") as table:
        rows = [
            (
                row["model"],
                row["node"],
                f"{int(row['context']):,}",
                f"{float(row['tokens_per_s']):,.0f}",
                f"{float(row['p10']):,.0f} to {float(row['p90']):,.0f}",
                row["new"].replace("_", r"\_"),
            )
            for row in csv.DictReader(table)
        ]
    head = ("model", "node", "positions", "predicted, tokens/s", "p10 to p90", "never ran")
    return markdown_table(head, rows, text_columns=2)


def chart(found: Found) -> Bars:
    """Shares inside of the bins of hidden sizes, hand-offs and GPUs."""
    replayed = [judged for one, judged in found.replayed if one.before and one.source == DRAWN]
    columns = {
        "as written": bins([one for one in found.written if one.run.record.startswith("shapes-")]),
        "by earlier runs": bins(replayed),
        "left out": bins(found.left_out),
    }
    kinds = ("all", "hidden size", "hand-off", "kind", "GPUs")
    places = [
        key for key, some in columns["left out"].items() if key[0] in kinds and len(some) >= FEWEST
    ]
    places.sort(key=lambda key: (kinds.index(key[0]), _order(key[1])))
    series = tuple(
        Series(label, tuple(share(of[key]) if key in of else None for key in places))
        for label, of in columns.items()
    )
    names = tuple(f"{name} {place}".strip() for name, place in places)
    return Bars(names, series, "share of runs inside p10 to p90 (0.8 is meant)")


def stamp() -> Stamp:
    names = ("1xh100", "1xh200", "2xh100", "2xh200", "4xh200")
    held = sorted((data_dir("calibration") / "held-out").glob("*.csv"))
    files = [*held, data_dir("hwmodels") / "intervals.yaml", NEXT]
    return Stamp(fits_on_file(*names), files_digest(files))


def main() -> None:
    found = Found()
    bodies = {
        "bins": table(found),
        "first": first_table(found),
        "ends": ends_table(),
        "next": next_table(),
    }
    write_page(HERE, stamp(), bodies, chart(found), pages=("README.md", "first.md"))
    print(bodies["bins"], bodies["first"], bodies["ends"], sep="\n\n")


if __name__ == "__main__":
    main()
