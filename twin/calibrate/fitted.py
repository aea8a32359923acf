"""Which fits a node's numbers are of: their last probing run, a digest of all of them."""

from __future__ import annotations

import hashlib
import json

from twin.calibrate import store
from twin.calibrate.node import fits_of
from twin.hardware.number import Number
from twin.hardware.types import Node

MOVES = "moved_by"  # in a fit's file: the records of engine runs
DIGITS = 12  # of a digest


def fit_of(node: Node) -> str | None:
    """The probing run behind the last fit that holds for a node; None without a fit."""
    for name in reversed(fits_of(node)):
        if found := store.read_fit(name):
            return str(found[1].get("run"))
    return None


def numbers_of(node: Node) -> str:
    """A digest of all numbers that the fits of a node give it, which distinguishes fits that a
    probing run alone does not; empty without a fit.
    """
    numbers: dict[str, Number] = {}
    for name in fits_of(node):
        numbers |= (store.read_fit(name) or ({}, {}))[0]
    if not numbers:
        return ""
    values = json.dumps({path: number.value for path, number in numbers.items()}, sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()[:DIGITS]


def moved_by(node: Node) -> dict[str, dict[str, float]]:
    """Records of engine runs that the fit on file rests on, each with the errors of its runs by the
    numbers that the others give.
    """
    kept = store.read_fit(node.name)
    return dict(kept[1].get(MOVES) or {}) if kept else {}
