"""Results go to stdout, talk and progress to stderr."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

Progress = Callable[[str], None]
BUSY = 0.5  # runnable programs per core from which a measurement suffers


def emit(args: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    """The result of a command: one JSON object with --json, else `text`."""
    print(json.dumps(data, indent=2) if args.json else text, flush=True)


def say(message: str) -> None:
    """A line for people, on stderr."""
    print(f"twin: {message}", file=sys.stderr, flush=True)


def warn_if_busy() -> None:
    """Other programs on these cores make a measurement slow: say so before it is taken for the truth."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > BUSY * cores:
        say(f"this computer is busy (load {load:.1f} on {cores} cores): what is measured now is too slow; better repeat it when it is idle")


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
