"""Our own data files: where they lie, how they are read, and what a mistyped name may have
meant.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable
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
    return marshal.dumps(yaml.load(text, Loader=_StrictLoader))


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


class _StrictLoader(yaml.SafeLoader):
    """Counts what it composes, with every alias as often as it is used, so that nothing can grow
    beyond the file's limits.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        # libyaml, where it is installed, finds the words several times as fast
        self.words: Any = getattr(getattr(yaml, "cyaml", None), "CParser", yaml.SafeLoader)(text)
        self.nodes = 0
        self.depth = 0
        self.sizes: dict[int, int] = {}  # nodes in what an alias may mean, by its identity

    def check_event(self, *kinds: Any) -> bool:
        return bool(self.words.check_event(*kinds))

    def peek_event(self) -> Any:
        return self.words.peek_event()

    def get_event(self) -> Any:
        return self.words.get_event()

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "tag", None) not in (None, "!"):
            raise _refused(
                f"tag {shown(event.tag)}: only plain data are read; leave it out", event.start_mark
            )
        before = self.nodes
        self.nodes += 1
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise _refused(TOO_DEEP, event.start_mark)
        alias = isinstance(event, yaml.AliasEvent)
        node: yaml.Node | None = super().compose_node(parent, index)
        if alias and id(node) not in self.sizes:
            raise _refused(
                "an alias stands inside of what it means; write it out", event.start_mark
            )
        self.nodes += self.sizes[id(node)] if alias else 0
        if self.nodes > MOST_NODES:
            raise _refused(
                f"more than {MOST_NODES} entries, those behind aliases counted each time; shorten "
                "it",
                event.start_mark,
            )
        self.sizes[id(node)] = self.nodes - before
        self.depth -= 1
        return node


def _refused(problem: str, mark: yaml.Mark | None) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[object, object]:
    seen: set[object] = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _refused(
                "a key must be a name or a number, not a list or a mapping", key_node.start_mark
            )
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise _refused(f"key {shown(key)} is given twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


def _whole(loader: _StrictLoader, node: yaml.ScalarNode) -> int:
    try:
        value = int(loader.construct_yaml_int(node))
    except ValueError:  # too many digits for Python, or none behind a prefix
        value = WIDEST
    if abs(value) >= WIDEST:
        raise _refused(
            f"{shown(node.value)} is no whole number of at most 63 bits; write a smaller one, or "
            "text in quotes",
            node.start_mark,
        )
    return value


def _real(loader: _StrictLoader, node: yaml.ScalarNode) -> float:
    try:
        return float(loader.construct_yaml_float(node))
    except (ValueError, OverflowError):
        raise _refused(
            f"{shown(node.value)} is no number; write digits, or text in quotes", node.start_mark
        ) from None


def _date(loader: _StrictLoader, node: yaml.ScalarNode) -> str:
    """As it is written: nothing here calculates with dates, and Python knows fewer of them than
    people write.
    """
    return str(node.value)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _whole)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _real)
_StrictLoader.add_constructor("tag:yaml.org,2002:timestamp", _date)
