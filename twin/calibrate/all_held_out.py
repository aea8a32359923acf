"""Errors of all held-out engine runs on file, of every GPU and of nodes of one and of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twin.calibrate import shape_record, store
from twin.calibrate.experiment import Errors
from twin.calibrate.known_error import FEWEST, kept_records, levels
from twin.errors import HardwareError
from twin.hardware.load import load_node
from twin.hardware.types import HOST, Node
from twin.models.kind import ModelKind


@dataclass(frozen=True, slots=True)
class Part(Errors):
    """A record's runs of one kind, or all of them together."""

    node: str
    record: str
    kind: str
    errors: tuple[float, ...]  # of the speed by the fits in force, positive where the twin is fast
    held: tuple[bool, ...] = ()  # by p10-p90, of the runs that have such an interval

    @property
    def every(self) -> Sequence[float]:
        return self.errors


def all_held_out() -> tuple[list[Part], list[str]]:
    """One part a record; then the nodes that are left out, with the reason. A computer's CPU is no
    GPU, and left out.
    """
    found, left = list[Part](), list[str]()
    for name in store.held_out_names():
        try:
            node = load_node(name)
        except HardwareError:
            left.append(f"{name}: no node on file has this name")
            continue
        if node.device.isa == HOST:
            continue
        parts = _parts(node)
        found += parts
        if not parts:
            again = f"repeat `twin validate {store.name_of(node.name)}`"
            left.append(f"{node.name}: its errors are of other fits than those in force; {again}")
    order = sorted(found, key=lambda part: (load_node(part.node).gpus, part.node))
    return order, left


def together(parts: Sequence[Part], what: str, kind: str = "all") -> Part:
    """All runs of some parts."""
    return Part(
        what,
        f"{len(parts)} record{'s' if len(parts) > 1 else ''}",
        kind,
        tuple(error for part in parts for error in part.errors),
        tuple(held for part in parts for held in part.held),
    )


def _parts(node: Node) -> list[Part]:
    records = kept_records(node)
    found = []
    for record, kind, errors in records:
        drawn = store.runs_folder(node.name) / record / shape_record.PREDICTIONS
        if drawn.is_file():
            held = _stated(node, record, errors)
        else:
            held = _by_others(node, records, record, errors)
        found.append(Part(node.name, record, kind.value, tuple(errors.values()), tuple(held)))
    return found


def _stated(node: Node, record: str, errors: Mapping[str, float]) -> list[bool]:
    """By the intervals that were written before the runs."""
    runs = shape_record.read(node, store.runs_folder(node.name) / record).measured.runs
    return [run.held for run in runs if run.name in errors and run.held is not None]


def _by_others(
    node: Node,
    records: Sequence[tuple[str, ModelKind, Mapping[str, float]]],
    record: str,
    errors: Mapping[str, float],
) -> list[bool]:
    """Nobody wrote intervals for these runs: by that of the node's other dense ones, of several
    devices else by that of one.
    """
    others = _dense(records, record)
    if len(others) < FEWEST and node.gpus > 1:
        others = _dense(kept_records(load_node(f"1x{node.device.name}")), record)
    if len(others) < FEWEST:
        return []
    low, high = levels(others)
    return [low <= 1 / (1 + error) <= high for error in errors.values()]


def _dense(
    records: Sequence[tuple[str, ModelKind, Mapping[str, float]]], without: str
) -> list[float]:
    return [
        error
        for name, kind, errors in records
        if kind is ModelKind.DENSE and name != without
        for error in errors.values()
    ]
