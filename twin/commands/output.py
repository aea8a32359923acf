"""Results go to stdout, talk and progress to stderr."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from twin.errors import ToolchainError

Progress = Callable[[str], None]
LONGEST_MESSAGE = 2000  # characters: a screen full
LONGEST_PROGRESS = 150
# Control characters, marks that turn the direction of text, line separators, and halves of
# characters that no terminal can show.
_HARMFUL = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
SOON_S = 2.0  # of silence that nobody wonders about
BUSY = 0.5  # runnable programs per core from which a measurement suffers


def harmless(text: str, *, allowed: str = "") -> str:
    """`text` with everything but newlines and `allowed` escaped that could move a terminal's cursor
    or change what it shows.
    """
    return _HARMFUL.sub(
        lambda found: (
            found[0] if found[0] in allowed else found[0].encode("unicode_escape").decode()
        ),
        text,
    )


def one_line(message: str, limit: int = LONGEST_MESSAGE) -> str:
    """A message as it may stand on a terminal: on one line, bounded, the last character an ellipsis
    where something is left out.
    """
    return _bounded(re.sub(r"\s*\n\s*", " ", message[: 8 * limit].strip()), limit)


def error_text(error: Exception) -> str:
    """The message of an error; what a compiler said keeps its lines."""
    return (
        _bounded(str(error), LONGEST_MESSAGE)
        if isinstance(error, ToolchainError)
        else one_line(str(error))
    )


def _bounded(text: str, limit: int) -> str:
    text = harmless(text[: limit + 1])
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def emit(args: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    """The result of a command: one JSON object with --json, else `text`."""
    print(json.dumps(data, indent=2) if args.json else harmless(text), flush=True)


def say(message: str) -> None:
    """A line for people, on stderr."""
    print(f"twin: {one_line(message)}", file=sys.stderr, flush=True)


def warn_if_busy() -> None:
    """Other programs on these cores make a measurement slow: say so before it is taken for the
    truth.
    """
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > BUSY * cores:
        say(
            f"this computer is busy (load {load:.1f} on {cores} cores): what is measured now is "
            "too slow; better repeat it when it is idle"
        )


def progress() -> Progress:
    """Shows one step after the other: on a terminal in one line that is overwritten, else a line
    each.
    """
    if not sys.stderr.isatty():
        return say

    def show(message: str) -> None:
        print(
            f"\r\x1b[Ktwin: {one_line(message, LONGEST_PROGRESS)}",
            end="",
            file=sys.stderr,
            flush=True,
        )

    return show


@contextmanager
def underway(what: str) -> Iterator[None]:
    """Says what is being done where that takes longer than SOON_S: once, or, on a terminal, each
    second with the time so far.
    """
    over, begun, show = threading.Event(), time.monotonic(), progress()

    def tell() -> None:
        wait = SOON_S
        while not over.wait(wait):
            show(f"{what}, {time.monotonic() - begun:.0f} s so far")
            if not sys.stderr.isatty():
                return
            wait = 1.0

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
        if time.monotonic() - begun > SOON_S:
            done()


def done() -> None:
    """Ends the line that a progress display left open."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
