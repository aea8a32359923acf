"""What a user names on the command line, as the library's objects."""

from __future__ import annotations

import argparse

from twin.calibrate.node import calibrated_node
from twin.commands.arguments import chosen_options
from twin.models.load import load_model
from twin.study.case import Case


def case_of(args: argparse.Namespace) -> Case:
    """`args.model` on `args.node` (with its device's fit, where there is one), with the engine
    options given.
    """
    return Case(load_model(args.model), calibrated_node(args.node), chosen_options(args))
