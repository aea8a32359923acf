"""Two options, no new code: splits of the attention, and smaller ring slots; see README.md.

python studies/h200-slots-and-splits/run.py predict predictions.json
python studies/h200-slots-and-splits/run.py measure measured.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "h200-first-run"))

from first_run import H200, TOKENS, Case, build_all, fitted, measure_model, row

from twin.models.load import load_model
from twin.models.spec import DType
from twin.plan.build import build
from twin.plan.types import CollectiveKind, Options, Plan

PROMPT = 32


def plan(name: str, *, blocks: int, slot_bytes: int, splits: int | None, rows: int = 8) -> Plan:
    spec = load_model(name)
    dtype = DType.FP16 if spec.lanes else DType.BF16
    context = PROMPT + TOKENS // 2

    def make(**ring: int) -> Plan:
        options = Options(
            blocks=blocks, weight_dtype=dtype, kv_dtype=dtype, context=context, max_context=context + 512, attention_splits=splits,
            tile_rows=rows, collective=CollectiveKind.PUSH if spec.lanes else CollectiveKind.NONE, **ring,
        )  # fmt: skip
        return build(spec, options, H200)

    return fitted(make, slot_bytes)


def cases() -> Iterator[Case]:
    for splits, slot, rows in ((1, 16384, 8), (2, 16384, 8), (4, 16384, 8), (16, 16384, 8), (2, 8192, 8), (2, 4096, 8), (2, 8192, 4)):
        made = plan("llama-3.2-1b", blocks=132, slot_bytes=slot, splits=splits, rows=rows)
        yield Case("model", f"llama-3.2-1b, {splits} splits, {rows} rows", made, PROMPT)
    for splits, slot in ((2, 16384), (2, 8192), (2, 4096)):
        yield Case("model", f"laneformer-2b, {splits} splits", plan("laneformer-2b", blocks=128, slot_bytes=slot, splits=splits), PROMPT)


def predict(path: Path) -> None:
    from twin.hardware.load import load_node
    from twin.sim.run import simulate

    node = load_node("1xh200")
    rows = {case.name: simulate(case.plan, node).step_s for case in cases()}
    path.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


def measure(path: Path) -> None:
    chosen = list(cases())
    build_all([case.plan for case in chosen], [])
    done: dict[str, Any] = {}
    for case in chosen:
        made = measure_model(case)
        done[case.name] = {key: made[key] for key in ("step_s", "medians_s", "p5_s", "p95_s", "same_tokens")}
        print(row(case, made), made["same_tokens"], flush=True)
        path.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    verb, path = sys.argv[1:]
    (predict if verb == "predict" else measure)(Path(path))
