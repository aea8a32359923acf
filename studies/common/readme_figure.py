"""The README's picture, from the kept results of a study:
`python -m studies.common.readme_figure > docs/compared.svg`.
"""

from __future__ import annotations

import csv

from studies.common import svg
from twin.batching.tables import load_tables
from twin.data import data_dir
from twin.errors import ConfigError
from twin.hardware.load import load_node
from twin.study.outcome import Bars, Series

RESULTS = ("graph-engines", "results", "one-sequence.csv")
MODEL, NODE = "llama-3.1-8b", "1xh200"
OURS, LOSSLESS = "resident kernel", "kernels without loss"


def chart() -> Bars:
    """Tokens per second of one request: ordinary engines with p10 to p90, and ours. Raises
    ConfigError where the study has no such rows.
    """
    with data_dir("studies").joinpath(*RESULTS).open(encoding="utf-8", newline="") as lines:
        rows = [
            row for row in csv.DictReader(lines) if (row["model"], row["node"]) == (MODEL, NODE)
        ]
    if not rows:
        raise ConfigError(f"{'/'.join(RESULTS)}: no rows of {MODEL} on {NODE}; run `make studies`")
    device = load_node(NODE).device.name
    names = [load_tables(device, row["engine"]).stack.title for row in rows]
    speeds = [float(row["tokens/s"]) for row in rows]
    low, high = ([float(row[end]) for row in rows] for end in ("p10", "p90"))
    alone = [float(rows[0][name]) for name in (LOSSLESS, OURS)]
    return Bars(
        (*names, "a graph of kernels without loss", "MonoTwin, one resident kernel"),
        (Series("predicted", (*speeds, *alone), (*low, None, None), (*high, None, None)),),
        "tokens/s, predicted: Llama-3.1-8B in BF16 on one H200, one request",
    )


if __name__ == "__main__":
    print(svg.figure(chart()), end="")
