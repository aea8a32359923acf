"""`twin validate NODE --from RECORD`, where the record holds figures that others published."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twin.calibrate import store
from twin.calibrate.published import Figure, Role, is_published, role_of
from twin.commands.output import done, emit, progress
from twin.errors import CalibrationError, ConfigError
from twin.hardware.load import load_node
from twin.report.tables import percent, table


def chosen(folder: Path | None) -> bool:
    """Is this a folder of published figures? A folder that is no run is the caller's to refuse."""
    try:
        return folder is not None and is_published(store.read_run(folder).meta)
    except CalibrationError:
        return (
            folder is not None
            and (folder / "meta.yaml").is_file()
            and not (folder / store.SAMPLES).is_file()
        )


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError for options that measure, CalibrationError for another node's record."""
    others = {"--report": args.report, "--again": args.again, "--out": args.out}
    if wrong := [name for name, value in others.items() if value]:
        raise ConfigError(f"{wrong[0]} does not go with published figures: leave it out")
    node, record = load_node(args.node), store.read_run(args.measured)
    if store.measured_on(record.meta) != store.name_of(node.name):
        raise CalibrationError(
            f"{args.measured} holds figures of {store.measured_on(record.meta)}, not of "
            f"{store.name_of(node.name)}: name that node, or another folder"
        )
    from twin.calibrate.published_plans import compared  # the simulator: only where it is needed

    try:
        found = compared(record, progress())
    finally:
        done()
    role = role_of(record.folder, record.meta)
    emit(args, to_json(node.name, record.id, role, found), text(record.id, role, found))
    return 0


def to_json(node: str, record: str, role: Role, found: Sequence[Figure]) -> dict[str, Any]:
    rows = [
        {
            "name": one.name,
            "node": one.node,
            "publication": one.publication,
            "date": one.date,
            "published": list(one.values),
            "unit": one.unit,
            "predicted": one.predicted,
            "error": one.error,
        }
        for one in found
    ]
    return {"node": node, "record": record, "role": role.value, "figures": rows}


def text(record: str, role: Role, found: Sequence[Figure]) -> str:
    rows = [
        (
            one.name,
            one.node,
            one.publication,
            one.shown(),
            f"{one.predicted:,.4g}",
            "inside" if one.inside else percent(one.error, signed=True),
        )
        for one in found
    ]
    middle = statistics.median(abs(one.error) for one in found)
    worst = max((one.error for one in found), key=abs)
    return (
        f"{record}: {'inputs of a fit' if role is Role.INPUT else 'held out of every fit'}\n\n"
        + table(("figure", "node", "published by", "published", "predicted", "error"), rows)
        + f"\n\nmedian error of the speed {percent(middle)}, worst {percent(worst, signed=True)}; "
        "above 0 the twin is too fast"
    )
