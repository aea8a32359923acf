"""A node as it was measured: fits in place of what hwmodels says.

A fit belongs to a node. That of a node of one serves every node of such devices for the device's
numbers; the fit of a larger node comes on top, with the numbers of its link. Links that nobody
probed are assumed to be as those between another number of the same devices, or of devices whose
links they are like.
"""

from __future__ import annotations

import dataclasses

from twin.calibrate import store
from twin.hardware.derive import follow, followed
from twin.hardware.load import load_device, load_node
from twin.hardware.override import apply_fit, numbers, resolve
from twin.hardware.types import HOST, Device, Kind, Node, Number


def calibrated_node(name: str) -> Node:
    """The node with the fits that hold for it, where there are any."""
    node = load_node(name)
    return with_links(dataclasses.replace(node, device=calibrated(node.device)))


def with_links(node: Node) -> Node:
    """The node with the fit of its links, or with what those of others say."""
    own = _fit_of(node.name, node.device) if node.gpus > 1 else None
    if own:
        return apply_fit(node, own)
    return apply_fit(node, _like_others(node))


def _like_others(node: Node) -> dict[str, Number]:
    """Of a link that nobody probed: what is assumed in its file, as it was fitted elsewhere."""
    other, known = other_links(node), numbers(node)
    if other is None:
        return {}
    return {
        path: _as_of(other, number)
        for path, number in (_fit_of(other, node.device) or {}).items()
        if path.startswith("link.") and known[path].kind is Kind.ASSUMED
    }


def other_links(node: Node) -> str | None:
    """The probed node whose links those of this one are assumed to be like: of this device with the
    most GPUs, else of the device that its file names; None where nobody probed any.
    """
    if node.link is None or store.read_fit(node.name) is not None:
        return None
    devices = [node.device.name, *([node.link.like] if node.link.like else [])]
    names = [f"{gpus}x{device}" for device in devices for gpus in (8, 4, 2)]
    return next((name for name in names if store.read_fit(name) is not None), None)


def _as_of(node: str, number: Number) -> Number:
    source = f"derived: as {node} ({number.source})"
    return Number(number.value, Kind.ASSUMED, source, number.low, number.high)


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
    own, links = f"1x{node.device.name}", other_links(node)
    found: dict[str, dict[str, Number] | None] = {
        name: _fit_of(name, node.device) for name in (own, node.name)
    }
    if links:
        like: dict[str, dict[str, Number] | None] = {links: _like_others(load_node(node.name))}
        # the links of another device say less of this one's steps than its own fit
        found = found | like if _same_device(links, node) else like | found
    return {name: {resolve(node, path) for path in fit} for name, fit in found.items() if fit}


def _same_device(name: str, node: Node) -> bool:
    return name.split("x", 1)[1] == node.device.name


def _fit_of(name: str, device: Device) -> dict[str, Number] | None:
    """The fit of a node; one of the host only on the very processor that made it: another
    computer's says nothing about this one.
    """
    found = store.read_fit(name)
    if found is None or (device.isa == HOST and found[1].get("cpu") != store.cpu_name()):
        return None
    return found[0]
