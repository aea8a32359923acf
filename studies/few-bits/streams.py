"""How fast is each stored format streamed from memory and multiplied, beside the read ceiling?

python studies/few-bits/streams.py NODE --predict   writes streamed-NODE.json; no GPU
python studies/few-bits/streams.py NODE             on that GPU: adds what was measured

One matrix a step, without hand-offs, on all blocks and with three slots under way: what a format's
decoding leaves of the stream, and nothing else. A step reads thirty times what the second-level
cache holds, or more: of 600 MB each step finds some there. Predictions are written once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from studies.common.shapes import conditions
from twin.calibrate.drawn_kinds import FORMATS
from twin.calibrate.node import calibrated_node
from twin.engine.choose import open_engine
from twin.errors import TwinError
from twin.files import write
from twin.hardware.floor import ceiling
from twin.hardware.types import Node
from twin.models.formats import DECODED
from twin.plan.types import Options, Plan
from twin.proof.prove import prove
from twin.schedule.choose import schedule_of
from twin.schedule.coded_tiles import coded_slot_bytes
from twin.schedule.probe import stream_probe
from twin.schedule.ring import limits_of, slots_under_way

FOLDER = Path(__file__).resolve().parent
COLS = (4096, 12_288)
MB = 10**6
SLOT = 16 << 10
UNDER_WAY_S, FEWEST_UNDER_WAY = 1.35e-6, 3  # of the peak bandwidth; slots
STEPS, WARM_UP, SEED = 40, 10, 1


def file_of(node: Node, folder: Path = FOLDER) -> Path:
    return folder / f"streamed-{node.name}.json"


def plans(node: Node, megabytes: float) -> dict[str, Plan]:
    """By format and columns; of the plan's weight type, BF16, too."""
    made = {}
    for name in ("bf16", *FORMATS):
        for cols in COLS:
            made[f"{name} {cols}"] = plan_of(node, name, cols, megabytes)
    return made


def plan_of(node: Node, name: str, cols: int, megabytes: float) -> Plan:
    """A ring of all that fits, as a model's, and of it what keeps the memory busy under way."""
    form, limits = DECODED.get(name), limits_of(node)
    options = Options(blocks=node.device.blocks, ring_slots=1, window_slots=1)
    if form:
        options = replace(options, slot_bytes=coded_slot_bytes((form,), SLOT))
    row = form.bytes(1, cols) if form else cols * options.weight_dtype.bytes
    rows = int(megabytes * MB / row)
    plan = stream_probe(options, limits, rows=rows, cols=cols, form=form)
    slots = schedule_of(plan).most_slots
    window = min(
        slots, slots_under_way(node.device, options.slot_bytes, UNDER_WAY_S, FEWEST_UNDER_WAY)
    )
    options = replace(options, ring_slots=slots, window_slots=window)
    plan = stream_probe(options, limits, rows=rows, cols=cols, form=form)
    prove(plan)
    return plan


def share(node: Node, plan: Plan, seconds: float) -> float:
    """Of the read ceiling."""
    return plan.weight_bytes() / seconds / ceiling(node.device).value


def predicted(node: Node, megabytes: float) -> dict[str, Any]:
    from twin.sim.run import simulate  # a computer with a GPU may have no simulator

    return {
        name: {"predicted_us": simulate(plan, node).step_s * 1e6}
        for name, plan in plans(node, megabytes).items()
    }


def measured(node: Node, plan: Plan) -> float:
    """Seconds of a step, the median."""
    with open_engine(node.device, plan, None) as engine:
        engine.fill_random(SEED)
        return statistics.median(engine.step_seconds(steps=STEPS, warmup=WARM_UP))


def keep(path: Path, said: Mapping[str, Any]) -> None:
    write({path: json.dumps(said, indent=1) + "\n"})


def table(node: Node, rows: Mapping[str, Mapping[str, float]], megabytes: float) -> str:
    lines = [f"{'format':18} {'columns':>7} {'told, us':>9} {'measured':>9} {'of the ceiling':>15}"]
    made = plans(node, megabytes)
    for name, row in rows.items():
        form, cols = name.split()
        us = row.get("us", row["predicted_us"])
        timed = f"{row['us']:9.1f}" if "us" in row else f"{'':9}"
        part = share(node, made[name], us / 1e6)
        lines.append(f"{form:18} {int(cols):7,} {row['predicted_us']:9.1f} {timed} {part:15.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("node")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument(
        "--megabytes", type=float, default=6000, help="a step, at most (default %(default)s)"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        node = calibrated_node(args.node)
        path = file_of(node, args.folder)
        if args.predict:
            if path.exists():
                raise TwinError(f"{path} is there: predictions are written once; remove it first")
            said = {"asked": args.megabytes, "rows": predicted(node, args.megabytes)}
            keep(path, said)
        else:
            if not path.exists():
                raise TwinError(f"no {path}: predict first, with --predict")
            said = json.loads(path.read_text(encoding="utf-8"))
            for name, plan in plans(node, said["asked"]).items():
                said["rows"][name]["us"] = measured(node, plan) * 1e6
                said["conditions"] = conditions()
                keep(path, said)
                print(name, f"{said['rows'][name]['us']:.1f} us", file=sys.stderr, flush=True)
        print(table(node, said["rows"], said["asked"]))
    except TwinError as reason:
        print(f"streams: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
