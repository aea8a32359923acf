"""Rows of rows.csv, and of prompts in ../prompts/carried.csv: predicted, then measured on this
computer's H200.

    python -m studies.hybrids.measure predict MODEL...    before a model's first run
    python -m studies.hybrids.measure compile MODEL...    kernels, into the cache
    python -m studies.hybrids.measure run FILE MODEL...   on the GPU
    python -m studies.hybrids.measure record FILE

MODEL may end in :32 or :4096, one of a model's two rows. A small model of the same layers is
compared with the reference first, and its runs with each other; the whole one then makes TOKENS
tokens, with random weights. Prompts are read once in every run, in passes where a plan has them.
"""

from __future__ import annotations

import csv
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.common.rows import (
    CHECK,
    Ready,
    alike,
    checked,
    cut,
    first_tokens,
    keep,
    repeated,
    rows_in_turn,
    step_ns,
)
from twin.calibrate.node import calibrated_node
from twin.engine.choose import compile_all, gpu_conditions
from twin.errors import TwinError
from twin.files import MOST_RECORD_BYTES, read_json, write
from twin.models.load import load_model
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.options import plan_for

NODE = "1xh200-sxm"
HERE = Path(__file__).resolve().parent
TABLE, PROMPTS = HERE / "rows.csv", HERE.parent / "prompts" / "carried.csv"
AFTER = (32, 4096)  # prompt tokens
TOKENS, WARM_UP = 128, 8
CHECKED = 6  # positions of which the reference's logits are computed
AHEAD = min(4, max(1, (os.cpu_count() or 1) // 4))  # small models that the host prepares meanwhile


def wanted(names: Sequence[str]) -> list[tuple[str, int]]:
    """Model and prompt of each row."""
    found = []
    for name in names:
        model, _, after = name.partition(":")
        found += [(model, int(after))] if after else [(model, each) for each in AFTER]
    return found


def plan_of(model: str, after: int) -> Plan:
    return plan_for(
        load_model(model),
        calibrated_node(NODE),
        context=after + TOKENS // 2,
        max_context=after + 2 * TOKENS,
    )


def plans_of(model: str, after: int) -> dict[str, Plan]:
    whole = plan_of(model, after)
    assert whole.spec is not None
    small = plan_for(cut(whole.spec), calibrated_node(NODE), context=64, max_context=256)
    made = {CHECK: small, "whole": whole}
    for plan in made.values():
        prove(plan)
    return made


# ---- before a run --------------------------------------------------------------------------------


def predict(rows: Sequence[tuple[str, int]]) -> None:
    import twin

    lines = _lines(TABLE)
    known = {(line["model"], line["after"]) for line in lines}
    for model, after in rows:
        if (model, str(after)) in known:
            raise TwinError(f"{model} after {after}: predicted before; remove it from the names")
        said = twin.simulate(
            model, NODE, context=after + TOKENS // 2, max_context=after + 2 * TOKENS
        )
        assert said.interval is not None
        line = dict.fromkeys(lines[0], "") | {"model": model, "after": str(after)}
        ends = zip(("p10", "p90"), said.interval, strict=True)
        line |= {"predicted": f"{said.tokens_per_s:.4g}"} | {k: f"{v:.4g}" for k, v in ends}
        if after == AFTER[0]:
            line["floor"] = f"{1 / said.result.model_floor_s:.4g}"
        lines.append(line)
        print(line, flush=True)
    _write(TABLE, sorted(lines, key=lambda line: (int(line["after"]), line["model"])))


# ---- on the GPU ----------------------------------------------------------------------------------


def run(file: Path, rows: Sequence[tuple[str, int]]) -> None:
    began = time.monotonic()
    device = calibrated_node(NODE).device
    plans = {f"{model}:{after}": plans_of(model, after) for model, after in rows}
    made: dict[str, Any] = {}
    turns = rows_in_turn(device, plans, checked=CHECKED, ahead=AHEAD, show=lambda said: None)
    for row in turns:
        made[row.name] = _measured(row)
        print(f"{time.monotonic() - began:5.1f} s  {row.name}: {made[row.name]}", flush=True)
        keep(file, {"node": NODE, "conditions": gpu_conditions(), "rows": made})


def _measured(row: Ready) -> dict[str, Any]:
    device = calibrated_node(NODE).device
    found: dict[str, Any] = {"refused": dict(row.refused)} if row.refused else {}
    try:
        if CHECK not in row.refused:
            found |= checked(device, row.small.result())
        if "whole" not in row.refused:
            found |= _timed(row.plans["whole"], int(row.name.partition(":")[2]))
    except TwinError as error:
        found["failed"] = str(error)
    return found


def _timed(plan: Plan, after: int) -> dict[str, Any]:
    assert plan.spec is not None
    prompt = first_tokens(plan.spec.vocab, after)
    in_passes = plan.options.prompt_chunk > 1
    _, *runs = repeated(calibrated_node(NODE).device, plan, prompt, TOKENS, reuse=not in_passes)
    steps = [step_ns(one, WARM_UP) / 1e3 for one in runs]
    found: dict[str, Any] = {"step_us": statistics.median(steps), "runs_us": steps}
    found["alike"] = alike(runs)
    if in_passes:
        found["prompts_s"] = [one.prompt_ns * 1e-9 for one in runs]
    return found


# ---- afterwards ----------------------------------------------------------------------------------


def record(file: Path) -> None:
    """Into both tables, where they have a prediction."""
    lines, prompts = _lines(TABLE), _lines(PROMPTS)
    for name, row in read_json(file, MOST_RECORD_BYTES)["rows"].items():
        model, _, after = name.partition(":")
        if "step_us" not in row or not row["alike"] or not row.get("bitwise_equal"):
            print(name, "is not recorded:", row, flush=True)
            continue
        fastest = min(row["prompts_s"]) if "prompts_s" in row else None
        for line in lines:
            if (line["model"], line["after"]) == (model, after):
                line |= {key: str(row[key]) for key in ("step_us", "bitwise_equal")}
                line["logit_difference"] = str(row["logit_difference"])
                line["runs_us"] = " ".join(map(str, row["runs_us"]))
                line["prompt_s"] = str(fastest) if fastest else ""
        for line in prompts:
            if fastest and (line["model"], line["tokens"]) == (model, after):
                line["measured_ms"] = f"{1e3 * fastest:.1f}"
    _write(TABLE, sorted(lines, key=lambda line: (int(line["after"]), line["model"])))
    _write(PROMPTS, prompts)


def _lines(table: Path) -> list[dict[str, str]]:
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _write(table: Path, lines: Sequence[dict[str, str]]) -> None:
    text = [",".join(lines[0])] + [",".join(line.values()) for line in lines]
    write({table: "\n".join(text) + "\n"})


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "record":
        return record(Path(rest[0]))
    if what == "run":
        return run(Path(rest[0]), wanted(rest[1:]))
    if what == "predict":
        return predict(wanted(rest))
    plans = [plan for row in wanted(rest) for plan in plans_of(*row).values()]
    refused = compile_all(calibrated_node(NODE).device, plans, lambda said: None)
    print(refused or "compiled", flush=True)


if __name__ == "__main__":
    main()
