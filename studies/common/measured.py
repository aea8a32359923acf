"""Runs of public models in the studies' newest records, as `calibration/measured.csv` has them:
`python -m studies.common.measured`, in a checkout.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from twin.calibrate.on_record import FILE, Measured
from twin.files import read_json, write
from twin.models.kind import stored_as
from twin.models.load import load_model

STUDIES = Path(__file__).resolve().parents[1]
sys.path += [str(STUDIES / name) for name in ("few-bits", "many-gpus")]
import few_bits  # noqa: E402  of another study
import many_gpus  # noqa: E402

ZOO, FEW_BITS, MANY_GPUS = "zoo", "few-bits", "many-gpus"  # studies
HYBRIDS, PROMPTS = "hybrids", "prompts"
DECODED = 128  # tokens behind the prompt, whose steps the studies time
MOST_BYTES = 2**24  # of a record
AT_ONCE_S = 10.0  # a prompt that took longer went token by token, as passes of that kernel did


def collected(studies: Path) -> list[Measured]:
    """Every run of the studies' newest records."""
    found = [
        *_zoo(studies / ZOO),
        *_few_bits(studies / FEW_BITS),
        *_many_gpus(studies / MANY_GPUS),
        *_hybrids(studies / HYBRIDS),
        *_prompts(studies / PROMPTS),
    ]
    steps = {(r.model, r.stored, r.node, r.context): r for r in found if r.tokens_per_s}
    found = [run for run in found if run.prompt_s] + list(steps.values())  # the newest of each
    return sorted(found, key=lambda run: (run.model, run.stored, run.node, run.context, run.record))


def _zoo(folder: Path) -> Iterator[Measured]:
    for file in sorted(folder.glob("measured-*.json")):
        node = f"1x{file.stem.removeprefix('measured-')}"
        for name, one in _json(file)["shapes"].items():
            if "step_s" in one:
                at = 32 + DECODED // 2
                record = f"studies/{ZOO}/{file.name}"
                yield Measured(name, "bf16", node, at, _three(1 / one["step_s"]), None, record)


def _few_bits(folder: Path) -> Iterator[Measured]:
    names = [row.name for row in few_bits.ROWS]
    for file in sorted(folder.glob("changed-*.json")):
        node = f"1x{file.stem.removeprefix('changed-')}"
        for name, prompts in _json(file)["rows"].items():
            if name not in names:
                continue
            spec, record = few_bits.spec_of(name), f"studies/{FEW_BITS}/{file.name}"
            about = (spec.name.partition("@")[0], stored_as(spec), node)
            for prompt in (32, 4096):
                one = prompts.get(str(prompt), {})
                if "tokens_per_s" in one:
                    speed = _three(one["tokens_per_s"])
                    yield Measured(*about, prompt + DECODED // 2, speed, None, record)
                if 0 < one.get("prompt_s", 0) < AT_ONCE_S:
                    yield Measured(*about, prompt, None, _three(one["prompt_s"]), record)


def _many_gpus(folder: Path) -> Iterator[Measured]:
    newest: dict[tuple[str, str], Measured] = {}
    for file in (*sorted(folder.glob("measured-*.json")), *sorted(folder.glob("changed-*.json"))):
        found = _json(file)
        for row in many_gpus.ROWS:
            speed = found["row"].get(row.name, {}).get("tokens_per_s")
            if not speed or (folder / row.model).is_dir():
                continue
            spec = many_gpus.spec_of(row, folder)
            dtype = row.options.get("weight_dtype", spec.dtype)
            stored = stored_as(spec) if spec.stored else dtype.value
            node = found["machine"]["node"]
            name, record = spec.name.partition("@")[0], f"studies/{MANY_GPUS}/{file.name}"
            newest[name, node] = Measured(
                name, stored, node, row.context, _three(speed), None, record
            )
    yield from newest.values()


def _hybrids(folder: Path) -> Iterator[Measured]:
    file = folder / "rows.csv"
    with file.open(encoding="utf-8", newline="") as table:
        for row in csv.DictReader(table):
            if not row["step_us"]:  # predicted, not run yet
                continue
            stored = stored_as(load_model(row["model"]))
            model, at = row["model"].partition("@")[0], int(row["after"]) + DECODED // 2
            speed, record = _three(1e6 / float(row["step_us"])), f"studies/{HYBRIDS}/{file.name}"
            yield Measured(model, stored, "1xh200-sxm", at, speed, None, record)


def _prompts(folder: Path) -> Iterator[Measured]:
    for name, column in (
        ("measured", "prompt_ms"),
        ("families", "ms"),
        ("drawn", "ms"),
        ("stored", "ms"),
    ):
        file = folder / f"{name}.csv"
        with file.open(encoding="utf-8", newline="") as table:
            for row in csv.DictReader(table):
                node = f"{row.get('node', '1xh200')}-sxm"
                record, seconds = f"studies/{PROMPTS}/{file.name}", float(row[column]) / 1e3
                model, _, stored = row["model"].partition("@")
                if not stored:
                    stored = "mxfp4" if model.startswith("gpt-oss") else "bf16"
                yield Measured(
                    model, stored, node, int(row["tokens"]), None, _three(seconds), record
                )


def _three(value: float) -> float:
    """To four digits: cards differ by more."""
    return float(f"{value:.4g}")


def _json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(file, MOST_BYTES)
    return found


def text_of(found: list[Measured]) -> str:
    """The file."""
    head = [field.name for field in fields(Measured)]
    lines = [",".join("" if v is None else str(v) for v in asdict(run).values()) for run in found]
    return "\n".join([",".join(head), *lines]) + "\n"


def main() -> None:
    found = collected(STUDIES)
    write({STUDIES.parent / "calibration" / FILE: text_of(found)})
    print(f"{len(found)} runs")


if __name__ == "__main__":
    main()
