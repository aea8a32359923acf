"""Our engine and ordinary ones on the same node, one request at a time: prompt, speed, energy,
cost.
"""

from __future__ import annotations

import csv
from dataclasses import asdict
from functools import lru_cache
from statistics import median, quantiles
from typing import Any

from twin.batching.costs import Load
from twin.batching.prices import Rates
from twin.batching.step import predict
from twin.batching.tables import devices_with_tables, load_tables, stack_names
from twin.data import data_dir
from twin.errors import TwinError
from twin.frozen import frozen
from twin.hardware.types import Node
from twin.models.spec import ModelSpec

OURS = "MonoTwin"
SERVERS = ("graph-engines", "results", "held-out-servers.csv")
ERROR = "error of time"


@frozen
class Compared:
    """One engine's row. `low` and `high`: eight of ten, if it is as wrong as where it was checked;
    None: nobody checked, or there is no such number.
    """

    engine: str
    tokens_per_s: float
    low: float | None
    high: float | None
    prompt_s: float | None
    kwh_per_million: float | None
    usd_per_million: float | None

    def json(self) -> dict[str, Any]:
        return asdict(self)


@frozen
class Comparison:
    rows: tuple[Compared, ...]
    missing: tuple[str, ...]  # why an ordinary engine is not among them
    rates: Rates

    def json(self) -> dict[str, Any]:
        rests = {
            name: {"value": n.value, "kind": n.kind.value, "source": n.source}
            for name, n in self.rates.known().items()
        }
        return {
            "engines": [row.json() for row in self.rows],
            "missing": list(self.missing),
            "rests_on": rests,
        }


def compared(
    spec: ModelSpec,
    node: Node,
    context: int,
    tokens_per_s: float,
    rates: Rates,
    *,
    sequences: int = 1,
    interval: tuple[float, float] | None = None,
    prompt_s: float | None = None,
    others: bool = True,
) -> Comparison:
    """`tokens_per_s` (of one of the `sequences`), `interval` and `prompt_s` are ours. Prompts of
    ordinary engines are nobody's prediction: no kernels for them were tabulated. `others`: are
    there any with the weights that ours reads?
    """

    def row(
        engine: str, speed: float, ends: tuple[float, float] | None, prompt: float | None
    ) -> Compared:
        low, high = ends or (None, None)
        kwh = rates.kwh_per_million(node, sequences * speed)
        usd = rates.usd_per_million(node, sequences * speed)
        return Compared(engine, speed, low, high, prompt, kwh, usd)

    rows = [row(OURS, tokens_per_s, interval, prompt_s)]
    missing = []
    tabulated = others and node.device.name in devices_with_tables()
    for stack in stack_names() if tabulated else ():
        title = load_tables(node.device.name, stack).stack.title
        try:
            step = predict(spec, node, stack, Load(sequences=sequences, context=context))
        except TwinError as error:
            missing.append(f"{title}: {error}")
            continue
        low, high = (step.tokens_per_s() * end for end in spread())
        rows.append(row(title, step.tokens_per_s(), (low, high), None))
    return Comparison(tuple(rows), tuple(missing), rates)


@lru_cache(maxsize=1)
def server_errors() -> tuple[float, ...]:
    """Of the predicted step times of servers that were measured end to end, as the study of them
    keeps them.
    """
    path = data_dir("studies").joinpath(*SERVERS)
    with path.open(encoding="utf-8", newline="") as lines:
        return tuple(float(row[ERROR]) for row in csv.DictReader(lines) if row[ERROR])


def spread() -> tuple[float, float]:
    """10th and 90th percentile of measured over predicted speed of these servers."""
    low, *_, high = quantiles([1 + error for error in server_errors()], n=10, method="inclusive")
    return low, high


def checked() -> str:
    """How wrong predictions of ordinary engines were, in a sentence."""
    errors = server_errors()
    return (
        f"ordinary engines: their own kernels added up, {100 * median(map(abs, errors)):.1f}% off "
        f"in the median over {len(errors)} measured servers (studies/graph-engines); nobody's "
        "prompt is read meanwhile"
    )
