"""`twin hardware`: the devices and nodes on file, and each number with its kind and source."""

from __future__ import annotations

import argparse
from pathlib import Path

from twin.calibrate.node import calibrated_node
from twin.commands.arguments import Subparsers, command, file_to_write
from twin.commands.output import emit
from twin.errors import ConfigError, HardwareError
from twin.files import write
from twin.hardware.floor import ceiling
from twin.hardware.load import FILES, counted, device_names, load_device, node_names, own_device
from twin.hardware.override import interval, numbers
from twin.hardware.template import template
from twin.hardware.types import Device, Node
from twin.machines.load import load_machine, machine_names
from twin.report.machines import described, shown
from twin.report.sources import numbers_text
from twin.report.tables import table, terminal_width
from twin.text import shown as shown_text
from twin.units import binary_bytes, format_quantity

EXAMPLES = """\
  twin hardware                  all devices and nodes
  twin hardware mi300x           each number of one device: value, range, kind, source
  twin hardware 8xmi300x         the same for a node, with its links
  twin hardware cerebras-cs3     a machine that holds weights on chip: numbers and speeds
  twin hardware host --json      this computer, for machines
  twin hardware --new my-part.yaml --like h200-sxm --set block.clock=+10%
  twin hardware ./my-gpu.yaml    a file of your own; every command takes it where a node is named"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "hardware",
        run,
        usage="[DEVICE] [--new [FILE] --like DEVICE [--set NUMBER=VALUE]] [--json]",
        summary="list devices, show one's numbers with kind and source, or begin a new one",
        text="A number is measured, fitted, datasheet, third-party, vendor, unbound (in a fit "
        "whose probes do not determine it) or assumed, in this order of trust. Machines that hold "
        "weights on chip have a law of their own (twin/machines): they are not planned or "
        "simulated.",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "device",
        metavar="DEVICE",
        nargs="?",
        help="a device, a node or a machine, or a file of your own; left out: list all",
    )
    parser.add_argument(
        "--new",
        metavar="FILE",
        nargs="?",
        const=Path("my-gpu.yaml"),
        type=file_to_write,
        help="write a device file of your own to begin with (default my-gpu.yaml); needs --like",
    )
    parser.add_argument("--like", metavar="DEVICE", help="with --new: the part that it is like")
    parser.add_argument(
        "--set",
        metavar="NUMBER=VALUE",
        action="append",
        default=[],
        dest="changes",
        help="with --new: what it has otherwise, such as memory.stream='12 TB/s'; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    if args.new is not None or args.like is not None or args.changes:
        return _new(args)
    if args.device is None:
        return _list(args)
    if args.device in machine_names():
        machine = load_machine(args.device)
        emit(args, described(machine), shown(machine, terminal_width()))
        return 0
    target = find(args.device)
    known = numbers(target)
    data = {}
    for path, number in known.items():
        low, high = interval(number)
        data[path] = {
            "value": number.value,
            "low": low,
            "high": high,
            "kind": number.kind.value,
            "source": number.source,
        }
    emit(
        args,
        {"name": target.name, "numbers": data},
        f"{_title(target)}\n\n{numbers_text(known, terminal_width())}",
    )
    return 0


def _new(args: argparse.Namespace) -> int:
    if args.new is None or args.like is None or args.device is not None:
        raise ConfigError(
            "--new FILE and --like DEVICE belong together, and to no other device: `twin hardware "
            "--new my-gpu.yaml --like h200-sxm`"
        )
    if args.new.exists():
        raise ConfigError(f"--new {shown_text(args.new)}: is there already; choose another name")
    write({args.new: template(args.new, args.like, args.changes)})
    try:
        device, family = own_device(args.new)  # what was written can be read
    except HardwareError:
        args.new.unlink()
        raise
    note = (
        f"{args.new}: {device.name}, like {args.like} but for {len(args.changes)} numbers\nedit "
        f"it, then: twin hardware {args.new}; twin simulate llama-3.1-8b {args.new}"
    )
    emit(args, {"file": str(args.new), "name": device.name, "gpus": list(family.links)}, note)
    return 0


def find(name: str) -> Device | Node:
    """A node where the name says how many ("8xh200"), else a device; with its fit where there is
    one.
    """
    if name.endswith(FILES):
        node = calibrated_node(name)
        return node if name[:1].isdigit() and not Path(name).exists() else node.device
    if counted(name)[0] is not None:
        return calibrated_node(name)
    return calibrated_node(f"1x{load_device(name).name}").device


def _list(args: argparse.Namespace) -> int:
    nodes = node_names()
    devices = [load_device(name) for name in device_names()]
    binary = binary_bytes(d.memory.capacity_bytes.value for d in devices)
    rows = [
        (
            d.name,
            d.title,
            d.blocks,
            format_quantity(d.memory.capacity_bytes.value, "B", binary=binary),
            format_quantity(ceiling(d).value, "B/s"),
            d.isa or "twin only",
            " ".join(n.split("x", 1)[0] for n in nodes if n.split("x", 1)[1] == d.name),
        )
        for d in devices
    ]
    text = table(
        ("device", "title", "blocks", "memory", "ceiling", "engine", "GPUs a node"),
        rows,
        text_columns=2,
    )
    listed = [{"name": d.name, "title": d.title, "blocks": d.blocks, "isa": d.isa} for d in devices]
    machines = [load_machine(name) for name in machine_names()]
    of_machines = table(("machine", "title"), [(m.name, m.title) for m in machines], text_columns=2)
    data = {
        "devices": listed,
        "nodes": nodes,
        "machines": [{"name": m.name, "title": m.title} for m in machines],
    }
    emit(
        args,
        data,
        f"{text}\n\nA node is a count and a device: 8x{devices[-1].name}\n\n{of_machines}",
    )
    return 0


def _title(target: Device | Node) -> str:
    if isinstance(target, Device):
        return target.title
    return f"{target.gpus} x {target.device.title}"
