"""JSON schemas of a request: how large they may be, what they cost before a token is made; whether
an argument is a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from twin.server.problem import Problem

MOST_PARTS = 4096  # objects of a request's schemas together
MOST_PROPERTIES = 512  # of one object; more than twice as many no grammar of the library follows
DEEPEST = 64  # of objects and lists
# What numbers are multiples of together: an automaton has as many states. It takes 0.1 s for this
# one, and 47 s and 380 MB for a million.
LARGEST_MULTIPLE = 10_000


def check_schemas(schemas: Iterable[Mapping[str, Any]], param: str) -> None:
    """Raises Problem, of the field `param`."""
    multiple = 1
    objects = (one for schema in schemas for one in _objects(schema))
    for number, (found, depth) in enumerate(objects):
        if number >= MOST_PARTS:
            raise Problem(f"{param}: more than {MOST_PARTS} objects in schemas", param=param)
        if depth > DEEPEST:
            raise Problem(f"{param}: a schema is nested deeper than {DEEPEST}", param=param)
        properties = found.get("properties")
        if isinstance(properties, Mapping) and len(properties) > MOST_PROPERTIES:
            raise Problem(
                f"{param}: an object with {len(properties)} properties; at most {MOST_PROPERTIES}",
                param=param,
            )
        multiple = math.lcm(multiple, _whole(found.get("multipleOf")))
        if multiple > LARGEST_MULTIPLE:
            raise Problem(
                f"{param}: numbers that are multiples of {multiple} together; at most "
                f"{LARGEST_MULTIPLE}, so write multipleOf of rounder numbers, or leave it out",
                param=param,
            )


def _objects(schema: Any) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Every mapping, and how deep it lies; no further than one beyond DEEPEST."""
    left: list[tuple[Any, int]] = [(schema, 0)]
    while left:
        found, depth = left.pop()
        if isinstance(found, Mapping):
            yield found, depth
        inner = found.values() if isinstance(found, Mapping) else found
        left += ((one, depth + 1) for one in inner if isinstance(one, Mapping | list))


def _whole(multiple: Any) -> int:
    """The number without its decimal point; 1 for what is none."""
    if not isinstance(multiple, int | float) or not multiple or not math.isfinite(multiple):
        return 1
    _, digits, exponent = Decimal(str(abs(multiple))).as_tuple()
    zeros = min(max(int(exponent), 0), len(str(LARGEST_MULTIPLE)))
    return int("".join(map(str, digits)) + "0" * zeros)


def takes_text(schema: Mapping[str, Any], key: str) -> bool:
    """Whether an argument is a text by the function's schema: it is then no JSON."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(found, dict):
        return False
    kind = found.get("type")
    if kind == "string":
        return True
    choices = found.get("enum")
    return kind is None and isinstance(choices, list) and all(isinstance(c, str) for c in choices)
