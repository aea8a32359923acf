"""Results on disk: a folder of Parquet files, keyed by content. Files are only added, so several
programs may share the folder.

Arrow takes half a second to load, so that only a store that reads or writes files loads it
(twin/study/parquet.py).
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from twin.errors import ConfigError, OutputError
from twin.files import check_folder
from twin.study.point import Point, Row, code_version
from twin.text import shown
from twin.toolchain import cache_dir

VARIABLE = "MONOTWIN_POINTS"
ABANDONED_S = 3600.0  # writing a file takes less than a second
NESTED = ("attribution", "kinds", "assumed", "step_times_s")  # JSON in their column
RESULT = tuple(Row.__dataclass_fields__)


def default_folder() -> Path:
    """MONOTWIN_POINTS, else `points` in the user's cache."""
    chosen = os.environ.get(VARIABLE)
    return Path(chosen) if chosen else cache_dir() / "points"


class Store:
    """One writer: rows are gathered in memory and become a file when `flush` is called, whole or
    not at all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._waiting: list[dict[str, Any]] = []
        try:
            check_folder(self.folder)  # made with the first file: a refusal leaves nothing
        except OutputError as error:
            raise ConfigError(
                f"{error}: results cannot be kept there; name another folder with --store"
            ) from error
        self._remove_abandoned()

    def find(self, keys: Collection[str]) -> dict[str, Row]:
        """The rows that are there, by key."""
        files = self.files() if keys else []
        if not files:
            return {}
        from twin.study import parquet

        found: dict[str, Row] = {}
        for file in files:
            try:
                found |= {row["key"]: _row(row) for row in parquet.read(file, keys, RESULT)}
            except (OSError, parquet.Failure, ValueError, TypeError, KeyError) as error:
                # also other columns than ours, and other values in files of our columns
                raise ConfigError(
                    f"{shown(file, 200)}: its results cannot be read ({error}); remove the file, "
                    "or name another --store"
                ) from error
        return found

    def add(self, point: Point, row: Row) -> None:
        record = asdict(row) | {name: json.dumps(getattr(row, name)) for name in NESTED}
        said = {
            "model": point.model,
            "node": point.node,
            "options": json.dumps(point.options),
            "settings": json.dumps(point.settings),
        }
        self._waiting.append(record | said | {"steps": point.steps, "code": code_version()})

    def flush(self) -> None:
        """Everything added becomes a file: written under a name that no reader takes, then renamed,
        so that nobody sees half of it.
        """
        if not self._waiting:
            return
        from twin.study import parquet

        name = f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:12]}.parquet"
        hidden = self.folder / f".{name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with hidden.open("xb") as file:
                parquet.write(self._waiting, file)
            hidden.rename(self.folder / name)
        except OSError as error:
            raise OutputError(
                f"{shown(self.folder, 200)}: results cannot be kept ({error.strerror or error}); "
                "make room, or name another --store"
            ) from error
        finally:
            hidden.unlink(missing_ok=True)
        self._waiting.clear()

    def _remove_abandoned(self) -> None:
        """What a killed program was writing; another program's is younger."""
        for hidden in self.folder.glob(".*.parquet"):
            with suppress(OSError):
                if time.time() - hidden.stat().st_mtime > ABANDONED_S:
                    hidden.unlink()

    def count(self) -> int:
        """Rows on disk."""
        files = self.files()
        if not files:
            return 0
        from twin.study import parquet

        return sum(parquet.count(file) for file in files)

    def files(self) -> list[Path]:
        """Whole files of results; those that are being written, or were when their program was
        killed, begin with a dot.
        """
        return sorted(
            file for file in self.folder.glob("*.parquet") if not file.name.startswith(".")
        )


def _row(record: dict[str, Any]) -> Row:
    nested = {name: json.loads(record[name]) for name in NESTED}
    return Row(
        **record | nested | {name: tuple(nested[name]) for name in ("assumed", "step_times_s")}
    )
