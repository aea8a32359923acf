"""`twin calibrate`: ask the device each probe's question and fit the twin's numbers to the answers."""

from __future__ import annotations

import argparse
from typing import Any

from twin.calibrate import store
from twin.calibrate.fit import Fit, fit_device
from twin.calibrate.measure import probe_host
from twin.calibrate.probes import host_probes
from twin.commands.arguments import Subparsers, command
from twin.commands.output import done, emit, progress, warn_if_busy
from twin.errors import CalibrationError
from twin.hardware.load import load_device, load_node
from twin.hardware.override import numbers
from twin.hardware.types import Device
from twin.plan.defaults import limits_of
from twin.report.tables import percent, table
from twin.units import format_quantity, unit_of

EXAMPLES = """\
  twin calibrate host            probe and fit this computer's CPU (some minutes)
  twin calibrate host --quick    fewer samples: enough for a first look"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "calibrate", run, usage="DEVICE [--quick] [--json]", summary="measure a device with probes and fit the twin to them",
        text="Each probe asks one question (stream bandwidth, hand-off, attention, launch ...) and is itself a plan that the twin\n"
        "can run. Fitting makes simulated probes take as long as measured ones. Engine runs are never fitted:\n"
        "`twin validate` predicts them. The fit is stored and used by all commands from then on.", examples=EXAMPLES,
    )  # fmt: skip
    parser.add_argument("device", metavar="DEVICE", help="the device to measure; it must be in this computer")
    parser.add_argument("--quick", action="store_true", help="every question, fewer samples")


def run(args: argparse.Namespace) -> int:
    device = load_device(args.device)
    _refuse_absent(device)
    warn_if_busy()
    fit = calibrate_host(quick=args.quick)
    emit(args, to_json(device, fit), text(device, fit))
    return 0


def _refuse_absent(device: Device) -> None:
    if device.isa != "host":
        raise CalibrationError(f"{device.name}: its probes need that GPU, and here they are built for host; use `twin calibrate host`")


def to_json(device: Device, fit: Fit) -> dict[str, Any]:
    fitted = {path: {"value": n.value, "low": n.low, "high": n.high} for path, n in fit.numbers.items()}
    return {"device": device.name, "run": fit.run, "numbers": fitted, "residuals": fit.residuals}


def text(device: Device, fit: Fit) -> str:
    before = numbers(device)
    rows = []
    for path, number in fit.numbers.items():
        unit = unit_of(path.rsplit(".", 1)[-1])
        low, high = (format_quantity(end if end is not None else number.value, unit) for end in (number.low, number.high))
        rows.append((path, format_quantity(before[path].value, unit), format_quantity(number.value, unit), f"{low} .. {high}"))
    name, error = fit.worst
    head = f"fit of {device.title} to {len(fit.residuals)} probes, run {fit.run}"
    foot = f"worst probe: {name}, simulated / measured off by {percent(abs(error))}; next: twin validate {device.name}"
    return f"{head}\n\n{table(('number', 'before', 'fitted', 'interval'), rows)}\n\n{foot}"


def calibrate_host(*, quick: bool) -> Fit:
    """Probe this computer and store the fit, with progress on stderr."""
    node = load_node("1xhost")
    show = progress()
    try:
        run = probe_host(show, quick=quick)
        probes = host_probes(limits_of(node), node.device.blocks, quick=quick)
        fit = fit_device(node.device, probes, run, show)
    finally:
        done()
    store.write_fit(node.device.name, fit.numbers, {**store.conditions(), "run": fit.run, "residuals": fit.residuals})
    return fit
