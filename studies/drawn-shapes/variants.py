"""Four of the drawn shapes as other families and in other types, timed on an H200 of this computer:
`python studies/drawn-shapes/variants.py`. Needs no simulator.

Writes variants.csv beside itself.
"""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

from twin.calibrate import shape_record
from twin.calibrate.heldout import HeldOut
from twin.calibrate.node import calibrated_node
from twin.engine.choose import compile_all
from twin.engine.cuda_build import compile_cubin
from twin.hardware.types import Node
from twin.models.spec import DType

FILE = Path(__file__).resolve().parent / "variants.csv"
FIELDS = ("shape", "family", "dtype", "spill_bytes", "stack_bytes", "first_s", "second_s")
SHAPES, SEED = 24, 58213
SHOWN = ("10", "11", "21", "22")  # those that the twin predicted worst; two contexts, one here
Key = tuple[str, str, str]  # shape, family, type


def variants(node: Node) -> dict[Key, HeldOut]:
    """The short runs of the shapes: with and without norms of queries and keys, in both types."""
    record = shape_record.read(node, shape_record.folder_of(node, SHAPES, SEED))
    drawn = {run.name: run for run in record.runs}
    found = {}
    for shape in SHOWN:
        run = drawn[f"s{SEED}-{shape}-short"]
        for family in ("qwen3", "llama"):
            for dtype in (DType.FP16, DType.BF16):
                found[shape, family, dtype.value] = _variant(run, family, dtype)
    return found


def _variant(run: HeldOut, family: str, dtype: DType) -> HeldOut:
    spec = dataclasses.replace(
        run.spec, family=family, qk_norm=family == "qwen3", qkv_bias=False, dtype=dtype
    )
    options = dataclasses.replace(run.options, weight_dtype=dtype, kv_dtype=dtype)
    return dataclasses.replace(run, spec=spec, options=options)


def main() -> None:
    node = calibrated_node("1xh200")
    runs = variants(node)
    plans = {key: run.plan(node.device.name) for key, run in runs.items()}
    compile_all(node.device, list(plans.values()), print)
    rows = []
    for key, run in runs.items():
        report = compile_cubin(plans[key])
        took = (f"{s:.9g}" for s in shape_record.timed(node, run, plans[key]))
        rows.append((*key, report.spill_bytes, report.stack_bytes, *took))
        print(*rows[-1], flush=True)
    with FILE.open("w", newline="", encoding="utf-8") as table:
        csv.writer(table, lineterminator="\n").writerows([FIELDS, *rows])


if __name__ == "__main__":
    main()
