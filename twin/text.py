"""Values that somebody else wrote, as they may stand in a message: short, on one line, without
control characters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from datetime import date, time
from enum import Enum
from itertools import islice
from pathlib import PurePath

LONGEST = 4096  # bits of an integer that is written: Python itself refuses 4,300 digits
DEEPEST = 100  # levels of nesting that are written, whatever the limit
# types whose repr is short, whatever the value
_SHORT = (bool, float, complex, Enum, date, time, type(None))


def shown(value: object, limit: int = 80) -> str:
    """`value` as repr writes it, at most `limit` characters, the last an ellipsis where something
    is left out; of a path the first, since its end says which file it is.

    Takes no longer for nested, shared or endless data: what would be left out is never written.
    Control characters, terminal escapes, marks that turn the direction of text and lone surrogates
    come as escapes.
    """
    if isinstance(value, PurePath):
        path = str(value)
        whole = repr(path if len(path) <= limit else path[-limit:])
        return whole if len(path) <= limit and len(whole) <= limit else "…" + whole[-limit + 1 :]
    text = ""
    for piece in _pieces(value, limit):
        text += piece
        if len(text) > limit:
            return text[: limit - 1] + "…"
    return text


def said(text: str, limit: int = 200) -> str:
    """Somebody else's words without quotes, as `shown` otherwise: one line, no control characters,
    at most `limit` characters.
    """
    line = " ".join(text[: 4 * limit].split())
    line = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _pieces(value: object, limit: int, depth: int = 0) -> Iterator[str]:
    """The text in parts. A level of nesting writes a character before the next one begins."""
    if isinstance(value, _SHORT):
        yield repr(value)
    elif isinstance(value, int):
        bits = value.bit_length()
        # 4 bits make more than a digit
        yield repr(value) if bits <= min(4 * limit, LONGEST) else f"<integer of {bits} bits>"
    elif isinstance(value, (str, bytes, bytearray)):
        yield repr(value[: limit + 1])
    elif isinstance(value, PurePath):
        yield repr(str(value)[: limit + 1])
    elif depth == DEEPEST:
        yield "…"
    elif isinstance(value, Mapping):
        yield "{"
        yield from _joined(value, limit, depth + 1, value)
        yield "}"
    elif isinstance(value, (list, tuple, Set)):
        opening, closing = (
            ("[", "]")
            if isinstance(value, list)
            else ("(", ")")
            if isinstance(value, tuple)
            else ("{", "}")
        )
        yield opening
        yield from _joined(value, limit, depth + 1)
        yield closing
    else:
        yield f"<{type(value).__name__}>"


def _joined(
    items: Collection[object], limit: int, depth: int, means: Mapping[object, object] | None = None
) -> Iterator[str]:
    """Items separated by commas, each with what it means. More than `limit` of them have no
    room.
    """
    for number, item in enumerate(islice(items, limit + 1)):
        if number:
            yield ", "
        yield from _pieces(item, limit, depth)
        if means is not None:
            yield ": "
            yield from _pieces(means[item], limit, depth)
