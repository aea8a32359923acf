"""Values that no honest program writes, and the law that every refusal of them obeys."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.attack.defect import Defect
from twin.models.bounds import FIELDS

LONGEST_MESSAGE = 1_000  # characters without the scratch folder's own path


class Raw(str):
    """JSON text that stands for itself: what Python's own writer would not write."""


class Pairs(list[tuple[str, object]]):
    """A mapping whose keys may repeat."""


INTEGERS = (
    0,
    -1,
    1,
    2,
    3,
    5,
    7,
    8,
    64,
    127,
    128,
    255,
    256,
    257,
    1023,
    1024,
    65_535,
    65_536,
    2**20,
    2**20 + 1,
    2**24,
    2**24 + 1,
    10**6,
    10**9,
    2**30,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    10**15,
    10**30,
    10**39,
    10**40,
    10**308,
    10**309,
    -(2**31),
    -(2**63),
    -(10**30),
)
FLOATS = (
    0.0,
    -0.0,
    0.5,
    1.0,
    1.5,
    4.0,
    -1.5,
    1e-5,
    1e-30,
    1e-39,
    5e-324,
    1e15,
    1e16,
    1e30,
    3.4e38,
    3.5e38,
    1.7e308,
    0.1,
)
WRITTEN = (
    Raw("1e400"),
    Raw("-1e400"),
    Raw("1e-400"),
    Raw("NaN"),
    Raw("Infinity"),
    Raw("-Infinity"),
    Raw("9" * 41),
    Raw("9" * 400),
    Raw("9" * 4_300),
    Raw("9" * 4_301),
    Raw("9" * 100_000),
    Raw("1." + "0" * 100_000),
    Raw("[" * 500 + "]" * 500),
    Raw("[" * 5_000 + "]" * 5_000),
    Raw("[" * 200_000 + "]" * 200_000),
    Raw('{"a":' * 3_000 + "1" + "}" * 3_000),
    Raw("[" + "[]," * 50_000 + "[]]"),
)
TEXTS = (
    "",
    " ",
    "64",
    "true",
    "x" * 100,
    "x" * 100_000,
    "\x1b[2J\x1b]0;owned\x07",
    "a\nb\r\nc",
    "\0",
    "\ud800",
    "\u202egnp.exe",
    "\u2028",
    "a" * 300,
    "../../etc/passwd",
    "/dev/zero",
    "%s%n{0}{x}",
    "🙂" * 50,
    "\x7f\x9b",
    "'\"`",
    "NaN",
)
OTHERS: tuple[object, ...] = (
    None,
    True,
    False,
    [],
    {},
    [1],
    ["a"],
    [None],
    {"a": 1},
    [[[]]],
    [1.5],
    [True],
    {"": None},
    list(range(300)),
    ["x"] * 5_000,
    [2**70] * 100,
)


def value(chance: random.Random) -> object:
    """Any of them."""
    kind = chance.random()
    if kind < 0.35:
        return chance.choice(INTEGERS)
    if kind < 0.5:
        return chance.choice(FLOATS)
    if kind < 0.62:
        return chance.choice(WRITTEN)
    return chance.choice(TEXTS) if kind < 0.78 else chance.choice(OTHERS)


def near_limit(chance: random.Random, key: str) -> object:
    """A number at, just inside or just outside of the field's range."""
    limits = FIELDS[key]
    edge, step = chance.choice((limits.lowest, limits.highest)), chance.choice((-1, 0, 1))
    return edge + step if isinstance(edge, int) else edge * (1 + step * 1e-6)


def to_json(found: object) -> str:
    """JSON text, hostile values as they are."""
    if isinstance(found, Raw):
        return str(found)
    if isinstance(found, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)}: {to_json(each)}" for key, each in found) + "}"
    if isinstance(found, dict):
        return to_json(Pairs(found.items()))
    if isinstance(found, list | tuple):
        return "[" + ", ".join(to_json(each) for each in found) + "]"
    return json.dumps(found)


def check_refusal(error: BaseException, folder: Path, case: str) -> None:
    """A refusal is one bounded line that a terminal shows as it is."""
    text = str(error).replace(str(folder), "").replace(str(folder.resolve()), "")
    if not text.isprintable():
        raise Defect(f"{case}: the message has control characters: {text[:500]!r}")
    if len(text) > LONGEST_MESSAGE:
        raise Defect(f"{case}: the message has {len(text)} characters: {text[:500]!r}")
    if len(text) < 20:
        raise Defect(f"{case}: the message says too little: {text!r}")
