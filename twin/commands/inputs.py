"""What a user names on the command line, as the library's objects."""

from __future__ import annotations

import argparse

from twin.commands.arguments import chosen_options
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.study.case import Case


def node_of(name: str) -> Node:
    """The node, with its device's fit where there is one."""
    return load_node(name)


def case_of(args: argparse.Namespace) -> Case:
    """`args.model` on `args.node` with the engine options given."""
    return Case(load_model(args.model), node_of(args.node), chosen_options(args))
