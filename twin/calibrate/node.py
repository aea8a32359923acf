"""A node as it was measured: its device's fit in place of what hwmodels says."""

from __future__ import annotations

from twin.calibrate import store
from twin.engine.choose import HOST
from twin.hardware.load import load_node
from twin.hardware.override import apply_fit
from twin.hardware.types import Node


def calibrated_node(name: str) -> Node:
    """The node with its device's fit applied, where there is one; a fit of the host only on the very processor that made it."""
    node = load_node(name)
    found = store.read_fit(node.device.name)
    if found is None:
        return node
    numbers, meta = found
    if node.device.isa == HOST and meta.get("cpu") != store.cpu_name():
        return node  # another computer's fit says nothing about this one
    return Node(node.name, apply_fit(node.device, numbers), node.gpus, node.link)
