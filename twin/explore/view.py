"""What a page of the explorer shows: cases and a sweep, read from its address and written as the
commands that give the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

from twin.data import did_you_mean
from twin.errors import ConfigError
from twin.hardware.load import FILES
from twin.models.load import model_names
from twin.plan.options import Options
from twin.study.grid import Axis
from twin.study.options import CONDITIONS, Plain, plain_option
from twin.study.point import Point
from twin.study.whatif import changed, parse_axes, parse_changes, with_steps
from twin.text import shown

MOST_CASES = 4
MOST_AXES = 2
MOST_CELLS = 144  # of a sweep
MOST_QUERY = 4096  # characters of an address
MOST_WORDS = 40  # of a case
CASE, SWEEP, USD = "case", "sweep", "usd"
MOST_USD = 10_000.0
ROUTING = "routing"  # a condition that may name a file


@dataclass(frozen=True, slots=True)
class ViewCase:
    """A case: a model, a node, and `name=value` as `--set` takes them."""

    model: str
    node: str
    sets: tuple[str, ...] = ()

    def point(self) -> Point:
        """Raises TwinError for whatever it names that does not exist."""
        base = Point(self.model, self.node)
        changes = parse_changes(self.sets, base.on_node(), read_option)
        for change in changes:
            _no_file(CASE, change.name, change.value)
        return with_steps(changed(base, changes))

    def __str__(self) -> str:
        return " ".join((self.model, self.node, *self.sets))

    def command(self, usd: float | None = None) -> str:
        """The command line that gives the same."""
        names = [text.partition("=")[0].strip().replace("-", "_") for text in self.sets]
        if all(name in Options.__dataclass_fields__ for name in names):
            words = ["twin", "simulate", self.model, self.node]
            for name, text in zip(names, self.sets, strict=True):
                flag = "--dtype" if name == "weight_dtype" else f"--{name.replace('_', '-')}"
                words += [flag, text.partition("=")[2]]
            return shlex.join([*words, *([] if usd is None else ["--usd-per-hour", f"{usd:g}"])])
        return shlex.join(["twin", "whatif", self.model, self.node, *_flags("--set", self.sets)])

    def ladder_command(self) -> str:
        words = ["twin", "whatif", self.model, self.node, *_flags("--set", self.sets)]
        return shlex.join([*words, "--ladder", "--draws", "8"])


@dataclass(frozen=True, slots=True)
class View:
    """`sweeps` vary the first case."""

    cases: tuple[ViewCase, ...]
    sweeps: tuple[str, ...] = ()
    usd: float | None = None  # of a GPU's hour, instead of the price on file

    def axes(self) -> list[Axis]:
        axes = parse_axes(self.sweeps, self.cases[0].point().on_node(), read_option)
        size = 1
        for axis in axes:
            size *= len(axis.values)
            for value in axis.values:
                _no_file(SWEEP, axis.name, value)
        if size > MOST_CELLS:
            raise ConfigError(f"{SWEEP}: {size} points; at most {MOST_CELLS}: leave values out")
        return axes

    def commands(self) -> Iterator[str]:
        """One for each case, one for the sweep."""
        for case in self.cases:
            yield case.command(self.usd)
        if self.sweeps:
            first = self.cases[0]
            words = ["twin", "whatif", first.model, first.node, *_flags("--set", first.sets)]
            yield shlex.join([*words, *_flags("--sweep", self.sweeps)])


def read_view(query: bytes, own: Mapping[str, str] | None = None) -> View:
    """`case=MODEL NODE name=value ...` up to four times, `sweep=name=value,value` up to twice,
    `usd=`.

    `own`: nodes of the user's files by the name under which pages know them; no other file can be
    named. Raises ConfigError.
    """
    if len(query) > MOST_QUERY:
        raise ConfigError(f"an address of {len(query)} characters; at most {MOST_QUERY}")
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict")
    except (UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"the address cannot be read ({error}); copy it again") from error
    cases, sweeps, usd = [], [], None
    for name, value in pairs:
        if name == CASE:
            cases.append(_case(value, own or {}))
        elif name == SWEEP:
            if value.strip():
                sweeps.append(value.strip())
        elif name == USD and usd is not None:
            raise ConfigError(f"{USD} is given twice; remove one")
        elif name == USD:
            usd = _usd(value)
        else:
            raise ConfigError(f"{shown(name)}: unknown in an address; write {CASE}, {SWEEP}, {USD}")
    if not 1 <= len(cases) <= MOST_CASES:
        raise ConfigError(f"{len(cases)} cases; from 1 to {MOST_CASES}: {CASE}=llama-3.1-8b+1xh200")
    if len(sweeps) > MOST_AXES:
        raise ConfigError(f"{len(sweeps)} sweeps; at most {MOST_AXES}")
    return View(tuple(cases), tuple(sweeps), usd)


def _case(text: str, own: Mapping[str, str]) -> ViewCase:
    words = text.split()
    if not 2 <= len(words) <= MOST_WORDS:
        raise ConfigError(
            f"{CASE}={shown(text)}: write a model, a node and name=value, such as llama-3.1-8b "
            "1xh200 context=1024"
        )
    model, node, *sets = words
    name = model.rpartition("@")[0] or model
    if name not in model_names():
        raise ConfigError(
            f"{CASE}: {shown(name)}: the page takes models by name, no files; "
            f"{did_you_mean(name, model_names())}"
        )
    node = own.get(node, node)
    if node not in own.values() and ("/" in node or node.endswith(FILES)):
        raise ConfigError(f"{CASE}: {shown(node)}: name it with --node when the server starts")
    for one in sets:
        name, equals, value = one.partition("=")
        if not equals or not value:
            raise ConfigError(f"{CASE}: {shown(one)}: write name=value, such as context=1024")
        _no_file(CASE, name, value)
    return ViewCase(model, node, tuple(sets))


def _no_file(where: str, name: str, value: Plain) -> None:
    """Raises ConfigError for a routing that is read from a file."""
    text = str(value)
    if name == ROUTING and text != "uniform" and not text.startswith("zipf:"):
        raise ConfigError(
            f"{where}: {name}={shown(text)}: the page takes uniform or zipf:EXPONENT, no files"
        )


def _usd(text: str) -> float | None:
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST_USD:
        raise ConfigError(
            f"{USD}={shown(text)}: USD an hour and GPU, above 0, at most {MOST_USD:g}"
        )
    return value


def read_option(name: str, text: str) -> Plain:
    """The Options field as text. Raises ConfigError."""
    if name in CONDITIONS:
        raise ConfigError(f"{name} is a condition")  # whatif reads those itself
    if text.lstrip("-").isdecimal() and len(text) < 20:
        return plain_option(name, int(text))
    return plain_option(name, None if text == "none" else text)


def _flags(flag: str, texts: Sequence[str]) -> list[str]:
    return [word for text in texts for word in (flag, text)]
