"""`twin diff`: two simulated steps side by side, cause by cause and stage by stage."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from twin import reading
from twin.commands.arguments import Subparsers, command
from twin.commands.output import emit
from twin.errors import ConfigError
from twin.files import read_json
from twin.report.step import spoken
from twin.report.tables import percent, table
from twin.text import said, shown

ASK = "give what `twin simulate MODEL NODE --json` printed"
MOST_BYTES = 64 << 20  # of a result; the longest model's has 2 MB
LARGEST = 1e18  # of a number: a step of 11 days in picoseconds
MOST_SHOWN = 20  # stages, where nobody wants all
PS_PER_US = 1e6
# name, mostly A, mostly B, microseconds of A, of B
Line = tuple[str, str, str, float | None, float | None]
ALIKE = 1e-9  # of a microsecond: below it nothing differs
EXAMPLES = """\
  twin diff a.json b.json
  twin diff a.json b.json --all --json"""


@dataclass(frozen=True, slots=True)
class Kept:
    """What `twin simulate --json` printed."""

    name: str
    tokens_per_s: float
    step_us: float
    causes: Mapping[str, float]  # microseconds
    stages: Mapping[str, tuple[str, str, float]]  # by name: kind, mostly, microseconds

    def kinds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for kind, _, us in self.stages.values():
            found[kind] = found.get(kind, 0.0) + us
        return found


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "diff",
        run,
        usage="A.json B.json [options]",
        summary="compare two results of twin simulate, stage by stage",
        text="Reads what `twin simulate MODEL NODE --json > A.json` wrote, and shows what B "
        "takes\nlonger or shorter than A: causes, kinds of stages, the stages that differ most.",
        examples=EXAMPLES,
    )
    parser.add_argument("before", metavar="A.json", type=Path, help="a result")
    parser.add_argument("after", metavar="B.json", type=Path, help="another one")
    parser.add_argument("--all", action="store_true", help="all stages, in their order")


def run(args: argparse.Namespace) -> int:
    before, after = read(args.before), read(args.after)
    stages = list(_stages(before, after))
    data = {
        "a": before.name,
        "b": after.name,
        "tokens_per_s": [before.tokens_per_s, after.tokens_per_s],
        "step_us": [before.step_us, after.step_us],
        "causes_us": _pairs(before.causes, after.causes),
        "kinds_us": _pairs(before.kinds(), after.kinds()),
        "stages": [
            {"name": name, "mostly": [one, other], "us": [a, b]}
            for name, one, other, a, b in stages
        ],
    }
    emit(args, data, text(before, after, stages, every=args.all))
    return 0


Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
Name = Annotated[str, Meta(min_length=1)]  # `said` makes a line of it


@dataclass(frozen=True, slots=True)
class Stage:
    name: Name
    kind: Name
    dominant: Name
    ps: Amount


@dataclass(frozen=True, slots=True)
class Result:
    """What of it is compared."""

    model: Name
    node: Name
    tokens_per_s: Amount
    step_s: Amount
    attribution: dict[str, Amount]
    stages: tuple[Stage, ...]


def read(path: Path) -> Kept:
    """Raises ConfigError with the file and all that is wrong or missing."""
    try:
        data = read_json(path, MOST_BYTES)
    except ConfigError as error:
        raise ConfigError(f"{error}; {ASK}") from error
    found = reading.read(data, Result, shown(path), advice=ASK, others=True)
    stages: dict[str, tuple[str, str, float]] = {}
    for one in found.stages:
        if (name := said(one.name)) in stages:
            raise ConfigError(f"{shown(path)}: the stage {shown(name)} stands there twice; {ASK}")
        stages[name] = (said(one.kind), said(one.dominant), one.ps / PS_PER_US)
    return Kept(
        f"{said(found.model)} on {said(found.node)}",
        found.tokens_per_s,
        1e6 * found.step_s,
        {said(cause): 1e6 * seconds for cause, seconds in found.attribution.items()},
        stages,
    )


def text(before: Kept, after: Kept, stages: Iterable[Line], *, every: bool) -> str:
    speed = [
        (f"A: {before.name}", f"{before.tokens_per_s:,.1f}", f"{before.step_us:,.1f}"),
        (f"B: {after.name}", f"{after.tokens_per_s:,.1f}", f"{after.step_us:,.1f}"),
    ]
    differ = [one for one in stages if every or _far(one) > ALIKE]
    listed = differ if every else sorted(differ, key=_far, reverse=True)[:MOST_SHOWN]
    rows = [(n, spoken(x), spoken(y), *_change(a, b)) for n, x, y, a, b in listed]
    head = ("A us", "B us", "B - A", "change")
    left = len(differ) - len(listed)
    return "\n\n".join(
        [
            table(("predicted", "tokens/s", "us a token"), speed),
            table(("cause", *head), list(_lines(before.causes, after.causes, spoken))),
            table(("stages", *head), list(_lines(before.kinds(), after.kinds(), str))),
            table(("stage", "A mostly", "B mostly", *head), rows, text_columns=3)
            if rows
            else "no stage differs",
            *([f"{left} more stages differ: --all"] if left else []),
        ]
    )


def _stages(before: Kept, after: Kept) -> Iterator[Line]:
    """In A's order, then those that only B has."""
    for name in dict.fromkeys((*before.stages, *after.stages)):
        a, b = before.stages.get(name), after.stages.get(name)
        yield name, a[1] if a else "", b[1] if b else "", a[2] if a else None, b[2] if b else None


def _pairs(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, list[float]]:
    return {name: [a.get(name, 0.0), b.get(name, 0.0)] for name in dict.fromkeys((*a, *b))}


def _lines(
    a: Mapping[str, float], b: Mapping[str, float], spell: Callable[[str], str]
) -> Iterator[tuple[str, ...]]:
    for name, (one, other) in _pairs(a, b).items():
        if one or other:
            yield (spell(name), *_change(one, other))


def _change(a: float | None, b: float | None) -> tuple[str, str, str, str]:
    ends = tuple("" if end is None else f"{end:,.2f}" for end in (a, b))
    by = (b or 0.0) - (a or 0.0)
    change = "gone" if b is None else "new" if not a else percent(b / a - 1, signed=True)
    return ends[0], ends[1], f"{by:+,.2f}", "" if abs(by) < ALIKE else change


def _far(one: Line) -> float:
    return abs((one[4] or 0.0) - (one[3] or 0.0))
