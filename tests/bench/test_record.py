"""The record's format, and that its description names the same fields."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twin.bench import fidelity, record
from twin.bench.timing import Sample, Steps
from twin.calibrate.packed import names, unpacked
from twin.errors import CalibrationError

FIELDS = list(record.Fields.__dataclass_fields__)
RUNS = Path(__file__).resolve().parents[2] / "calibration" / "runs"
RESULT: dict[str, Any] = {
    "model": "a model/1",
    "node": "1xh200-sxm",
    "context": 32,
    "tokens_per_s": 1000.0,
    "us_per_token": 1000.0,
    "bytes_per_step": 4_000_000_000,
    "ceiling_bytes_per_s": 4.6e12,
    "stream_fraction": 0.87,
    "mbu": 0.83,
    "fidelity": {},
    "clocks": {},
    "driver": "580.1",
    "commit": "abc-dirty",
}
SAMPLES = [
    Sample("resident", 0, Steps(np.array([10, 11], np.int64))),
    Sample("graph", 0, Steps(np.array([20, 21], np.int64))),
]


def test_a_record_reads_back_and_keeps_every_sample(tmp_path: Path) -> None:
    logits = np.array([[1.0, 0.0]], np.float32)
    folder = record.write(
        tmp_path, RESULT, SAMPLES, [fidelity.judge(logits, logits, logits, [0])] * 2
    )
    assert folder.name.endswith("-a-model-1-32")
    assert record.read(folder) == RESULT
    rows = list(csv.DictReader((folder / record.SAMPLES).open()))
    assert [(r["variant"], r["repeat"], r["step"], r["ns"]) for r in rows] == [
        ("resident", "0", "0", "10"),
        ("resident", "0", "1", "11"),
        ("graph", "0", "0", "20"),
        ("graph", "0", "1", "21"),
    ]
    judged = list(csv.DictReader((folder / record.FIDELITY).open()))
    assert [(r["prompt"], r["position"], r["chosen"]) for r in judged] == [
        ("0", "0", "0"),
        ("1", "0", "0"),
    ]


def test_records_of_one_second_are_kept_each(tmp_path: Path) -> None:
    made = [record.write(tmp_path, RESULT | {"context": 7}, SAMPLES, []) for _ in range(3)]
    assert len({*made}) == 3
    assert all(record.read(one) == RESULT | {"context": 7} for one in made)
    assert all(one.name.endswith("-7") for one in made)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_needed(name: str, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=f"{name}: missing"):
        record.write(
            tmp_path, {key: value for key, value in RESULT.items() if key != name}, SAMPLES, []
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mbu", math.nan),
        ("tokens_per_s", 0.0),
        ("context", True),
        ("driver", 580),
        ("bytes_per_step", 1.5),
    ],
)
def test_wrong_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(CalibrationError, match=name):
        record.check(RESULT | {name: value})


def test_the_description_lists_the_fields() -> None:
    text = (RUNS / "README.md").read_text()
    own = text[text.index("## Benchmarks") :]
    listed = [line.split("`")[1] for line in own.splitlines() if line.startswith("| `")]
    assert listed == FIELDS


def test_stored_results_keep_the_format() -> None:
    stored = [unpacked(runs / name) for runs in RUNS.glob("*/") for name in names(runs)]
    results = [folder for folder in stored if (folder / record.RESULT).is_file()]
    assert results
    for folder in results:
        record.read(folder)


def test_a_folder_without_a_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="cannot be read"):
        record.read(tmp_path)
