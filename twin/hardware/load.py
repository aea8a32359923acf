"""Devices and nodes by name, from hwmodels/devices and hwmodels/nodes, or from a user's file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from twin.data import data_dir, did_you_mean, read_yaml
from twin.errors import ConfigError, HardwareError
from twin.files import expanded, resolved
from twin.frozen import frozen
from twin.hardware.derive import KERNEL, Kinship, follow, with_followers
from twin.hardware.host import detect_host
from twin.hardware.moved import check_places
from twin.hardware.number import Number
from twin.hardware.overlay import Overlay, is_overlay, overlaid
from twin.hardware.override import IDLE, numbers
from twin.hardware.schema import check_blocks, read
from twin.hardware.stated import stated_file
from twin.hardware.types import HOST, Device, Link, Node
from twin.reading import SOME, Check, FieldError, together
from twin.text import shown
from twin.units import format_quantity

# 8xh200, 8x-mi300x; h200x8, h200:8
_FIRST = re.compile(r"([0-9]{1,4})\s*[x×*]\s*-?\s*(.+)\Z", re.DOTALL | re.IGNORECASE)
_LAST = re.compile(r"(.+?)(?:\s*-?\s*[x×*]\s*|:)([0-9]{1,4})\Z", re.DOTALL | re.IGNORECASE)
_VENDORS = ("nvidia-", "amd-", "instinct-")
FILES = (".yaml", ".yml")  # a name that ends so is a file of one's own
SECTION = "node"  # of such a file: how many there may be, and how they are linked
_own: dict[str, Path] = {}  # devices of such files that this process has read, by name


@frozen
class Family:
    """One file of hwmodels/nodes: the link between equal devices."""

    device: str
    aliases: tuple[str, ...]
    links: dict[int, Link | None]  # by number of GPUs


def _as_on_file(name: str) -> None:
    known = sorted(file.stem for file in (data_dir("hwmodels") / "devices").glob("*.yaml"))
    if name and name not in known:
        raise HardwareError(f"unknown device {shown(name)}; {did_you_mean(name, known)}")


@frozen
class _Links(Link):
    """The link that all numbers of GPUs share; the all-reduce is given by number."""

    library_allreduce_s: dict[int, Number]  # type: ignore[assignment]
    like: Annotated[str, Check(_as_on_file)] = ""
    pushes_like: Annotated[str, Check(_as_on_file)] = ""

    def __post_init__(self) -> None:
        _check_queue("loaded_hop_s", self.loaded_hop_s, "hop_s", self.hop_s)

    def of(self, gpus: int) -> Link:
        values = {field.name: getattr(self, field.name) for field in fields(Link)}
        return Link(**values | {"library_allreduce_s": self.library_allreduce_s[gpus]})


@frozen(kw_only=True)
class _Sizes:
    """How many GPUs a node may have, and what links them."""

    gpus: Annotated[tuple[Literal[1, 2, 4, 8, 16, 32, 64, 72], ...], SOME]
    link: _Links | None = None

    def __post_init__(self) -> None:
        several = [count for count in self.gpus if count > 1]
        if several and self.link is None:
            raise FieldError("link", f"missing; {max(several)} GPUs of a node need one")
        reduce = self.link.library_allreduce_s if self.link else {}
        if lacking := [str(count) for count in several if count not in reduce]:
            raise FieldError(
                "link.library_allreduce_s",
                f"needs one number per count of GPUs, {', '.join(lacking)} is missing",
            )

    def links(self) -> dict[int, Link | None]:
        return {n: self.link.of(n) if self.link and n > 1 else None for n in self.gpus}


@frozen(kw_only=True)
class _OwnNodes(_Sizes):
    device: str


@frozen(kw_only=True)
class _Nodes(_OwnNodes):
    aliases: tuple[str, ...] = ()


@lru_cache(maxsize=1)
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
    return folded if folded in device_names() else _alias(folded)


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
    file = data_dir("hwmodels") / "nodes" / f"{canonical}.yaml"
    if not file.is_file():
        raise HardwareError(
            f"device {canonical} has no node: say how many a node has, and how they are "
            f"linked, in hwmodels/nodes/{canonical}.yaml"
        )
    family = read_family(file)
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
    return device, Family(device.name, (), read(section, _Sizes, path, SECTION).links())


def overlay_of(name: str) -> tuple[Overlay, Path] | None:
    """What a device of a user's file is like and changes, and the file, where it says no more."""
    if name not in _own or not is_overlay(data := _own_parts(_own[name])):
        return None
    return read(data, Overlay, _own[name]), _own[name]


def links_as(node: Node) -> str | None:
    """The node on file whose links one of a user's device has, where the file says no others."""
    own = overlay_of(node.device.name)
    if own is None or node.gpus == 1 or SECTION in _yaml(own[1]):
        return None
    return f"{node.gpus}x{on_file(own[0].like)}"


def _own_parts(path: Path) -> dict[str, object]:
    """A device file without its section on nodes."""
    return {key: value for key, value in _yaml(path).items() if key != SECTION}


def _links_of(device: str) -> dict[int, Link | None]:
    """As nodes of a device on file have them."""
    file = data_dir("hwmodels") / "nodes" / f"{device}.yaml"
    return read_family(file).links if device and file.is_file() else {1: None}


def _own_nodes(path: Path, data: Mapping[str, object]) -> tuple[Device, Family]:
    """A node file: its device is a name on file, or another file, next to it."""
    found = read(data, _OwnNodes, path)
    device = load_device(
        str(path.parent / expanded(Path(found.device)))
        if found.device.endswith(FILES)
        else found.device
    )
    return device, Family(device.name, (), found.links())


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
    check_places(data, path)
    data = _with_kernel(data, path)
    if is_overlay(data):
        overlay = read(data, Overlay, path)
        device = overlaid(overlay, _base(overlay, path), path)
    elif "like" in data:
        kinship = read(data.pop("like"), Kinship, path, "like")
        reference = _reference(kinship.device, path)
        filled = with_followers(data, kinship, reference)
        device = follow(read(filled, Device, path), reference, reference)
    else:
        device = read(data, Device, path)
    if wrong := list(_wrong(device, path)):
        raise HardwareError(f"{path}: {together(wrong)}")
    return device


def _with_kernel(data: dict[str, object], path: Path) -> dict[str, object]:
    """The content of a device file with what is stated of our kernel's costs there: in its section,
    which may name a device on file whose costs these are; of a device on file in
    calibration/kernels.
    """
    named = data.get(KERNEL)
    if isinstance(named, str):
        known = {file.stem: file for file in stated_file("any").parent.glob("*.yaml")}
        file = known.get(on_file(named) or "")
        if file is None:
            raise HardwareError(
                f"{path}: {KERNEL}: no costs of {shown(named)} are on file; "
                f"{did_you_mean(named, known)}"
            )
        return {**data, KERNEL: _yaml(file)}
    stated = stated_file(path.stem)
    on_disk = path.parent == data_dir("hwmodels") / "devices" and stated.is_file()
    return {**data, KERNEL: _yaml(stated)} if on_disk and named is None else data


def _wrong(device: Device, path: Path) -> Iterator[str]:
    """Which laws of several numbers a file breaks."""
    if device.name != path.stem:
        yield f"name: {shown(device.name)} must be the file's name {path.stem!r}"
    try:
        check_blocks(device)
    except HardwareError as error:
        yield str(error)
    memory = device.memory
    for name in ("stream_bytes_per_s", "ceiling_bytes_per_s"):
        rate: Number | None = getattr(memory, name)
        if rate is not None and rate.value > memory.peak_bytes_per_s.value:
            yield (
                f"memory.{name}: exceeds memory.peak_bytes_per_s; a stream cannot beat the "
                "datasheet"
            )
    known = numbers(device)
    for loaded, idle in IDLE.items():
        if loaded in known:
            try:
                _check_queue(loaded, known[loaded], idle, known[idle])
            except FieldError as error:
                yield str(error)


def _base(overlay: Overlay, path: Path) -> Device:
    """The part on file, without its fit."""
    canonical = on_file(overlay.like)
    if canonical is None or canonical == HOST:
        raise HardwareError(
            f"{path}: like: unknown device {shown(overlay.like)}; "
            f"{did_you_mean(overlay.like, device_names()[1:])}"
        )
    return load_device(canonical)


def _check_queue(loaded: str, behind_stream: Number, idle: str, alone: Number) -> None:
    """What waits behind the stream is not there sooner than what does not."""
    if behind_stream.value < alone.value:
        times = [format_quantity(number.value, "s") for number in (behind_stream, alone)]
        raise FieldError(
            loaded, f"{times[0]} is less than {idle}, {times[1]}; give at least the idle time"
        )


@lru_cache(maxsize=64)
def read_family(path: Path) -> Family:
    """One node file: device, aliases, gpus, and the link that they share."""
    found = read(_yaml(path), _Nodes, path)
    if found.device != path.stem:
        raise HardwareError(
            f"{path}: device: {shown(found.device)} must be the file's name {path.stem!r}"
        )
    return Family(found.device, found.aliases, found.links())


def _reference(name: str, path: Path) -> Device:
    """The part that a file's numbers are like, as published."""
    canonical = _alias(name) or name
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


def _families() -> dict[str, Family]:
    return {p.stem: read_family(p) for p in sorted((data_dir("hwmodels") / "nodes").glob("*.yaml"))}


def _aliases() -> list[str]:
    return [alias for family in _families().values() for alias in family.aliases]


@lru_cache(maxsize=256)
def _alias(name: str) -> str | None:
    """The device that an alias means. Only files that hold the word are parsed: all take 30 ms."""
    for file in sorted((data_dir("hwmodels") / "nodes").glob("*.yaml")):
        if name in file.read_text(encoding="utf-8") and name in read_family(file).aliases:
            return file.stem
    return None


def _yaml(path: Path) -> dict[str, object]:
    try:
        return read_yaml(path)
    except ConfigError as error:
        raise HardwareError(str(error)) from error
