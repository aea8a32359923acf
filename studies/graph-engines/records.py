"""Published step times of ordinary engines, as the CSV files of a study list them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import median, quantiles

from twin.batching.costs import Load
from twin.batching.step import IDEAL, Step, predict
from twin.batching.tables import stack_names
from twin.errors import ConfigError, HardwareError, TwinError
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.models.spec import ModelSpec
from twin.text import shown

COLUMNS = (
    "model",
    "node",
    "stack",
    "weights",
    "kv",
    "sequences",
    "context",
    "prompt",  # tokens of each other user's, and of the answers; 0: nobody's was read meanwhile
    "answer",
    "ms",
    "source",
)
OTHER = "other"  # an engine whose kernels nobody tabulated
MS = 1e-3
Group = tuple[str, str, str]
LONGEST_S = 3600.0  # of a step
FEWEST = 10  # records from which a spread is taken


@dataclass(frozen=True)
class Record:
    """Somebody's time of a decode step, and our predictions of it."""

    model: str
    node: str
    stack: str
    weights: str
    load: Load
    seconds: float
    source: str

    @cached_property
    def spec(self) -> ModelSpec:
        return load_model(self.model)

    @cached_property
    def on(self) -> Node:
        return load_node(self.node)

    @cached_property
    def predicted(self) -> Step | None:
        """By the stack's own kernels; None where no such kernels were measured."""
        return self._with(self.stack)

    @cached_property
    def ideal(self) -> Step | None:
        """By kernels without loss."""
        return self._with(IDEAL)

    @property
    def group(self) -> Group:
        """What its error is one of."""
        return self.model, self.stack, self.on.device.name

    @property
    def error(self) -> float | None:
        """Predicted over published time, less 1."""
        return None if self.predicted is None else self.predicted.served_s / self.seconds - 1

    def _with(self, stack: str) -> Step | None:
        if stack == OTHER:
            return None
        try:
            return predict(self.spec, self.on, stack, self.load, self.weights)
        except HardwareError:
            return None


def read_records(file: Path) -> list[Record]:
    """The lines of a CSV file with COLUMNS; `ms` is the time of a step. Raises ConfigError with
    file, line and reason.
    """
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ConfigError(
                    f"{shown(file)}: the columns are {shown(reader.fieldnames)}; write "
                    f"{', '.join(COLUMNS)}"
                )
            return [_record(line, f"{shown(file)}: line {reader.line_num}") for line in reader]
    except OSError as error:
        raise ConfigError(
            f"{shown(file)}: cannot be read ({error.strerror}); check the path"
        ) from error
    except (csv.Error, ValueError) as error:
        raise ConfigError(
            f"{shown(file)}: not a CSV file in UTF-8 ({error}); write one with the columns "
            f"{', '.join(COLUMNS)}"
        ) from error


def _record(line: dict[str, str], where: str) -> Record:
    try:
        load = Load(
            sequences=int(line["sequences"]),
            context=int(line["context"]),
            kv=line["kv"],
            prompt=int(line["prompt"]),
            answer=int(line["answer"]),
        )
        record = Record(
            line["model"],
            line["node"],
            line["stack"],
            line["weights"],
            load,
            float(line["ms"]) * MS,
            line["source"],
        )
        stacks = (*stack_names(), OTHER)
        if not 0 < record.seconds <= LONGEST_S or record.stack not in stacks:
            limits = (
                f"must be positive and at most {LONGEST_S / MS:g}, and stack {shown(record.stack)} "
                f"one of {', '.join(stacks)}"
            )
            raise ConfigError(f"ms {line['ms'][:20]} {limits}")
        _ = record.spec, record.on
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{where}: {error}; sequences, context, prompt, answer and ms are numbers"
        ) from error
    except TwinError as error:
        raise ConfigError(f"{where}: {error}") from error
    return record


@dataclass(frozen=True, slots=True)
class Errors:
    """How far predictions are from what was published."""

    count: int
    median: float  # signed: above 0 is predicted too slow
    median_size: float
    worst: float  # signed


def held_by_others(records: list[Record]) -> float | None:
    """The share of predicted records inside the spread of those of other models, engines and
    devices; None where there are too few.
    """
    known = [record for record in records if record.error is not None]
    held = []
    for record in known:
        spread = _spread_without(tuple(known), record.group)
        if spread is None:
            return None
        assert record.error is not None
        held.append(spread[0] <= 1 + record.error <= spread[1])
    return sum(held) / len(held) if held else None


@lru_cache(maxsize=256)
def _spread_without(records: tuple[Record, ...], group: Group) -> tuple[float, float] | None:
    return spread_of([record for record in records if record.group != group])


def spread_of(records: list[Record]) -> tuple[float, float] | None:
    """10th and 90th percentile of published over predicted speed; None with fewer than FEWEST
    predicted records.
    """
    factors = [1 + record.error for record in records if record.error is not None]
    if len(factors) < FEWEST:
        return None
    low, *_, high = quantiles(factors, n=10, method="inclusive")
    return low, high


def errors_of(records: list[Record]) -> Errors | None:
    """Over the records that could be predicted; None if there is none."""
    errors = [record.error for record in records if record.error is not None]
    if not errors:
        return None
    return Errors(len(errors), median(errors), median(map(abs, errors)), max(errors, key=abs))
