"""What a study's results rest on: the fits on file, and a digest of everything else that it
reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from twin.calibrate import store
from twin.calibrate.node import fits_of
from twin.data import data_dir, read_yaml
from twin.errors import TwinError
from twin.hardware.derive import followed
from twin.hardware.override import numbers
from twin.hardware.types import HOST, Node
from twin.study.hardware import node_on_file
from twin.study.kinds import FILE

WORDS = ("title", "question", "prediction", "outcome")  # of a study file: what people wrote
DIGITS = 12  # of a digest
NO_FIT = "none"


def fits_on_file(*names: str) -> str:
    """The probing runs of the fits that hold for the nodes of these names, and for what their
    devices are like; joined by "+".
    """
    return _fits(node_on_file(name) for name in names)


def _fits(nodes: Iterable[Node]) -> str:
    names: set[str] = set()
    for node in nodes:
        if node.device.isa != HOST:  # no kept study rests on the fit of the computer at hand
            names |= {*fits_of(node), *(f"1x{device}" for device in followed(node.device))}
    found = (store.read_fit(name) for name in sorted(names))
    return "+".join(str(fit[1]["run"]) for fit in found if fit) or NO_FIT


def study_fits(folder: Path) -> str:
    """The fits behind all nodes and devices that a study names."""
    words = sorted(set(_words(read_yaml(folder / FILE))))
    return _fits(node for word in words if (node := _node(word)) is not None)


def study_digest(folder: Path) -> str:
    """Of a study's question, its own files, and the numbers of every node, model and machine named.

    Words and comments do not count. The kernel tables do, because ordinary engines are built of
    them.
    """
    wanted = {key: value for key, value in read_yaml(folder / FILE).items() if key not in WORDS}
    parts: list[Any] = [wanted]
    for word in sorted(set(_words(wanted))):
        parts += [[word, content] for content in _named(folder, word)]
    tables = sorted((data_dir("hwmodels") / "kernels").rglob("*.csv"))
    return digest(
        [json.dumps(parts, sort_keys=True).encode(), *(file.read_bytes() for file in tables)]
    )


def digest(contents: Iterable[bytes]) -> str:
    """A short name for these bytes in this order."""
    found = hashlib.sha256()
    for content in contents:
        found.update(hashlib.sha256(content).digest())
    return found.hexdigest()[:DIGITS]


def files_digest(files: Iterable[Path]) -> str:
    return digest(file.read_bytes() for file in files)


def numbers_digest(nodes: Iterable[str], *others: str) -> str:
    """Of all numbers of these nodes, and of `others`."""
    known = (
        f"{name} {path} {number.value!r}"
        for name in nodes
        for path, number in sorted(numbers(node_on_file(name)).items())
    )
    return digest(one.encode() for one in (*others, *known))


def _words(wanted: Any) -> Iterator[str]:
    """Every text and key of nested plain data."""
    if isinstance(wanted, str):
        yield wanted
    elif isinstance(wanted, dict):
        for key, value in wanted.items():
            yield from _words(key)
            yield from _words(value)
    elif isinstance(wanted, list):
        for one in wanted:
            yield from _words(one)


def _named(folder: Path, word: str) -> Iterator[Any]:
    """What a word of a study file stands for: a node or device, a model, a machine, a file next to
    it.
    """
    node = _node(word)
    if node is not None:
        yield {path: number.value for path, number in numbers(node).items()}
    for kind in ("models", "machines"):
        file = data_dir("hwmodels") / kind / f"{word.partition('@')[0]}.yaml"
        if "/" not in word and file.is_file():
            yield read_yaml(file)
    if "/" not in word and word.endswith(".csv") and (folder / word).is_file():
        yield (folder / word).read_text(encoding="utf-8")
    if "/" not in word and word:
        yield from sorted(run.name for run in store.runs_folder(word).glob("*-engine"))[-1:]


def _node(word: str) -> Node | None:
    """The node that a word names, or the one of a single device."""
    for name in (word, f"1x{word}"):
        with suppress(TwinError, ValueError):
            return node_on_file(name)
    return None
