"""What the twin says of each row, written before the rows are measured:
`python studies/long-contexts/predict.py` makes predictions.csv.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import twin
from twin.files import csv_text, write

HERE = Path(__file__).resolve().parent
FILE = HERE / "predictions.csv"
NODE = "1xh200-sxm"
TOKENS = 128
# positions that a plan has room for: all rows of a model are of one plan
MODELS = {"llama-3.2-1b": 131_072, "qwen3-8b": 40_960, "gpt-oss-20b": 131_072}
CONTEXTS = (32, 4096, 32_000, 128_000)
CACHES = ("bf16", "fp8")


def rows() -> Iterator[dict[str, Any]]:
    for model, most in MODELS.items():
        for after in (after for after in CONTEXTS if after + TOKENS < most):
            for cache in CACHES:
                yield _row(model, after, cache, most)


def _row(model: str, after: int, cache: str, most: int) -> dict[str, Any]:
    found = twin.simulate(
        model, NODE, context=after + TOKENS // 2, max_context=most, kv_dtype=cache
    )
    low, high = found.interval or (None, None)
    return {
        "model": model,
        "after": after,
        "cache": cache,
        "predicted": f"{found.tokens_per_s:.1f}",
        "p10": f"{low:.1f}",
        "p90": f"{high:.1f}",
        "floor_us": f"{1e6 * found.floor_s:.2f}",
        "bytes": found.bytes_per_step,
    }


def main() -> None:
    made = list(rows())
    write({FILE: csv_text(list(made[0]), [list(row.values()) for row in made])})


if __name__ == "__main__":
    main()
