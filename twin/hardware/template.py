"""A device file to begin with: another part, and the numbers that are to change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from twin.errors import HardwareError
from twin.files import check_stems
from twin.hardware.load import FILES, device_names, load_device
from twin.hardware.types import HOST
from twin.text import shown

HEAD = """\
# Your own part: {device} as it is best known, its fit included, but for the numbers under `set`.
# They are written as `twin whatif --set` takes them ("12 TB/s", "x1.5", "+20%"), or with what they
# are known by: {{value: "12 TB/s", kind: vendor, source: "its announcement", low: ..., high: ...}}.
# `twin hardware {device}` lists what can be set, `twin hardware {file}` shows the result. How many
# a node has, and their links, are as those of {device}; a section `node` with gpus and link says
# otherwise.
"""


def template(file: Path, like: str, changes: Sequence[str] = ()) -> str:
    """The content of `file` for a part that is like a device on file; each change as PATH=VALUE.
    Raises HardwareError.
    """
    device = load_device(like)
    if device.name == HOST or device.name not in device_names():
        raise HardwareError(f"--like {shown(like)}: name a device on file, not {device.name}")
    if file.suffix not in FILES:
        raise HardwareError(f"{shown(file)}: name a file that ends in {FILES[0]}")
    if file.stem in device_names():
        raise HardwareError(f"{shown(file)}: {file.stem} is on file already; choose another name")
    check_stems([file.stem])
    lines = [HEAD.format(device=device.name, file=file.name).rstrip()]
    lines += [f"name: {file.stem}", f"like: {device.name}", "set:" if changes else "set: {}"]
    for change in changes:
        path, equals, value = change.partition("=")
        if not equals or not path.strip() or not value.strip():
            raise HardwareError(
                f"--set {shown(change)}: write PATH=VALUE, such as memory.stream='12 TB/s'"
            )
        lines.append(f"  {json.dumps(path.strip())}: {json.dumps(value.strip())}")
    return "\n".join(lines) + "\n"
