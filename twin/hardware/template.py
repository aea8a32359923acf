"""A device file to begin with: the numbers of a part on file, all of them to be replaced."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from twin.data import data_dir, read_yaml
from twin.errors import HardwareError
from twin.files import check_stems
from twin.hardware.derive import FOLLOWS
from twin.hardware.load import FILES, SECTION, device_names, load_device
from twin.hardware.types import HOST, Kind
from twin.text import shown
from twin.units import format_quantity, parse_quantity, unit_of

LOW, HIGH = 0.8, 1.25  # of a rate or a time that was copied; what is counted is taken as it is
LEAF = "value"
HEAD = """\
# Your own part. Every number is copied from {device}: replace the value, and say how it is known
# (kind: datasheet, vendor, third-party, assumed) and who says so (source). An assumed number keeps
# low and high. `twin hardware {file}` shows how it is read.
"""


def template(file: Path, like: str) -> str:
    """The content of `file` for a part that is like a device on file. Raises HardwareError."""
    device = load_device(like)
    if device.name == HOST or device.name not in device_names():
        raise HardwareError(f"--like {shown(like)}: name a device on file, not {device.name}")
    if file.suffix not in FILES:
        raise HardwareError(f"{shown(file)}: name a file that ends in {FILES[0]}")
    if file.stem in device_names():
        raise HardwareError(f"{shown(file)}: {file.stem} is on file already; choose another name")
    check_stems([file.stem])
    data = _file("devices", device.name)
    lines = [HEAD.format(device=device.name, file=file.name).rstrip()]
    lines += [f"name: {file.stem}", f"title: {json.dumps(f'my part, like a {device.title}')}"]
    lines += [f"vendor: {data['vendor']}", "isa: null"]
    kinship = data.get("like") or _likeness(device.name, data)
    if kinship:
        lines.append(f"like: {json.dumps(kinship)}")
    for name, section in data.items():
        if isinstance(section, Mapping) and name != "like":
            lines += [f"{name}:", *_section(device.name, name, section, follows=bool(kinship))]
    node = _file("nodes", device.name)
    lines += [f"{SECTION}:", f"  gpus: {json.dumps(node['gpus'])}"]
    if isinstance(node.get("link"), Mapping):
        lines += ["  link:", *_section(device.name, "link", node["link"], depth=2)]
    return "\n".join(lines) + "\n"


def _file(folder: str, name: str) -> dict[str, Any]:
    return dict(read_yaml(data_dir("hwmodels") / folder / f"{name}.yaml"))


def _likeness(name: str, data: Mapping[str, Any]) -> dict[str, str] | None:
    """What a block costs may follow a part whose warps are on file."""
    known = data.get("warps", {})
    complete = all(path.split(".")[1] in known for path in FOLLOWS if path.startswith("warps."))
    return {"device": name, "low": f"x{LOW}", "high": f"x{HIGH}"} if complete else None


def _section(
    device: str, path: str, section: Mapping[str, Any], *, depth: int = 1, follows: bool = False
) -> Iterator[str]:
    """Lines of a section; `follows`: without what follows from the part that it is like."""
    indent = "  " * depth
    for key, item in section.items():
        if follows and f"{path}.{key}" in FOLLOWS:
            continue
        if not isinstance(item, Mapping):
            yield f"{indent}{key}: {json.dumps(item)}"
        elif LEAF in item:
            yield f"{indent}{key}: {_leaf(device, str(key), path, item)}"
        else:
            yield f"{indent}{key}:"
            yield from _section(device, str(key), item, depth=depth + 1)


def _leaf(device: str, key: str, path: str, item: Mapping[str, Any]) -> str:
    unit = unit_of(key) or unit_of(path)
    value = item[LEAF]
    low = high = value
    if unit in ("s", "B/s"):
        number = parse_quantity(value, unit)
        low, high = (format_quantity(number * factor, unit) for factor in (LOW, HIGH))
    source = f"derived: as {device}; replace it by your own number and who says so"
    leaf = {LEAF: value, "kind": Kind.ASSUMED.value, "low": low, "high": high, "source": source}
    return f"{{{', '.join(f'{name}: {json.dumps(said)}' for name, said in leaf.items())}}}"
