"""The tables of a view as CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from twin.explore import answers
from twin.explore.answers import Answer, Part
from twin.explore.rows import Rows
from twin.explore.view import View
from twin.server.problem import Problem

Line = Sequence[object]


def answer_for(view: View, name: str, rows: Rows) -> Answer:
    """Everything that the table of that name is made of. Raises Problem for an unknown one."""
    if name not in TABLES:
        raise Problem(f"table {name!r}: one of {', '.join(TABLES)}", param="table")
    if name == "sweep":
        return _needs(view, rows)
    if name == "stages":
        return answers.stages(view)
    return chain_of(view, rows)


def _needs(view: View, rows: Rows) -> Answer:
    if not view.sweeps:
        raise Problem("no sweep in the address; add sweep=context=128,1024", param="sweep")
    return answers.swept(view, rows)


def chain_of(view: View, rows: Rows) -> Answer:
    """All cases, each part with its case."""
    for at, one_case in enumerate(view.cases):
        for part in answers.case(one_case, view.usd, rows):
            yield part | {"case": at} if isinstance(part, dict) else part


def csv_of(view: View, name: str, parts: Sequence[Part]) -> tuple[Line, Iterable[Line]]:
    """Header and lines."""
    head, lines = TABLES[name]
    own = (() if name in ("sweep", "stages") else ("case",)) + tuple(head)
    if name == "sweep":
        own = (*(axis.name for axis in view.axes()), *head)
    if name == "stages":
        own = ("stage", "kind", *chain(*((f"us {n}", f"mostly {n}") for n in _sides(view))))
    return own, lines(view, parts)


def _sides(view: View) -> list[str]:
    return [str(one_case) for one_case in view.cases[:2]]


def _cases(view: View, parts: Sequence[Part]) -> Iterator[Line]:
    for at, one_case in enumerate(view.cases):
        mine = {part["part"]: part for part in parts if part.get("case") == at}
        speed, ends = mine.get("speed"), mine.get("interval", {})
        ours = mine["engines"]["engines"][0] if "engines" in mine else {}
        if speed is None:
            yield (str(one_case), *[""] * 10, mine.get("problem", {}).get("message", ""))
            continue
        yield (
            str(one_case),
            speed["tokens_per_s"],
            ends.get("low"),
            ends.get("high"),
            ends.get("rests", ""),
            speed["step_s"],
            speed["floor_tokens_per_s"],
            speed["stream_fraction"],
            ours.get("prompt_s"),
            ours.get("kwh_per_million"),
            ours.get("usd_per_million"),
            "",
        )


def _causes(view: View, parts: Sequence[Part]) -> Iterator[Line]:
    for part in _all(parts, "speed"):
        for kind, causes in part["kinds"].items():
            for cause, us in causes.items():
                yield (str(view.cases[part["case"]]), kind, cause, us)


def _engines(view: View, parts: Sequence[Part]) -> Iterator[Line]:
    for part in _all(parts, "engines"):
        for row in part["engines"]:
            yield (str(view.cases[part["case"]]), *row.values())


def _ladder(view: View, parts: Sequence[Part]) -> Iterator[Line]:
    for part in _all(parts, "ladder"):
        for rung in part["rungs"]:
            yield (str(view.cases[part["case"]]), *rung)


def _numbers(view: View, parts: Sequence[Part]) -> Iterator[Line]:
    for part in _all(parts, "rests"):
        for number in part["numbers"]:
            yield (str(view.cases[part["case"]]), *number)


def _swept(view: View, parts: Sequence[Part]) -> Iterator[Line]:
    for part in _all(parts, "sweep"):
        for cell in part["cells"]:
            yield (*cell["at"], cell["tokens_per_s"], cell["floor_tokens_per_s"], cell["problem"])


def _stages(view: View, parts: Sequence[Part]) -> Iterator[Line]:
    for part in _all(parts, "stages"):
        for stage in part["stages"]:
            pairs = chain(*zip(stage["us"], stage["mostly"], strict=True))
            yield (stage["name"], stage["kind"], *pairs)


def _all(parts: Sequence[Part], name: str) -> list[Part]:
    """Of each case the last one: the best plan's comes behind that of default options."""
    return list({part.get("case"): part for part in parts if part["part"] == name}.values())


TABLES: dict[str, tuple[Line, Callable[[View, Sequence[Part]], Iterable[Line]]]] = {
    "cases": (
        (
            "tokens/s",
            "p10",
            "p90",
            "interval from",
            "step s",
            "floor tokens/s",
            "stream fraction",
            "prompt s",
            "kWh per million tokens",
            "USD per million tokens",
            "problem",
        ),
        _cases,
    ),
    "causes": (("stages", "cause", "us a step"), _causes),
    "engines": (
        (
            "engine",
            "tokens/s",
            "p10",
            "p90",
            "prompt s",
            "kWh per million tokens",
            "USD per million tokens",
        ),
        _engines,
    ),
    "ladder": (("engine", "tokens/s", "us a step"), _ladder),
    "numbers": (("number", "kind", "value", "range", "source"), _numbers),
    "sweep": (("tokens/s", "floor tokens/s", "problem"), _swept),
    "stages": ((), _stages),
}
