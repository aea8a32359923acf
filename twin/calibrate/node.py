"""A node as it was measured: fits in place of what hwmodels says.

A fit belongs to a node. That of a node of one serves every node of such devices for the device's
numbers; the fit of a larger node comes on top, with the numbers of its link.
"""

from __future__ import annotations

import dataclasses

from twin.calibrate import store
from twin.hardware.derive import follow, followed
from twin.hardware.load import load_device, load_node
from twin.hardware.override import apply_fit, resolve
from twin.hardware.types import HOST, Device, Node, Number


def calibrated_node(name: str) -> Node:
    """The node with the fits that hold for it, where there are any."""
    node = load_node(name)
    node = dataclasses.replace(node, device=calibrated(node.device))
    return (
        apply_fit(node, own) if node.gpus > 1 and (own := _fit_of(node.name, node.device)) else node
    )


def calibrated(device: Device) -> Device:
    """A device on file with the fit of a node of one; what is like another part follows that part's
    fit.
    """
    device = following(device)
    fit = _fit_of(f"1x{device.name}", device)
    return apply_fit(device, fit) if fit else device


def following(device: Device) -> Device:
    """A device on file without a fit of its own: what is like another part follows that part's
    fit.
    """
    for name in followed(device):
        on_file = load_device(name)
        device = follow(device, calibrated(on_file), on_file)
    return device


def uncalibrated_node(name: str) -> Node:
    """What a fit of the node begins with, and what a number that its probes do not bind stays."""
    node = load_node(name)
    device = following(node.device) if node.gpus == 1 else calibrated(node.device)
    return dataclasses.replace(node, device=device)


def fits_of(node: Node) -> dict[str, set[str]]:
    """The nodes whose fits hold for this one, and the paths of the node's numbers that stand in
    each; the last one is in force.
    """
    names = dict.fromkeys((f"1x{node.device.name}", node.name))
    found = {name: _fit_of(name, node.device) for name in names}
    return {name: {resolve(node, path) for path in fit} for name, fit in found.items() if fit}


def _fit_of(name: str, device: Device) -> dict[str, Number] | None:
    """The fit of a node; one of the host only on the very processor that made it: another
    computer's says nothing about this one.
    """
    found = store.read_fit(name)
    if found is None or (device.isa == HOST and found[1].get("cpu") != store.cpu_name()):
        return None
    return found[0]
