"""Rows of results as Parquet files, by Arrow. Errors are Arrow's own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import LocalFileSystem

Failure = pa.ArrowException
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("problem", pa.string()),
        ("step_s", pa.float64()),
        ("floor_s", pa.float64()),
        ("bytes_per_step", pa.int64()),
        ("stream_bytes_per_s", pa.float64()),
        ("peak_bytes_per_s", pa.float64()),
        ("attribution", pa.string()),
        ("kinds", pa.string()),
        ("assumed", pa.string()),
        ("step_times_s", pa.string()),
        ("tokens_per_step", pa.float64()),
        ("draft_s", pa.float64()),
        ("sequences", pa.int64()),
        ("why_simpy", pa.string()),
        ("wall_s", pa.float64()),
        # For readers of the files; the key says the same.
        ("code", pa.string()),
        ("model", pa.string()),
        ("node", pa.string()),
        ("options", pa.string()),
        ("settings", pa.string()),
        ("steps", pa.int64()),
    ]
)


def read(folder: Path, keys: Collection[str], columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of all files of an absolute path whose `key` is one of `keys`."""
    files = ds.dataset(str(folder), format="parquet", schema=SCHEMA, filesystem=LocalFileSystem())
    table = files.to_table(columns=list(columns), filter=ds.field("key").isin(sorted(keys)))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def write(rows: Sequence[dict[str, Any]], file: IO[bytes]) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), file)


def count(file: Path) -> int:
    """Its rows."""
    return int(pq.read_metadata(file).num_rows)
