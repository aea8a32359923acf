"""What a user names on the command line, as the library's objects."""

from __future__ import annotations

import argparse
from enum import Enum
from pathlib import Path

from twin.calibrate.node import calibrated_node
from twin.commands.arguments import chosen_options
from twin.files import resolved
from twin.hardware.load import FILES
from twin.models.load import load_model
from twin.study.case import Case
from twin.study.options import Plain
from twin.study.point import Point


def case_of(args: argparse.Namespace) -> Case:
    """`args.model` on `args.node` (with its device's fit, where there is one), with the engine
    options given.
    """
    return Case(load_model(args.model), calibrated_node(args.node), chosen_options(args))


def point_of(args: argparse.Namespace) -> Point:
    """`args.model` on `args.node` with the engine options given."""
    return Point(model_of(args), place_of_node(args.node), options_of(args))


def model_of(args: argparse.Namespace) -> str:
    """A name, or the whole path of a folder or file: points travel between processes."""
    path = Path(args.model)
    return str(resolved(path)) if path.exists() else str(args.model)


def place_of_node(name: str) -> str:
    """A node's name, that of a user's file with its whole path."""
    if not name.endswith(FILES):
        return name
    count, times, rest = name.partition("x")
    if count.isdigit() and times and not Path(name).exists():
        return f"{count}x{resolved(Path(rest))}"
    return str(resolved(Path(name)))


def options_of(args: argparse.Namespace) -> tuple[tuple[str, Plain], ...]:
    options: dict[str, Plain] = {
        name: value.value if isinstance(value, Enum) else value
        for name, value in chosen_options(args).items()
    }
    return tuple(sorted(options.items()))
