"""A benchmark on disk: calibration/runs/<device>/<date>-<model>-<context>/, written once and never
touched again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from twin import files, reading
from twin.bench import fidelity
from twin.bench.fidelity import Judged
from twin.bench.timing import Sample
from twin.errors import CalibrationError, ConfigError, OutputError

RESULT, SAMPLES, FIDELITY = "result.json", "samples.csv", "fidelity.csv"
Amount = Annotated[float, Meta(gt=0, le=1e18)]


@dataclass(frozen=True, slots=True)
class Fields:
    """What every result.json holds; calibration/runs/README.md explains what else it holds."""

    model: str
    node: str
    context: Annotated[int, Meta(ge=1)]  # positions in the cache before the first timed step
    tokens_per_s: Amount
    us_per_token: Amount  # median over the repetitions of their mean step
    # weights and cached keys and values, mean of the timed steps
    bytes_per_step: Annotated[int, Meta(ge=1)]
    ceiling_bytes_per_s: Amount  # the stream probe, measured in the same rounds
    stream_fraction: Amount  # bytes_per_step / time over the ceiling
    mbu: Amount  # the same over the datasheet's bandwidth
    fidelity: dict[str, Any]
    clocks: dict[str, Any]
    driver: str
    commit: str


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
    check(result, folder / RESULT)
    found: dict[str, Any] = result
    return found


def check(result: Any, file: Path | str = "result") -> None:
    """Every field is there, of its type, and a number is finite and positive. Raises
    CalibrationError.
    """
    reading.read(result, Fields, file, refusal=CalibrationError, others=True)


def _step_rows(samples: Iterable[Sample]) -> Iterable[tuple[object, ...]]:
    for sample in samples:
        yield from (
            (sample.variant, sample.repeat, step, int(ns))
            for step, ns in enumerate(sample.steps.ns)
        )
