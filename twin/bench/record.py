"""A benchmark on disk: calibration/runs/<device>/<date>-<model>-<context>/, written once and never
touched again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twin import files
from twin.bench import fidelity
from twin.bench.fidelity import Judged
from twin.bench.timing import Sample
from twin.errors import CalibrationError, ConfigError, OutputError

RESULT, SAMPLES, FIDELITY = "result.json", "samples.csv", "fidelity.csv"
# what every result.json holds; what else it holds is explained in calibration/runs/README.md
FIELDS: dict[str, type] = {
    "model": str,
    "node": str,
    "context": int,  # positions in the cache before the first timed step
    "tokens_per_s": float,
    "us_per_token": float,  # median over the repetitions of their mean step
    "bytes_per_step": int,  # weights and cached keys and values, mean of the timed steps
    "ceiling_bytes_per_s": float,  # the stream probe, measured in the same rounds
    "stream_fraction": float,  # bytes_per_step / time over the ceiling
    "mbu": float,  # the same over the datasheet's bandwidth
    "fidelity": dict,
    "clocks": dict,
    "driver": str,
    "commit": str,
}


def write(
    parent: Path, result: dict[str, Any], samples: Sequence[Sample], judged: Sequence[Judged]
) -> Path:
    """Store a checked result under a new folder of `parent`. Raises CalibrationError."""
    check(result)
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S")
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', result['model'])}-{result['context']}"
    contents = {
        RESULT: json.dumps(result, indent=1, allow_nan=False) + "\n",
        SAMPLES: files.csv_text(("variant", "repeat", "step", "ns"), _step_rows(samples)),
    }
    if judged:
        header = ("prompt", "position", *(field.name for field in fields(Judged)))
        contents[FIDELITY] = files.csv_text(
            header, (row for prompt, one in enumerate(judged) for row in fidelity.rows(one, prompt))
        )
    folder = parent
    try:
        folder = files.new_folder(parent, stamp, name)
        files.write({folder / file: text for file, text in contents.items()})
    except (OSError, OutputError) as error:
        if folder != parent:
            with suppress(OSError):
                folder.rmdir()  # it is empty
        raise CalibrationError(
            f"{folder}: cannot be written ({error}); give another folder with --out"
        ) from error
    return folder


def read(folder: Path) -> dict[str, Any]:
    """A stored result, checked. Raises CalibrationError."""
    try:
        result = files.read_json(folder / RESULT, files.MOST_RECORD_BYTES)
    except ConfigError as error:
        raise CalibrationError(
            f"{folder / RESULT}: cannot be read as JSON ({error}); give the folder of a `twin "
            "bench` record"
        ) from error
    if not isinstance(result, dict):
        raise CalibrationError(
            f"{folder / RESULT}: the top level must be a mapping, not {type(result).__name__}"
        )
    check(result)
    return result


def check(result: dict[str, Any]) -> None:
    """Every field is there, of its type, and a number is finite and positive. Raises
    CalibrationError.
    """
    for name, kind in FIELDS.items():
        if name not in result:
            raise CalibrationError(f"a result without {name}; needed: {', '.join(FIELDS)}")
        value = result[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CalibrationError(
                f"{name}: {value!r} is a {type(value).__name__}, expected {kind.__name__}"
            )
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value > 0):
            raise CalibrationError(f"{name}: {value!r} must be finite and positive")


def _step_rows(samples: Iterable[Sample]) -> Iterable[tuple[object, ...]]:
    for sample in samples:
        yield from (
            (sample.variant, sample.repeat, step, int(ns))
            for step, ns in enumerate(sample.steps.ns)
        )
