"""Study files: good ones of every kind, broken in one to three places by wrong types, hostile
numbers and names, or in their text.

Laws: read_study and `twin project` answer, or refuse with exit code 2, nothing on stdout and one
bounded message; files are only made in
--out and --store; no half-written file is left; a run that was killed between two results goes on
from them.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import random
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tests.attack.calling import called
from tests.attack.defect import Defect
from tests.command_line import TINY
from twin.commands.output import LONGEST_MESSAGE
from twin.engine.save import save_checkpoint
from twin.engine.weights import random_weights
from twin.files import TEMPORARY

NAME = "study files"
CASES = 20  # some run a study twice
KILLED = 0.05  # of the cases end in the middle and are run again
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    7,
    0.5,
    1e-300,
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
    10**9,
    10**20,
    10**400,
    -(10**30),
    "",
    " ",
    "x",
    "0",
    "-1",
    "1e999%",
    "50%",
    "5 TB/s",
    "5 us",
    "0 s",
    "-3 us",
    "x2",
    "x0",
    "+10%",
    "nan",
    "²",
    "a\nb",
    "\x1b[2J",
    "\u202e",
    "\0",
    "x" * 20_000,
    "../../escape",
    "a/b",
    "/etc/passwd",
    "..",
    ".",
    "cost",
    "COST",
    "steps",
    "con",
    "ß" * 80,
    "n" * 400,
    "link",
    "8xh200",
    "1xh200",
    "llama-3.2-1b",
    "vllm",
    "resident",
    "ideal",
    "uniform",
    "zipf:1",
    "zipf:inf",
    "file",
    "/dev/null",
    [],
    {},
    [None],
    [[]],
    [1, "a"],
    {"a": 1},
    [{}],
    {1: 2},
    {None: None},
    {True: False},
    datetime.date(2026, 1, 1),
    datetime.datetime(2026, 1, 1, 12, 0),
    b"bytes",
    set(),
    list(range(50)),
)
LETTERS = "{}[]:,-&*!|>'\"%@`#? \t\n\\\x00\x1b\xff~<"
PRICES = {
    name: {"value": value, "kind": "third-party", "source": "x"}
    for name, value in (
        ("cents_per_hour", 400),
        ("busy_w", "600 W"),
        ("idle_w", "100 W"),
        ("host_w", "200 W"),
    )
}


def attack(chance: random.Random, folder: Path) -> str:
    """One study file."""
    study = copy.deepcopy(_good(chance))
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        _break(chance, study)
    text = yaml.safe_dump(study, sort_keys=False, allow_unicode=chance.random() < 0.5).encode()
    if chance.random() < 0.1:
        text = _garble(chance, text)
    place = folder / "in" / chance.choice(("study.yaml", "study.yaml", "other.yaml", "...yaml"))
    place.parent.mkdir()
    place.write_bytes(text)
    said = text.decode(errors="backslashreplace")[:3000]
    words = ["project", str(place), "--store", str(folder / "store"), "--workers", "1"]
    words += ["--out", str(folder / "out")] if chance.random() < 0.8 else []
    if chance.random() < KILLED:
        _killed(chance, words, folder)
    code, out, err = _called(words, folder, said)
    _judge(code, out, err, folder, said)
    return "accepted" if code == 0 else "refused"


# ---- good studies --------------------------------------------------------------------------------


def _good(chance: random.Random) -> dict[str, Any]:
    """A small one of any kind."""
    kind = chance.choice(
        (_projection, _projection, _launch_tax, _agent, _mixed_load, _mixed_load, _graph_engines)
    )
    return {"title": "t", "question": "q", "prediction": "p"} | kind(chance)


def _projection(chance: random.Random) -> dict[str, Any]:
    study: dict[str, Any] = {
        "kind": "projection",
        "models": [{"model": _tiny(), "label": "tiny"}],
        "nodes": ["1xh200"],
        "options": {"blocks": 4},
        "axes": {"context": [1, 8]},
        "settings": {"handoff.hop": "x1.1"},
    }
    if chance.random() < 0.3:
        study["intervals"] = {"draws": 4, "seed": 1}
    if chance.random() < 0.3:
        study["closely"] = [{"model": "tiny", "node": "1xh200"}]
        study["axes"] = {"context": [8]}
    if chance.random() < 0.3:
        study["roofline"] = {"utilisation": "36%", "bytes_per_s": {"1xh200": "4.8 TB/s"}}
    if chance.random() < 0.3:
        study["published"] = [
            {
                "model": "tiny",
                "node": "1xh200",
                "at": {"context": 8},
                "tokens_per_s": 10,
                "kind": "vendor",
                "source": "x",
            }
        ]
    if chance.random() < 0.3:
        study["impossible"] = "show"
    return study


def _launch_tax(chance: random.Random) -> dict[str, Any]:
    return {
        "kind": "launch-tax",
        "layers": 25,
        "kernels": [5, 10],
        "launch_s": "4.5 us",
        "goal_tokens_per_s": 3000,
        "devices": ["mi300x", "h200"],
        "published": [{"kernels": 10, "tokens_per_s": 890}],
    } | ({"simulate": [{"model": _tiny(), "node": "1xh200"}]} if chance.random() < 0.3 else {})


def _agent(chance: random.Random) -> dict[str, Any]:
    return {
        "kind": "agent",
        "job": {"tokens": 1000, "tokens_per_step": 50, "calls_per_step": 2, "source": "x"},
        "context": 128,
        "tools": [
            {"name": "fast", "call_s": "100 ms", "source": "x"},
            {"name": "slow", "call_s": "2 s", "source": "x"},
        ],
        "engines": [
            {"name": "known", "tokens_per_s": 100, "kind": "vendor", "source": "x"},
            {
                "name": "ours",
                "model": _tiny(),
                "node": "1xh200",
                "stack": chance.choice(("resident", "ideal", "vllm")),
            },
        ],
    }


def _mixed_load(chance: random.Random) -> dict[str, Any]:
    return {
        "kind": "mixed-load",
        "model": "llama-3.2-1b",
        "context": 512,
        "loads": [1, 400],
        "hours": 0.002,
        "seeds": [1],
        "prices": PRICES,
        "classes": [
            {
                "name": "long jobs",
                "tokens": 2000,
                "per_hour": 400,
                "distribution": chance.choice(("fixed", "fixed", "exponential")),
            },
            {"name": "short", "tokens": 100, "per_hour": 800, "distribution": "fixed"},
        ],
        "policies": [
            {
                "name": "shared",
                "groups": [
                    {
                        "node": "1xh200",
                        "nodes": 2,
                        "stack": "vllm",
                        "batch": 16,
                        "serves": ["long jobs", "short"],
                    }
                ],
            },
            {
                "name": "alone",
                "groups": [
                    {"node": "1xh200", "nodes": 1, "stack": "ideal", "serves": ["long jobs"]},
                    {
                        "node": "1xh200",
                        "nodes": 1,
                        "stack": "vllm",
                        "batch": 4,
                        "serves": ["short"],
                    },
                ],
            },
        ],
    }


def _graph_engines(chance: random.Random) -> dict[str, Any]:
    return {
        "kind": "graph-engines",
        "models": ["llama-3.2-1b"],
        "nodes": ["1xh200", "2xh200"],
        "stacks": ["vllm", "sglang"],
        "context": 512,
    }


@lru_cache(maxsize=1)
def _tiny() -> str:
    folder = Path(tempfile.mkdtemp(prefix="twin-attack-")) / "tiny"
    save_checkpoint(folder, random_weights(TINY, 1))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


# ---- breaking them -------------------------------------------------------------------------------


def _break(chance: random.Random, study: dict[str, Any]) -> None:
    """One entry somewhere becomes another value, another name, is doubled, multiplied or gone."""
    holder, key = chance.choice(list(_entries(study)))
    match chance.choice(
        ("value", "value", "value", "value", "name", "gone", "more", "grid", "class")
    ):
        case "value":
            holder[key] = copy.deepcopy(chance.choice(VALUES))
        case "name" if isinstance(holder, dict):
            holder[_hashable(chance.choice(VALUES))] = holder.pop(key)
        case "gone":
            del holder[key]
        case "more" if isinstance(holder[key], list):
            holder[key] = holder[key] * chance.choice((2, 3, 50))
        case "grid" if study.get("kind") == "projection":
            longest = chance.choice((4, 4, 200_000))
            study["axes"] = {f"a{i}": list(range(10)) for i in range(9)} | {
                "context": list(range(1, longest))
            }
        case "class" if study.get("kind") == "mixed-load" and isinstance(
            study.get("classes"), list
        ):
            name = chance.choice([value for value in VALUES if isinstance(value, str)])
            text = json.dumps(
                {"classes": study["classes"], "policies": study.get("policies")}, default=str
            )
            study |= json.loads(text.replace('"short"', json.dumps(name)))
        case _:
            holder[key] = copy.deepcopy(chance.choice(VALUES))


def _entries(item: Any) -> Any:
    """(holder, key) of everything below."""
    pairs = (
        list(item.items())
        if isinstance(item, dict)
        else list(enumerate(item))
        if isinstance(item, list)
        else []
    )
    for key, value in pairs:
        yield item, key
        yield from _entries(value)


def _hashable(value: Any) -> Any:
    return (
        value
        if isinstance(value, str | int | float | bool | bytes | datetime.date | None)
        else "key"
    )


def _garble(chance: random.Random, text: bytes) -> bytes:
    """Letters that mean something to YAML, bytes that are no UTF-8, deep nesting, one anchor in
    many places.
    """
    at = chance.randrange(len(text) + 1)
    lists = (
        b"%c: &%c [%s]\n" % (letter + 1, letter + 1, b",".join([b"*%c" % letter] * 9))
        for letter in range(97, 106)
    )
    bomb = b"\na: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(lists)
    letter = chance.choice(LETTERS).encode("latin-1")
    nested = (b"[" * 5000, b"{" * 3000, b"- " * 2000)
    piece = chance.choice(
        (letter, letter, *nested, b"\n? [a]\n: b\n", bomb, b"9" * 5000, b"\n<<: {}\n", b"\r")
    )
    return text[:at] + piece + text[at:]


# ---- running and judging -------------------------------------------------------------------------


class _Killed(BaseException):
    """Stands for SIGKILL: nothing of ours may catch it and tidy up what a killed program could
    not.
    """


def _killed(chance: random.Random, words: list[str], folder: Path) -> None:
    """A first run that ends at one of its renames."""
    left = [chance.randrange(1, 4)]
    rename = Path.rename

    def last(path: Path, target: Path) -> Path:
        left[0] -= 1
        if not left[0]:
            raise _Killed
        return rename(path, target)

    Path.rename = last  # type: ignore[assignment,method-assign]
    try:
        with contextlib.suppress(_Killed):
            _called(words, folder, "")
    finally:
        Path.rename = rename  # type: ignore[method-assign]


def _called(words: list[str], folder: Path, said: str) -> tuple[int, str, str]:
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return called(words, work, f"the study\n{said}")


def _judge(code: int, out: str, err: str, folder: Path, said: str) -> None:
    if code not in (0, 2) or (code == 0) != bool(out):
        raise Defect(f"exit code {code} with {len(out)} characters of output: {err[-300:]}\n{said}")
    last = err.rstrip("\n").rsplit("\n", 1)[-1]
    if code == 2 and (not last.startswith("twin: ") or len(last) > LONGEST_MESSAGE + len("twin: ")):
        raise Defect(f"no message of one bounded line: {err[-500:]!r}\n{said}")
    for text in (out, err):
        if any(not letter.isprintable() and letter != "\n" for letter in text):
            raise Defect(
                "control characters on the terminal: "
                f"{[c for c in text if not c.isprintable() and c != chr(10)][:20]}\n{said}"
            )
    places = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    strange = [
        place
        for place in places
        if not place.startswith(("in/", "out/", "store/", "work/out/")) or TEMPORARY in place
    ]
    if strange or (code == 2 and any(place.startswith(("out/", "work/out/")) for place in places)):
        raise Defect(f"unwanted files: {sorted(strange) or sorted(places)}: {err[-300:]}\n{said}")
    if any(path.is_dir() for path in (folder / "out").glob("*")):
        raise Defect(f"a study made folders below --out\n{said}")
