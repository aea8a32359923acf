"""Changes of a node's numbers, single ones and those that change together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from twin.calibrate.node import calibrated_node
from twin.errors import ConfigError, HardwareError
from twin.hardware.override import apply_fit, numbers, resolve, scaled, with_number, with_numbers
from twin.hardware.types import Node
from twin.text import shown
from twin.units import unit_of

# (dotted path or a name below, change: "5 TB/s", "x0.5", "+10%", or a value in base units)
Setting = tuple[str, str | float]

HARDWARE = "hardware."  # optional prefix of a path
GPUS = "gpus"
CLOCK = "clock"
TOGETHER = (GPUS, CLOCK)  # names that change more than one number
# What a block's clock drives. Memory, links and launches have clocks of their own, and so have the
# fabric and caches that a hop crosses.
CLOCKED = tuple(
    f"{of}{section}"
    for of in ("", "device.")
    for section in ("block.", "kernel.", "l2.", "memory.jitter_s")
)
UNCLOCKED = (
    "on_chip_bytes",
    "capacity_bytes",
    "reserved_bytes",
    "border_s",  # through memory
    "fetched_bytes_per_s",
)


def with_settings(node: Node, settings: Sequence[Setting]) -> Node:
    """The node with all changes made, in order. Raises HardwareError or ConfigError for a name or a
    value that cannot be.
    """
    for together, group in groupby(settings, key=lambda setting: setting[0] in TOGETHER):
        if together:
            for name, value in group:
                node = with_setting(node, name, value)
        else:  # at once: an idle time takes the loaded one along unless that is set as well
            node = with_numbers(
                node, [(name.removeprefix(HARDWARE), value) for name, value in group]
            )
    return node


def with_setting(node: Node, name: str, value: str | float) -> Node:
    """One change. `gpus` is another number of the same device; `clock` is a factor of everything
    that the blocks' clock drives.
    """
    if name == GPUS:
        return _other_size(node, value)
    if name == CLOCK:
        return _clocked(node, _factor(value))
    return with_number(node, name.removeprefix(HARDWARE), value)


def setting_path(node: Node, name: str) -> str:
    """The full path of what a setting changes, or its own name when that is more than one
    number.
    """
    return name if name in TOGETHER else resolve(node, name.removeprefix(HARDWARE))


def _other_size(node: Node, value: str | float) -> Node:
    """The same device in another number. Its numbers are those on file: change the number of GPUs
    before any other.
    """
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    text = shown(int(value)) if whole else str(value)
    return node_on_file(f"{text}x{node.device.name}")


@lru_cache(maxsize=64)
def node_on_file(name: str) -> Node:
    """A node with its device's fit; read once per process, because a sweep asks for it at every
    point.
    """
    return calibrated_node(name)


def _clocked(node: Node, factor: float) -> Node:
    changed = {}
    for path, number in numbers(node).items():
        leaf = path.rsplit(".", 1)[-1]
        unit = unit_of(leaf)
        if (
            not path.startswith(CLOCKED)
            or leaf in UNCLOCKED
            or unit not in ("s", "B/s", "Hz")
            or not number.value
        ):
            continue
        change = 1 / factor if unit == "s" else factor
        changed[path] = scaled(number, change, number.kind, f"{number.source}; clock x{factor:g}")
    return apply_fit(node, changed)


def _factor(value: str | float) -> float:
    """The change of a clock as a factor: "x0.6", "-40%", or 0.6."""
    text = str(value).strip()
    try:
        factor = (
            1 + float(text[:-1].replace(" ", "")) / 100
            if text.endswith("%")
            else float(text.lstrip("x*"))
        )
    except ValueError:
        raise ConfigError(
            f"clock: {shown(value)} is not a factor; write 'x0.6' or '-40%'"
        ) from None
    if not 0 < factor <= 10:
        raise HardwareError(
            f"clock: factor {factor:g} is out of range; at most 10, and greater than 0"
        )
    return factor


def drawable(path: str) -> bool:
    """Whether a number may vary in an interval: rates and times do.

    Counts, capacities and shared memory decide the plan and are known where the part is known;
    power and clock are not used by the simulator; the datasheet's peak and the read ceiling are
    only denominators, of MBU and of the stream fraction.
    """
    leaf = path.rsplit(".", 1)[-1]
    return unit_of(leaf) in ("s", "B/s") and leaf not in ("peak_bytes_per_s", "ceiling_bytes_per_s")
