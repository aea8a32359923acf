"""A node as it was measured: fits in place of what hwmodels says.

A fit belongs to a node. That of a node of one serves every node of such devices for the device's
numbers; the fit of a larger node comes on top, with the numbers of its link. Links that nobody
probed are assumed to be as those between another number of the same devices, or of devices whose
links they are like. What a larger node's own probes do not settle is as the fit of a smaller one
says.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from twin.calibrate import store
from twin.hardware.activity import usable
from twin.hardware.derive import follow, followed
from twin.hardware.load import links_as, load_device, load_node, overlay_of
from twin.hardware.number import Kind, Number
from twin.hardware.overlay import overlaid
from twin.hardware.override import apply_fit, numbers, resolve_all
from twin.hardware.types import HOST, Device, Node

COUNTS = (2, 4, 8)  # GPUs of a node with links
# what sentinels say of a link: of two GPUs, and of more, which differ from two by the ranks that a
# block pushes to
OF_TWO = ("link.hop_s", "link.loaded_hop_s", "link.spread_s")
OF_MORE = ("link.peer_s",)
# what the kernel's stores to other GPUs cost beyond the link: the same code on another link
OF_PUSHES = ("link.spread_s", "link.peer_s", "link.fence_s")


def calibrated_node(name: str) -> Node:
    """The node with the fits that hold for it, where there are any."""
    node = load_node(name)
    return with_links(dataclasses.replace(node, device=calibrated(node.device)))


def with_links(node: Node) -> Node:
    """The node with the fit of its links, or with what those of others say."""
    if (other := links_as(node)) is not None:
        links = numbers(calibrated_node(other))
        fit = {path: n for path, n in links.items() if path.startswith("link.")}
        return apply_fit(node, {path: _as_of(other, number) for path, number in fit.items()})
    like: dict[str, Number] = {}
    for found in _like_others(node).values():
        like |= found
    own = _fit_of(node.name, node.device) if node.gpus > 1 else None
    return apply_fit(node, like | (own or {}))


def _like_others(node: Node) -> dict[str, dict[str, Number]]:
    """By probed node: what is assumed in this node's file, as it was fitted there. The last one is
    in force.
    """
    if node.link is None:
        return {}
    known, pushes = numbers(node), bool(node.link.pushes_like)
    return {
        other: {
            path: _as_of(other, number)
            for path, number in (_fit_of(other, node.device) or {}).items()
            if (path in OF_PUSHES if pushes else path.startswith("link."))
            and known[path].kind is Kind.ASSUMED
        }
        for other in _others(node)
    }


def _others(node: Node) -> list[str]:
    """The probed nodes whose links, or pushes, those of this one are like, the most GPUs last: of
    this device, else of the device that its file names. With a fit of its own, those of this device
    with fewer GPUs.
    """
    if node.link is None:
        return []
    named = node.link.like or node.link.pushes_like
    if store.read_fit(node.name) is not None:
        return _probed(node.device.name, below=node.gpus)
    return _probed(node.device.name) or (_probed(named) if named else [])


def _probed(device: str, *, below: int = COUNTS[-1] + 1) -> list[str]:
    names = [f"{gpus}x{device}" for gpus in COUNTS if gpus < below]
    return [name for name in names if store.read_fit(name) is not None]


def other_links(node: Node) -> str | None:
    """The probed node whose links those of this one are assumed to be like; None where nobody
    probed any, or this one has a fit of its own.
    """
    if store.read_fit(node.name) is not None:
        return None
    return next(reversed(_others(node)), None)


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
    if own := overlay_of(device.name):
        overlay, file = own
        return overlaid(overlay, calibrated(load_device(overlay.like)), file)
    for name in followed(device):
        on_file = load_device(name)
        device = follow(device, calibrated(on_file), on_file)
    return device


def uncalibrated_node(name: str) -> Node:
    """What a fit of the node begins with, and what a number that its probes do not bind stays: of
    more than two GPUs what two of them have settled.
    """
    node = load_node(name)
    if node.gpus == 1:
        return dataclasses.replace(node, device=following(node.device))
    node = dataclasses.replace(node, device=calibrated(node.device))
    two = f"2x{node.device.name}"
    return apply_fit(
        node,
        {
            path: number
            for path, number in _like_others(node).get(two, {}).items()
            if node.gpus > 2 and path in OF_TWO
        },
    )


def fits_of(node: Node) -> dict[str, set[str]]:
    """The nodes whose fits hold for this one, and the paths of the node's numbers that stand in
    each; the last one is in force.
    """
    device = f"1x{node.device.name}"
    like = _like_others(load_node(node.name))
    # the links of another device say less of this one's steps than its own fit
    foreign = [name for name in like if not _same_device(name, node)]
    names = dict.fromkeys((*foreign, device, *like, node.name))
    fits = {name: like[name] if name in like else _fit_of(name, node.device) for name in names}
    return {name: resolve_all(node, fit) for name, fit in fits.items() if fit}


def _same_device(name: str, node: Node) -> bool:
    return name.split("x", 1)[1] == node.device.name


def _fit_of(name: str, device: Device) -> dict[str, Number] | None:
    """The fit of a node; one of the host only on the very processor that made it, and of as many
    cores at least: another computer's says nothing about this one.
    """
    found = store.read_fit(name)
    if found is None or (device.isa == HOST and not _of_this_computer(found[1])):
        return None
    return found[0]


def _of_this_computer(meta: dict[str, Any]) -> bool:
    cores = len(usable())
    return meta.get("cpu") == store.cpu_name() and int(meta.get("cores") or cores) >= cores
