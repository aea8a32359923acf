"""A node as it was measured: its device's fit in place of what hwmodels says."""

from __future__ import annotations

import dataclasses

from twin.calibrate import store
from twin.hardware.derive import follow, followed
from twin.hardware.load import load_device, load_node
from twin.hardware.override import apply_fit
from twin.hardware.types import HOST, Device, Node


def calibrated_node(name: str) -> Node:
    """The node with its device's fit applied, where there is one."""
    node = load_node(name)
    return dataclasses.replace(node, device=calibrated(node.device))


def calibrated(device: Device) -> Device:
    """A device on file with its fit; what is like another part follows that part's fit.

    A fit of the host only on the very processor that made it.
    """
    for name in followed(device):
        on_file = load_device(name)
        device = follow(device, calibrated(on_file), on_file)
    found = store.read_fit(device.name)
    if found is None:
        return device
    fit, meta = found
    if device.isa == HOST and meta.get("cpu") != store.cpu_name():
        return device  # another computer's fit says nothing about this one
    return apply_fit(device, fit)
