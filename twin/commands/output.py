"""Results go to stdout, talk and progress to stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

Progress = Callable[[str], None]


def emit(args: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    """The result of a command: one JSON object with --json, else `text`."""
    print(json.dumps(data, indent=2) if args.json else text, flush=True)


def say(message: str) -> None:
    """A line for people, on stderr."""
    print(f"twin: {message}", file=sys.stderr, flush=True)


def progress() -> Progress:
    """Shows one step after the other: on a terminal in one line that is overwritten, else a line each."""
    if not sys.stderr.isatty():
        return say

    def show(message: str) -> None:
        print(f"\r\x1b[Ktwin: {message[:150]}", end="", file=sys.stderr, flush=True)

    return show


def done() -> None:
    """Ends the line that a progress display left open."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
