"""Do the intervals hold what they say? Every run on file by an interval that it is no part of.

    python -m studies.common.coverage

A seed's runs are left out together, for they had one card; of a study's public models, which also
had one, each is left out alone. Eight of ten should lie inside, 70 to 90 % of each class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twin.calibrate import store
from twin.calibrate.known_error import MANY, seen_on
from twin.calibrate.seen import Seen, levels_at, mirrored, shape_of
from twin.hardware.load import load_node
from twin.hardware.types import HOST
from twin.models.kind import ModelKind

CLASSES = (
    (8e9, "8 GB and more"),
    (4e9, "4 to 8 GB"),
    (2e9, "2 to 4 GB"),
    (1e9, "1 to 2 GB"),
    (0.0, "below 1 GB"),
)
ALL = "all"


@dataclass(frozen=True, slots=True)
class Class:
    """Runs of a node, a kind and a size, and how many of them lie inside."""

    node: str
    kind: str
    size: str
    runs: int
    inside: int
    width: float  # of their intervals, the mean: p90 less p10, over the prediction

    @property
    def share(self) -> float:
        return self.inside / self.runs


def coverage() -> list[Class]:
    """Of every node with held-out runs of two cards, by kind and size."""
    found = []
    for name in store.held_out_names():
        node = load_node(name)
        if node.device.isa == HOST:
            continue
        for kind in ModelKind:
            found += list(_of_kind(node.name, kind.value, seen_on(node, kind)))
    return found


def _of_kind(node: str, kind: str, seen: Sequence[Seen]) -> Iterator[Class]:
    held: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    for run in seen:
        others = left(seen, run)
        if len({one.record for one in others}) < 2:
            continue
        few = len(seen) < MANY
        low, high = levels_at(mirrored(others) if few else others, run.bytes)
        one = (low <= run.factor <= high, high - low)
        held[class_of(run.bytes)].append(one)
        held[ALL].append(one)
    for size in (*(size for _, size in CLASSES), ALL):
        if rows := held.get(size):
            width = sum(wide for _, wide in rows) / len(rows)
            yield Class(node, kind, size, len(rows), sum(inside for inside, _ in rows), width)


def left(seen: Sequence[Seen], run: Seen) -> list[Seen]:
    """The runs that an interval of this one may be of."""
    if run.public:
        return [one for one in seen if one.record != run.record or one.name != run.name]
    return [one for one in seen if one.record != run.record and shape_of(one.name) != run.name]


def class_of(size: float) -> str:
    return next(name for least, name in CLASSES if size >= least)


def table() -> str:
    """Markdown."""
    head = ("node", "models", "bytes a step and GPU", "runs", "inside p10 to p90", "mean width")
    lines = [
        (one.node, one.kind, one.size, str(one.runs), f"{one.share:.0%}", f"{one.width:.1%}")
        for one in coverage()
    ]
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


if __name__ == "__main__":
    print(table())
