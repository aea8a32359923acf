"""Our own data files: where they lie, how they are read, and what a mistyped name may have
meant.
"""

from __future__ import annotations

import csv
import json
import marshal
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from twin.errors import ConfigError
from twin.text import said, shown

MOST_BYTES = 10**6  # of a YAML file; the longest of ours has 31 kB
MOST_NODES = 50_000  # of its scalars, lists and mappings; the most of ours has some 3,000
MOST_DEPTH = 50
TOO_DEEP = f"nested more than {MOST_DEPTH} levels deep; write it flatter"
TOO_MANY = f"more than {MOST_NODES} entries, those behind aliases counted each time; shorten it"
LIBYAML_TOO_DEEP = "exceeded maximum nesting depth"
WIDEST = 2**63  # whole numbers are smaller
MOST_NAMES = 48  # in a message
MOST_LETTERS = 560  # of these names
LONGEST_NAME = 100  # of which a resemblance is looked for
_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """The folder `name` ("hwmodels"): inside the package of a wheel, next to the package in a
    checkout.
    """
    candidates = (_PACKAGE / "_data" / name, _PACKAGE.parent / name)
    for folder in candidates:
        if folder.is_dir():
            return folder
    places = " and ".join(str(c) for c in candidates)
    raise ConfigError(
        f"data folder {name!r} is missing (looked in {places}): reinstall, or run from a checkout"
    )


def read_table(folder: str, *names: str) -> list[dict[str, str]]:
    """The rows of one of our own CSV files."""
    with data_dir(folder).joinpath(*names).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def cell(text: str) -> Any:
    """A number, list or other value in a cell of one of them."""
    return json.loads(text)


def read_yaml(path: Path) -> dict[str, object]:
    """A YAML file whose top level is a mapping of plain data: text, numbers, truth values, lists
    and mappings.

    A key given twice is an error, not a silent override. A date is text. Raises ConfigError, also
    for files beyond the MOST_ limits: what is refused has cost no more than reading so much.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(
                f"{said(str(path))}: more than {MOST_BYTES} bytes; a file of ours is far shorter: "
                "check the path"
            )
        data = marshal.loads(_parsed(content.decode("utf-8")))
    except OSError as error:
        raise ConfigError(
            f"{said(str(path))}: cannot be read ({error.strerror}); check the path"
        ) from error
    except ValueError as error:  # of bytes that are no text, and of a path with a null character
        raise ConfigError(
            f"{said(str(path))}: cannot be read ({said(str(error))}); save it as UTF-8 text"
        ) from error
    except yaml.MarkedYAMLError as error:
        place = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        # libyaml has a limit of its own and may reach it first
        why = TOO_DEEP if error.problem == LIBYAML_TOO_DEEP else said(error.problem or str(error))
        raise ConfigError(f"{said(str(path))}: not valid YAML{place}: {why}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{said(str(path))}: not valid YAML: {said(str(error))}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{said(str(path))}: the top level must be a mapping, not {type(data).__name__}"
        )
    return data


@lru_cache(maxsize=64)
def _parsed(text: str) -> bytes:
    """What a file means, to be loaded anew by everybody who reads it: parsing takes some fifty
    times as long, and every node is loaded again and again.
    """
    return marshal.dumps(_Plain(text).document())


def did_you_mean(
    wrong: object, allowed: Iterable[str], fits: Callable[[str], bool] = lambda name: True
) -> str:
    """The end of an error message: the closest allowed names, then all of them (if they are few),
    or some where none is close. `fits`: what else a close name must meet to be named.
    """
    names = list(allowed)
    close = (
        get_close_matches(wrong, names, n=3, cutoff=0.5)
        if isinstance(wrong, str) and len(wrong) <= LONGEST_NAME
        else []
    )
    close = [name for name in close if fits(name)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    if close and len(names) > MOST_NAMES:
        return hint.rstrip()
    few = names[:MOST_NAMES]
    while len(few) > 1 and len(", ".join(few)) > MOST_LETTERS:
        few.pop()
    more = f" and {len(names) - len(few)} more" if len(names) > len(few) else ""
    return f"{hint}allowed: {', '.join(few)}{more}"


class _Plain:
    """Plain data of a text's events, which libyaml finds where it is installed: several times as
    fast. What is beyond a limit is refused where it is met; every alias counts as often as it is
    used, so that nothing can grow beyond the file's limits.
    """

    def __init__(self, text: str) -> None:
        loader: Any = getattr(getattr(yaml, "cyaml", None), "CParser", yaml.SafeLoader)
        self.next = loader(text).get_event
        self.count = 0
        # data and entries of what an alias may mean; none inside of it
        self.known: dict[str, tuple[Any, int]] = {}

    def document(self) -> Any:
        """Of the only one that there is."""
        self.next()  # the start of the stream
        if isinstance(self.next(), StreamEndEvent):
            return None
        data = self.of(self.next(), 1)
        self.next()  # the end of the document
        if not isinstance(event := self.next(), StreamEndEvent):
            raise _refused("a second document; write one file for each", event)
        return data

    def of(self, event: Any, depth: int) -> Any:
        """What an event begins. It is used up to its last event."""
        before, anchor = self.count, event.anchor
        if isinstance(event, AliasEvent):
            return self._alias(event)
        if depth > MOST_DEPTH:
            raise _refused(TOO_DEEP, event)
        self._counted(1, event)
        if event.tag not in (None, "!"):
            raise _refused(f"tag {shown(event.tag)}: only plain data are read; leave it out", event)
        if anchor is not None:
            if anchor in self.known:
                raise _refused(f"anchor {shown(anchor)} is given twice", event)
            self.known[anchor] = None, 0
        if isinstance(event, ScalarEvent):
            data = _word(event) if event.implicit[0] else event.value
        elif isinstance(event, SequenceStartEvent):
            data = []
            while not isinstance(one := self.next(), SequenceEndEvent):
                data.append(self.of(one, depth + 1))
        else:
            data = self._mapping(depth)
        if anchor is not None:
            self.known[anchor] = data, self.count - before
        return data

    def _mapping(self, depth: int) -> dict[Any, Any]:
        data: dict[Any, Any] = {}
        while not isinstance(event := self.next(), MappingEndEvent):
            key = self.of(event, depth + 1)
            if isinstance(key, list | dict):
                raise _refused("a key must be a name or a number, not a list or a mapping", event)
            if key in data:
                raise _refused(f"key {shown(key)} is given twice", event)
            data[key] = self.of(self.next(), depth + 1)
        return data

    def _alias(self, event: Any) -> Any:
        if event.anchor not in self.known:
            raise _refused(f"alias {shown(event.anchor)} means nothing before", event)
        data, size = self.known[event.anchor]
        if not size:
            raise _refused("an alias stands inside of what it means; write it out", event)
        self._counted(size, event)
        return data

    def _counted(self, entries: int, event: Any) -> None:
        self.count += entries
        if self.count > MOST_NODES:
            raise _refused(TOO_MANY, event)


# what a word may be, by its first letter; anything else is text, a date as well: nothing here
# calculates with dates, and Python knows fewer of them than people write
_WORDS: dict[str, list[tuple[str, Callable[[str], object]]]] = {
    letter: [(tag.rpartition(":")[2], pattern.match) for tag, pattern in patterns]
    for letter, patterns in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_SAFE = yaml.constructor.SafeConstructor()


def _word(event: Any) -> Any:
    """The value of a word without quotes."""
    text = event.value
    for kind, match in _WORDS.get(text[:1], ()):
        if match(text):
            if kind == "merge":
                raise _refused("a merge of mappings (<<): write their entries out", event)
            made = _MADE.get(kind)
            return made(event) if made else text
    return text


def _refused(problem: str, event: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, event.start_mark)


def _whole(word: ScalarEvent) -> int:
    try:
        value = int(_SAFE.construct_yaml_int(_node(word)))
    except ValueError:  # too many digits for Python, or none behind a prefix
        value = WIDEST
    if abs(value) >= WIDEST:
        raise _refused(
            f"{shown(word.value)} is no whole number of at most 63 bits; write a smaller one, or "
            "text in quotes",
            word,
        )
    return value


def _real(word: ScalarEvent) -> float:
    with suppress(ValueError):
        return float(word.value)
    try:
        return float(_SAFE.construct_yaml_float(_node(word)))  # .inf, .nan, numbers to base 60
    except (ValueError, OverflowError):
        raise _refused(
            f"{shown(word.value)} is no number; write digits, or text in quotes", word
        ) from None


def _node(word: ScalarEvent) -> yaml.ScalarNode:
    return yaml.ScalarNode("", word.value)


_MADE: dict[str, Callable[[Any], Any]] = {
    "null": lambda word: None,
    "bool": lambda word: _SAFE.construct_yaml_bool(_node(word)),
    "int": _whole,
    "float": _real,
}
