"""Rows of results as Parquet files, by Arrow. Errors are Arrow's own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

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


def read(file: Path, keys: Collection[str], columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a file whose `key` is one of `keys`.

    Not by Arrow's datasets, whose first use loads pandas: 0.3 s of every study.
    """
    # OSFile: a path would be somebody's home after "~", a computer elsewhere after "s3:"
    with pa.OSFile(str(file)) as source, pq.ParquetFile(source) as rows_on_file:
        if "key" not in rows_on_file.schema_arrow.names:
            return []
        held = rows_on_file.read(columns=["key"]).column("key").to_pylist()
        places = [place for place, key in enumerate(held) if key in keys]
        if not places:
            return []
        table = rows_on_file.read(columns=list(columns)).select(list(columns))
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    rows: list[dict[str, Any]] = table.take(places).cast(schema).to_pylist()
    return rows


def write(rows: Sequence[dict[str, Any]], file: IO[bytes]) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), file)


def write_columns(columns: Mapping[str, Any], file: Path) -> None:
    """Arrays of equal length, by the names of their columns."""
    with pa.OSFile(str(file), "wb") as place:
        pq.write_table(
            pa.table({name: pa.array(values) for name, values in columns.items()}), place
        )


def count(file: Path) -> int:
    """Its rows."""
    return int(pq.read_metadata(file).num_rows)
