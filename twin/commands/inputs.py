"""What a user names on the command line, as the library's objects."""

from __future__ import annotations

import argparse

from twin.commands.arguments import chosen_options
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.plan.defaults import plan_for
from twin.plan.types import Plan
from twin.plan.validate import validate


def node_of(name: str) -> Node:
    """The node, with its device's fit where there is one."""
    return load_node(name)


def planned(args: argparse.Namespace) -> tuple[Plan, Node]:
    """The proven plan of `args.model` on `args.node` with the engine options given."""
    node = node_of(args.node)
    plan = plan_for(load_model(args.model), node, **chosen_options(args))
    validate(plan)
    return plan, node
