"""Marked blocks of a Markdown file: what a script writes, with the fit and the inputs that it was
computed from.

    <!-- made: speeds columns=1,2,5 fit=2026-11-22T161133-probes inputs=0123456789ab -->
    ...
    <!-- end -->

`fit` and `inputs` are the block's stamp, written with it. Every other word is the author's choice
and stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twin.errors import ConfigError
from twin.text import shown

MARK = re.compile(
    r"^<!-- made: (?P<name>\S+)(?P<words>[^\n]*?) -->\n(?P<body>.*?)^<!-- end -->$",
    re.DOTALL | re.MULTILINE,
)
FIT, INPUTS = STAMPED = ("fit", "inputs")


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a block was computed from: the id of the fit, and the digest of the other inputs."""

    fit: str
    inputs: str

    def words(self) -> str:
        return f"{FIT}={self.fit} {INPUTS}={self.inputs}"


@dataclass(frozen=True, slots=True)
class Block:
    """A marked block. `stamp` is None until a script has written it."""

    name: str
    choices: Mapping[str, str]
    stamp: Stamp | None
    body: str

    def places(self, choice: str) -> list[int] | None:
        """The columns chosen by their place, the first is 1; None for all."""
        chosen = self.choices.get(choice)
        return None if chosen is None else [int(place) - 1 for place in chosen.split(",")]


def blocks(text: str) -> Iterator[Block]:
    """All blocks in order. Raises ConfigError for a word that is not key=value."""
    for found in MARK.finditer(text):
        yield _block(found)


def filled(text: str, make: Callable[[Block], str], stamp: Stamp) -> str:
    """The text with every block made again and stamped."""
    return MARK.sub(lambda found: marked(_block(found), make(_block(found)), stamp), text)


def marked(block: Block, body: str, stamp: Stamp) -> str:
    """One block as it stands in a file."""
    chosen = "".join(f" {key}={value}" for key, value in block.choices.items())
    return f"<!-- made: {block.name}{chosen} {stamp.words()} -->\n{body.rstrip()}\n<!-- end -->"


def _block(found: re.Match[str]) -> Block:
    pairs = [word.partition("=") for word in found["words"].split()]
    if wrong := [key for key, equals, _ in pairs if not equals]:
        raise ConfigError(f"block {found['name']}: {shown(wrong[0])} is not key=value")
    words = {key: value for key, _, value in pairs}
    stamp = Stamp(words.pop(FIT), words.pop(INPUTS)) if set(STAMPED) <= set(words) else None
    return Block(found["name"], words, stamp, found["body"])


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, text_columns: int = 1
) -> str:
    """A table of Markdown: the first `text_columns` to the left, the others to the right. None is
    an empty cell.
    """
    lines = [list(head), ["---" if at < text_columns else "---:" for at in range(len(head))]]
    lines += [["" if cell is None else str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of(
    rows: Iterable[Any], columns: Mapping[str, str | Callable[[Any], object]], *, texts: int = 1
) -> str:
    """The same of records: each column by its heading is a format with the row as `r`, such as
    "{r.error:+.1%}", or a function of the row.
    """
    kinds = columns.values()
    cells = [
        [one.format(r=row) if isinstance(one, str) else one(row) for one in kinds] for row in rows
    ]
    return markdown_table(tuple(columns), cells, text_columns=texts)
