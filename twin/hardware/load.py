"""Devices and nodes by name, from hwmodels/devices and hwmodels/nodes, or from a user's file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from twin.data import data_dir, did_you_mean, read_yaml
from twin.errors import ConfigError, HardwareError
from twin.files import expanded, resolved
from twin.hardware.derive import follow, read_kinship, with_followers
from twin.hardware.host import detect_host
from twin.hardware.overlay import Overlay, is_overlay, overlaid, read_overlay
from twin.hardware.override import IDLE, numbers
from twin.hardware.schema import build, check_blocks, check_keys, text
from twin.hardware.types import HOST, Device, Link, Node, Number
from twin.text import shown
from twin.units import format_quantity

LOADING = ("ahead", "on-demand")
INPUTS = ("on-chip", "registers")
RETENTION = ("whole", "random", "none")
TOPOLOGIES = ("mesh", "switch", "memory")
# 8xh200, 8x-mi300x; h200x8, h200:8
_FIRST = re.compile(r"([0-9]{1,4})\s*[x×*]\s*-?\s*(.+)\Z", re.DOTALL | re.IGNORECASE)
_LAST = re.compile(r"(.+?)(?:\s*-?\s*[x×*]\s*|:)([0-9]{1,4})\Z", re.DOTALL | re.IGNORECASE)
_VENDORS = ("nvidia-", "amd-", "instinct-")
FILES = (".yaml", ".yml")  # a name that ends so is a file of one's own
SECTION = "node"  # of such a file: how many there may be, and how they are linked
_own: dict[str, Path] = {}  # devices of such files that this process has read, by name


@dataclass(frozen=True, slots=True)
class Family:
    """One file of hwmodels/nodes: the link between equal devices."""

    device: str
    aliases: tuple[str, ...]
    links: dict[int, Link | None]  # by number of GPUs


def device_names() -> list[str]:
    """Every name that load_device knows, without the aliases."""
    return [HOST, *sorted(p.stem for p in (data_dir("hwmodels") / "devices").glob("*.yaml"))]


def node_names() -> list[str]:
    """Every name that load_node knows, without the aliases."""
    return [f"{gpus}x{name}" for name, family in _families().items() for gpus in family.links]


def counted(name: str) -> tuple[int | None, str]:
    """How many devices a node's name says, None where it says nothing, and the device's name:
    "8xh200", "8x-mi300x", "H200x8", "h200:8".
    """
    if on_file(name) is None:
        if first := _FIRST.match(name):
            return int(first[1]), first[2]
        if (last := _LAST.match(name)) and not name.endswith(FILES):
            return int(last[2]), last[1]
    return None, name


def on_file(name: str) -> str | None:
    """The device on file that a name or an alias means, however it is written: "H200",
    "NVIDIA H200 SXM".
    """
    folded = _folded(name)
    return folded if folded in device_names() else _aliases().get(folded)


def _folded(name: str) -> str:
    folded = re.sub(r"[\s_-]+", "-", name.strip().lower())
    for vendor in _VENDORS:
        folded = folded.removeprefix(vendor)
    return folded


def load_device(name: str) -> Device:
    """The device `name`, or an alias such as "h200"; "host" is this computer's CPU."""
    if name.endswith(FILES) or name in _own:
        return own_device(_own.get(name, Path(name)))[0]
    canonical = on_file(name)
    if canonical is None:
        raise HardwareError(
            f"unknown device {shown(name)}; "
            f"{did_you_mean(_folded(name), [*device_names(), *_aliases()])}; a file of your own "
            "ends in .yaml"
        )
    if canonical == HOST:
        return detect_host()
    return read_device(data_dir("hwmodels") / "devices" / f"{canonical}.yaml")


def load_node(name: str) -> Node:
    """The node `name`: "8xh200-sxm", an alias such as "8xh200", or a device's name for one of
    it.
    """
    count, device = counted(name)
    if name.endswith(FILES) or device in _own:
        return _own_node(name, count, _own.get(device))
    canonical, gpus = on_file(device), 1 if count is None else count
    if canonical is None:
        known = [*device_names(), *_aliases()]
        raise HardwareError(
            f"unknown node {shown(name)}; {did_you_mean(_folded(device), known)}; write "
            f"{gpus}xDEVICE; a file of your own ends in .yaml"
        )
    family = _families().get(canonical)
    if family is None:
        raise HardwareError(
            f"device {canonical} has no node: say how many a node has, and how they are "
            f"linked, in hwmodels/nodes/{canonical}.yaml"
        )
    if gpus not in family.links:
        made = [f"{n}x{canonical}" for n in family.links]
        raise HardwareError(
            f"{shown(name)}: no node has {gpus} of {canonical}; allowed: {', '.join(made)}"
        )
    return Node(f"{gpus}x{canonical}", load_device(canonical), gpus, family.links[gpus])


def own_device(path: Path) -> tuple[Device, Family]:
    """A user's device file, or node file that names one, and which nodes can be made of it.

    Its name must be new: a fit of a part on file says nothing about another. Raises HardwareError.
    """
    path = resolved(expanded(path))
    data = _yaml(path)
    if "device" in data and "name" not in data:
        return _own_nodes(path, data)
    device = read_device(path)
    if device.name in (*device_names(), *_aliases()):
        raise HardwareError(
            f"{path}: name: {device.name} is on file already; give the part and its file a name of "
            "their own"
        )
    if _own.setdefault(device.name, path) != path:
        raise HardwareError(
            f"{path}: name: {device.name} is also the name of {_own[device.name]}; rename one"
        )
    section = data.get(SECTION)
    if section is None and is_overlay(data):
        return device, Family(device.name, (), _links_of(on_file(str(data["like"])) or ""))
    if section is None:
        return device, Family(device.name, (), {1: None})
    keys = ["gpus", "link"]
    section = check_keys(section, path, SECTION, required=["gpus"], allowed=keys)
    return device, Family(device.name, (), _links(section, path))


def overlay_of(name: str) -> Overlay | None:
    """What a device of a user's file is like and changes, where the file says no more."""
    if name not in _own:
        return None
    data = _own_parts(_own[name])
    return read_overlay(data, _own[name]) if is_overlay(data) else None


def links_as(node: Node) -> str | None:
    """The node on file whose links one of a user's device has, where the file says no others."""
    overlay = overlay_of(node.device.name)
    if overlay is None or node.gpus == 1 or SECTION in _yaml(_own[node.device.name]):
        return None
    return f"{node.gpus}x{on_file(overlay.device)}"


def _own_parts(path: Path) -> dict[str, object]:
    """A device file without its section on nodes."""
    return {key: value for key, value in _yaml(path).items() if key != SECTION}


def _links_of(device: str) -> dict[int, Link | None]:
    """As nodes of a device on file have them."""
    family = _families().get(device)
    return family.links if family else {1: None}


def _own_nodes(path: Path, data: Mapping[str, object]) -> tuple[Device, Family]:
    """A node file: its device is a name on file, or another file, beside it."""
    keys = ["device", "gpus", "link"]
    data = check_keys(data, path, "", required=keys[:2], allowed=keys)
    named = text(data["device"], path, "device")
    device = load_device(
        str(path.parent / expanded(Path(named))) if named.endswith(FILES) else named
    )
    return device, Family(device.name, (), _links(data, path))


def _own_node(name: str, count: int | None, known: Path | None) -> Node:
    """`path`, `4xpath`, or `4xname` of a file that this process has read."""
    path = known or Path(name)
    if known is None and count is not None and not expanded(path).exists():
        path = Path(name.partition("x")[2])
    elif known is None:
        count = None  # a file whose name begins like a count
    device, family = own_device(path)
    gpus = count if count is not None else min(family.links)
    if gpus not in family.links:
        made = ", ".join(map(str, family.links))
        raise HardwareError(
            f"{shown(path)}: a node has {made} of {device.name}, not {gpus}; add the count to gpus "
            f"in its section {SECTION}, with the link between them"
        )
    return Node(f"{gpus}x{device.name}", device, gpus, family.links[gpus])


@lru_cache(maxsize=64)
def read_device(path: Path) -> Device:
    """One device file. Its name must be the file's, and its ceiling cannot exceed the datasheet.

    What it leaves out because it is `like` another part follows from that part's file.
    """
    data = _own_parts(path)
    if is_overlay(data):
        overlay = read_overlay(data, path)
        return _named(overlaid(overlay, _base(overlay)), path)
    kinship = read_kinship(data.pop("like"), path) if "like" in data else None
    if kinship is None:
        device = build(Device, data, path)
    else:
        reference = _reference(kinship.device, path)
        device = follow(
            build(Device, with_followers(data, kinship, reference), path), reference, reference
        )
    check_blocks(_named(device, path))
    _check_words(device, path)
    memory = device.memory
    for name in ("stream_bytes_per_s", "ceiling_bytes_per_s"):
        rate: Number | None = getattr(memory, name)
        if rate is not None and rate.value > memory.peak_bytes_per_s.value:
            raise HardwareError(
                f"{path}: memory.{name}: exceeds memory.peak_bytes_per_s; a stream cannot beat "
                "the datasheet"
            )
    known = numbers(device)
    for loaded, idle in IDLE.items():
        if loaded in known:
            _check_queue(loaded, known[loaded], idle, known[idle], path)
    return device


def _base(overlay: Overlay) -> Device:
    """The part on file, without its fit."""
    canonical = on_file(overlay.device)
    if canonical is None or canonical == HOST:
        raise HardwareError(
            f"{overlay.file}: like: unknown device {shown(overlay.device)}; "
            f"{did_you_mean(overlay.device, device_names()[1:])}"
        )
    return load_device(canonical)


def _named(device: Device, path: Path) -> Device:
    if device.name != path.stem:
        raise HardwareError(
            f"{path}: name: {shown(device.name)} must be the file's name {path.stem!r}"
        )
    return device


def _check_words(device: Device, path: Path) -> None:
    """Capabilities are words, and a word that nobody looks for would be a capability left out in
    silence.
    """
    words = {
        "block.loading": (device.block.loading, LOADING),
        "block.inputs": (device.block.inputs, INPUTS),
        "l2.retention": (device.l2.retention, RETENTION),
    }
    if device.llc is not None:
        words["llc.retention"] = (device.llc.retention, RETENTION)
    for name, (word, known) in words.items():
        if word not in known:
            raise HardwareError(
                f"{path}: {name}: {shown(word)} is unknown; {did_you_mean(word, known)}"
            )


def _check_queue(loaded: str, behind_stream: Number, idle: str, alone: Number, path: Path) -> None:
    """What waits behind the stream is not there sooner than what does not."""
    if behind_stream.value < alone.value:
        times = [format_quantity(number.value, "s") for number in (behind_stream, alone)]
        raise HardwareError(
            f"{path}: {loaded}: {times[0]} is less than {idle}, {times[1]}; give at least the "
            "idle time"
        )


def read_family(path: Path) -> Family:
    """One node file: device, aliases, gpus, and the link that they share."""
    keys = ["device", "gpus", "link"]
    data = check_keys(_yaml(path), path, "", required=keys[:2], allowed=[*keys, "aliases"])
    aliases, device = data.get("aliases", []), data["device"]
    if device != path.stem:
        raise HardwareError(
            f"{path}: device: {shown(device)} must be the file's name {path.stem!r}"
        )
    if not isinstance(aliases, list) or not all(isinstance(a, str) for a in aliases):
        raise HardwareError(f"{path}: aliases: {shown(aliases)} must be a list of names")
    return Family(device, tuple(aliases), _links(data, path))


def _links(data: Mapping[str, object], path: Path) -> dict[int, Link | None]:
    """`gpus` and, where there are several, the `link` that they share."""
    gpus = data["gpus"]
    if (
        not isinstance(gpus, list)
        or not gpus
        or any(type(g) is not int or g not in (1, 2, 4, 8) for g in gpus)
    ):
        raise HardwareError(f"{path}: gpus: {shown(gpus)} must be a list out of 1, 2, 4, 8")
    if max(gpus) > 1 and "link" not in data:
        raise HardwareError(f"{path}: link: missing; {max(gpus)} GPUs of a node need one")
    return {n: _link(data["link"], n, path) if n > 1 else None for n in gpus}


def _link(data: object, gpus: int, path: Path) -> Link:
    """The link as `gpus` devices use it; the all-reduce is given by number of GPUs."""
    names = list(Link.__dataclass_fields__)
    required = [name for name in names if name != "like"]
    link = check_keys(data, path, "link", required=required, allowed=names)
    reduce = link["library_allreduce_s"]
    if not isinstance(reduce, dict) or gpus not in reduce:
        raise HardwareError(
            f"{path}: link.library_allreduce_s: needs one number per count of GPUs, {gpus} is "
            "missing"
        )
    if link["topology"] not in TOPOLOGIES:
        raise HardwareError(
            f"{path}: link.topology: {shown(link['topology'])}; "
            f"{did_you_mean(link['topology'], TOPOLOGIES)}"
        )
    made = build(Link, {**link, "library_allreduce_s": reduce[gpus]}, path, "link")
    known = sorted(file.stem for file in (data_dir("hwmodels") / "devices").glob("*.yaml"))
    if made.like and made.like not in known:
        raise HardwareError(
            f"{path}: link.like: unknown device {shown(made.like)}; "
            f"{did_you_mean(made.like, known)}"
        )
    _check_queue("link.loaded_hop_s", made.loaded_hop_s, "link.hop_s", made.hop_s, path)
    return made


def _reference(name: str, path: Path) -> Device:
    """The part that a file's numbers are like, as published."""
    canonical = _aliases().get(name, name)
    if canonical not in device_names()[1:]:
        raise HardwareError(
            f"{path}: like.device: unknown device {shown(name)}; "
            f"{did_you_mean(name, device_names()[1:])}"
        )
    file = data_dir("hwmodels") / "devices" / f"{canonical}.yaml"
    if "like" in _yaml(file):
        raise HardwareError(
            f"{path}: like.device: {shown(name)} is itself like another part; name that one"
        )
    return read_device(file)


@lru_cache(maxsize=1)
def _families() -> dict[str, Family]:
    return {p.stem: read_family(p) for p in sorted((data_dir("hwmodels") / "nodes").glob("*.yaml"))}


def _aliases() -> dict[str, str]:
    return {alias: name for name, family in _families().items() for alias in family.aliases}


def _yaml(path: Path) -> dict[str, object]:
    try:
        return read_yaml(path)
    except ConfigError as error:
        raise HardwareError(str(error)) from error
