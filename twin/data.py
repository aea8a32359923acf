"""Our own data files: where they lie, how they are read, and what a mistyped name may have
meant.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

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
    """The folder `name` ("hwmodels"): inside the package of a wheel, beside the package in a
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
    times as long, and every node is asked for again and again.
    """
    return marshal.dumps(_Plain().of(_nodes(text)))


def did_you_mean(
    wrong: object, allowed: Iterable[str], fits: Callable[[str], bool] = lambda name: True
) -> str:
    """The end of an error message: the closest allowed names, then all of them (if they are few),
    or some where none is close. `fits`: what a close name must do besides to be named.
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


def _nodes(text: str) -> Any:
    """What stands in a text, by libyaml where it is installed: several times as fast. What is
    beyond a limit is refused where it is met.
    """
    composer: Any = getattr(getattr(yaml, "cyaml", None), "CParser", yaml.SafeLoader)

    class Counted(composer):  # type: ignore[misc]  # of a type that is known at run time
        nodes = depth = 0

        def descend_resolver(self, parent: Any, index: Any) -> None:
            self.depth += 1
            if self.depth > MOST_DEPTH:
                raise _refused(TOO_DEEP)

        def ascend_resolver(self) -> None:
            self.depth -= 1

        def resolve(self, kind: type, value: str | None, implicit: tuple[bool, bool]) -> str:
            """What a node without a tag is; tags of their own are longer."""
            self.nodes += 1
            if self.nodes > MOST_NODES:
                raise _refused(TOO_MANY)
            if value is not None and implicit[0]:
                for kind_of_word, match in _WORDS.get(value[:1], ()):
                    if match(value):
                        return kind_of_word
            return ""

    return Counted(text).get_single_node()


# what a word may be, by its first letter
_WORDS: dict[str, list[tuple[str, Callable[[str], object]]]] = {
    letter: [(tag.rpartition(":")[2], pattern.match) for tag, pattern in patterns]
    for letter, patterns in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_OWN = {"", "null", "bool", "int", "float", "timestamp", "value", "yaml"}  # no merges
_SAFE = yaml.constructor.SafeConstructor()


class _Plain:
    """Plain data of nodes. Every alias counts as often as it is used, so that nothing can grow
    beyond the file's limits.
    """

    def __init__(self) -> None:
        self.count = 0
        self.known: dict[int, tuple[Any, int]] = {}  # data and nodes of what an alias may mean

    def of(self, node: Any) -> Any:
        if node is None:
            return None
        if id(node) in self.known:
            data, size = self.known[id(node)]
            if not size:
                raise _refused("an alias stands inside of what it means; write it out", node)
            self.count += size
        else:
            self.known[id(node)], before = (None, 0), self.count
            self.count += 1
            data = self._made(node)
            self.known[id(node)] = data, self.count - before
        if self.count > MOST_NODES:
            raise _refused(TOO_MANY, node)
        return data

    def _made(self, node: Any) -> Any:
        if node.tag not in _OWN:
            raise _refused(f"tag {shown(node.tag)}: only plain data are read; leave it out", node)
        if isinstance(node, yaml.ScalarNode):
            made = _MADE.get(node.tag)
            return made(node) if made else node.value
        if isinstance(node, yaml.SequenceNode):
            return [self.of(one) for one in node.value]
        data = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refused(
                    "a key must be a name or a number, not a list or a mapping", key_node
                )
            key = self.of(key_node)
            if key in data:
                raise _refused(f"key {shown(key)} is given twice", key_node)
            data[key] = self.of(value)
        return data


def _refused(problem: str, node: Any = None) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node and node.start_mark)


def _whole(node: yaml.ScalarNode) -> int:
    try:
        value = int(_SAFE.construct_yaml_int(node))
    except ValueError:  # too many digits for Python, or none behind a prefix
        value = WIDEST
    if abs(value) >= WIDEST:
        raise _refused(
            f"{shown(node.value)} is no whole number of at most 63 bits; write a smaller one, or "
            "text in quotes",
            node,
        )
    return value


def _real(node: yaml.ScalarNode) -> float:
    with suppress(ValueError):
        return float(node.value)
    try:
        return float(_SAFE.construct_yaml_float(node))  # .inf, .nan, and numbers to base 60
    except (ValueError, OverflowError):
        raise _refused(
            f"{shown(node.value)} is no number; write digits, or text in quotes", node
        ) from None


# by what a pattern says of a word; anything else is text, a date as well: nothing here calculates
# with dates, and Python knows fewer of them than people write
_MADE: dict[str, Callable[[Any], Any]] = {
    "null": lambda node: None,
    "bool": _SAFE.construct_yaml_bool,
    "int": _whole,
    "float": _real,
}
